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


@dataclass(frozen=True)
class ServedVariant:
    """A variant of the model on a server."""

    name: str = ""  # of its adapter; empty for the unpruned model
    heads: tuple[str, ...] = ()  # pruned heads; none under an ordinary LoRA adapter

    def __str__(self) -> str:
        return self.name or "dense"


UNPRUNED = ServedVariant()


@dataclass(frozen=True)
class ServedModel:
    """What a server says of an unpruned model."""

    name: str = ""
    root: str | None = None  # path it was loaded from; llama.cpp: name of its file, with its parameters and bytes
    max_length: int | None = None  # tokens of prompt and answer together
    parameter_bytes: float | None = None  # of a parameter in the model's file, on average

    @property
    def identity(self) -> str:
        """Return the name and the root."""
        return f"{self.name}: {self.root}"


@dataclass
class Listing:
    """Models and adapters that a server lists."""

    models: dict[str, ServedModel] = field(default_factory=dict)  # unpruned models by name
    parents: dict[str, str] = field(default_factory=dict)  # adapter → its base model
    adapter_ids: dict[str, int] = field(default_factory=dict)  # adapter → its number (llama.cpp)
    software: str | None = None  # the owner of the models: `vllm`, `sglang`, `llamacpp`, or somebody's name

    def model(self, name: str) -> ServedModel:
        """Return the model of this name; otherwise the first one, which is the only one where names are free."""
        return self.models.get(name) or next(iter(self.models.values()), ServedModel())


_COMMON_SETTINGS = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "ignore_eos", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
)

_NO_PENALTY = MappingProxyType({"presence_penalty": 0.0, "frequency_penalty": 0.0})


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
        continuation: settings that continue the last message of a chat, if it is the beginning of the answer.
        repeats_beginning: whether an answer that continues a message begins with it.
        generation_settings: names of supported settings, as in lm-eval.
    """

    name = "vllm"
    scores_prompts = True
    echoes_model = True
    adapter_list: str | None = None
    name_option = "--served-model-name"
    logprob_settings: Mapping[str, Any] = MappingProxyType({"logprobs": 1})
    continuation: Mapping[str, Any] = MappingProxyType({"add_generation_prompt": False, "continue_final_message": True})
    repeats_beginning = False
    generation_settings: frozenset[str] = _COMMON_SETTINGS | {"min_tokens", "stop_token_ids"}

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
            length = card.get("max_model_len")
            limit = None if length is None else int(length)
            listing.models[name] = ServedModel(name, card.get("root"), limit)
            listing.software = card.get("owned_by")
        return listing

    def tokenize_payload(self, model: str, text: str) -> dict[str, Any]:
        """Return the `/tokenize` request for a text without special tokens."""
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def sampling_fields(self, settings: Mapping[str, Any], is_sampled: bool, length: int) -> dict[str, Any]:
        """Return the request fields for generation settings; `length` is the most tokens of prompt and answer.

        Penalties are always sent: a server applies defaults of its own to what a request leaves out (vLLM and SGLang:
        those of the served model's generation config; llama.cpp: those of its command).
        """
        return {**_NO_PENALTY, "repetition_penalty": 1.0, **settings}


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
    continuation, repeats_beginning = MappingProxyType({}), True  # it continues without being told
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
            name, parameter_bytes = str(card["id"]), None
            root = _path_parts(name)[-1]
            if "n_params" in facts:
                parameters, size = int(facts["n_params"]), int(facts["size"])
                root += f", {parameters} parameters in {size} bytes"
                parameter_bytes = size / max(parameters, 1)
            # of a slot, and of the file: the window of a model that llama.cpp computes without a sliding window
            lengths = [int(facts[key]) for key in ("n_ctx", "n_ctx_train") if facts.get(key) is not None]
            listing.models[name] = ServedModel(name, root, min(lengths, default=None), parameter_bytes)
        for adapter in adapters or []:
            path = _path_parts(adapter["path"])
            name = path[-2] if len(path) > 1 and path[-1] == "adapter.gguf" else path[-1].removesuffix(".gguf")
            if name in listing.adapter_ids:
                raise InputError(f"the server has two adapters {name}; start it with one of them")
            listing.adapter_ids[name] = int(adapter["id"])
        return listing

    def tokenize_payload(self, model: str, text: str) -> dict[str, Any]:
        """Return the `/tokenize` request for a text without special tokens."""
        return {"content": text, "add_special": False}

    def sampling_fields(self, settings: Mapping[str, Any], is_sampled: bool, length: int) -> dict[str, Any]:
        """Return the settings in llama.cpp's names, and the order of `hf`.

        llama.cpp's own order has the temperature last, and so draws from other tokens. Its repetition penalty is that
        of `hf` if it counts all tokens, for whose number it takes memory.
        """
        other_settings = {name: value for name, value in settings.items() if name != "repetition_penalty"}
        penalty = {"repeat_penalty": settings.get("repetition_penalty", 1.0), "repeat_last_n": length}
        order = ["penalties", "temperature", *(("top_k", "top_p", "min_p") if is_sampled else ())]
        return {**_NO_PENALTY, **penalty, "mirostat": 0, "dynatemp_range": 0.0, "samplers": order, **other_settings}


def _path_parts(path: Any) -> list[str]:
    """Split a path of a server, which can be of another system."""
    return re.split(r"[/\\]", str(path))


KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (ServerKind(), SGLang(), LlamaCpp())}
