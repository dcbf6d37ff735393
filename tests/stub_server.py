"""A stub of vLLM and llama.cpp in this process, with a tiny model and injected faults."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask

Fault = Callable[[int, dict[str, Any]], str | None]
_LOCK = threading.RLock()  # one model answers for all stubs
_MODELS: dict[str, Any] = {}
_KNOWN: dict[str, Any] = {}


class Stub:
    """A server of one model.

    Args:
        folder: of the model.
        adapters: names of its adapters, e.g. `L0H1` or `L0H1+L1H2`.
        kind: `vllm` or `llamacpp`.
        fault: called with the number of a completion (from 0) and its payload; returns a fault to inject, or None.
        name: of the model.
        silent: adapters that change nothing.
        port: default: a free port.
    """

    def __init__(
        self,
        folder: Path,
        adapters: tuple[str, ...] = (),
        kind: str = "vllm",
        fault: Fault = lambda number, payload: None,
        name: str = "tiny",
        silent: tuple[str, ...] = (),
        port: int = 0,
        tokenizer: Any = None,
    ) -> None:
        self.folder, self.adapters, self.kind, self.fault, self.name = str(folder), adapters, kind, fault, name
        self.silent = silent
        self.root = self.folder  # that it lists; another path on another machine
        self.length = 512  # tokens of its context
        self.payloads: list[dict[str, Any]] = []  # payloads of completions
        self.size, self.trained_length = 1000, 512  # bytes of its GGUF file, and its context
        self.defaults: dict[str, Any] = {}  # its own values of settings that a request leaves out
        if self.folder not in _MODELS:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
            _MODELS[self.folder] = (model, AutoTokenizer.from_pretrained(folder))
        self.model, own = _MODELS[self.folder]
        self.tokenizer = tokenizer or own
        self.connections: set[socket.socket] = set()
        self.spoil: Callable[[dict[str, Any]], None] = lambda body: None  # changes a completion
        stub = self

        class Handler(_Handler):
            of = stub

        for _ in range(100):  # the port of a stub that died may not be free yet
            with suppress(OSError):
                self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
                break
            time.sleep(0.05)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: Any) -> None:
        self.die()

    def die(self) -> None:
        """Close everything at once."""
        self.server.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self.server.shutdown, daemon=True).start()

    # ------------------------------------------------------------------ model and adapters

    def models(self) -> dict[str, Any]:
        if self.kind == "llamacpp":
            facts = {"n_params": self.model.num_parameters(), "size": self.size, "n_ctx": self.length}
            facts["n_ctx_train"] = self.trained_length
            return {"object": "list", "data": [{"id": self.name, "owned_by": self.kind, "meta": facts}]}
        cards: list[dict[str, Any]] = [
            {"id": self.name, "root": self.root, "parent": None, "max_model_len": self.length, "owned_by": self.kind}
        ]
        cards += [{"id": adapter, "root": f"/adapters/{adapter}", "parent": self.name} for adapter in self.adapters]
        return {"object": "list", "data": cards}

    def lora_adapters(self) -> list[dict[str, Any]]:
        return [
            {"id": number, "path": f"/adapters/{name}/adapter.gguf", "scale": 0.0}
            for number, name in enumerate(reversed(self.adapters))
        ]

    def heads(self, payload: dict[str, Any]) -> str | None:
        """Return the pruned heads of a request; None if it names an unknown adapter."""
        model = payload.get("model")
        if self.kind == "llamacpp":
            scales = {entry["id"]: entry["scale"] for entry in payload.get("lora", [])}
            on = [adapter["path"].split("/")[-2] for adapter in self.lora_adapters() if scales.get(adapter["id"], 1)]
            return "+".join(on)
        if model == self.name:
            return ""
        if model not in self.adapters:
            return None
        return "" if model in self.silent else str(model)

    def complete(self, payload: dict[str, Any], heads: str, chat: bool) -> dict[str, Any]:
        payload = {**self.defaults, **payload}
        key = json.dumps(
            [self.folder, self.kind, self.length, payload | {"model": 0, "lora": 0}, heads], sort_keys=True
        )
        with _LOCK:
            if key not in _KNOWN:
                with nullcontext() if not heads else HeadMask(heads).applied_to(self.model), torch.no_grad():
                    _KNOWN[key] = self._complete(payload, chat)
            return json.loads(json.dumps(_KNOWN[key]))

    def _complete(self, payload: dict[str, Any], chat: bool) -> dict[str, Any]:
        beginning = ""
        if chat:
            last, how = payload["messages"][-1], {"add_generation_prompt": payload.get("add_generation_prompt", True)}
            how |= {"continue_final_message": payload.get("continue_final_message", False)}
            if self.kind == "llamacpp" and last["role"] == "assistant":
                how, beginning = {"continue_final_message": True}, last["content"]
            text = self.tokenizer.apply_chat_template(payload["messages"], tokenize=False, **how)
            prompt = self.tokenizer.encode(text)
        else:
            prompt = (
                payload["prompt"] if isinstance(payload["prompt"], list) else self.tokenizer.encode(payload["prompt"])
            )
        temperature = payload["temperature"]
        generator = torch.Generator().manual_seed(payload.get("seed", 0))
        tokens, values = list(prompt), []
        limit = payload["max_tokens"]
        if self.kind == "llamacpp":  # which ends an answer where its context is full
            limit = min(limit, self.length - len(prompt))
        for _ in range(limit):
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            penalised = list({*tokens[-self.window(payload) :]})
            some, penalty = logits[penalised], payload.get(self.penalty, 1.0)
            logits[penalised] = torch.where(some > 0, some / penalty, some * penalty)
            token = int(logits.argmax())
            if temperature:
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            values.append(float(logits.log_softmax(-1)[token]))
            if token == self.tokenizer.eos_token_id and not payload.get("echo"):
                break
            tokens.append(token)
        count = len(values)
        text = self.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
        reason = "length" if count == limit else "stop"
        for stop in payload.get("stop") or []:
            if stop in text:
                text, reason = text.split(stop)[0], "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": beginning + text}} if chat else {"text": text}
        if payload.get("echo"):
            every = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            own = [None, *(float(every[i, t]) for i, t in enumerate(tokens[1:]))]
            best = [None, *(self._best(every[i], t) for i, t in enumerate(tokens[1:]))]
            names = [f"token_id:{token}" for token in tokens]
            choice["logprobs"] = {"tokens": names, "token_logprobs": own, "top_logprobs": best}
        elif payload.get("n_probs" if self.kind == "llamacpp" else "logprobs"):
            names = [f"token_id:{token}" for token in tokens[len(prompt) :]]
            if self.kind == "llamacpp":
                pairs = zip(names, values, strict=False)
                choice["logprobs"] = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
            else:
                choice["logprobs"] = {"tokens": names, "token_logprobs": values[: len(names)]}
        return {"object": "text_completion", "choices": [choice], "usage": {"completion_tokens": count}}

    @property
    def penalty(self) -> str:
        """The name of the repetition penalty."""
        return "repeat_penalty" if self.kind == "llamacpp" else "repetition_penalty"

    def window(self, payload: dict[str, Any]) -> int:
        """The number of tokens that are penalised."""
        return payload.get("repeat_last_n", 64) if self.kind == "llamacpp" else 1 << 20

    @staticmethod
    def _best(row: torch.Tensor, token: int) -> dict[str, float]:
        top = int(row.argmax())
        return {f"token_id:{token}": float(row[token]), f"token_id:{top}": float(row[top])}


class _Handler(BaseHTTPRequestHandler):
    of: Stub
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.of.connections.add(self.connection)

    def finish(self) -> None:
        self.of.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: Any, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.wfile.flush()
        if cut:
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        routes = {"/v1/models": self.of.models}
        if self.of.kind == "llamacpp":
            routes["/lora-adapters"] = self.of.lora_adapters
        self.send(200, routes[self.path]()) if self.path in routes else self.send(404, {"error": "not found"})

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            text = payload["content"] if self.of.kind == "llamacpp" else payload["prompt"]
            return self.send(200, {"tokens": self.of.tokenizer.encode(text, add_special_tokens=False)})
        with _LOCK:
            number = len(self.of.payloads)
            self.of.payloads.append(payload)
        self.completion(number, payload)

    def completion(self, number: int, payload: dict[str, Any]) -> None:
        fault = self.of.fault(number, payload)
        if fault == "500":
            return self.send(500, {"error": {"message": "the engine stumbled"}})
        if fault == "429":
            return self.send(429, {"error": "busy"}, {"Retry-After": "0.05"})
        if fault == "400":
            return self.send(400, {"error": {"message": "this prompt is too long"}})
        if fault == "die":
            return self.of.die()
        heads = self.of.heads(payload)
        if heads is None:
            return self.send(404, {"error": {"message": f"The model `{payload['model']}` does not exist."}})
        body = {**self.of.complete(payload, heads, "chat" in self.path), "model": payload.get("model")}
        if fault == "wrong":
            body["model"] = "another"
            body["choices"][0]["text"] = "a wrong adapter's text"
        if fault == "twice":
            body["choices"].append({**body["choices"][0], "text": "another text"})
        if fault == "abort":
            body["choices"][0] |= {"text": "half a te", "finish_reason": "abort"}
        self.of.spoil(body)
        return self.send(200, b"<html>gateway</html>" if fault == "garbage" else body, cut=fault == "cut")
