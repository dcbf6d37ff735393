"""Requests to the engine: a prompt, heads to prune, and sampling parameters."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any

from annotated_types import Interval
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from lmeval_prune.config import Count, Divisor, Natural, Settings, Share, parse_value
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask


@dataclass(frozen=True)
class SamplingParams(Settings):
    """Choice of the tokens of an answer, and conditions that end it.

    Attributes:
        max_new_tokens: largest number of tokens, including the EOS token.
        eos: ids of EOS tokens. None: those of the model's generation config, as in `generate`; `()`: no EOS token.
        stop: texts that end an answer when its decoded text contains one (needs a tokenizer). The tokens of the text
            stay in the answer, as in `generate`.
        do_sample: draw tokens at random; otherwise take the most probable token.
        temperature, top_k, top_p, min_p: of sampling; `top_k=0`, `top_p=1`, `min_p=0` have no effect.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens in the prompt and the answer.
        others: other settings of transformers' `GenerationConfig` that change logits (`suppress_tokens`,
            `no_repeat_ngram_size`, …), as JSON.
    """

    max_new_tokens: Count = 256
    eos: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Divisor = 1.0
    others: str = "{}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.do_sample:
            parse_value("temperature", self.temperature, Divisor)
        if "" in self.stop:
            raise InputError("an empty stop string would end every answer at once", remedy="leave it out")

    @cached_property
    def takes_argmax(self) -> bool:
        return not self.do_sample and self.repetition_penalty == 1.0 and self.others == "{}"

    @classmethod
    def from_generation_config(cls, config: Any, stop: tuple[str, ...] = (), **changes: Any) -> SamplingParams:
        """Convert a `GenerationConfig` of transformers.

        Args:
            config: the generation config; unset values have the defaults of `generate`.
            stop: stop strings in addition to the config's `stop_strings`.
            changes: fields that replace those of the config.
        """
        settings = {name: value for name, value in config.to_dict().items() if value is not None}
        for name, neutral in _OTHER_SEARCHES.items():
            if settings.get(name, neutral) not in (None, neutral):
                raise InputError(
                    f"engine=batched does not know the generation setting {name}={settings[name]}",
                    remedy="leave it out of gen_kwargs or generation_config.json",
                )
        defaults = {**GenerationConfig._get_default_generation_params(), "min_p": 0.0, "max_new_tokens": 256}
        complete = copy.copy(config)
        for name, value in {**defaults, **settings}.items():
            setattr(complete, name, value)
        mode = complete.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise InputError(
                f"engine=batched does not know the generation mode {mode.value}", remedy="change its settings"
            )
        fields: dict[str, Any] = {name: settings.get(name, defaults[name]) for name in _FIELDS}
        others = logits_settings(settings)
        fields |= {"eos": end_tokens(config), "stop": (*stop, *stop_strings(config))}
        return cls(**{**fields, "others": json.dumps(others, sort_keys=True), **changes})

    def generation_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"num_beams": 1, **json.loads(self.others)}
        for name in ("max_new_tokens", "do_sample", "repetition_penalty"):
            settings[name] = getattr(self, name)
        if self.do_sample:
            settings |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            settings |= {"min_p": self.min_p} if self.min_p else {}
        return settings


def logits_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a generation config that change logits, without the fields of `SamplingParams`."""
    defaults = GenerationConfig._get_default_generation_params()
    return {name: settings[name] for name in _LOGITS if settings.get(name, defaults.get(name)) != defaults.get(name)}


def token_ids(tokens: Any) -> tuple[int, ...]:
    return tokens if isinstance(tokens, tuple) else tuple(tokens.tolist() if hasattr(tokens, "tolist") else tokens)


def end_tokens(config: Any) -> tuple[int, ...]:
    ends = getattr(config, "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else token_ids(ends)


def stop_strings(config: Any) -> tuple[str, ...]:
    value = getattr(config, "stop_strings", None)
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


# Settings for searches other than one greedy or sampled answer, with their neutral values.
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
_FIELDS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Other settings of transformers' logits processors.
_LOGITS = (
    "min_length", "min_new_tokens", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size",
    "bad_words_ids", "renormalize_logits", "forced_eos_token_id", "remove_invalid_values", "sequence_bias",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One answer to decode.

    Attributes:
        prompt: token ids, at least one; any sequence becomes a tuple.
        mask: heads to prune, or their text as for `HeadMask`; None for no pruning.
        params: sampling parameters.
        seed: of sampling, not negative. A draw depends on the seed, the position in the answer and the logits.
        tag: free for the caller; ignored.
    """

    prompt: tuple[int, ...]
    mask: HeadMask | None = None
    params: SamplingParams = SamplingParams()
    seed: int = 0
    tag: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", token_ids(self.prompt))
        object.__setattr__(self, "mask", HeadMask(self.mask) if isinstance(self.mask, str) else self.mask)


class Stopping:
    """Decide whether an answer has ended.

    Args:
        tokenizer: decodes tokens to search for stop strings; without it, parameters with `stop` are refused.
        ends: EOS tokens of parameters with `eos=None`.
        think_end: end of a thought, a text or a token: stop strings before the first one do not count.
    """

    def __init__(self, tokenizer: Any = None, ends: tuple[int, ...] = (), think_end: str | int | None = None) -> None:
        self.tokenizer, self.think_end = tokenizer, think_end
        self._ends = ends
        self._windows: dict[tuple[str, ...], int] = {}  # tokens in which stop strings are looked for
        self.may_complete = lru_cache(maxsize=1 << 20)(self._may_complete)

    def ends(self, params: SamplingParams) -> tuple[int, ...]:
        return self._ends if params.eos is None else params.eos

    def ended(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        return len(tokens) >= params.max_new_tokens or self.stopped(tokens, params)

    def stopped(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        stop = params.stop
        if tokens[-1] in self.ends(params):
            return True
        if not stop or not self.may_complete(tokens[-1], stop):
            return False
        if stop not in self._windows:
            lengths = [len(self.tokenizer.encode(text, add_special_tokens=False)) for text in stop]
            self._windows[stop] = 2 + max(lengths)
        text = self.tokenizer.decode(tokens[-self._windows[stop] :])
        if not any(stop_text in text for stop_text in stop):
            return False
        if self.think_end in (None, "") or tokens[-1] == self.tokenizer.eos_token_id:  # which ends a thought, too
            return True
        if isinstance(self.think_end, str):
            after = self.tokenizer.decode(tokens).partition(self.think_end)[2]
        else:
            start = tokens.index(self.think_end) + 1 if self.think_end in tokens else len(tokens)
            after = self.tokenizer.decode(tokens[start:])
        return any(stop_text in after for stop_text in stop)

    def _may_complete(self, token: int, stop: tuple[str, ...]) -> bool:
        """Return whether a token may complete a stop string: it has the last character of one, or part of a character.

        The token is decoded twice in a row, since some tokenizers drop a space before the first token.
        """
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):  # later tokens change earlier text
            return True
        text = self.tokenizer.decode([token, token])
        return "\ufffd" in text or any(stop_text[-1] in text for stop_text in stop)
