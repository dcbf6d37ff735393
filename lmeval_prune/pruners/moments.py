"""Moments of what projections read, over calibration text: streamed, batch by batch, summed up in float64.

Products of pairs are computed in the inputs' own type, float32 or better, and summed up in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features
from lmeval_prune.artefacts import NONFINITE_REMEDY, check_finite
from lmeval_prune.interventions.base import change_input
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import Part


class Moments:
    """Mean, deviations and products of some columns over tokens.

    Args:
        columns: how many there are.
        pairs: collect products of pairs of columns, too; those of one batch in the inputs' own type, float32 or better.

    Attributes:
        columns: how many there are.
        count: tokens so far.
        mean: of each column.
        deviations: sum over tokens of the squared distance from the mean.
        products: sum over tokens of x·xᵀ, (columns, columns); None without pairs.
    """

    def __init__(self, columns: int, pairs: bool = False) -> None:
        self.columns, self.count = columns, 0
        self.mean = torch.zeros(columns, dtype=torch.float64)
        self.deviations = torch.zeros(columns, dtype=torch.float64)
        self.products = torch.zeros(columns, columns, dtype=torch.float64) if pairs else None

    def add(self, x: Tensor) -> None:
        """Take in tokens, (tokens, columns)."""
        if not len(x):
            return
        if self.products is not None:
            inputs = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            self.products += (inputs.T @ inputs).cpu()
        x = x.detach().double()
        mean = x.mean(0)
        deviations = (x - mean).square().sum(0).cpu()
        apart = mean.cpu() - self.mean
        total = self.count + len(x)
        self.mean += apart * (len(x) / total)
        self.deviations += deviations + apart.square() * (self.count * len(x) / total)
        self.count = total

    def add_batch(self, x: Tensor, real: Tensor) -> None:
        """Take in those of the tokens (rows, tokens, columns) that are real."""
        self.add(x.reshape(*real.shape, -1)[real.bool()])

    def check(self, projection: str) -> None:
        """Refuse values that are no numbers.

        Raises:
            InputError: naming the projection.
        """
        statistics = self.deviations if self.products is None else self.products
        check_finite({projection: statistics}, "what was read of the inputs", NONFINITE_REMEDY)

    @property
    def variance(self) -> Tensor:
        """Variance of each column over tokens."""
        return self.deviations / max(1, self.count)

    @property
    def fluctuation(self) -> Tensor:
        """FLAP's fluctuation of each column: the variance."""
        return self.variance

    @property
    def mean_square(self) -> Tensor:
        """Mean square of each column."""
        return self.variance + self.mean.square()

    @property
    def second(self) -> Tensor:
        """Mean over tokens of x·xᵀ, (columns, columns)."""
        assert self.products is not None
        return self.products / max(1, self.count)


class ReferenceFluctuation(Moments):
    """Moments with the fluctuation of FLAP's reference code: distances from a mean that runs over the windows.

    Its mean is updated in place before it is subtracted, and of the first window nothing counts:
    1/(N−1) · Σ k/(k+1) · Σ (x − m_k)² over windows k = 1 … N−1, m_k the mean of windows 0 … k.
    """

    windows = 0
    distances: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """Take in the tokens of one window."""
        super().add(x)
        apart = (x.detach().double().cpu() - self.mean).square().sum(0)
        self.distances = self.distances + self.windows / (self.windows + 1) * apart
        self.windows += 1

    def add_batch(self, x: Tensor, real: Tensor) -> None:
        """Take in a batch window after window."""
        for window, mask in zip(x.reshape(*real.shape, -1), real.bool(), strict=True):
            self.add(window[mask])

    @property
    def fluctuation(self) -> Tensor:
        """Fluctuation of each column, by the formula of the class."""
        return self.mean.new_tensor(0.0) + self.distances / max(1, self.windows - 1)


def read_inputs(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], collect: Callable[[Part, Tensor, Tensor], None]
) -> None:
    """Run a text, and hand on what the projections of some parts read.

    Args:
        model_map: of the model, with whatever is applied to it.
        text: calibration text.
        parts: the parts.
        collect: called once a batch and part with the part, its inputs (rows, tokens, columns), and which tokens are
            real and no padding (rows, tokens).
    """
    real = torch.ones(0)

    def hand_on(part: Part, x: Tensor) -> Tensor:
        collect(
            part, x.detach().reshape(*real.shape, -1), real.bool()
        )  # some projections read (rows · tokens, columns)
        return x

    with ExitStack() as stack:
        for part in parts:
            change_input(part.projection, partial(hand_on, part), stack)
        for _, real in text.run(model_map.model):  # noqa: B007 - read by the hooks
            pass


def input_moments(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], kind: type[Moments] = Moments
) -> dict[str, Moments]:
    """Return moments of what the projections of some parts read, by part, from one run of the text.

    Args:
        model_map: of the model, with whatever is applied to it.
        text: calibration text.
        parts: the parts.
        kind: class of the moments.
    """
    moments = {part.key: kind(in_features(part.projection)) for part in parts}
    read_inputs(model_map, text, parts, lambda part, x, real: moments[part.key].add_batch(x, real))
    for part in parts:
        moments[part.key].check(part.name)
    return moments
