"""The end of an answer: end tokens, stop texts, length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lmeval_prune.decoding.request import SamplingParams
from lmeval_prune.errors import InputError


class Stopping:
    """Judge of whether an answer has ended.

    Args:
        tokenizer: decodes tokens for stop texts; without one, parameters with `stop` are refused.
        ends: end tokens of parameters that name none.
    """

    def __init__(self, tokenizer: Any = None, ends: tuple[int, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self._ends = ends
        self._stop_tokens = lru_cache(maxsize=None)(self._most_tokens)

    def check(self, params: SamplingParams) -> None:
        """Refuse stop texts that cannot be looked for.

        Raises:
            InputError: there is no tokenizer, or a stop text is empty.
        """
        if params.stop and self.tokenizer is None:
            raise InputError("stop texts need a tokenizer: Engine(model, tokenizer)")
        if "" in params.stop:
            raise InputError("an empty stop text would end every answer at once; leave it out")

    def ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the end tokens under some parameters."""
        return self._ends if params.eos is None else params.eos

    def ended(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        """Return whether `tokens`, an answer that had not ended without its last token, ends with it."""
        return len(tokens) >= params.max_new_tokens or self.stopped(tokens, params)

    def stopped(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        """Return whether `tokens` end with an end token or a stop text, and not for lack of room."""
        return tokens[-1] in self.ends(params) or self.has_stop_text(tokens, params.stop)

    def has_stop_text(self, tokens: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Return whether the decoded end of `tokens` contains a stop text."""
        if not stop:
            return False
        text = self.tokenizer.decode(tokens[-self._stop_tokens(stop) :])
        return any(each in text for each in stop)

    def _most_tokens(self, stop: tuple[str, ...]) -> int:
        """Count the last tokens that lm-eval looks into: some more than a stop text takes."""
        return 2 + max(len(self.tokenizer.encode(text, add_special_tokens=False)) for text in stop)
