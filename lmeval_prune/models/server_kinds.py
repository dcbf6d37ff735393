"""Kinds of servers: how a request names its variant, and which requests a server can answer.

A served variant is the base model with an adapter that prunes heads (`lmeval-prune export adapter`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lmeval_prune.errors import InputError, first_few


@dataclass(frozen=True)
class ServedVariant:
    """A variant of the model on a server."""

    name: str = ""  # of its adapter; empty for the unpruned model
    heads: tuple[str, ...] = ()  # pruned heads; none under an ordinary LoRA adapter

    def __str__(self) -> str:
        return self.name or "dense"


UNPRUNED = ServedVariant()


@dataclass
class ServedModel:
    """What a server lists of its unpruned model, and its adapters."""

    name: str
    root: str | None = None  # path it was loaded from; llama.cpp: name of its file, with its parameters and bytes
    max_length: int | None = None  # tokens of prompt and answer together
    parameter_bytes: float | None = None  # of a parameter in the model's file, on average
    adapter_ids: dict[str, int] = field(default_factory=dict)  # adapter → its number (llama.cpp)

    @property
    def identity(self) -> str:
        """Return the name and the root."""
        return f"{self.name}: {self.root}"


class ServerKind:
    """vLLM, and the base class of other kinds of servers.

    All kinds answer `/v1/completions`, `/v1/chat/completions` and `/v1/models`.

    Attributes:
        name: value of `server=` in model_args.
        scores_prompts: whether responses can include the log-probabilities of the prompt (for log-likelihoods).
        echoes_model: whether responses name the variant that computed them.
        adapter_list: path that lists the adapters; None where they are listed as models.
        logprob_settings: settings that request the log-probabilities of generated tokens.
        continuation: settings that continue the last message of a chat, if it is the beginning of the answer.
        repeats_beginning: whether an answer that continues a message begins with it.
        generation_settings: names of supported settings, as in lm-eval.
    """

    name = "vllm"
    scores_prompts = echoes_model = True
    adapter_list: str | None = None
    logprob_settings: ClassVar[Mapping[str, Any]] = {"logprobs": 1}
    continuation: ClassVar[Mapping[str, Any]] = {"add_generation_prompt": False, "continue_final_message": True}
    repeats_beginning = False
    generation_settings = frozenset(
        {
            *("temperature", "top_k", "top_p", "min_p", "ignore_eos", "logit_bias", "min_tokens", "stop_token_ids"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        }
    )

    def variant_fields(self, model: ServedModel, variant: ServedVariant) -> dict[str, Any]:
        """Return the request fields that name a variant: in vLLM, an adapter is a model with a name of its own."""
        return {"model": variant.name or model.name}

    def parse_listing(self, models: Mapping[str, Any], adapters: Any, name: str | None) -> ServedModel:
        """Return the model of this name, by default the only one, from `/v1/models` and `adapter_list`."""
        cards = {str(card["id"]): card for card in models["data"] if not card.get("parent")}
        software = {card.get("owned_by") for card in cards.values()} & (KINDS.keys() - {self.name})
        if software:
            raise InputError(f"this is not a server of `server={self.name}`: give server={software.pop()}")
        if name not in cards and (name or len(cards) != 1):
            raise InputError(f"the server has {first_few(cards, 'no model')}; name one of them with model=")
        return self._parse_card(cards[name or next(iter(cards))])

    def _parse_card(self, card: Mapping[str, Any]) -> ServedModel:
        return ServedModel(str(card["id"]), card.get("root"), card.get("max_model_len"))

    def tokenize_payload(self, model: ServedModel, text: str) -> dict[str, Any]:
        """Return the `/tokenize` request for a text without special tokens."""
        return {"model": model.name, "prompt": text, "add_special_tokens": False}

    def sampling_fields(self, settings: Mapping[str, Any], is_sampled: bool, length: int) -> dict[str, Any]:
        """Return the request fields for generation settings; `length` is the most tokens of prompt and answer.

        Penalties are always sent: a server applies defaults of its own to what a request leaves out (vLLM and SGLang:
        those of the served model's generation config; llama.cpp: those of its command).
        """
        return {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, **settings}


class SGLang(ServerKind):
    """SGLang: an adapter is `MODEL:ADAPTER`."""

    name, scores_prompts, echoes_model = "sglang", False, False

    def variant_fields(self, model: ServedModel, variant: ServedVariant) -> dict[str, Any]:
        """Return the model's name, with the adapter's after a colon."""
        return {"model": f"{model.name}:{variant.name}" if variant.name else model.name}


class LlamaCpp(ServerKind):
    """llama.cpp: adapters have ids and can be combined; an adapter that a request does not mention is applied."""

    name, scores_prompts, echoes_model, adapter_list = "llamacpp", False, False, "/lora-adapters"
    logprob_settings: ClassVar[Mapping[str, Any]] = {"logprobs": 1, "n_probs": 1}
    continuation: ClassVar[Mapping[str, Any]] = {}  # it continues without being told
    repeats_beginning = True
    generation_settings = ServerKind.generation_settings - {"min_tokens", "stop_token_ids"}

    def variant_fields(self, model: ServedModel, variant: ServedVariant) -> dict[str, Any]:
        """Return a scale for every loaded adapter: 1 for those of the variant, 0 for all others.

        The server's prompt cache is off because it matches tokens only, not the adapters that computed its entries.
        """
        is_composed = variant.heads and variant.name not in model.adapter_ids
        names = variant.heads if is_composed else (variant.name,) if variant.name else ()
        if missing := [name for name in names if name not in model.adapter_ids]:
            raise InputError(
                f"the server has no adapter {missing[0]} (it has {first_few(model.adapter_ids)}); export it, and start "
                f"the server with it"
            )
        scales = [{"id": number, "scale": int(name in names)} for name, number in model.adapter_ids.items()]
        return {"model": model.name, "lora": sorted(scales, key=lambda scale: scale["id"]), "cache_prompt": False}

    def parse_listing(self, models: Mapping[str, Any], adapters: Any, name: str | None) -> ServedModel:
        """Parse the lists; an adapter is named by its file, or by the folder of an `adapter.gguf`."""
        model = super().parse_listing(models, adapters, name)
        for adapter in adapters:
            path = re.split(r"[/\\]", adapter["path"])  # also of another system
            own = path[-2] if len(path) > 1 and path[-1] == "adapter.gguf" else path[-1].removesuffix(".gguf")
            if own in model.adapter_ids:
                raise InputError(f"the server has two adapters {own}; start it with one of them")
            model.adapter_ids[own] = int(adapter["id"])
        return model

    def _parse_card(self, card: Mapping[str, Any]) -> ServedModel:
        facts = card.get("meta") or {}
        model = ServedModel(str(card["id"]), re.split(r"[/\\]", card["id"])[-1])
        if "n_params" in facts:
            model.root = f"{model.root}, {facts['n_params']} parameters in {facts['size']} bytes"
            model.parameter_bytes = facts["size"] / max(facts["n_params"], 1)
        # of a slot, and of the file: the window of a model that llama.cpp computes without a sliding window
        lengths = [int(facts[key]) for key in ("n_ctx", "n_ctx_train") if facts.get(key) is not None]
        model.max_length = min(lengths, default=None)
        return model

    def tokenize_payload(self, model: ServedModel, text: str) -> dict[str, Any]:
        """Return the `/tokenize` request for a text without special tokens."""
        return {"content": text, "add_special": False}

    def sampling_fields(self, settings: Mapping[str, Any], is_sampled: bool, length: int) -> dict[str, Any]:
        """Return the settings in llama.cpp's names, and the order of `hf`.

        llama.cpp's own order has the temperature last, and so draws from other tokens. Its repetition penalty is that
        of `hf` if it counts all tokens, for whose number it takes memory.
        """
        fields = super().sampling_fields(settings, is_sampled, length)
        penalty = {"repeat_penalty": fields.pop("repetition_penalty"), "repeat_last_n": length}
        order = ["penalties", "temperature", *(("top_k", "top_p", "min_p") if is_sampled else ())]
        return {**penalty, "mirostat": 0, "dynatemp_range": 0.0, "samplers": order, **fields}


KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (ServerKind(), SGLang(), LlamaCpp())}
