"""Random scores, by a seed: what any other score must be better than."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.selection import Removed


@dataclass(frozen=True)
class RandomScores(Pruner):
    """Draws scores.

    Attributes:
        seed: of the draw.
    """

    seed: int = 0

    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """Drawn evenly; see the base class."""
        draw = torch.Generator().manual_seed(self.seed)
        return {x.label: torch.rand(x.heads, generator=draw, dtype=torch.float64) for x in model_map.attention}

    def channel_scores(
        self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None
    ) -> Scores:
        """Drawn evenly; see the base class."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        return {x.label: torch.rand(x.channels, generator=draw, dtype=torch.float64) for x in model_map.feed_forward}
