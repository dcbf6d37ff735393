"""Magnitude: how large the weights are that read a head or a channel, in every layer its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import weight_of
from lmeval_prune.pruners.selection import Removed


@dataclass(frozen=True)
class Magnitude(Pruner):
    """Scores a head by the norms of its columns in the output projection, a channel by its column's in the down one."""

    allocation: ClassVar[str] = "uniform"

    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """The sum of the Euclidean norms of a head's columns; see the base class."""
        return {
            layer.label: weight_of(layer.o_proj).double().norm(dim=0).cpu().unflatten(0, (layer.heads, -1)).sum(1)
            for layer in model_map.attention
        }

    def channel_scores(
        self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None
    ) -> Scores:
        """The Euclidean norm of a channel's column; see the base class."""
        return {block.label: weight_of(block.down).double().norm(dim=0).cpu() for block in model_map.feed_forward}
