"""When an answer ends: end tokens, stop texts, length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lmeval_prune.decoding.request import SamplingParams
from lmeval_prune.errors import InputError


class Stopping:
    """Decide whether an answer has ended.

    Args:
        tokenizer: decodes tokens to search for stop texts; without it, parameters with `stop` are refused.
        ends: end tokens of parameters with `eos=None`.
        think_end: end of a thought, a text or a token: stop texts before the first one do not count.
    """

    def __init__(self, tokenizer: Any = None, ends: tuple[int, ...] = (), think_end: str | int | None = None) -> None:
        self.tokenizer, self.think_end = tokenizer, think_end
        self._ends = ends
        self._windows: dict[tuple[str, ...], int] = {}  # tokens in which stop texts are looked for
        self.may_complete = lru_cache(maxsize=1 << 20)(self._may_complete)

    def check(self, params: SamplingParams) -> None:
        """Refuse empty stop texts."""
        if "" in params.stop:
            raise InputError("an empty stop text would end every answer at once", remedy="leave it out")

    def ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the end tokens for these parameters."""
        return self._ends if params.eos is None else params.eos

    def ended(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        """Return whether an answer ends with its last token, by an end token, a stop text or its length."""
        return len(tokens) >= params.max_new_tokens or self.stopped(tokens, params)

    def stopped(self, tokens: Sequence[int], params: SamplingParams) -> bool:
        """Return whether an answer ends with an end token or a stop text."""
        return tokens[-1] in self.ends(params) or self.has_stop_text(tokens, params.stop)

    def has_stop_text(self, tokens: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Return whether the decoded end of `tokens` contains a stop text."""
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
        return any(stop_text in self._after_thought(tokens) for stop_text in stop)

    def _after_thought(self, tokens: Sequence[int]) -> str:
        if isinstance(self.think_end, str):
            return str(self.tokenizer.decode(tokens).partition(self.think_end)[2])
        start = tokens.index(self.think_end) + 1 if self.think_end in tokens else len(tokens)
        return str(self.tokenizer.decode(tokens[start:]))

    def _may_complete(self, token: int, stop: tuple[str, ...]) -> bool:
        """Return whether a token may complete a stop text: it has the last character of one, or part of a character.

        The token is decoded twice in a row, since some tokenizers drop a space before the first token.
        """
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):  # later tokens change earlier text
            return True
        text = self.tokenizer.decode([token, token])
        return "\ufffd" in text or any(stop_text[-1] in text for stop_text in stop)
