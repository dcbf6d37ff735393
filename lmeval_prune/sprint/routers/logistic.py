"""Order the pool by the probabilities of a low-rank logistic regression."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen

from lmeval_prune.settings import Count, Natural, Positive
from lmeval_prune.sprint.routers.base import Candidate, Examples, RouterMethod
from lmeval_prune.sprint.routers.outcome_model import OutcomeModel


@dataclass(frozen=True)
class Logistic(RouterMethod):
    """Fits P(column j solves question i) by logistic regression, of low rank in the embedding, with an L2 penalty.

    Attributes:
        rank: rank of the embedding's effect; 0 orders all questions alike, by the columns' accuracy.
        l2: weight of the penalty on this effect.
        iterations: at most so many steps of L-BFGS.
    """

    ranker: ClassVar = OutcomeModel
    rank: Annotated[tuple[Natural, ...], MinLen(1)] = (0, 2, 8)
    l2: Annotated[tuple[Positive, ...], MinLen(1)] = (1e-3, 1e-2, 1e-1)
    iterations: Count = 200

    def combinations(self) -> list[dict[str, Any]]:
        """Return all combinations of option values."""
        pairs = [(rank, l2) for rank in self.rank for l2 in (self.l2 if rank else self.l2[:1])]  # rank 0: no penalty
        return [{"rank": rank, "l2": l2} for rank, l2 in pairs]

    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        """Fit each combination; see the base class."""
        for values in self.combinations():
            settings = {"factors": 0, **values, "seed": examples.seed, "iterations": self.iterations}
            model = OutcomeModel.fit(examples.x, examples.z, **settings)
            loss = float(model.negative_log_likelihood(*examples.judged).mean())
            yield Candidate(values, model, loss)
