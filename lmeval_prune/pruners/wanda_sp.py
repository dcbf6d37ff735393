"""Wanda-sp: weights times the size of what they read, layer by layer with the layers before already pruned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.pruners.moments import Moments
from lmeval_prune.pruners.parts import Units
from lmeval_prune.pruners.sequential import SequentialPruner


@dataclass(frozen=True)
class WandaSp(SequentialPruner):
    """Scores a column by mean |W_j| · root mean square of its input, a head by the sum over its columns."""

    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Sum the scores of columns; see the base class."""
        columns = weight.abs().mean(0) * moments.mean_square.sqrt()
        return columns[torch.tensor(units)].sum(1)
