"""Fit the paper's router: the heads nearest to θ φ(x), by the contrastive loss (eq. 1)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lmeval_prune.errors import InputError
from lmeval_prune.sprint.loss import agreement, constrain, contrastive_loss, ranking_losses, squared_distances
from lmeval_prune.sprint.routers.base import Candidate, Examples, Ranker, RouterMethod
from lmeval_prune.sprint.routers.contrastive_options import ContrastiveOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class NearestHeads(Ranker):
    """Orders heads by the squared distance of v_j to q = θ φ(x).

    Attributes:
        theta: θ, shape (p, width).
        heads: head embeddings v_j, shape (pool, p).
    """

    shapes: ClassVar = {"theta": ("p", "width"), "heads": ("pool", "p")}
    theta: Tensor
    heads: Tensor

    def order(self, x: Tensor) -> Tensor:
        """Return the nearest head first; ties, also those by rounding, by pool order."""
        distances = squared_distances(x.double() @ self.theta.double().T, self.heads.double())
        return distances.round(decimals=12).argsort(dim=1, stable=True)


@dataclass(frozen=True)
class Contrastive(ContrastiveOptions, RouterMethod):
    """Minimises eq. 1 over θ and V by AdamW; the epoch is that of the lowest validation loss."""

    version: ClassVar = 2  # 1: distances in float32, whose rounding could depend on the other questions of a batch
    ranker: ClassVar = NearestHeads

    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        """Fit each p and λ; see the base class."""
        for size, weight in product(self.sizes, self.weights):
            theta, heads, curve = self._optimise(examples, size, weight)
            loss = min(epoch["validation"] for epoch in curve)
            if not np.isfinite([loss, curve[-1]["training"]]).all():
                fit = (
                    f"the fit with p={size} and lambda={weight:g} has diverged at learning_rate={self.learning_rate:g}"
                )
                if not np.isfinite(loss):
                    raise InputError(f"{fit}; give a smaller one")
                logger.warning("%s in epoch %d: the best epoch before is kept; give a smaller one", fit, len(curve))
            yield Candidate({"p": size, "lambda": weight}, NearestHeads(theta, heads), loss, {"curve": curve})

    def _optimise(self, examples: Examples, size: int, weight: float) -> tuple[Tensor, Tensor, list[dict[str, float]]]:
        """Return θ and V at the lowest validation loss (without validation: training loss), and the curve."""
        x, z = examples.x, examples.z
        generator = torch.Generator().manual_seed(examples.seed)
        theta = torch.randn(size, x.shape[1], generator=generator) / x.shape[1] ** 0.5
        raw = torch.randn(z.shape[1], size, generator=generator) * self.radius / (2 * size**0.5)
        theta.requires_grad_(), raw.requires_grad_()
        s = agreement(z)
        groups: list[dict[str, Any]] = [
            {"params": [theta], "weight_decay": self.decay},
            {"params": [raw], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(groups, lr=self.learning_rate)
        best, lowest, epochs_since = (theta.detach().clone(), raw.detach().clone()), float("inf"), 0
        curve: list[dict[str, float]] = []
        for epoch in range(self.epochs):
            for batch in torch.randperm(len(x), generator=generator).split(self.batch):
                optimiser.zero_grad()
                heads = constrain(raw, self.diversity, self.radius)
                contrastive_loss(x[batch] @ theta.T, heads, z[batch], s, weight).backward()
                optimiser.step()
            with torch.no_grad():
                heads = constrain(raw, self.diversity, self.radius)
                training_loss = float(contrastive_loss(x @ theta.T, heads, z, s, weight))
                losses = ranking_losses(examples.validation_x @ theta.T, heads, examples.validation_z)
                validation_loss = float(losses.mean()) if len(losses) else training_loss
            curve.append({"epoch": epoch, "training": training_loss, "validation": validation_loss})
            epochs_since += 1
            if validation_loss < lowest:
                best, lowest, epochs_since = (theta.detach().clone(), raw.detach().clone()), validation_loss, 0
            if epochs_since >= self.patience or not np.isfinite(training_loss):
                break
        return best[0], constrain(best[1], self.diversity, self.radius).detach(), curve
