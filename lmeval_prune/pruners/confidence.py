"""Confidence, our reading of "attention visualisation": how sure a head's strongest look is.

It ranks against the entropy of `norm_entropy`: there heads that concentrate go first, here those that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.attention_statistics import AttentionRows, attention_statistic
from lmeval_prune.pruners.base import Pruner, Scores, needed
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.selection import Removed


@dataclass(frozen=True)
class Confidence(Pruner):
    """Scores a head by the mean over queries of its largest attention weight, without first key and first query."""

    def needs_text(self, heads: bool, channels: bool) -> bool:
        """For heads; see the base class."""
        return heads

    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """As the class says; see the base class."""
        text = needed(self, text)
        return attention_statistic(model_map, text, confidences)


def confidences(rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """The largest weight of each query, its text's first key left out; all queries but the first count."""
    largest = rows.weights.masked_fill(rows.first_keys[:, None, None], 0).amax(-1)
    several = (rows.visible.sum(-1) > 1).any(1).expand(len(largest), largest.shape[2])
    return largest, several & ~rows.first
