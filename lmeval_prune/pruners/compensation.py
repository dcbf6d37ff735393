"""Compensate for removed columns of a projection: with a bias, or with a least-squares update of its weight."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lmeval_prune.errors import InputError

_DAMPING_STEPS = 6  # attempts, each with ten times the damping


def bias_for(weight: Tensor, mean: Tensor, removed: Collection[int]) -> Tensor:
    """Return the mean output of the removed columns: W·(m ⊙ removed), shape (outputs,), in float64.

    `weight` is W, (outputs, columns); `mean` is m, the mean of each column over tokens, (columns,).
    """
    columns = sorted(removed)
    return weight.double().cpu()[:, columns] @ mean[columns]


def least_squares_for(weight: Tensor, second: Tensor, removed: Collection[int]) -> Tensor:
    """Return the weight without the removed columns whose output is nearest to the original one, in float64.

    Minimises the mean of ‖W·x − W'·x‖² over W' with zeros in the removed columns S: W'_K = W_K + W_S·H_SK·H_KK⁻¹.
    `weight` is W, (outputs, columns); `second` is H, the damped mean of x·xᵀ over tokens, (columns, columns).
    """
    weight = weight.double().cpu()
    is_removed = torch.zeros(len(second), dtype=torch.bool)
    is_removed[sorted(removed)] = True
    is_kept = ~is_removed
    factor = torch.linalg.cholesky(second[is_kept][:, is_kept])
    solved = torch.zeros_like(weight)
    solved[:, is_kept] = (
        weight[:, is_kept] + torch.cholesky_solve(second[is_kept][:, is_removed] @ weight[:, is_removed].T, factor).T
    )
    return solved


def damped(second: Tensor, damping: float) -> tuple[Tensor, float]:
    """Add damping, as a share of the mean diagonal, to a mean of x·xᵀ (columns, columns) until it is invertible.

    Returns the damped matrix and the damping that it needed; raises `InputError` if no damping is enough.
    """
    diagonal = float(second.diagonal().mean())
    for _ in range(_DAMPING_STEPS):
        raised = second + torch.eye(len(second), dtype=second.dtype) * (damping * diagonal)
        _, failed = torch.linalg.cholesky_ex(raised)
        if diagonal > 0 and not failed and _is_invertible(raised):
            return raised, damping
        damping = max(10 * damping, 1e-6)
    raise InputError("the inputs of a layer are zero or not finite on the calibration text; give another text or dtype")


def _is_invertible(matrix: Tensor) -> bool:
    pivots = torch.linalg.cholesky(matrix).diagonal()
    return bool(pivots.min() > 1e-7 * pivots.max())
