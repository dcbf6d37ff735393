"""Metrics of several attempts at one question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb


def attempts(count: int) -> list[int]:
    """1, 2, 4, … up to `count`, and `count` itself."""
    ks = [1 << i for i in range(count.bit_length()) if 1 << i <= count]
    return ks if ks[-1] == count else [*ks, count]


def pass_ordered(right: Sequence[bool], k: int) -> bool:
    """Whether any of the first k attempts is right: for candidates that stand in an order (a router's)."""
    return any(right[:k])


def pass_unbiased(n: int, c: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): chance that k of n exchangeable attempts, c of them right, hold a right one."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(answers: Sequence[str], same: Callable[[str, str], bool]) -> tuple[int | None, int]:
    """The attempt whose answer is the most frequent (the first among equals), and how many answers differ.

    Args:
        answers: extracted answers; empty ones do not vote.
        same: whether two answers are the same.

    Returns:
        Place of the first attempt with the winning answer (None if there is no answer), and the number of
        distinct answers.
    """
    firsts: list[int] = []
    votes: list[int] = []
    for place, text in enumerate(answers):
        if not text:
            continue
        for i, first in enumerate(firsts):
            if answers[first] == text or same(text, answers[first]):
                votes[i] += 1
                break
        else:
            firsts.append(place)
            votes.append(1)
    if not firsts:
        return None, 0
    return firsts[max(range(len(firsts)), key=lambda i: votes[i])], len(firsts)
