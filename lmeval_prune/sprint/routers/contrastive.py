"""Fit the paper's router: the heads nearest to q = θ φ(x), by SPRINT's contrastive loss (eq. 1).

    L = 1/n Σ_i −log( Σ_{j∈M_i⁺} exp(−‖q_i − v_j‖²) / Σ_j exp(−‖q_i − v_j‖²) ) − λ Σ_{j<k} s_jk ‖v_j − v_k‖²

Both sums of the first term run over the known outcomes of a question. A question that no head solves has an empty M_i⁺
and is left out of the first term. A question that all heads solve adds 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmeval_prune.sprint.options import ContrastiveOptions
from lmeval_prune.sprint.routers import Candidate, Examples, Ranker, RouterMethod


def squared_distances(q: Tensor, v: Tensor) -> Tensor:
    """Return ‖q_i − v_j‖², shape (questions, heads), from q (questions, p) and v (heads, p)."""
    return (q[:, None, :] - v[None, :, :]).square().sum(-1)


def ranking_losses(q: Tensor, v: Tensor, z: Tensor) -> Tensor:
    """Return the first term of eq. 1 for each question that some head solves.

    The shapes are q (questions, p), v (heads, p) and z (questions, heads): 1, 0 or NaN (unknown).
    """
    solved = (z == 1).any(1)
    logits, z = -squared_distances(q[solved], v), z[solved]
    total = logits.masked_fill(z.isnan(), -torch.inf).logsumexp(1)
    return total - logits.masked_fill(z != 1, -torch.inf).logsumexp(1)


def agreement(z: Tensor) -> Tensor:
    """Return s_jk, the share of equal outcomes of heads j and k, shape (heads, heads).

    The share is over questions with both outcomes known; it is 0 without any.
    """
    observed = (~z.isnan()).to(torch.float64)
    right = (z == 1).to(torch.float64)
    wrong = observed - right
    counts = observed.T @ observed
    return ((right.T @ right + wrong.T @ wrong) / counts.clamp(min=1)).to(z.dtype)


def constrain(v: Tensor, diversity: str, radius: float) -> Tensor:
    """Project head embeddings into a ball or onto a sphere; leave them if `diversity` is `unbounded`.

    As printed, the loss has no minimum for λ > 0: its second term grows without bound as heads move apart.
    """
    if diversity == "unbounded":
        return v
    length = v.norm(dim=1, keepdim=True).clamp(min=1e-12)
    scale = radius / length
    return v * (scale.clamp(max=1) if diversity == "ball" else scale)


def contrastive_loss(q: Tensor, v: Tensor, z: Tensor, s: Tensor, weight: float) -> Tensor:
    """Return eq. 1 with λ = `weight`; the first term is 0 if no question is solved."""
    losses = ranking_losses(q, v, z)
    ranking = losses.mean() if len(losses) else q.sum() * 0
    diversity = (s * squared_distances(v, v)).triu(1).sum()  # Σ_{j<k} s_jk ‖v_j − v_k‖²
    return ranking - weight * diversity


@dataclass(frozen=True, eq=False)
class NearestHeads(Ranker):
    """Orders heads by the squared distance of v_j to q = θ φ(x)."""

    theta: Tensor  # θ, shape (p, width)
    heads: Tensor  # head embeddings v_j, shape (pool, p)

    def order(self, x: Tensor) -> Tensor:
        """Return the nearest head first; ties, also those by rounding, by pool order."""
        distances = squared_distances(x.double() @ self.theta.double().T, self.heads.double())
        return distances.round(decimals=12).argsort(dim=1, stable=True)


@dataclass(frozen=True)
class Contrastive(ContrastiveOptions, RouterMethod):
    """Minimises eq. 1 over θ and V by AdamW; the epoch is that of the lowest validation loss."""

    ranker: ClassVar = NearestHeads

    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        for size, weight in product(self.sizes, self.weights):
            theta, heads, curve = self._optimise(examples, size, weight)
            loss = min(epoch["validation"] for epoch in curve)
            yield Candidate({"p": size, "lambda": weight}, NearestHeads(theta, heads), loss, {"curve": curve})

    def _optimise(self, examples: Examples, size: int, weight: float) -> tuple[Tensor, Tensor, list[dict[str, float]]]:
        """Return θ and V at the lowest validation loss (without validation: training loss), and the curve."""
        x, z = examples.x, examples.z
        generator = torch.Generator().manual_seed(examples.seed)
        theta = torch.randn(size, x.shape[1], generator=generator) / x.shape[1] ** 0.5
        raw = torch.randn(z.shape[1], size, generator=generator) * self.radius / (2 * size**0.5)
        theta.requires_grad_(), raw.requires_grad_()
        s = agreement(z)
        decays: list[dict[str, Any]] = [{"params": [theta]}, {"params": [raw], "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW(decays, lr=self.learning_rate, weight_decay=self.decay)
        best, lowest, epochs_since = (theta.detach().clone(), raw.detach().clone()), math.inf, 0
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
            if epochs_since >= self.patience or not math.isfinite(training_loss):
                break
        return best[0], constrain(best[1], self.diversity, self.radius).detach(), curve
