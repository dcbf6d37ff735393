"""Score heads and channels by the size of their projection's inputs over calibration text."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.config import Positive
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import read_inputs
from lmeval_prune.pruners.parts import Part, Removed


@dataclass(frozen=True)
class LargestInputs(Pruner):
    """Scores a head or channel by the sum over tokens of |x|ⁿ, x its inputs to the projection.

    Attributes:
        power: n.
    """

    reads_text: ClassVar[bool] = True
    power: Positive = 2.0

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        sums = {part.key: torch.zeros(part.size, dtype=torch.float64) for part in parts}

        def collect(part: Part, x: Tensor, counted: Tensor) -> None:  # (rows, tokens, columns) and (rows, tokens)
            values = x[counted].unflatten(-1, (part.size, -1))  # (tokens, heads or channels, columns of each)
            sums[part.key] += values.abs().double().pow(self.power).sum((0, 2)).cpu()

        read_inputs(model_map, self.require_text(text), parts, collect)
        return Scores(sums)
