"""Kinds of servers: how a variant is named in a request, and what a server can answer.

A served variant is the base model under an adapter that takes heads away (`lmeval-prune export adapter`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.http_client import whole_number
from lmeval_prune.settings import Count, Positive, Settings

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class ServerOptions(Settings):
    """Options of `pruned-server`: servers, and how they are asked.

    Attributes:
        base_url: of a server, e.g. `http://localhost:8000`; of several a list, or joined by `+`.
        server: its kind: `vllm`, `sglang` or `llamacpp`.
        model: the unpruned model's name on the server; default the one that it names.
        pretrained: the same model where this program can read its configuration and tokenizer; default `model`.
        adapters: folder that `lmeval-prune export adapter` wrote; what is served is then known by its content.
        dtype: the type that the servers compute in, as they were started; needed where answers are kept.
        num_concurrent: requests that a server has at once.
        max_retries: so many failures of a server, or of a request, in a row are borne.
        timeout: seconds that a request and its answer may take.
        seed: sampled try i is drawn with a seed that is made of `seed` and i.
        probe: ask the servers at the start whether they serve what they are asked for.
    """

    base_url: Any = None
    server: Literal["vllm", "sglang", "llamacpp"] = "vllm"
    model: str | None = None
    pretrained: str | None = None
    adapters: str | None = None
    dtype: str | None = None
    num_concurrent: Count = 64
    max_retries: Count = 8
    timeout: Positive = 600.0
    seed: int = 1234
    probe: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_url:
            raise InputError("name a server: --model_args base_url=http://HOST:PORT (several are joined by +)")
        dtype = str(self.dtype or "float32").removeprefix("torch.")
        if self.server != "llamacpp" and dtype not in DTYPES:
            raise InputError(f"dtype={dtype} is not a type that {self.server} computes in; use {', '.join(DTYPES)}")

    @property
    def urls(self) -> list[str]:
        """Return the servers' addresses, without a path of the API, each once."""
        parts = re.split(r"\+(?=https?://)", self.base_url) if isinstance(self.base_url, str) else self.base_url
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise InputError(f"base_url={self.base_url!r} is neither an address nor a list of them")
        return list(dict.fromkeys(map(_root, parts)))

    @property
    def kind(self) -> ServerKind:
        """Return the kind of server."""
        return KINDS[self.server]


@dataclass(frozen=True)
class ApiOptions(Settings):
    """Options that lm-eval's `local-completions` and `hf` know, too.

    Attributes:
        max_gen_toks, add_bos_token, eos_string, custom_prefix_token_id: see lm-eval.
        think_end_token: text that ends a model's thoughts, which are cut off.
        enable_thinking, chat_template_args: what the chat template is told.
        tokenizer, trust_remote_code, revision, use_fast_tokenizer: of the tokenizer.
        max_length: tokens of prompt and answer; at most what the servers take.
        verify_certificate, ca_cert_path, auth_token, header: of connections.
        tokenized_requests: prompts are always sent as tokens.
        batch_size, max_batch_size, device: without meaning here; lm-eval gives them.
    """

    max_gen_toks: Count | None = None
    add_bos_token: bool | None = None
    eos_string: str | None = None
    custom_prefix_token_id: int | None = None
    think_end_token: str | None = None
    enable_thinking: bool | None = None
    chat_template_args: Any = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    use_fast_tokenizer: bool = True
    max_length: Count | None = None
    verify_certificate: bool = True
    ca_cert_path: str | None = None
    auth_token: str | None = None
    header: Any = None
    tokenized_requests: bool = True
    batch_size: Any = None
    max_batch_size: Any = None
    device: Any = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ApiOptions:
        """Read those of a user's values that are options of these.

        Raises:
            InputError: a value is of another type, or cannot be used.
        """
        return cls(**{name: values[name] for name in API_OPTIONS if values.get(name) is not None})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("header", "chat_template_args"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise InputError(f"{name}={value!r} is no dictionary; give model_args as JSON")
        if self.think_end_token and self.think_end_token.isdigit():
            raise InputError(f"servers send texts: think_end_token={self.think_end_token} is a number; give its text")
        if not self.tokenized_requests:
            raise InputError("prompts are sent as tokens, so that they are those of pruned-hf: no tokenized_requests")
        if self.ca_cert_path and not Path(self.ca_cert_path).exists():
            raise InputError(f"ca_cert_path={self.ca_cert_path}: there is no such file")

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template."""
        thinks = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**(self.chat_template_args or {}), **thinks}

    @property
    def answers(self) -> dict[str, Any]:
        """Return the options that an answer depends on, those that were given."""
        names = ("max_gen_toks", "add_bos_token", "eos_string", "custom_prefix_token_id", "think_end_token")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return options | ({"template": self.template_arguments} if self.template_arguments else {})


API_OPTIONS = {each.name for each in fields(ApiOptions)}
# arguments of no local model
SERVER_ARGUMENTS = {each.name for each in fields(ServerOptions)} - {"pretrained", "dtype"}
SERVER_ARGUMENTS |= {"verify_certificate", "ca_cert_path", "auth_token", "header", "tokenized_requests"}


def without_server(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model_args of a variant that say what the model is, without those that say who answers."""
    served = "base_url" in arguments
    return {name: value for name, value in arguments.items() if not served or name not in SERVER_ARGUMENTS}


def _root(url: str) -> str:
    address = urlsplit(url.strip())
    if address.scheme not in ("http", "https") or not address.netloc:
        raise InputError(f"base_url={url} is no address; write http://HOST:PORT")
    path = re.sub(r"(/v1)?(/(chat/)?completions)?/*$", "", address.path)
    return f"{address.scheme}://{address.netloc}{path}"


@dataclass(frozen=True)
class Served:
    """A variant as it is served."""

    name: str = ""  # of its adapter; empty for the unpruned model
    heads: tuple[str, ...] = ()  # that it lacks

    def __str__(self) -> str:
        return self.name or "dense"


DENSE = Served()


@dataclass
class Listing:
    """Models and adapters that a server lists."""

    models: list[str] = field(default_factory=list)  # names of unpruned models
    # of adapters that are loaded, the model that they belong to, where it says so
    parents: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # of adapters that are called by number, their numbers
    length: int | None = None  # tokens that a request may have, prompt and answer together, where it says so
    # of unpruned models, where the server has them from, if it says so
    roots: dict[str, str | None] = field(default_factory=dict)


_COMMON = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "logit_bias"}
)


