"""Random scores: the baseline that every other score must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.config import Seed
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import DEPTH_KINDS, KINDS, DepthPart, Part, Removal, Removed
from lmeval_prune.pruners.stores import Sums


@dataclass(frozen=True)
class RandomScores(Pruner):
    """Draws uniform scores, with a separate random generator for each kind of part.

    Attributes:
        seed: seed of the random numbers.
    """

    depth: ClassVar[bool] = True
    seed: Seed = 0

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Draw the scores; see `Pruner.scores`."""
        return self._draw(parts)

    def depth_scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        parts: Sequence[DepthPart],
        earlier: Removal,
        sums: Sums | None = None,
    ) -> Scores:
        """Draw the scores; see `Pruner.depth_scores`."""
        return self._draw(parts)

    def _draw(self, parts: Sequence[Part | DepthPart]) -> Scores:
        kinds = [*KINDS, *DEPTH_KINDS]
        generators = {kind: torch.Generator().manual_seed(self.seed + n) for n, kind in enumerate(kinds)}
        return Scores({p.key: torch.rand(p.size, generator=generators[p.kind], dtype=torch.float64) for p in parts})
