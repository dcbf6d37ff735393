"""Which heads to prune for a question, in order: SPRINT's router and what it is compared with.

All candidates of a question differ; every policy orders the whole pool (or, `RandomTop`, its shortlist), so that
the i-th try takes the i-th head.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.router import Router


class Policy(ABC):
    """Orders a pool for each question.

    Attributes:
        pool: what it chooses from.
        note: what a reader of its results must know; empty for a method.
    """

    pool: list[str]
    note: str = ""

    @abstractmethod
    def order(self, questions: Sequence[str]) -> list[list[str]]:
        """For each question, columns of the pool, each once, the first choice first."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON value that determines the order."""


@dataclass(frozen=True)
class Nearest(Policy):
    """SPRINT: the heads nearest to the question's place."""

    router: Router

    @property
    def pool(self) -> list[str]:  # type: ignore[override]
        """The router's."""
        return self.router.pool

    @property
    def identity(self) -> dict[str, Any]:
        """The router's file."""
        return {"policy": "router", "router_sha256": self.router.sha256, "encoder": self.router.encoder}

    def order(self, questions: Sequence[str]) -> list[list[str]]:
        """By squared distance, ties by pool order."""
        return self.router.order(questions)


@dataclass(frozen=True)
class Random(Policy):
    """A plainly random order, by seed and question."""

    pool: list[str]
    seed: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """Pool and seed."""
        return {"policy": "random", "pool": self.pool, "seed": self.seed}

    def order(self, questions: Sequence[str]) -> list[list[str]]:
        """A question's order does not depend on the others."""
        generators = (random.Random(digest([self.seed, question])) for question in questions)
        return [generator.sample(self.pool, len(self.pool)) for generator in generators]


@dataclass(frozen=True)
class RandomTop(Random):
    """The paper's random baseline: a random order of the heads that together solve most training questions."""

    @classmethod
    def of(cls, outcomes: Outcomes, size: int, seed: int = 0) -> RandomTop:
        """Choose `size` heads greedily."""
        return cls([outcomes.pool[j] for j in greedy_cover(outcomes.z, size)], seed)

    @property
    def identity(self) -> dict[str, Any]:
        """Shortlist and seed."""
        return {**super().identity, "policy": "random_top"}


@dataclass(frozen=True)
class Best(Policy):
    """For every question the heads of highest training accuracy."""

    pool: list[str]

    @classmethod
    def of(cls, outcomes: Outcomes) -> Best:
        """Order by accuracy over the known outcomes; ties by pool order."""
        accuracy = np.nan_to_num(outcomes.accuracy(), nan=-1.0)
        return cls([outcomes.pool[j] for j in np.argsort(-accuracy, kind="stable")])

    @property
    def identity(self) -> dict[str, Any]:
        """The order."""
        return {"policy": "best", "pool": self.pool}

    def order(self, questions: Sequence[str]) -> list[list[str]]:
        """The same for all."""
        return [self.pool for _ in questions]


@dataclass(frozen=True)
class Oracle(Policy):
    """In hindsight: heads that solve the question first. An upper bound, not a method."""

    outcomes: Outcomes
    note: str = field(default="not a method: it looks at the outcomes of the very questions it answers")

    @property
    def pool(self) -> list[str]:  # type: ignore[override]
        """The store's."""
        return self.outcomes.pool

    @property
    def identity(self) -> dict[str, Any]:
        """What it looked at."""
        return {"policy": "oracle", "outcomes": digest(np.nan_to_num(self.outcomes.z, nan=-1).tolist())}

    def order(self, questions: Sequence[str]) -> list[list[str]]:
        """Solving heads first, then the others, both by pool order.

        Raises:
            InputError: a question has no outcomes.
        """
        found = []
        for question in questions:
            row = self.outcomes.row_of.get(question)
            if row is None:
                raise InputError(f"the oracle's outcome store does not hold the question {question[:60]!r}")
            z = np.nan_to_num(self.outcomes.z[row], nan=0.0)
            found.append([self.pool[j] for j in np.argsort(-z, kind="stable")])
        return found


def greedy_cover(z: np.ndarray, size: int) -> list[int]:
    """Columns that together solve most questions, chosen one by one.

    Each step takes the column that solves most of the questions not solved yet; ties by accuracy, then by
    order. Once nothing new can be solved, accuracy decides.

    Args:
        z: shape (questions, pool); NaN counts as not solved.
        size: how many.

    Raises:
        InputError: the pool is smaller.
    """
    if not 1 <= size <= z.shape[1]:
        raise InputError(f"a shortlist of {size} cannot be taken from a pool of {z.shape[1]}")
    solved = z == 1
    open_, chosen = np.ones(len(z), bool), []
    for _ in range(size):
        rest = [j for j in range(z.shape[1]) if j not in chosen]
        best = max(rest, key=lambda j: (solved[open_, j].sum(), solved[:, j].sum(), -j))
        chosen.append(best)
        open_ &= ~solved[:, best]
    return chosen
