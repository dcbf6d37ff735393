"""Moments of projection inputs over calibration text, and what compensates for removed columns by them.

Sums are in float64. Products x·xᵀ of one batch are computed in the inputs' dtype, float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features
from lmeval_prune.artefacts import NONFINITE_REMEDY, check_finite
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import Part

_DAMPING_STEPS = 6  # attempts, each with ten times the damping


class Moments:
    """Mean, variance and, with `products`, second moments of columns over tokens."""

    def __init__(self, columns: int, products: bool = False) -> None:
        self.count = 0  # number of tokens
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self.deviations = torch.zeros(columns, dtype=torch.float64)  # sum of squared distances from the mean
        self.products = torch.zeros(columns, columns, dtype=torch.float64) if products else None  # sum of x·xᵀ

    def add(self, x: Tensor) -> None:
        """Add tokens, (tokens, columns)."""
        if not len(x):
            return
        if self.products is not None:
            inputs = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            self.products += (inputs.T @ inputs).cpu()
        x = x.detach().double()
        mean = x.mean(0)
        deviations = (x - mean).square().sum(0).cpu()
        difference = mean.cpu() - self.mean
        total = self.count + len(x)
        self.mean += difference * (len(x) / total)
        self.deviations += deviations + difference.square() * (self.count * len(x) / total)
        self.count = total

    def add_batch(self, x: Tensor, counted: Tensor) -> None:
        """Add the tokens of a batch that count; x is (rows, tokens, columns), counted (rows, tokens)."""
        self.add(x.reshape(*counted.shape, -1)[counted.bool()])

    def check(self, projection: str) -> None:
        """Raise `InputError`, with the projection's name, if the moments are not finite."""
        statistics = self.deviations if self.products is None else self.products
        check_finite({projection: statistics}, "the calibration run", NONFINITE_REMEDY)

    @property
    def variance(self) -> Tensor:
        return self.deviations / max(1, self.count)

    @property
    def fluctuation(self) -> Tensor:
        """FLAP's fluctuation of each column: the variance."""
        return self.variance

    @property
    def mean_square(self) -> Tensor:
        return self.variance + self.mean.square()

    @property
    def second(self) -> Tensor:
        """Mean over tokens of x·xᵀ, (columns, columns)."""
        assert self.products is not None
        return self.products / max(1, self.count)


class ReferenceFluctuation(Moments):
    """Moments with the fluctuation of FLAP's reference code: squared distances from a running mean over windows.

    The code updates the mean before it subtracts it, and the first window does not count:
    1/(N−1) · Σ k/(k+1) · Σ (x − m_k)² over windows k = 1 … N−1, m_k the mean of windows 0 … k.
    """

    windows = 0
    distances: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        super().add(x)
        distances = (x.detach().double().cpu() - self.mean).square().sum(0)
        self.distances = self.distances + self.windows / (self.windows + 1) * distances
        self.windows += 1

    def add_batch(self, x: Tensor, counted: Tensor) -> None:
        for window, mask in zip(x.reshape(*counted.shape, -1), counted.bool(), strict=True):
            self.add(window[mask])

    @property
    def fluctuation(self) -> Tensor:
        return self.mean.new_tensor(0.0) + self.distances / max(1, self.windows - 1)


def read_inputs(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], collect: Callable[[Part, Tensor, Tensor], None]
) -> None:
    """Run the model on a text and pass the inputs of the parts' projections to a function.

    `collect` is called for each batch and part with the part, its inputs, (rows, tokens, columns), and a mask of the
    tokens that count, (rows, tokens), False for padding.
    """
    counted = torch.ones(0)

    def hook(part: Part, x: Tensor) -> Tensor:
        # OPT's feed-forward projections read (rows · tokens, columns)
        collect(part, x.detach().reshape(*counted.shape, -1), counted)
        return x

    with ExitStack() as stack:
        for part in parts:
            change_input(part.projection, partial(hook, part), stack)
        for batch in text.run(model_map.model):
            counted = batch.counted.bool()  # read by the hooks


def input_moments(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], moments_class: type[Moments] = Moments
) -> dict[str, Moments]:
    """Return the moments of the inputs of the parts' projections over a text, by part key."""
    moments = {part.key: moments_class(in_features(part.projection)) for part in parts}
    read_inputs(model_map, text, parts, lambda part, x, counted: moments[part.key].add_batch(x, counted))
    for part in parts:
        moments[part.key].check(part.projection_name)
    return moments


def bias_for(weight: Tensor, mean: Tensor, removed: Collection[int]) -> Tensor:
    """Return the mean output of the removed columns: W·(m ⊙ removed), shape (outputs,), in float64.

    `weight` is W, (outputs, columns), and `mean` is m, the mean of each column over tokens, (columns,), in float64.
    """
    columns = sorted(removed)
    return weight[:, columns] @ mean[columns]


def least_squares_for(weight: Tensor, second: Tensor, removed: Collection[int]) -> Tensor:
    """Return the weight without the removed columns whose output is nearest to the original one, in float64.

    Minimises the mean of ‖W·x − W'·x‖² over W' with zeros in the removed columns S: W'_K = W_K + W_S·H_SK·H_KK⁻¹.
    `weight` is W, (outputs, columns); `second` is H, the damped mean of x·xᵀ over tokens, (columns, columns).
    """
    is_kept = torch.ones(len(second), dtype=torch.bool)
    is_kept[sorted(removed)] = False
    factor = torch.linalg.cholesky(second[is_kept][:, is_kept])
    change = torch.cholesky_solve(second[is_kept][:, ~is_kept] @ weight[:, ~is_kept].T, factor).T
    solved = torch.zeros_like(weight)
    solved[:, is_kept] = weight[:, is_kept] + change
    return solved


def damped(second: Tensor, damping: float) -> tuple[Tensor, float]:
    """Add damping, as a share of the mean diagonal, to a mean of x·xᵀ until it is invertible; return both."""
    diagonal = float(second.diagonal().mean())
    for _ in range(_DAMPING_STEPS):
        raised = second + torch.eye(len(second), dtype=second.dtype) * (damping * diagonal)
        factor, failed = torch.linalg.cholesky_ex(raised)
        pivots = factor.diagonal()
        if diagonal > 0 and not failed and pivots.min() > 1e-7 * pivots.max():
            return raised, damping
        damping = max(10 * damping, 1e-6)
    raise InputError("the inputs of a layer are zero or not finite on the calibration text; give another text or dtype")
