"""Wanda-sp: score weight magnitude times input magnitude, layer by layer, with earlier layers already pruned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.pruners.moments import Moments
from lmeval_prune.pruners.parts import Units
from lmeval_prune.pruners.sequential import SequentialPruner


@dataclass(frozen=True)
class WandaSp(SequentialPruner):
    """Scores a column by mean |W_j| · root mean square of its input, and a head by the sum over its columns."""

    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Sum the column scores of each unit; see `SequentialPruner.unit_scores`."""
        columns = weight.abs().mean(0) * moments.mean_square.sqrt()
        return columns[torch.tensor(units)].sum(1)
