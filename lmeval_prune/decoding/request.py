"""What is asked of a decoder: a prompt, the heads to prune, and how tokens are chosen."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMode

from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and where the answer ends.

    Attributes:
        max_new_tokens: at most so many tokens, the end token included.
        eos: ids of end tokens; an answer ends with the first one. None: those of the model's generation config,
            as in `generate`; `()`: none.
        stop: texts that end an answer once its decoded text holds one (needs a tokenizer); the tokens
            that completed it are kept, as by `generate`.
        do_sample: draw tokens instead of taking the most probable one.
        temperature, top_k, top_p, min_p: of sampling; `top_k=0`, `top_p=1`, `min_p=0` do nothing.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens seen before.
        others: further settings of transformers' `GenerationConfig` that change logits (`suppress_tokens`,
            `no_repeat_ngram_size`, …), as JSON.
    """

    max_new_tokens: int = 256
    eos: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    others: str = "{}"

    def __post_init__(self) -> None:
        wrong = {
            "max_new_tokens must be at least 1": self.max_new_tokens < 1,
            "temperature must be above 0 when do_sample is true": self.do_sample and self.temperature <= 0,
            "top_k must not be negative": self.top_k < 0,
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "min_p must be between 0 and 1": not 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": self.repetition_penalty <= 0,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise InputError(f"{message}: {self}")

    @classmethod
    def of_generation_config(cls, config: Any, stop: tuple[str, ...] = (), **changes: Any) -> SamplingParams:
        """What `generate` would do under a `GenerationConfig`.

        Args:
            config: transformers' generation config; what it leaves unset has `generate`'s defaults.
            stop: stop texts beside the config's `stop_strings`.
            changes: fields that replace what the config says.

        Raises:
            InputError: the config asks for something else than one greedy or sampled answer (beams, guidance, …).
        """
        given = {name: value for name, value in config.to_dict().items() if value is not None}
        for name, nothing in _OTHER_SEARCHES.items():
            if given.get(name, nothing) not in (None, nothing):
                raise InputError(
                    f"engine=batched does not know the generation setting {name}={given[name]}; leave it out"
                )
        usual = {**GenerationConfig._get_default_generation_params(), "min_p": 0.0, "max_new_tokens": 256}
        as_it_runs = copy.copy(config)
        for name, value in {**usual, **given}.items():
            setattr(as_it_runs, name, value)
        mode = as_it_runs.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise InputError(f"engine=batched does not know the generation mode {mode.value}; change its settings")
        own = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        known: dict[str, Any] = {name: given.get(name, usual[name]) for name in own}
        others = {name: given[name] for name in _LOGITS if given.get(name, usual.get(name)) != usual.get(name)}
        known |= {"eos": end_tokens(config), "stop": (*stop, *_texts(given.get("stop_strings")))}
        return cls(**{**known, "others": json.dumps(others, sort_keys=True), **changes})

    def generation_settings(self) -> dict[str, Any]:
        """The same as settings of `generate`, but for what ends an answer."""
        settings: dict[str, Any] = {"num_beams": 1, **json.loads(self.others)}
        for name in ("max_new_tokens", "do_sample", "repetition_penalty"):
            settings[name] = getattr(self, name)
        if self.do_sample:
            settings |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            settings |= {"min_p": self.min_p} if self.min_p else {}
        return settings


def end_tokens(config: Any) -> tuple[int, ...]:
    """Ids of the end tokens of a generation config."""
    ends = getattr(config, "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def _texts(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


# What asks for another search than one greedy or sampled answer, with the value that does nothing.
_OTHER_SEARCHES = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1,
    "watermarking_config": None,
    "token_healing": False,
    "max_time": None,
    "prompt_lookup_num_tokens": None,
    "use_mtp": False,
    "speculation_type": None,
}
# What transformers' logits processors know beside our own fields.
_LOGITS = (
    *("min_length", "min_new_tokens", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"),
    *("bad_words_ids", "renormalize_logits", "forced_eos_token_id", "remove_invalid_values", "sequence_bias"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"),
)


@dataclass(frozen=True)
class Request:
    """One answer to be decoded.

    Attributes:
        prompt: token ids, at least one.
        mask: heads to prune; None runs the model as it is.
        params: how to choose tokens.
        seed: of sampling, not negative. A draw depends on the seed, its place in the answer and the logits.
        tag: the caller's own; not looked at.
    """

    prompt: tuple[int, ...]
    mask: HeadMask | None = None
    params: SamplingParams = SamplingParams()
    seed: int = 0
    tag: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("a request needs a prompt of at least one token")
        if self.seed < 0:
            raise InputError(f"seed must not be negative: {self.seed}")
