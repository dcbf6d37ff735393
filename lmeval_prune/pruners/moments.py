"""Moments of what projections read, over calibration text: streamed, batch by batch, summed up in float64.

Products of pairs are computed in the inputs' own type, float32 or better, and summed up in float64.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features, is_transposed
from lmeval_prune.artefacts import COMPUTED, check_finite
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.pruners.calibration import CalibrationText


class Moments:
    """Of some columns over tokens.

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
            own = x.detach().to(torch.promote_types(x.dtype, torch.float32))
            self.products += (own.T @ own).cpu()
        x = x.detach().double()
        mean = x.mean(0)
        deviations = (x - mean).square().sum(0).cpu()
        apart = mean.cpu() - self.mean
        total = self.count + len(x)
        self.mean += apart * (len(x) / total)
        self.deviations += deviations + apart.square() * (self.count * len(x) / total)
        self.count = total

    def check(self, projection: str) -> None:
        """Refuse what is no number.

        Raises:
            InputError: naming the projection.
        """
        statistics = self.deviations if self.products is None else self.products
        check_finite({projection: statistics}, "what was read of the inputs", COMPUTED)

    @property
    def variance(self) -> Tensor:
        """Of each column over tokens."""
        return self.deviations / max(1, self.count)

    @property
    def fluctuation(self) -> Tensor:
        """What FLAP goes by: the variance."""
        return self.variance

    @property
    def mean_square(self) -> Tensor:
        """Of each column."""
        return self.variance + self.mean.square()

    @property
    def second(self) -> Tensor:
        """The mean over tokens of x·xᵀ."""
        assert self.products is not None
        return self.products / max(1, self.count)


class ReferenceFluctuation(Moments):
    """With what FLAP's reference code sums up for a variance: distances from a mean that runs over the windows.

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

    @property
    def fluctuation(self) -> Tensor:
        """As the class says."""
        return self.mean.new_tensor(0.0) + self.distances / max(1, self.windows - 1)


def input_moments(
    model_map: ModelMap,
    text: CalibrationText,
    heads: bool = True,
    channels: bool = True,
    kind: type[Moments] = Moments,
) -> dict[str, Moments]:
    """Moments of what output projections (`L0.o_proj`) and down projections (`L0.down`) read, from one run of the text.

    Args:
        model_map: of the model, with whatever is applied to it.
        text: calibration text.
        heads, channels: of which.
        kind: how they are summed up; what is no plain `Moments` is given window after window.
    """
    projections = {f"{layer.label}.o_proj": layer.o_proj for layer in model_map.attention if heads}
    projections |= {f"{block.label}.down": block.down for block in model_map.feed_forward if channels}
    found = {name: kind(in_features(module)) for name, module in projections.items()}
    real = torch.ones(0)

    def collect(name: str, x: Tensor) -> Tensor:
        add_tokens(found[name], x, real)
        return x

    with ExitStack() as stack:
        for name, module in projections.items():
            change_input(module, partial(collect, name), stack)
        for _, real in text.run(model_map.model):  # noqa: B007 - read by the hooks
            pass
    for name, one in found.items():
        one.check(name)
    return found


def add_tokens(moments: Moments, x: Tensor, real: Tensor) -> None:
    """Take in the real ones of the tokens (rows, tokens, columns) that a projection reads."""
    x = x.reshape(*real.shape, -1)
    if type(moments) is Moments:
        moments.add(x[real.bool()])
    else:
        for row, own in zip(x, real.bool(), strict=True):
            moments.add(row[own])


def weight_of(module: nn.Module) -> Tensor:
    """A projection's weight as (outputs, inputs).

    Raises:
        InputError: it is quantised.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not weight.is_floating_point():
        raise InputError("the weights of a quantised model cannot be read; load it in float32 or bfloat16")
    weight = weight.detach()
    return weight.T if is_transposed(module) else weight
