"""Drafts by n-gram lookup: the tokens that followed an earlier occurrence of the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

from lmeval_prune.decoding.sequence import PromptGroup, Sequence

LONGEST, SHORTEST = 4, 2  # n-grams that are indexed


class NgramIndex:
    """Texts, indexed by their n-grams; the last of equal n-grams counts."""

    def __init__(self, tokens: Items[int] = ()) -> None:
        self._next: dict[tuple[int, ...], tuple[list[int], int]] = {}  # the text and the position of the next token
        self.add(tokens)

    def add(self, tokens: Items[int]) -> None:
        """Index a new text."""
        self.text: list[int] = []  # the last text, which may still grow
        self.extend(tokens)

    def extend(self, tokens: Items[int]) -> None:
        """Append tokens to the last text. An n-gram is indexed when a token follows it."""
        for token in tokens:
            end = len(self.text)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._next[tuple(self.text[end - size :])] = (self.text, end)
            self.text.append(token)

    def propose(self, tail: Items[int], count: int) -> tuple[int, list[int]]:
        """Return the length of the longest indexed n-gram at the end of `tail`, and at most `count` tokens after it.

        Without a match: 0 and no tokens.
        """
        for size in range(min(LONGEST, len(tail)), SHORTEST - 1, -1):
            if match := self._next.get(tuple(tail[-size:])):
                text, end = match
                return size, text[end : end + count]
        return 0, []


class Drafter:
    """Drafts from the n-grams of each running row, and of the complete answers of its prompt group."""

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()
        self._answers: WeakKeyDictionary[PromptGroup, NgramIndex] = WeakKeyDictionary()

    def add(self, row: Sequence) -> None:
        """Index a complete answer for the other requests of its group."""
        if row.group.unanswered:
            self._answers.setdefault(row.group, NgramIndex()).add(row.tokens)

    def propose(self, rows: Items[Sequence], most: int, budget: int) -> list[list[int]]:
        """Return at most `most` tokens for each row, and at most `budget` for all; the longest match counts."""
        drafts: list[list[int]] = [[] for _ in rows]
        most = min(most, max(1, budget // len(rows)))
        for i, row in enumerate(rows):
            count = min(most, budget, row.max_tokens - len(row.answer) - 1)
            if count <= 0:
                continue
            ngrams = self._rows.get(row) or self._rows.setdefault(row, NgramIndex(row.prompt))
            ngrams.extend(row.answer[len(ngrams.text) - len(row.prompt) :])
            size, drafts[i] = ngrams.propose(ngrams.text, count)
            if answers := self._answers.get(row.group):
                sibling_size, draft = answers.propose(ngrams.text, count)
                drafts[i] = draft if sibling_size >= size else drafts[i]
            budget -= len(drafts[i])
        return drafts
