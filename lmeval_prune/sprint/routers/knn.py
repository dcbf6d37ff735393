"""Order the pool by the outcomes of the most similar training questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import MinLen
from torch import Tensor

from lmeval_prune.config import Count, Positive
from lmeval_prune.sprint.routers import Candidate, Examples, Ranker, RouterMethod

Weighting = Literal["uniform", "distance"]


@dataclass(frozen=True, eq=False)
class Neighbours(Ranker):
    """Weighs the training questions for a question, and orders columns by their outcomes."""

    mean: Tensor  # standardisation of embeddings, shape (width,), and its scale
    scale: Tensor
    vectors: Tensor  # standardised embeddings of the training questions, of length 1, shape (questions, width)
    outcomes: Tensor  # shape (questions, pool); an unknown one is the column's share of solved questions
    k: Count
    weighting: Weighting
    prior: Positive

    def weights(self, x: Tensor) -> Tensor:
        """Return the weight of each training question, shape (questions, training questions); they sum to 1.

        The k nearest questions share k, all questions share `prior`; then all is divided by k + prior. Of equally
        near ones the first is taken.
        """
        query = unit((x.double() - self.mean) / self.scale)
        distances = (2 - 2 * query @ self.vectors.T).clamp(min=0).sqrt().round(decimals=10)
        k = min(self.k, len(self.vectors))
        nearest = distances.argsort(dim=1, stable=True)[:, :k]
        near = torch.ones_like(nearest, dtype=torch.double)
        if self.weighting == "distance":
            near = 1 / distances.gather(1, nearest).clamp(min=1e-3)
        near = near * k / near.sum(1, keepdim=True)
        everyone = torch.full_like(distances, self.prior / len(self.vectors))
        return everyone.scatter_add(1, nearest, near) / (k + self.prior)

    def probabilities(self, x: Tensor) -> Tensor:
        """Return the weighted share of solved training questions, shape (questions, pool)."""
        return self.weights(x) @ self.outcomes

    def order(self, x: Tensor) -> Tensor:
        """Order by the weighted share of solved questions; ties, also those by rounding, by pool order."""
        return self.probabilities(x).round(decimals=12).argsort(dim=1, descending=True, stable=True)


def standardisation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and scale, shape (width,) each, in float64, of training embeddings (questions, width).

    (x − mean) / scale has variance 1/width in every dimension, so that its mean squared length is 1. A dimension that
    is constant keeps the scale of the mean dimension.
    """
    x = x.double()
    deviation = x.std(0, correction=0)
    typical = deviation.square().mean().sqrt()
    deviation = torch.where(deviation > 1e-6 * typical, deviation, typical if typical > 0 else torch.ones_like(typical))
    return x.mean(0), deviation * x.shape[1] ** 0.5


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def log_loss(p: Tensor, z: Tensor) -> float:
    """Return the mean of −log P(outcome) over known outcomes; probabilities are limited to 10⁻⁶ … 1 − 10⁻⁶."""
    known = ~z.isnan()
    chance = p[known].double().numpy().clip(1e-6, 1 - 1e-6)
    return float(-np.where(z[known].numpy() == 1, np.log(chance), np.log1p(-chance)).mean())


@dataclass(frozen=True)
class Knn(RouterMethod):
    """Estimates that a column solves a question from the outcomes of the k most similar training questions.

    Attributes:
        k: number of neighbours; those beyond the number of training questions are left out.
        weighting: `uniform`, or `distance` for weights that are inverse to the distance.
        prior: number of neighbours that the average over all training questions counts as.
    """

    ranker: ClassVar = Neighbours
    k: Annotated[tuple[Count, ...], MinLen(1)] = (5, 10, 20, 40, 80)
    weighting: Annotated[tuple[Weighting, ...], MinLen(1)] = ("uniform", "distance")
    prior: Annotated[tuple[Positive, ...], MinLen(1)] = (1.0, 20.0)

    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        mean, scale = standardisation(examples.x)
        vectors, z = unit((examples.x.double() - mean) / scale), examples.z.double()
        rates = (z == 1).double().sum(0) / (~z.isnan()).double().sum(0).clamp(min=1)
        outcomes = torch.where(z.isnan(), rates, z)
        x, z = examples.x, examples.z
        if len(examples.validation_z):
            x, z = examples.validation_x, examples.validation_z
        for k, weighting, prior in product(sorted({min(k, len(vectors)) for k in self.k}), self.weighting, self.prior):
            ranker = Neighbours(mean, scale, vectors, outcomes, k, weighting, prior)
            values: dict[str, Any] = {"k": k, "weighting": weighting, "prior": prior}
            yield Candidate(values, ranker, log_loss(ranker.probabilities(x), z))