class ServerKind:
    """vLLM, and the base of other kinds of servers, which say in what they differ.

    All of them answer `/v1/completions`, `/v1/chat/completions` and `/v1/models`.

    Attributes:
        name: in model_args.
        scores: whether it gives the log-probabilities of a prompt, by which given texts are scored.
        echoes: whether an answer says under which name it was made.
        lists: where its adapters are listed; default among its models.
        telling: settings for the log-probabilities of what is generated.
        settings: of generation, that it knows by lm-eval's names.
    """

    name = "vllm"
    scores = True
    echoes = True
    lists: str | None = None
    telling: Mapping[str, Any] = MappingProxyType({"logprobs": 1})
    settings: frozenset[str] = frozenset({*_COMMON, "repetition_penalty", "min_tokens", "stop_token_ids"})

    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """Return the fields of a request that name the variant; `InputError` if the server does not have it.

        An adapter of vLLM is a model by its own name; one that is not there may be loaded when it is first asked for.
        """
        return {"model": variant.name or model}

    def listing(self, models: Mapping[str, Any], adapters: Any) -> Listing:
        """Read the answers of `/v1/models` and of `lists`."""
        listing = Listing()
        for card in models.get("data") or []:
            if card.get("parent"):
                listing.parents[str(card["id"])] = str(card["parent"])
            else:
                listing.models.append(str(card["id"]))
                listing.roots[str(card["id"])] = card.get("root")
                if card.get("max_model_len") is not None:
                    listing.length = whole_number(card["max_model_len"], 1)
        return listing

    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        """Return the request to `/tokenize` for a text's tokens without special ones."""
        return {"model": model, "prompt": text, "add_special_tokens": False}


class SGLang(ServerKind):
    """An adapter is named after the model and a colon."""

    name, scores, echoes = "sglang", False, False

    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """Name `MODEL:ADAPTER`, or the model."""
        return {"model": f"{model}:{variant.name}" if variant.name else model}


class LlamaCpp(ServerKind):
    """Adapters have numbers and compose; one that is not mentioned in a request, or in none, applies."""

    name, scores, echoes, lists = "llamacpp", False, False, "/lora-adapters"
    telling = MappingProxyType({"logprobs": 1, "n_probs": 1})
    settings = _COMMON

    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """Give every loaded adapter a scale: 1 for those of the variant, 0 for all others.

        No part of a prompt may come from the server's cache, which finds it by its tokens, whatever adapter it was
        computed under.
        """
        names: Sequence[str] = [variant.name] if variant.name in listing.numbers else variant.heads
        for name in names:
            if name not in listing.numbers:
                has = first_few(listing.numbers or ())
                raise InputError(
                    f"the server has no adapter {variant} (it has {has}); export it, and start the server with it"
                )
        scales = [{"id": number, "scale": int(name in names)} for name, number in listing.numbers.items()]
        return {"model": model, "lora": sorted(scales, key=lambda scale: scale["id"]), "cache_prompt": False}

    def listing(self, models: Mapping[str, Any], adapters: Any) -> Listing:
        """Read what a server lists; adapters are files of folders that have the variants' names."""
        listing = super().listing(models, None)
        for adapter in adapters or []:
            path = re.split(r"[/\\]", str(adapter["path"]))
            name = path[-2] if len(path) > 1 and path[-1] == "adapter.gguf" else path[-1].removesuffix(".gguf")
            if name in listing.numbers:
                raise InputError(f"the server has two adapters {name}; start it with one of them")
            listing.numbers[name] = whole_number(adapter["id"])
        return listing

    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        """Return llama.cpp's request."""
        return {"content": text, "add_special": False}


KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (ServerKind(), SGLang(), LlamaCpp())}
