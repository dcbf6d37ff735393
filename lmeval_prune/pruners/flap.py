"""FLAP: how much what a column reads fluctuates over tokens, times how much is made of it; lost means become biases.

A column's score is the variance of its input times the squared norm of its weights. Scores are standardised within each
layer, heads and channels of all layers compared, and what the removed columns add on average becomes a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.base import ReadingPruner, Scored, Scores, needed, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import Moments, ReferenceFluctuation, input_moments, weight_of
from lmeval_prune.pruners.selection import Removed
from lmeval_prune.pruners.sequential import check_not_quantised

METRICS = ("wifv", "ifv", "wifn")


@dataclass(frozen=True)
class Flap(ReadingPruner):
    """Scores columns of the output and down projections by what their inputs do over calibration text.

    Attributes:
        metric: `wifv`: variance · ‖W_j‖²; `ifv`: the variance alone; `wifn`: mean |W_j| · root of the
            input's mean square.
        reference: score as the method's reference code does: a mean that runs over windows, and squared scores of
            attention columns; its budget is `--allocation flap_reference` then, unless another one is named.
    """

    compensates: ClassVar[str] = "bias"
    metric: str = "wifv"
    reference: bool = False

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise InputError(f"metric={self.metric!r} is not known; use {', '.join(METRICS)}")

    @property
    def allocation(self) -> str:  # type: ignore[override]
        """Return the method's own, or its reference code's; see the base class."""
        return "flap_reference" if self.reference else "standardised"

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse quantised ones; see the base class."""
        check_not_quantised(model_map, pruner_name(self))

    def scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        heads: bool,
        channels: bool,
        removed: tuple[Removed, Removed] = ({}, {}),
    ) -> Scored:
        """Both from one run of the text, and the means for the biases; see the base class."""
        kind = ReferenceFluctuation if self.reference else Moments
        moments = input_moments(model_map, needed(self, text), heads, channels, kind)
        of_heads: Scores = {}
        for layer in model_map.attention if heads else ():
            score = self._of_columns(weight_of(layer.o_proj), moments[f"{layer.label}.o_proj"])
            score = score.square() if self.reference else score
            of_heads[layer.label] = score.unflatten(0, (layer.heads, layer.head_dim))
        of_channels = {
            block.label: self._of_columns(weight_of(block.down), moments[f"{block.label}.down"])
            for block in (model_map.feed_forward if channels else ())
        }
        return Scored(of_heads, of_channels, {name: one.mean for name, one in moments.items()})

    def _of_columns(self, weight: Tensor, moments: Moments) -> Tensor:
        weight = weight.double().cpu()
        if self.metric == "wifn":
            return weight.abs().mean(0) * moments.mean_square.sqrt()
        return moments.fluctuation * (weight.square().sum(0) if self.metric == "wifv" else 1.0)
