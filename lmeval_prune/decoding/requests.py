"""What is asked of a decoder: a prompt, the heads to prune, and how tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask


@dataclass(frozen=True)
class Settings:
    """How the tokens of an answer are chosen, and where the answer ends.

    Attributes:
        max_new_tokens: at most so many tokens, the end token included.
        eos: ids of end tokens; an answer ends with the first one.
        stop: texts that end an answer once its decoded text holds one (needs a tokenizer); the tokens
            that completed it are kept, as by `generate`.
        do_sample: draw tokens instead of taking the most probable one.
        temperature, top_k, top_p, min_p: of sampling; `top_k=0`, `top_p=1`, `min_p=0` do nothing.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens seen before.
    """

    max_new_tokens: int = 256
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

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
    def of_generation_config(cls, config: Any, **changes: Any) -> Settings:
        """What `generate` would do under a `GenerationConfig`.

        Args:
            config: transformers' generation config; what it leaves unset has `generate`'s defaults.
            changes: fields that replace what the config says.

        Raises:
            InputError: the config asks for something that these settings cannot say (beams, a minimal
                length, forbidden words, …).
        """
        usual = {**GenerationConfig._get_default_generation_params(), "min_p": 0.0, "max_new_tokens": 256}
        for name, harmless in _NOT_SUPPORTED.items():
            value = getattr(config, name, None)
            if value is not None and value not in harmless:
                raise InputError(f"engine=batched does not know the generation setting {name}={value}; leave it out")
        known = {}
        for name in ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value = getattr(config, name, None)
            known[name] = usual[name] if value is None else value
        ends = config.eos_token_id
        known["eos"] = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        return cls(**{**known, **changes})


# Settings of `generate` that change the tokens and that we do not have, with the values that do nothing.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "stop_strings": (),
    "max_time": (),
}


@dataclass(frozen=True)
class Request:
    """One answer to be decoded.

    Attributes:
        prompt: token ids, at least one.
        mask: heads to prune; None runs the model as it is.
        settings: how to choose tokens.
        seed: of sampling. The same seed gives the same answer, whatever else is decoded beside it.
        tag: the caller's own; not looked at.
    """

    prompt: tuple[int, ...]
    mask: HeadMask | None = None
    settings: Settings = Settings()
    seed: int = 0
    tag: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("a request needs a prompt of at least one token")
