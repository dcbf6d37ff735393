"""Policies that order a pool of variants for each question: SPRINT's router and its baselines.

By default the i-th try takes the i-th variant of the order, so all tries differ; a `Mix` makes other tries of an order.
`random_top` orders only its shortlist.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import Attempt
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.router import Router


@dataclass(frozen=True)
class Policy:
    """An order of a pool for each question.

    Attributes:
        pool: names of variants.
        identity: JSON value that determines the order.
        order: function from questions to one order of the pool each, first choice first.
        note: warning about its results.
        weights: function from questions to the weight of each of the pool in a vote, (questions, pool): the probability
            that it solves the question. None: the policy has none.
    """

    pool: list[str]
    identity: dict[str, Any]
    order: Callable[[Sequence[str]], list[list[str]]]
    note: str = ""
    weights: Callable[[Sequence[str]], np.ndarray | None] | None = None

    def vote_weights(self, questions: Sequence[str], attempts: Sequence[Sequence[Attempt]]) -> np.ndarray | None:
        """Return the weight of each attempt in a vote, (questions, attempts); None if the policy has no weights.

        Attempts of a variant that is not in the pool (`dense`) have the mean weight of the pool.
        """
        weights = self.weights(questions) if self.weights else None
        if weights is None:
            return None
        columns = {name: j for j, name in enumerate(self.pool)}
        rows = [
            [row[columns[attempt.variant]] if attempt.variant in columns else row.mean() for attempt in chosen]
            for row, chosen in zip(weights, attempts, strict=True)
        ]
        return np.array(rows, float)


def nearest(router: Router) -> Policy:
    """Order by a fitted router; its probabilities, if it has some, are the weights of a vote."""
    identity = {"policy": "router", "router_sha256": router.sha256, "encoder": router.encoder}
    return Policy(router.pool, identity, router.order, weights=router.probabilities)


def random_order(pool: list[str], seed: int = 0, name: str = "random") -> Policy:
    """Order at random by seed and question, independently of the other questions."""

    def order(questions: Sequence[str]) -> list[list[str]]:
        return [random.Random(digest([seed, question])).sample(pool, len(pool)) for question in questions]

    return Policy(pool, {"policy": name, "pool": pool, "seed": seed}, order)


def random_top(outcomes: Outcomes, size: int, seed: int = 0) -> Policy:
    """Order at random the variants that together solve most training questions: the paper's random baseline."""
    pool = [outcomes.pool[j] for j in greedy_cover(outcomes.z, size)]
    return replace(random_order(pool, seed, "random_top"), weights=_accuracies(outcomes, pool))


def best(outcomes: Outcomes) -> Policy:
    """Order by training accuracy, the same for all questions; ties by pool order."""
    accuracy = np.nan_to_num(outcomes.accuracy(), nan=-1.0)
    return _fixed("best", outcomes, [outcomes.pool[j] for j in np.argsort(-accuracy, kind="stable")])


def cover(outcomes: Outcomes) -> Policy:
    """Order so that each next variant solves most of the training questions that the earlier ones do not solve."""
    return _fixed("cover", outcomes, [outcomes.pool[j] for j in greedy_cover(outcomes.z, len(outcomes.pool))])


def _fixed(name: str, outcomes: Outcomes, pool: list[str]) -> Policy:
    weights = _accuracies(outcomes, pool)
    return Policy(pool, {"policy": name, "pool": pool}, lambda questions: [pool for _ in questions], weights=weights)


def _accuracies(outcomes: Outcomes, pool: Sequence[str]) -> Callable[[Sequence[str]], np.ndarray]:
    """Return the training accuracies of a pool as weights, the same for all questions."""
    accuracy = np.nan_to_num(outcomes.columns(pool).accuracy(), nan=0.0)
    return lambda questions: np.tile(accuracy, (len(questions), 1))


def oracle(outcomes: Outcomes) -> Policy:
    """Order the variants that solve the question first: an upper bound, not a method."""

    def order(questions: Sequence[str]) -> list[list[str]]:
        unknown = [question for question in questions if question not in outcomes.row_of]
        if unknown:
            raise InputError(f"the oracle's outcome store does not hold the question {unknown[0][:60]!r}")
        z = np.nan_to_num(outcomes.z[[outcomes.row_of[question] for question in questions]], nan=0.0)
        return [[outcomes.pool[j] for j in row] for row in np.argsort(-z, axis=1, kind="stable")]

    identity = {"policy": "oracle", "outcomes": digest(np.nan_to_num(outcomes.z, nan=-1).tolist())}
    note = "not a method: it uses the outcomes of the questions that it answers"
    return Policy(outcomes.pool, identity, order, note)


def greedy_cover(z: np.ndarray, size: int) -> list[int]:
    """Choose `size` columns of z (questions, pool) that together solve most questions; NaN counts as not solved.

    Each step takes the column that solves most of the unsolved questions; ties by accuracy, then by pool order.
    """
    if not 1 <= size <= z.shape[1]:
        raise InputError(f"a shortlist of {size} cannot be taken from a pool of {z.shape[1]}")
    solved = z == 1
    unsolved, chosen = np.ones(len(z), bool), []
    for _ in range(size):
        unchosen = [j for j in range(z.shape[1]) if j not in chosen]
        column = max(unchosen, key=lambda j: (solved[unsolved, j].sum(), solved[:, j].sum(), -j))
        chosen.append(column)
        unsolved &= ~solved[:, column]
    return chosen
