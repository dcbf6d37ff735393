"""Drafts by n-gram lookup: the tokens that followed the same few tokens before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # n-grams that are indexed


class NgramIndex:
    """Texts, indexed by their n-grams; of equal n-grams the last one counts."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], tuple[list[int], int]] = {}  # text and place of what followed
        self.text: list[int] = []  # the last text, which may still grow

    def add(self, tokens: Sequence[int]) -> None:
        """Index a new text."""
        self.text = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the last text. An n-gram is indexed once a token follows it."""
        for token in tokens:
            end = len(self.text)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._next[tuple(self.text[end - size :])] = (self.text, end)
            self.text.append(token)

    def propose(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        """Return the length of the longest indexed n-gram that `tail` ends with, and at most `count` tokens after it.

        Without any it is 0, and there are none.
        """
        for size in range(min(LONGEST, len(tail)), SHORTEST - 1, -1):
            if match := self._next.get(tuple(tail[-size:])):
                text, end = match
                return size, text[end : end + count]
        return 0, []
