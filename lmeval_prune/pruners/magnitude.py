"""Magnitude pruning: score heads and channels by the norm of the weights that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import Part, Removed


@dataclass(frozen=True)
class Magnitude(Pruner):
    """Scores a head or channel by the sum of the L2 norms of its columns in the output or down projection."""

    allocation: ClassVar[str] = "uniform"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Sum the column norms; see `Pruner.scores`."""
        norms = {part.key: weight_of(part.projection).double().norm(dim=0).cpu() for part in parts}
        return Scores({part.key: norms[part.key].unflatten(0, (part.size, -1)).sum(1) for part in parts})
