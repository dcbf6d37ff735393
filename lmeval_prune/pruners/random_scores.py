"""Random scores, by a seed: what any other score must be better than."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import KINDS, Part, Removed


@dataclass(frozen=True)
class RandomScores(Pruner):
    """Draws scores evenly, heads and channels by seeds of their own.

    Attributes:
        seed: of the draw.
    """

    seed: int = 0

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: Sequence[Part], removed: Removed
    ) -> Scores:
        """Draw them; see the base class."""
        draws = {kind: torch.Generator().manual_seed(self.seed + n) for n, kind in enumerate(KINDS)}
        return Scores({p.key: torch.rand(p.size, generator=draws[p.kind], dtype=torch.float64) for p in parts})
