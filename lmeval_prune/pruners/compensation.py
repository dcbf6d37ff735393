"""What makes up for removed inputs of a projection: a bias, or the output projection that does best without them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lmeval_prune.errors import InputError

_STEPS = 6  # how often the damping is raised, ten times each


def bias_for(weight: Tensor, mean: Tensor, removed: Collection[int]) -> Tensor:
    """What the removed columns add to the output on average: W·(m ⊙ removed), in float64.

    Args:
        weight: (outputs, columns).
        mean: of each column over tokens.
        removed: columns.
    """
    places = sorted(removed)
    return weight.double().cpu()[:, places] @ mean[places]


def least_squares_for(weight: Tensor, second: Tensor, removed: Collection[int]) -> Tensor:
    """The weight whose output without the removed columns is nearest to what it was, in float64.

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
    found = torch.zeros_like(weight)
    found[:, ~lost] = weight[:, ~lost] + torch.cholesky_solve(second[~lost][:, lost] @ weight[:, lost].T, factor).T
    return found


def damped(second: Tensor, damping: float) -> tuple[Tensor, float]:
    """A matrix of products that can be inverted: a share of its mean diagonal is added to the diagonal.

    Args:
        second: the mean of x·xᵀ.
        damping: that share; raised as long as the matrix is not positive definite.

    Returns:
        The matrix, and the share that it took.

    Raises:
        InputError: no share does.
    """
    diagonal = float(second.diagonal().mean())
    for _ in range(_STEPS):
        found = second + torch.eye(len(second), dtype=second.dtype) * (damping * diagonal)
        _, failed = torch.linalg.cholesky_ex(found)
        if diagonal > 0 and not failed and _is_invertible(found):
            return found, damping
        damping = max(10 * damping, 1e-6)
    raise InputError(
        "the covariance of a layer's inputs is not positive definite, however it is damped: the calibration text gives "
        "nothing there (not a number, or zeros only); give another text, or another type"
    )


def _is_invertible(matrix: Tensor) -> bool:
    """Whether what is computed with the inverse means something: rounding has not eaten the smallest pivots."""
    pivots = torch.linalg.cholesky(matrix).diagonal()
    return bool(pivots.min() > 1e-7 * pivots.max())
