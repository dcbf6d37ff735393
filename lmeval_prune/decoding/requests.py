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
        eos: ids of end tokens; an answer ends with the first one. None: those of the model's generation config,
            as in `generate`; `()`: none.
        stop: texts that end an answer once its decoded text holds one (needs a tokenizer); the tokens
            that completed it are kept, as by `generate`.
        do_sample: draw tokens instead of taking the most probable one.
        temperature, top_k, top_p, min_p: of sampling; `top_k=0`, `top_p=1`, `min_p=0` do nothing.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens seen before.
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
        plain = GenerationConfig()
        for name, value in config.to_dict().items():
            harmless = (None, getattr(plain, name, None), *_NO_EFFECT.get(name, ()))
            if name not in _KNOWN and name[0] != "_" and not any(value == other for other in harmless):
                raise InputError(f"engine=batched does not know the generation setting {name}={value}; leave it out")
        usual = {**GenerationConfig._get_default_generation_params(), "min_p": 0.0, "max_new_tokens": 256}
        known = {}
        for name in ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value = getattr(config, name, None)
            known[name] = usual[name] if value is None else value
        known["eos"] = end_tokens(config)
        return cls(**{**known, **changes})


def end_tokens(config: Any) -> tuple[int, ...]:
    """Ids of the end tokens of a generation config."""
    ends = getattr(config, "eos_token_id", None)
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


# Fields of a GenerationConfig that we have, or that do not change the tokens of one answer.
_KNOWN = {
    *("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"),
    *("max_length", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache"),
    *("cache_implementation", "cache_config", "max_cache_len", "return_dict_in_generate", "output_scores"),
    *("output_logits", "output_attentions", "output_hidden_states", "early_stopping", "length_penalty"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_lookbehind", "target_lookbehind", "compile_config", "disable_compile", "prefill_chunk_size"),
}
# Of the others, values that do nothing although they are not the default.
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "typical_p"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "num_beam_groups"), (1,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "token_healing", "low_memory"), (False,)),
}


@dataclass(frozen=True)
class Request:
    """One answer to be decoded.

    Attributes:
        prompt: token ids, at least one.
        mask: heads to prune; None runs the model as it is.
        settings: how to choose tokens.
        seed: of sampling, not negative. A draw depends on the seed, its place in the answer and the logits.
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
        if self.seed < 0:
            raise InputError(f"seed must not be negative: {self.seed}")
