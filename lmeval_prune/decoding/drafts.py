"""Drafts by n-gram lookup: the tokens that followed the same few tokens before."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmeval_prune.decoding.sequence import Sequence

LONGEST, SHORTEST = 4, 2  # n-grams that are indexed


def propose_drafts(rows: Items[Sequence], most: int, budget: int) -> list[list[int]]:
    """Propose at most `most` tokens for each row, and at most `budget` for all, from the n-grams of its prompt group.

    Of the n-grams of the row itself and of its group's complete answers, the longer match counts.
    """
    drafts: list[list[int]] = [[] for _ in rows]
    most = min(most, max(1, budget // len(rows)))
    for i, row in enumerate(rows):
        count = min(most, budget, row.limit - len(row.answer) - 1)
        if count <= 0:
            continue
        row.ngrams = row.ngrams or NgramIndex(row.request.prompt)
        row.ngrams.extend(row.answer[len(row.ngrams.text) - len(row.request.prompt) :])
        tokens = row.ngrams.text
        size, drafts[i] = row.ngrams.propose(tokens, count)
        if row.group.answers:
            sibling_size, draft = row.group.answers.propose(tokens, count)
            drafts[i] = draft if sibling_size >= size else drafts[i]
        budget -= len(drafts[i])
    return drafts


class NgramIndex:
    """Texts, indexed by their n-grams; of equal n-grams the last one counts.

    Args:
        tokens: the first text.
    """

    def __init__(self, tokens: Items[int] = ()) -> None:
        self._next: dict[tuple[int, ...], tuple[list[int], int]] = {}  # the text and the position of the next token
        self.add(tokens)

    def add(self, tokens: Items[int]) -> None:
        """Index a new text."""
        self.text: list[int] = []  # the last text, which may still grow
        self.extend(tokens)

    def extend(self, tokens: Items[int]) -> None:
        """Append tokens to the last text. An n-gram is indexed once a token follows it."""
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
