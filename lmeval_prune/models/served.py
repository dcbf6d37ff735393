"""What is said to an engine's server, by its kind: how a variant is named in a request, and what it can answer.

A served variant is the base model under an adapter that takes heads away (`lmeval-prune export adapter`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from lmeval_prune.errors import InputError, nearest


@dataclass(frozen=True)
class ServerOptions:
    """Which servers are asked, and how.

    Attributes:
        base_url: of a server, e.g. `http://localhost:8000`; of several a list, or joined by `+`.
        server: its kind: `vllm`, `sglang` or `llamacpp`.
        model: the unpruned model's name on the server; default the one that it names.
        pretrained: the same model where this program can read its configuration and tokenizer; default `model`.
        adapters: folder that `lmeval-prune export adapter` wrote; what is served is then known by its content.
        dtype: the type that the servers compute in, as they were started; needed where answers are kept.
        num_concurrent: requests that a server has at once.
        max_retries: so many failures of a server, or of a request, in a row are borne.
        timeout: seconds that a request may take.
        seed: sampled try i is drawn with `seed` + i.
        probe: ask the servers at the start whether they serve what they are asked for.
    """

    base_url: Any = None
    server: str = "vllm"
    model: str | None = None
    pretrained: str | None = None
    adapters: str | None = None
    dtype: str | None = None
    num_concurrent: int = 64
    max_retries: int = 8
    timeout: float = 600.0
    seed: int = 1234
    probe: bool = True

    def __post_init__(self) -> None:
        if self.server not in KINDS:
            raise InputError(f"server={self.server} is not known{nearest(self.server, KINDS)}; use {', '.join(KINDS)}")
        if not self.base_url:
            raise InputError("name a server: --model_args base_url=http://HOST:PORT (several are joined by +)")
        if self.num_concurrent < 1 or self.max_retries < 1 or self.timeout <= 0:
            raise InputError("num_concurrent and max_retries must be at least 1, and timeout above 0")

    @property
    def urls(self) -> list[str]:
        """The servers' addresses, without a path of the API, each once."""
        given = self.base_url
        parts = re.split(r"\+(?=https?://)", given) if isinstance(given, str) else given
        if not isinstance(parts, list | tuple) or not all(isinstance(one, str) for one in parts):
            raise InputError(f"base_url={given!r} is neither an address nor a list of them")
        return list(dict.fromkeys(map(_root, parts)))

    @property
    def kind(self) -> ServerKind:
        """The kind of server."""
        return KINDS[self.server]


SERVERS_OWN = {one.name for one in fields(ServerOptions)} - {"pretrained", "dtype"}  # arguments of no local model


def without_server(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Model_args of a served variant, as far as they say what the model is, and not who answers."""
    served = "base_url" in arguments
    return {name: value for name, value in arguments.items() if not served or name not in SERVERS_OWN}


def _root(url: str) -> str:
    found = urlsplit(url.strip())
    if found.scheme not in ("http", "https") or not found.netloc:
        raise InputError(f"base_url={url} is no address; write http://HOST:PORT")
    path = re.sub(r"(/v1)?(/(chat/)?completions)?/*$", "", found.path)
    return f"{found.scheme}://{found.netloc}{path}"


@dataclass(frozen=True)
class Served:
    """A variant as it is served.

    Attributes:
        name: of its adapter; empty for the unpruned model.
        heads: that it lacks.
    """

    name: str = ""
    heads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name or "dense"


DENSE = Served()


@dataclass
class Listing:
    """What a server says that it has.

    Attributes:
        models: names of unpruned models.
        parents: of adapters that are loaded, the model that they belong to, where it says so.
        numbers: of adapters that are called by number, their numbers.
        length: tokens that a request may have, prompt and answer together, where it says so.
    """

    models: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    length: int | None = None


class ServerKind(ABC):
    """A kind of server. All of them answer `/v1/completions`, `/v1/chat/completions` and `/v1/models`.

    Attributes:
        name: in model_args.
        scores: whether it gives the log-probabilities of a prompt, by which given texts are scored.
        echoes: whether an answer says under which name it was made.
        lists: where its adapters are listed; default among its models.
        telling: settings for the log-probabilities of what is generated.
        sampling: settings of drawn answers, where its own defaults would cut the distribution.
    """

    name: str
    scores = False
    echoes = False
    lists: str | None = None
    telling: Mapping[str, Any] = MappingProxyType({"logprobs": 1})
    sampling: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """What of a request names the variant.

        Raises:
            InputError: the server does not have it.
        """

    def listing(self, models: Mapping[str, Any], adapters: Any) -> Listing:
        """Read what the server says that it has.

        Args:
            models: its answer of `/v1/models`.
            adapters: of `lists`.
        """
        found = Listing()
        for card in models.get("data") or []:
            if card.get("parent"):
                found.parents[str(card["id"])] = str(card["parent"])
            else:
                found.models.append(str(card["id"]))
                found.length = card.get("max_model_len") or found.length
        return found

    @abstractmethod
    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        """The request to `/tokenize` for a text's tokens without special ones."""


class VLLM(ServerKind):
    """An adapter is a model by its own name; one that is not there may be loaded when it is first asked for."""

    name, scores, echoes = "vllm", True, True

    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """The name of the adapter, or of the model."""
        return {"model": variant.name or model}

    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        """As the base class."""
        return {"model": model, "prompt": text, "add_special_tokens": False}


class SGLang(VLLM):
    """An adapter is named after the model and a colon."""

    name, scores, echoes = "sglang", False, False

    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """`MODEL:ADAPTER`, or the model."""
        return {"model": f"{model}:{variant.name}" if variant.name else model}


class LlamaCpp(ServerKind):
    """Adapters have numbers and compose; one that is not mentioned in a request, or in none, applies."""

    name, lists = "llamacpp", "/lora-adapters"
    telling = MappingProxyType({"logprobs": 1, "n_probs": 1})
    sampling = MappingProxyType({"top_k": 0, "top_p": 1.0, "min_p": 0.0})

    def fields(self, model: str, variant: Served, listing: Listing) -> dict[str, Any]:
        """A scale for every adapter that is loaded: 1 for those of the variant, 0 for all others.

        No part of a prompt may come from the server's cache, which finds it by its tokens, whatever adapter it was
        computed under.
        """
        wanted: Sequence[str] = [variant.name] if variant.name in listing.numbers else variant.heads
        for name in wanted:
            if name not in listing.numbers:
                raise InputError(_lacks(str(variant), listing.numbers))
        scales = [{"id": number, "scale": int(name in wanted)} for name, number in listing.numbers.items()]
        return {"model": model, "lora": sorted(scales, key=lambda one: one["id"]), "cache_prompt": False}

    def listing(self, models: Mapping[str, Any], adapters: Any) -> Listing:
        """Adapters are files of folders that have the variants' names."""
        found = super().listing(models, None)
        for one in adapters or []:
            path = re.split(r"[/\\]", str(one["path"]))
            name = path[-2] if len(path) > 1 and path[-1] == "adapter.gguf" else path[-1].removesuffix(".gguf")
            if name in found.numbers:
                raise InputError(f"the server has two adapters {name}; start it with one of them")
            found.numbers[name] = int(one["id"])
        return found

    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        """As the base class."""
        return {"content": text, "add_special": False}


def _lacks(name: str, known: Mapping[str, Any]) -> str:
    has = ", ".join(list(known)[:8]) + (", …" if len(known) > 8 else "") if known else "none"
    return f"the server has no adapter {name} (it has {has}); export it, and start the server with it"


KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), LlamaCpp())}
