"""Where an answer ends: end tokens, stop texts, length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lmeval_prune.decoding.requests import Settings
from lmeval_prune.errors import InputError


class Stops:
    """Tells whether an answer has ended.

    Args:
        tokenizer: decodes tokens for stop texts; without one, settings with `stop` are refused.
        ends: end tokens of settings that name none.
    """

    def __init__(self, tokenizer: Any = None, ends: tuple[int, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self._ends = ends
        self._look_back = lru_cache(maxsize=None)(self._tokens_of)

    def check(self, settings: Settings) -> None:
        """Refuse stop texts that cannot be looked for.

        Raises:
            InputError: there is no tokenizer, or a stop text is empty.
        """
        if settings.stop and self.tokenizer is None:
            raise InputError("stop texts need a tokenizer: Engine(model, tokenizer)")
        if "" in settings.stop:
            raise InputError("an empty stop text would end every answer at once; leave it out")

    def ends(self, settings: Settings) -> tuple[int, ...]:
        """End tokens under some settings."""
        return self._ends if settings.eos is None else settings.eos

    def ended(self, tokens: Sequence[int], settings: Settings) -> bool:
        """Whether `tokens`, an answer that had not ended without its last token, ends with it."""
        if len(tokens) >= settings.max_new_tokens or tokens[-1] in self.ends(settings):
            return True
        if not settings.stop:
            return False
        # as lm-eval looks: into the last tokens, some more than the stop text takes
        text = self.tokenizer.decode(tokens[-self._look_back(settings.stop) :])
        return any(stop in text for stop in settings.stop)

    def _tokens_of(self, stop: tuple[str, ...]) -> int:
        return 2 + max(len(self.tokenizer.encode(text, add_special_tokens=False)) for text in stop)
