"""Order the pool so that the next try has the best chance given that all earlier ones failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Interval, MinLen

from lmeval_prune.sprint.routers.knn import Knn
from lmeval_prune.sprint.routers.logistic import Logistic


@dataclass(frozen=True)
class Sequential(Logistic):
    """Fits a logistic model with factors that all outcomes of a question share, and covers greedily.

    A try that fails makes those columns less likely that fail with it: the factors' distribution moves towards values
    at which the failed columns fail. Without factors the order would be that by probability.

    Attributes:
        factors: number of factors.
        rank: rank of the embedding's effect; 0 orders all questions alike.
        l2: weight of the penalty on this effect.
        iterations: at most so many steps of L-BFGS.
    """

    factors: Annotated[tuple[Annotated[int, Interval(ge=0, le=3)], ...], MinLen(1)] = (1, 2)

    def combinations(self) -> list[dict[str, Any]]:
        """Return all combinations of option values."""
        others = super().combinations()
        return [{"factors": factors, **values} for factors in self.factors for values in others]


@dataclass(frozen=True)
class SequentialKnn(Knn):
    """Orders as `knn` does, but by what is solved of those neighbours' questions that no earlier try solves."""

    sequential: ClassVar[bool] = True
