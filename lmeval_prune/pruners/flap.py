"""FLAP: score a column of the output or down projection by the fluctuation of its input times its weight norm.

The mean output of the removed columns becomes a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import Moments, ReferenceFluctuation, input_moments
from lmeval_prune.pruners.parts import HEADS, Part, Removed


@dataclass(frozen=True)
class Flap(Pruner):
    """Scores a column of the output or down projection by variance · ‖W_j‖², the variance of its input over a text.

    Attributes:
        reference: score as the method's reference code does: with a running mean over windows and squared scores of
            attention columns. The default allocation is then `flap_reference`.
    """

    reads_text: ClassVar[bool] = True
    compensates: ClassVar[str] = "bias"
    reference: bool = False

    @property
    def allocation(self) -> str:  # type: ignore[override]
        return "flap_reference" if self.reference else "standardised"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Score channels and columns of heads, and return the input means for the biases."""
        moments_class = ReferenceFluctuation if self.reference else Moments
        moments, values = input_moments(model_map, self.require_text(text), parts, moments_class), {}
        for part in parts:
            scores = moments[part.key].fluctuation * part.weight.square().sum(0)
            if part.kind == HEADS:
                scores = scores.unflatten(0, (part.size, -1))
                scores = scores.square() if self.reference else scores
            values[part.key] = scores
        return Scores(values, {key: statistics.mean for key, statistics in moments.items()})
