"""Scores that read no text: norms of weights, and random numbers, which every other score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.config import Seed
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import DEPTH_KINDS, KINDS, Part, Removed


@dataclass(frozen=True)
class Magnitude(Pruner):
    """Scores a head or channel by the sum of the L2 norms of its columns in the output or down projection."""

    allocation: ClassVar[str] = "uniform"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        return Scores({part.key: part.weight.norm(dim=0).unflatten(0, (part.size, -1)).sum(1) for part in parts})


@dataclass(frozen=True)
class RandomScores(Pruner):
    """Draws uniform scores, with a separate random generator for each kind of part.

    Attributes:
        seed: seed of the random numbers.
    """

    kinds: ClassVar[tuple[str, ...]] = (*KINDS, *DEPTH_KINDS)
    seed: Seed = 0

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Any], removed: Removed) -> Scores:
        generators = {kind: torch.Generator().manual_seed(self.seed + n) for n, kind in enumerate(self.kinds)}
        return Scores({p.key: torch.rand(p.size, generator=generators[p.kind], dtype=torch.float64) for p in parts})
