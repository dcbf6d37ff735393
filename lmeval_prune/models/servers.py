"""Kinds of servers and options of `pruned-server`, and the record by which a served model is known again.

A served variant is the base model with an adapter that prunes heads (`lmeval-prune export adapter`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from typing_extensions import TypedDict

from lmeval_prune.artefacts import digest, file_lock, lock_path, read_artefact, write_artefact
from lmeval_prune.config import Count, Finite, Settings
from lmeval_prune.errors import InputError, first_few

# ---------------------------------------------------------------------- options


@dataclass(frozen=True)
class ServerOptions(Settings):
    """The model_args of `pruned-server`, except those that select the variant (see `Arguments`)."""

    # server
    base_url: str | None = None  # address of the server, e.g. `http://localhost:8000`
    server: Literal["vllm", "llamacpp"] = "vllm"  # its kind
    num_concurrent: Count = 64  # requests at a time
    max_retries: Count = 8  # times that a request is sent, at most
    timeout: Count = 600  # seconds for a request and its complete response
    probe: bool = True  # check at the start that the server has the variants
    verify_certificate: bool = True
    ca_cert_path: str | None = None
    auth_token: str | None = None
    header: Any = None
    # model
    model: str | None = None  # name of the unpruned model on the server; default: the only model that it lists
    pretrained: str | None = None  # the same model, for its configuration and tokenizer; default `tokenizer`, `model`
    revision: str | None = None
    trust_remote_code: bool = False
    adapters: str | None = None  # folder that `lmeval-prune export adapter` wrote; answers depend on its content
    lora: str | None = None  # ordinary LoRA adapter, a folder; the server has it under the folder's name
    dtype: str | None = None  # type in which the server computes; required with `responses=`, or named by `adapters`
    max_length: Count | None = None  # tokens of prompt and answer; at most the server's limit
    # prompts and answers, as for lm-eval's `local-completions` and `hf`
    tokenizer: str | None = None
    use_fast_tokenizer: bool = True
    add_bos_token: bool | None = None
    eos_string: str | None = None
    custom_prefix_token_id: int | None = None
    enable_thinking: bool | None = None  # argument of the chat template
    chat_template_args: Any = None  # further arguments of the chat template
    think_end_token: str | None = None  # text that ends a model's thoughts, which are removed from the answer
    max_gen_toks: Count | None = None
    seed: int = 1234  # sampled try i uses a seed derived from `seed` and i
    # ignored; lm-eval passes them
    batch_size: Any = None
    max_batch_size: Any = None
    device: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.think_end_token and self.think_end_token.isdigit():  # no answer of a server has a number in its place
            raise InputError(f"think_end_token={self.think_end_token} is a number; give the token's text")

    @property
    def url(self) -> str:
        """Return the server's address without a path of the API."""
        address = urlsplit(str(self.base_url).strip())
        path = re.sub(r"(/v1)?(/(chat/)?completions)?/*$", "", address.path)
        return f"{address.scheme}://{address.netloc}{path}"

    def given(self, *names: str) -> dict[str, Any]:
        """Return some of the options, except those left at None."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


SERVER_OPTIONS = {field.name for field in fields(ServerOptions)}
# options that no local model has
SERVER_ARGUMENTS = {
    *("base_url", "server", "num_concurrent", "max_retries", "timeout", "probe", "model", "adapters", "lora", "seed"),
    *("verify_certificate", "ca_cert_path", "auth_token", "header"),
}


# ---------------------------------------------------------------------- kinds


class ServedVariant(NamedTuple):
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
    max_length: int | None = field(default=None, compare=False)  # tokens of prompt and answer together
    adapter_ids: dict[str, int] = field(default_factory=dict)  # adapter → its number (llama.cpp)


class ServerKind:
    """vLLM, and the base class of other kinds: all answer `/v1/completions`, `/v1/chat/completions`, `/v1/models`."""

    name = "vllm"  # value of `server=`
    # path that lists the adapters; None: they are models, which responses name, with log-probabilities of the prompt
    adapter_list: str | None = None
    tokenize_fields = ("prompt", "add_special_tokens")  # of a `/tokenize` request
    # settings that request the log-probabilities of generated tokens
    logprob_settings: ClassVar[Mapping[str, Any]] = {"logprobs": 1}
    # settings that continue the last message of a chat, if it is the beginning of the answer
    continuation: ClassVar[Mapping[str, Any]] = {"add_generation_prompt": False, "continue_final_message": True}
    generation_settings = frozenset(  # that it supports, in lm-eval's names
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
        card = cards[name or next(iter(cards))]
        return ServedModel(str(card["id"]), card.get("root"), card.get("max_model_len"))

    def sampling_fields(self, settings: Mapping[str, Any], is_sampled: bool, length: int) -> dict[str, Any]:
        """Return the request fields for generation settings; `length` is the most tokens of prompt and answer.

        Penalties are always sent: a server applies defaults of its own to what a request leaves out (vLLM: those of
        the served model's generation config; llama.cpp: those of its command).
        """
        return {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, **settings}


class LlamaCpp(ServerKind):
    """llama.cpp: adapters have ids and can be combined; an adapter that a request does not mention is applied."""

    name, adapter_list, tokenize_fields = "llamacpp", "/lora-adapters", ("content", "add_special")
    logprob_settings: ClassVar[Mapping[str, Any]] = {"logprobs": 1, "n_probs": 1}
    continuation: ClassVar[Mapping[str, Any]] = {}  # it continues without being told
    generation_settings = ServerKind.generation_settings - {"min_tokens", "stop_token_ids"}

    def variant_fields(self, model: ServedModel, variant: ServedVariant) -> dict[str, Any]:
        """Return a scale for every loaded adapter: 1 for those of the variant, 0 for all others.

        The server's prompt cache is off because it matches tokens only, not the adapters that computed its entries.
        """
        is_composed = variant.heads and variant.name not in model.adapter_ids
        names = variant.heads if is_composed else (variant.name,) if variant.name else ()
        if missing := [name for name in names if name not in model.adapter_ids]:
            raise InputError(f"the server has no adapter {missing[0]}, only {first_few(model.adapter_ids)}; export it")
        scales = [{"id": number, "scale": int(name in names)} for name, number in model.adapter_ids.items()]
        return {"model": model.name, "lora": sorted(scales, key=lambda scale: scale["id"]), "cache_prompt": False}

    def parse_listing(self, models: Mapping[str, Any], adapters: Any, name: str | None) -> ServedModel:
        """Parse the lists; an adapter is named by its file, or by the folder of an `adapter.gguf`."""
        model = super().parse_listing(models, adapters, name)
        facts = next(card for card in models["data"] if card["id"] == model.name).get("meta") or {}
        model.root = re.split(r"[/\\]", model.name)[-1]  # also of another system
        if "n_params" in facts:
            model.root += f", {facts['n_params']} parameters in {facts['size']} bytes"
        # of a slot, and of the file: the window of a model that llama.cpp computes without a sliding window
        lengths = [int(facts[key]) for key in ("n_ctx", "n_ctx_train") if facts.get(key) is not None]
        model.max_length = min(lengths, default=None)
        for adapter in adapters:
            path = re.split(r"[/\\]", adapter["path"])
            own = path[-2] if len(path) > 1 and path[-1] == "adapter.gguf" else path[-1].removesuffix(".gguf")
            if own in model.adapter_ids:
                raise InputError(f"the server has two adapters {own}; start it with one of them")
            model.adapter_ids[own] = int(adapter["id"])
        return model

    def sampling_fields(self, settings: Mapping[str, Any], is_sampled: bool, length: int) -> dict[str, Any]:
        """Return the settings in llama.cpp's names, and the order of `hf`.

        llama.cpp's own order has the temperature last, and so draws from other tokens. Its repetition penalty is that
        of `hf` if it counts all tokens, for whose number it takes memory.
        """
        fields = super().sampling_fields(settings, is_sampled, length)
        penalty = {"repeat_penalty": fields.pop("repetition_penalty"), "repeat_last_n": length}
        order = ["penalties", "temperature", *(("top_k", "top_p", "min_p") if is_sampled else ())]
        return {**penalty, "mirostat": 0, "dynatemp_range": 0.0, "samplers": order, **fields}


KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (ServerKind(), LlamaCpp())}


# ---------------------------------------------------------------------- record

RECORD = "answers.servers.json"  # in the folder of an answer store
SCHEMA, VERSION = "lmeval-prune/servers", 1
# Largest root mean square difference of log-probabilities that an engine and its hardware explain.
TOLERANCES = {"float32": 0.01, "float64": 0.01}
TOLERANCE = 0.15  # in other types
Signature = list[tuple[str, float]]  # a text's tokens and log-probabilities


class _Content(TypedDict):
    signatures: dict[str, list[list[str | Finite]]]  # pairs, by a digest of what else is known of the model


def check_record(path: Path, identity: Any, dtype: str, signature: Signature, is_empty: bool, url: str) -> None:
    """Refuse a server with other log-probabilities than those of the answers in a folder; write down the first ones.

    Nothing that a server lists tells one training from another: a file can be replaced, and a path on another machine
    can hold other weights.

    `identity` is what is known of the model otherwise, `dtype` the type in which the server computes, or empty,
    `signature` that of its unpruned model. If no answers are stored (`is_empty`), one in the file does not count.
    """
    key, tolerance = digest(identity), TOLERANCES.get(dtype, TOLERANCE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(lock_path(path)):
        signatures: dict[str, Any] = {}
        if path.exists():
            signatures = read_artefact(path, SCHEMA, VERSION, _Content)[0]["signatures"]
        if is_empty or key not in signatures:
            write_artefact(path, SCHEMA, VERSION, {"signatures": {**signatures, key: signature}})
        elif (difference := distance(signatures[key], signature)) > tolerance:
            raise InputError(
                f"{url} has other weights or another type than the server that gave the answers in {path.parent}: "
                f"log-probabilities differ by {difference:.2g}, more than the {tolerance:g} of rounding. For another "
                f"model give another folder"
            )


def distance(first: Signature, second: Signature, mismatch: float | None = None) -> float:
    """Return the root mean square difference of log-probabilities up to the first different token.

    `mismatch` is the difference of two tokens. By default that of their log-probabilities: two tokens that are nearly
    as probable can change places by rounding.
    """
    squares = []
    for (token, value), (other_token, other_value) in zip(first, second, strict=False):
        difference = value - other_value if token == other_token or mismatch is None else mismatch
        squares.append(difference * difference)  # `**` raises an error for a very large one
        if token != other_token:
            break
    return math.sqrt(sum(squares) / len(squares))
