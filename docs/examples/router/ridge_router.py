"""Order the pool by a ridge regression of the outcomes on the questions' embeddings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmeval_prune.config import Positive
from lmeval_prune.sprint.routers import Candidate, Examples, Ranker, RouterMethod


@dataclass(frozen=True, eq=False)
class Linear(Ranker):
    """Predicts the outcome of each column of the pool; the highest come first."""

    weights: Tensor  # (width + 1, pool)

    def predict(self, x: Tensor) -> Tensor:
        return with_constant(x) @ self.weights

    def order(self, x: Tensor) -> Tensor:
        return self.predict(x).argsort(dim=1, descending=True, stable=True)


@dataclass(frozen=True)
class Ridge(RouterMethod):
    """Minimises ‖X W − Z‖² + strength · ‖W‖².

    Attributes:
        strength: of several values, validation chooses one.
    """

    ranker: ClassVar = Linear
    strength: tuple[Positive, ...] = (0.1, 1.0, 10.0)

    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        x, z = with_constant(examples.x), examples.z.double()
        z = torch.where(z.isnan(), z.nanmean(0), z)  # an unknown outcome is the column's mean
        chosen = (
            (examples.validation_x, examples.validation_z) if len(examples.validation_z) else (examples.x, examples.z)
        )
        for strength in self.strength:
            penalty = strength * torch.eye(x.shape[1], dtype=torch.float64)
            ranker = Linear(torch.linalg.solve(x.T @ x + penalty, x.T @ z))
            loss = (ranker.predict(chosen[0]) - chosen[1]).square().nanmean()
            yield Candidate({"strength": strength}, ranker, float(loss))


def with_constant(x: Tensor) -> Tensor:
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
