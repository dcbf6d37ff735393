"""Confidence: score a head by its largest attention weights; an interpretation of "attention visualisation".

Confidence and the entropy of `norm_entropy` rank heads in opposite order: entropy removes heads with concentrated
attention first, confidence removes them last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.attention_statistics import AttentionRows, attention_statistic
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import Part, Removed


@dataclass(frozen=True)
class Confidence(Pruner):
    """Scores a head by the mean over queries of its largest attention weight, without first key and first query."""

    reads_text: ClassVar[bool] = True
    heads_only: ClassVar[bool] = True

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Average the largest attention weights; see `Pruner.scores`."""
        return Scores(attention_statistic(model_map, self.require_text(text), confidences))


def confidences(rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """Return the largest weight of each query without its text's first key, and a mask that leaves out first queries.

    Shapes: (batch, heads, queries) and (batch, queries).
    """
    largest = rows.weights.masked_fill(rows.first_keys[:, None, None], 0).amax(-1)
    several_keys = (rows.visible.sum(-1) > 1).any(1).expand(len(largest), largest.shape[2])
    return largest, several_keys & ~rows.first
