"""FLAP: how much what a column reads fluctuates over tokens, times how much is made of it; lost means become biases.

A column's score is the variance of its input times the squared norm of its weights. Scores are standardised within each
layer, heads and channels of all layers compared, and what the removed columns add on average becomes a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import Moments, ReferenceFluctuation, input_moments
from lmeval_prune.pruners.parts import HEADS, Part, Removed
from lmeval_prune.pruners.sequential import check_not_quantised


@dataclass(frozen=True)
class Flap(Pruner):
    """Scores columns of the output and down projections by what their inputs do over calibration text.

    Attributes:
        metric: `wifv`: variance · ‖W_j‖²; `ifv`: the variance alone; `wifn`: mean |W_j| · root of the
            input's mean square.
        reference: score as the method's reference code does: a mean that runs over windows, and squared scores of
            attention columns; its budget is `--allocation flap_reference` then, unless another one is named.
    """

    reads_text: ClassVar[bool] = True
    compensates: ClassVar[str] = "bias"
    metric: Literal["wifv", "ifv", "wifn"] = "wifv"
    reference: bool = False

    @property
    def allocation(self) -> str:  # type: ignore[override]
        """Allocation of the method, or its reference code's."""
        return "flap_reference" if self.reference else "standardised"

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse quantised ones; see the base class."""
        check_not_quantised(model_map, pruner_name(self))

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: Sequence[Part], removed: Removed
    ) -> Scores:
        """Score heads by column, and return the means for the biases, too; see the base class."""
        kind = ReferenceFluctuation if self.reference else Moments
        moments = input_moments(model_map, self.required(text), parts, kind)
        values = {part.key: self._of_columns(part.weight, moments[part.key]) for part in parts}
        for part in parts:
            if part.kind == HEADS:
                score = values[part.key].unflatten(0, (part.size, -1))
                values[part.key] = score.square() if self.reference else score
        return Scores(values, {key: statistics.mean for key, statistics in moments.items()})

    def _of_columns(self, weight: Tensor, moments: Moments) -> Tensor:
        if self.metric == "wifn":
            return weight.abs().mean(0) * moments.mean_square.sqrt()
        return moments.fluctuation * (weight.square().sum(0) if self.metric == "wifv" else 1.0)
