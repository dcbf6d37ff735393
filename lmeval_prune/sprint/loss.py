"""SPRINT's contrastive loss (eq. 1), over questions whose outcomes may be partly unknown.

    L = 1/n Σ_i −log( Σ_{j∈M_i⁺} exp(−‖q_i − v_j‖²) / Σ_j exp(−‖q_i − v_j‖²) ) − λ Σ_{j<k} s_jk ‖v_j − v_k‖²

Both sums of the first term run over the known outcomes of a question. A question that no head solves has an
empty M_i⁺ and is left out of the first term; one that every head solves adds 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distances(q: Tensor, v: Tensor) -> Tensor:
    """‖q_i − v_j‖², shape (questions, heads), from q (questions, p) and v (heads, p)."""
    return (q[:, None, :] - v[None, :, :]).square().sum(-1)


def ranking_term(q: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The first term, a question at a time.

    Args:
        q: question embeddings (questions, p).
        v: head embeddings (heads, p).
        z: outcomes (questions, heads): 1, 0, NaN unknown.

    Returns:
        The losses of the questions that some head solves, and which questions those are.
    """
    ranked = (z == 1).any(1)
    logits = -squared_distances(q[ranked], v)
    known, solved = ~z[ranked].isnan(), z[ranked] == 1
    every = logits.masked_fill(~known, -torch.inf).logsumexp(1)
    return every - logits.masked_fill(~solved, -torch.inf).logsumexp(1), ranked


def agreement(z: Tensor) -> Tensor:
    """s_jk: the share of questions for which heads j and k have the same outcome, shape (heads, heads).

    Over the questions where both are known; 0 where there is none.
    """
    known = (~z.isnan()).to(torch.float64)
    right = (z == 1).to(torch.float64)
    wrong = known - right
    both = known.T @ known
    return ((right.T @ right + wrong.T @ wrong) / both.clamp(min=1)).to(z.dtype)


def diversity_term(v: Tensor, s: Tensor) -> Tensor:
    """Σ_{j<k} s_jk ‖v_j − v_k‖², a number."""
    return (s * squared_distances(v, v)).triu(1).sum()


def placed(v: Tensor, diversity: str, radius: float) -> Tensor:
    """Head embeddings as the loss sees them: inside a ball, on a sphere, or as they are.

    The printed loss has no minimum for λ > 0: its second term grows without bound as heads move apart. Within a
    ball, or on a sphere, it does the same job and stays bounded.
    """
    if diversity == "unbounded":
        return v
    length = v.norm(dim=1, keepdim=True).clamp(min=1e-12)
    scale = radius / length
    return v * (scale.clamp(max=1) if diversity == "ball" else scale)


def contrastive_loss(q: Tensor, v: Tensor, z: Tensor, s: Tensor, weight: float) -> Tensor:
    """Eq. 1 with λ = `weight`; the first term is 0 if no head solves any of the questions."""
    losses, _ = ranking_term(q, v, z)
    ranking = losses.mean() if len(losses) else q.sum() * 0
    return ranking - weight * diversity_term(v, s)
