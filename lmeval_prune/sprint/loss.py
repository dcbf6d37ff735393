"""SPRINT's contrastive loss (eq. 1) over partly unknown outcomes.

    L = 1/n Σ_i −log( Σ_{j∈M_i⁺} exp(−‖q_i − v_j‖²) / Σ_j exp(−‖q_i − v_j‖²) ) − λ Σ_{j<k} s_jk ‖v_j − v_k‖²

Both sums of the first term run over the known outcomes of a question. A question that no head solves has an empty M_i⁺
and is left out of the first term. A question that all heads solve adds 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distances(q: Tensor, v: Tensor) -> Tensor:
    """Return ‖q_i − v_j‖², shape (questions, heads), from q (questions, p) and v (heads, p)."""
    return (q[:, None, :] - v[None, :, :]).square().sum(-1)


def ranking_losses(q: Tensor, v: Tensor, z: Tensor) -> Tensor:
    """Return the first term of eq. 1 for each question that some head solves.

    Args:
        q: question embeddings (questions, p).
        v: head embeddings (heads, p).
        z: outcomes (questions, heads): 1, 0 or NaN (unknown).
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
