"""Make up for removed inputs of a projection: by a bias, or by the output projection that does best without them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lmeval_prune.errors import InputError

_STEPS = 6  # how often the damping is raised, ten times each


def bias_for(weight: Tensor, mean: Tensor, removed: Collection[int]) -> Tensor:
    """Return what the removed columns add to the output on average: W·(m ⊙ removed), in float64.

    Args:
        weight: (outputs, columns).
        mean: of each column over tokens.
        removed: columns.
    """
    columns = sorted(removed)
    return weight.double().cpu()[:, columns] @ mean[columns]


def least_squares_for(weight: Tensor, second: Tensor, removed: Collection[int]) -> Tensor:
    """Return the weight whose output without the removed columns is nearest to what it was, in float64.

    Minimises the mean of ‖W·x − W'·x‖² over W' that are zero in the removed columns S: W'_K = W_K + W_S·H_SK·H_KK⁻¹.

    Args:
        weight: (outputs, columns).
        second: H, the mean of x·xᵀ over tokens, damped (`damped`).
        removed: columns.
    """
    weight = weight.double().cpu()
    lost = torch.zeros(len(second), dtype=torch.bool)
    lost[sorted(removed)] = True
    factor = torch.linalg.cholesky(second[~lost][:, ~lost])
    solved = torch.zeros_like(weight)
    solved[:, ~lost] = weight[:, ~lost] + torch.cholesky_solve(second[~lost][:, lost] @ weight[:, lost].T, factor).T
    return solved


def damped(second: Tensor, damping: float) -> tuple[Tensor, float]:
    """Return a mean of x·xᵀ that can be inverted, and the share of its mean diagonal that its diagonal is raised by.

    Args:
        second: the mean of x·xᵀ.
        damping: that share; raised as long as the matrix is not positive definite.

    Raises:
        InputError: no share is enough.
    """
    diagonal = float(second.diagonal().mean())
    for _ in range(_STEPS):
        raised = second + torch.eye(len(second), dtype=second.dtype) * (damping * diagonal)
        _, failed = torch.linalg.cholesky_ex(raised)
        if diagonal > 0 and not failed and _is_invertible(raised):
            return raised, damping
        damping = max(10 * damping, 1e-6)
    raise InputError(
        "the covariance of a layer's inputs is not positive definite, however it is damped: the calibration text gives "
        "nothing there (not a number, or zeros only); give another text, or another type"
    )


def _is_invertible(matrix: Tensor) -> bool:
    """Return whether rounding has left the smallest pivots, so that the inverse means something."""
    pivots = torch.linalg.cholesky(matrix).diagonal()
    return bool(pivots.min() > 1e-7 * pivots.max())
