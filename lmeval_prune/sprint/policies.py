"""Policies that order a pool of heads for each question: SPRINT's router and its baselines.

The i-th try prunes the i-th head of the order, so all tries differ. `random_top` orders only its shortlist.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmeval_prune.artefacts import digest
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.router import Router


@dataclass(frozen=True)
class Policy:
    """An order of a pool for each question.

    Attributes:
        pool: names of the heads, and perhaps `dense`.
        identity: JSON value that determines the order.
        order: function from questions to one order of the pool each, first choice first.
        note: warning about its results.
    """

    pool: list[str]
    identity: dict[str, Any]
    order: Callable[[Sequence[str]], list[list[str]]]
    note: str = ""


def nearest(router: Router) -> Policy:
    """Order by a fitted router."""
    identity = {"policy": "router", "router_sha256": router.sha256, "encoder": router.encoder}
    return Policy(router.pool, identity, router.order)


def random_order(pool: list[str], seed: int = 0, name: str = "random") -> Policy:
    """Order at random by seed and question, independently of the other questions."""

    def order(questions: Sequence[str]) -> list[list[str]]:
        return [random.Random(digest([seed, question])).sample(pool, len(pool)) for question in questions]

    return Policy(pool, {"policy": name, "pool": pool, "seed": seed}, order)


def random_top(outcomes: Outcomes, size: int, seed: int = 0) -> Policy:
    """Order at random the heads that together solve most training questions: the paper's random baseline."""
    return random_order([outcomes.pool[j] for j in greedy_cover(outcomes.z, size)], seed, "random_top")


def best(outcomes: Outcomes) -> Policy:
    """Order by training accuracy, the same for all questions; ties by pool order."""
    accuracy = np.nan_to_num(outcomes.accuracy(), nan=-1.0)
    pool = [outcomes.pool[j] for j in np.argsort(-accuracy, kind="stable")]
    return Policy(pool, {"policy": "best", "pool": pool}, lambda questions: [pool for _ in questions])


def oracle(outcomes: Outcomes) -> Policy:
    """Order the heads that solve the question first: an upper bound, not a method."""

    def order(questions: Sequence[str]) -> list[list[str]]:
        z = np.nan_to_num(outcomes.z[[outcomes.row_of[question] for question in questions]], nan=0.0)
        return [[outcomes.pool[j] for j in row] for row in np.argsort(-z, axis=1, kind="stable")]

    identity = {"policy": "oracle", "outcomes": digest(np.nan_to_num(outcomes.z, nan=-1).tolist())}
    note = "not a method: it uses the outcomes of the questions that it answers"
    return Policy(outcomes.pool, identity, order, note)


def greedy_cover(z: np.ndarray, size: int) -> list[int]:
    """Choose `size` columns of z (questions, pool) that together solve most questions; NaN counts as not solved.

    Each step takes the column that solves most of the unsolved questions; ties by accuracy, then by pool order.
    """
    solved = z == 1
    unsolved, chosen = np.ones(len(z), bool), []
    for _ in range(size):
        unchosen = [j for j in range(z.shape[1]) if j not in chosen]
        column = max(unchosen, key=lambda j: (solved[unsolved, j].sum(), solved[:, j].sum(), -j))
        chosen.append(column)
        unsolved &= ~solved[:, column]
    return chosen
