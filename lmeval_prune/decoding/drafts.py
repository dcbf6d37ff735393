"""Drafts by lookup: what followed the same few tokens before."""

from __future__ import annotations

from collections.abc import Sequence


class Lookup:
    """Texts, indexed by every run of `LONGEST` … `SHORTEST` tokens; of equal runs the last one counts."""

    LONGEST = 4
    SHORTEST = 2

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._next: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Index one more text."""
        text = list(tokens)
        for end in range(self.SHORTEST, len(text)):
            self._index(text, end)

    def _index(self, text: list[int], end: int) -> None:
        for size in range(self.SHORTEST, min(self.LONGEST, end) + 1):
            self._next[tuple(text[end - size : end])] = (text, end)

    def propose(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        """What followed the longest indexed run that `tail` ends with.

        Returns:
            Length of that run (0: none is known), and at most `count` tokens.
        """
        for size in range(min(self.LONGEST, len(tail)), self.SHORTEST - 1, -1):
            found = self._next.get(tuple(tail[-size:]))
            if found:
                text, end = found
                return size, text[end : end + count]
        return 0, []


class GrowingLookup(Lookup):
    """A lookup in one text that is still being written."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text. A run is indexed once a token follows it."""
        for token in tokens:
            self._index(self.text, len(self.text))
            self.text.append(token)
