"""Kinds of servers: how a request names its variant, and which requests a server can answer.

A served variant is the base model with an adapter that prunes heads (`lmeval-prune export adapter`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.http_client import whole_number


@dataclass(frozen=True)
class ServedVariant:
    """A variant of the model on a server."""

    name: str = ""  # of its adapter; empty for the unpruned model
    heads: tuple[str, ...] = ()  # pruned heads; none under an ordinary LoRA adapter

    def __str__(self) -> str:
        return self.name or "dense"


DENSE = ServedVariant()


@dataclass
class Listing:
    """Models and adapters that a server lists."""

    models: list[str] = field(default_factory=list)  # names of unpruned models
    # unpruned model → path it was loaded from; llama.cpp: name of its file, with the number of its parameters and bytes
    roots: dict[str, str | None] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)  # adapter → its base model
    adapter_ids: dict[str, int] = field(default_factory=dict)  # adapter → its number (llama.cpp)
    max_length: int | None = None  # tokens of prompt and answer together
    parameter_bytes: float | None = None  # of a parameter in the model's file, on average
    software: str | None = None  # the owner of the models: `vllm`, `sglang`, `llamacpp`, or somebody's name


_COMMON_SETTINGS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "logit_bias"}
)


class ServerKind:
    """vLLM, and the base class of other kinds of servers.

    All kinds answer `/v1/completions`, `/v1/chat/completions` and `/v1/models`.

    Attributes:
        name: value of `server=` in model_args.
        scores_prompts: whether responses can include the log-probabilities of the prompt (for log-likelihoods).
        echoes_model: whether responses name the variant that computed them.
        adapter_list: path that lists the adapters; None where they are listed as models.
        name_option: the server's option for the name of its model.
        logprob_settings: settings that request the log-probabilities of generated tokens.
        generation_settings: names of supported settings, as in lm-eval.
    """

    name = "vllm"
    scores_prompts = True
    echoes_model = True
    adapter_list: str | None = None
    name_option = "--served-model-name"
    logprob_settings: Mapping[str, Any] = MappingProxyType({"logprobs": 1})
    generation_settings: frozenset[str] = _COMMON_SETTINGS | {"repetition_penalty", "min_tokens", "stop_token_ids"}

    def variant_fields(self, model: str, variant: ServedVariant, listing: Listing) -> dict[str, Any]:
        """Return the request fields that name a variant: in vLLM, an adapter is a model with a name of its own."""
        return {"model": variant.name or model}

    def parse_listing(self, models: Mapping[str, Any], adapters: Any) -> Listing:
        """Parse the responses of `/v1/models` and of `adapter_list`."""
        listing = Listing()
        for card in models.get("data") or []:
            name = str(card["id"])
            if card.get("parent"):
                listing.parents[name] = str(card["parent"])
                continue
            listing.models.append(name)
            listing.roots[name] = card.get("root")
            listing.software = card.get("owned_by")
            if card.get("max_model_len") is not None:
                listing.max_length = whole_number(card["max_model_len"], 1)
        return listing

    def tokenize_payload(self, model: str, text: str) -> dict[str, Any]:
        """Return the `/tokenize` request for a text without special tokens."""
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def sampling_fields(self, is_sampled: bool) -> dict[str, Any]:
        """Return the request fields that make a server sample as `hf` does, beside the settings."""
        return {}


class SGLang(ServerKind):
    """SGLang: an adapter is `MODEL:ADAPTER`."""

    name, scores_prompts, echoes_model = "sglang", False, False

    def variant_fields(self, model: str, variant: ServedVariant, listing: Listing) -> dict[str, Any]:
        """Return the model's name, with the adapter's after a colon."""
        return {"model": f"{model}:{variant.name}" if variant.name else model}


class LlamaCpp(ServerKind):
    """llama.cpp: adapters have ids and can be combined; an adapter that a request does not mention is applied."""

    name, scores_prompts, echoes_model, adapter_list = "llamacpp", False, False, "/lora-adapters"
    name_option = "--alias"
    logprob_settings = MappingProxyType({"logprobs": 1, "n_probs": 1})
    generation_settings = _COMMON_SETTINGS

    def variant_fields(self, model: str, variant: ServedVariant, listing: Listing) -> dict[str, Any]:
        """Return a scale for every loaded adapter: 1 for those of the variant, 0 for all others.

        The server's prompt cache is off because it matches tokens only, not the adapters that computed its entries.
        """
        is_composed = variant.heads and variant.name not in listing.adapter_ids
        names: Sequence[str] = variant.heads if is_composed else [variant.name] if variant.name else []
        for name in names:
            if name not in listing.adapter_ids:
                raise InputError(
                    f"the server has no adapter {variant} (it has {first_few(listing.adapter_ids)}); export it, and "
                    f"start the server with it"
                )
        scales = [{"id": number, "scale": int(name in names)} for name, number in listing.adapter_ids.items()]
        return {"model": model, "lora": sorted(scales, key=lambda scale: scale["id"]), "cache_prompt": False}

    def parse_listing(self, models: Mapping[str, Any], adapters: Any) -> Listing:
        """Parse the lists; an adapter is named by its file, or by the folder of an `adapter.gguf`."""
        listing = super().parse_listing(models, None)
        for card in models.get("data") or []:
            facts = card.get("meta") or {}
            root = _path_parts(card["id"])[-1]
            if "n_params" in facts:
                parameters, size = whole_number(facts["n_params"]), whole_number(facts["size"])
                root += f", {parameters} parameters in {size} bytes"
                listing.parameter_bytes = size / max(parameters, 1)
            # of a slot, and of the file: the window of a model that llama.cpp computes without a sliding window
            lengths = [whole_number(facts[name], 1) for name in ("n_ctx", "n_ctx_train") if facts.get(name) is not None]
            listing.max_length = min(lengths, default=None)
            listing.roots[str(card["id"])] = root
        for adapter in adapters or []:
            path = _path_parts(adapter["path"])
            name = path[-2] if len(path) > 1 and path[-1] == "adapter.gguf" else path[-1].removesuffix(".gguf")
            if name in listing.adapter_ids:
                raise InputError(f"the server has two adapters {name}; start it with one of them")
            listing.adapter_ids[name] = whole_number(adapter["id"])
        return listing

    def tokenize_payload(self, model: str, text: str) -> dict[str, Any]:
        """Return the `/tokenize` request for a text without special tokens."""
        return {"content": text, "add_special": False}

    def sampling_fields(self, is_sampled: bool) -> dict[str, Any]:
        """Return the order of `hf`; llama.cpp's own has the temperature last, and so draws from other tokens."""
        order = ["penalties", "temperature", "top_k", "top_p", "min_p"]
        return {"samplers": order} if is_sampled else {}


def _path_parts(path: Any) -> list[str]:
    """Split a path of a server, which can be of another system."""
    return re.split(r"[/\\]", str(path))


KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (ServerKind(), SGLang(), LlamaCpp())}
