"""Metrics of several attempts at one question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb


def attempts(count: int) -> list[int]:
    """Return 1, 2, 4, … up to `count`, and `count` itself."""
    return sorted({1 << i for i in range(count.bit_length())} | {count})


def pass_ordered(right: Sequence[bool], k: int) -> bool:
    """Return whether any of the first k attempts is right: for candidates that stand in an order (a router's)."""
    return any(right[:k])


def pass_unbiased(n: int, c: int, k: int) -> float:
    """Return 1 − C(n−c, k)/C(n, k): the chance that k of n exchangeable attempts, c of them right, hold a right one."""
    if k > n:
        raise ValueError(f"{k} of {n} attempts cannot be drawn")
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(answers: Sequence[str], same: Callable[[str, str], bool]) -> tuple[int | None, int]:
    """Return the attempt whose answer is the most frequent (the first among equals), and how many answers differ.

    Empty answers do not count.
    """
    counts: dict[int, int] = {}  # of the first attempt with each answer
    for i, text in enumerate(answers):
        if text:
            first = next((k for k in counts if answers[k] == text or same(text, answers[k])), i)
            counts[first] = counts.get(first, 0) + 1
    return max(counts, key=lambda first: counts[first], default=None), len(counts)
