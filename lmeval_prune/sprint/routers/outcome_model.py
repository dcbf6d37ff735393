"""A logistic model of all outcomes of a question, with factors that they share.

    P(z_ij = 1 | x_i, t_i) = σ(b_j + a_j · W x_i + s_j · t_i),  t_i ~ N(0, I)

b_j is the bias of column j; a_j (pool, rank) and W (rank, width) are a low-rank effect of the standardised embedding
x_i. Given x_i and t_i the outcomes of a question are independent. t_i is what the embedding does not say about the
question, e.g. how hard it is: because of it, failures of one question are correlated. Without factors, s has no columns
and this is a logistic regression for each column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import softplus

from lmeval_prune.sprint.routers.base import Ranker, by_coverage, standardisation

NODES = {0: 1, 1: 15, 2: 7, 3: 5}  # of the quadrature in each dimension, by the number of factors


def quadrature(factors: int) -> tuple[Tensor, Tensor]:
    """Return values of t (nodes, factors) and their probabilities (nodes,): Gauss-Hermite quadrature of N(0, I)."""
    points, weights = np.polynomial.hermite_e.hermegauss(NODES[factors])
    t, chance = np.zeros((1, 0)), np.ones(1)
    for _ in range(factors):
        t = np.concatenate([np.repeat(t, len(points), 0), np.tile(points, len(t))[:, None]], 1)
        chance = np.outer(chance, weights / weights.sum()).ravel()
    return torch.from_numpy(t), torch.from_numpy(chance)


@dataclass(frozen=True, eq=False)
class OutcomeModel(Ranker):
    """Orders columns greedily by expected coverage under the model; without factors, by probability.

    Attributes:
        mean, scale: standardisation of embeddings, shape (width,).
        bias: b, shape (pool,).
        effects: a, shape (pool, rank).
        projection: W, shape (rank, width).
        loadings: s, shape (pool, factors).
    """

    shapes: ClassVar = {
        "mean": ("width",),
        "scale": ("width",),
        "bias": ("pool",),
        "effects": ("pool", "rank"),
        "projection": ("rank", "width"),
        "loadings": ("pool", "factors"),
    }
    mean: Tensor
    scale: Tensor
    bias: Tensor
    effects: Tensor
    projection: Tensor
    loadings: Tensor

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits at each node of the quadrature, (questions, nodes, pool), from x (questions, width)."""
        t, _ = quadrature(self.loadings.shape[1])
        x = (x.double() - self.mean) / self.scale
        return (self.bias + x @ self.projection.T @ self.effects.T)[:, None] + (t @ self.loadings.T)[None]

    def probabilities(self, x: Tensor) -> Tensor:
        """Return the mean over the factors of each column's probability, shape (questions, pool)."""
        _, chance = quadrature(self.loadings.shape[1])
        return (self.logits(x).sigmoid() * chance[:, None]).sum(1)

    def order(self, x: Tensor) -> Tensor:
        """Return columns so that the next one is most probable given that the earlier ones failed."""
        _, chance = quadrature(self.loadings.shape[1])
        return by_coverage(chance.expand(len(x), -1), self.logits(x).sigmoid())

    def negative_log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """Return −log P(z_i | x_i) of each question over its known outcomes, shape (questions,)."""
        _, chance = quadrature(self.loadings.shape[1])
        sign = torch.where(z == 1, -1.0, 1.0).double()[:, None]
        losses = (softplus(sign * self.logits(x)) * (~z.isnan()).double()[:, None]).sum(2)
        return -(chance.log() - losses).logsumexp(1)

    def objective(self, x: Tensor, z: Tensor, l2: float) -> Tensor:
        """Return the mean negative log-likelihood + l2 (‖a‖² + ‖W‖²) + 10⁻⁴ (‖b‖² + ‖s‖²).

        The last term keeps the bias of a column finite that solves no question, or all.
        """
        penalty = l2 * (self.effects.square().sum() + self.projection.square().sum())
        penalty = penalty + 1e-4 * (self.bias.square().sum() + self.loadings.square().sum())
        return self.negative_log_likelihood(x, z).mean() + penalty

    @classmethod
    def fit(cls, x: Tensor, z: Tensor, rank: int, factors: int, l2: float, seed: int, iterations: int) -> Self:
        """Minimise the objective by L-BFGS in float64.

        Args:
            x: embeddings, shape (questions, width).
            z: outcomes, shape (questions, pool): 1, 0 or NaN (unknown).
            rank: rank of the embedding's effect; 0: none.
            factors: dimensions of t.
            l2: weight of the penalty.
            seed: seed of the initial values.
            iterations: at most so many steps.
        """
        mean, scale = standardisation(x)
        generator = torch.Generator().manual_seed(seed)
        solved, observed = (z == 1).double().sum(0), (~z.isnan()).double().sum(0)
        start = [
            ((solved + 1) / (observed + 2)).logit(),
            torch.randn(z.shape[1], rank, generator=generator).double() / 10,
            torch.randn(rank, x.shape[1], generator=generator).double() / 10,
            1 + torch.randn(z.shape[1], factors, generator=generator).double() / 10,
        ]
        parameters = minimise(lambda *values: cls(mean, scale, *values).objective(x, z, l2), start, iterations)
        return cls(mean, scale, *parameters)


def minimise(loss: Callable[..., Tensor], start: list[Tensor], iterations: int) -> list[Tensor]:
    """Minimise a function of tensors in float64 by scipy's L-BFGS-B with torch's gradients."""
    sizes = [tensor.numel() for tensor in start]

    def tensors(flat: np.ndarray) -> list[Tensor]:
        parts = torch.from_numpy(np.array(flat)).split(sizes)
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, start, strict=True)]

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        parameters = [tensor.requires_grad_() for tensor in tensors(flat)]
        value = loss(*parameters)
        gradients = torch.autograd.grad(value, parameters)
        return float(value.detach()), torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()

    flat = torch.cat([tensor.reshape(-1) for tensor in start]).numpy()
    options: dict[str, Any] = {"maxiter": iterations, "maxcor": 20}
    return tensors(minimize(value_and_gradient, flat, jac=True, method="L-BFGS-B", options=options).x)
