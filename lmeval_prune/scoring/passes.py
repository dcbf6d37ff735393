"""Metrics of several attempts at one question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, prod
from typing import NamedTuple


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


def pass_mixed(groups: Sequence[tuple[int, int, int]]) -> float:
    """Return the chance that attempts of several kinds hold a right one: 1 − Π C(n−c, m)/C(n, m).

    Unbiased for samples that are independent between kinds; a greedy attempt is a kind with n = m = 1.

    Args:
        groups: for each kind the number n of exchangeable attempts that were made, the number c of right ones, and the
            number m that is drawn of them.
    """
    return 1.0 - prod(1.0 - pass_unbiased(n, c, m) for n, c, m in groups)


class Vote(NamedTuple):
    """The result of a vote.

    Attributes:
        winner: index of the first attempt with the winning answer; None if there is no answer.
        distinct: number of different answers.
        is_tied: whether another answer has as many votes.
    """

    winner: int | None
    distinct: int
    is_tied: bool


def vote(answers: Sequence[str], weights: Sequence[float], same: Callable[[str, str], bool]) -> Vote:
    """Choose the answer whose attempts have the largest sum of weights; of several, the first.

    Args:
        answers: extracted answers; empty ones do not vote.
        weights: weight of each attempt.
        same: whether two answers are the same.
    """
    sums: dict[int, float] = {}  # of the first attempt with each answer
    for i, (text, weight) in enumerate(zip(answers, weights, strict=True)):
        if text:
            first = next((k for k in sums if answers[k] == text or same(text, answers[k])), i)
            sums[first] = sums.get(first, 0.0) + weight
    if not sums:
        return Vote(None, 0, False)
    most = max(sums.values())
    leaders = [first for first, total in sums.items() if most - total <= 1e-9 * max(abs(most), 1.0)]
    return Vote(leaders[0], len(sums), len(leaders) > 1)


def majority(answers: Sequence[str], same: Callable[[str, str], bool]) -> tuple[int | None, int]:
    """Return the attempt whose answer is the most frequent (the first among equals), and how many answers differ."""
    winner, distinct, _ = vote(answers, [1.0] * len(answers), same)
    return winner, distinct
