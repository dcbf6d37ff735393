"""GISP: global iterative structured pruning (arXiv 2510.18030), a first-order score that compares all structures.

With S = W ⊙ ∂L/∂W, L the loss on the calibration text, a head or channel scores Σ|S| over its weights. So that heads
and channels can be compared over all layers, the sum is divided by a number of weights. Scores are computed again at
each of many steps (`steps`), without training between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import FeedForward, ModelMap
from lmeval_prune.architectures.blocks import in_features, out_features, weight_of
from lmeval_prune.pruners.base import Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.llm_pruner import LlmPruner, structure_sums
from lmeval_prune.pruners.parts import HEADS, Part, Removed


@dataclass(frozen=True)
class Gisp(LlmPruner):
    """Scores heads and channels by a Taylor expansion of the loss, for one ranking of all of them.

    Attributes:
        importance: as in `LlmPruner`; the paper's is `first`.
        normalize: divisor of a sum: `size`: the number of weights of the head or channel; `released`: the constants of
            the released code, 4·(columns of a head)·(width of the model) and (matrices of the block)·(channels of the
            block); `none`.
    """

    allocation: ClassVar[str] = "joint"
    normalize: Literal["size", "released", "none"] = "size"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Divide the sums of `LlmPruner`; see `Pruner.scores`."""
        sums = super().scores(model_map, text, parts, removed).values
        return Scores({part.key: sums[part.key] / divisor for part, divisor in self._divisors(parts)})

    def _divisors(self, parts: list[Part]) -> list[tuple[Part, Tensor | float]]:
        if self.normalize == "size":
            sizes = structure_sums(parts, _ones, False)
            return [(part, sizes[part.key]) for part in parts]
        return [(part, _released(part) if self.normalize == "released" else 1.0) for part in parts]


def _ones(module: nn.Module) -> Tensor:
    return torch.ones(weight_of(module).shape, dtype=torch.float64)


def _released(part: Part) -> float:
    columns = in_features(part.projection) // part.size
    if part.kind == HEADS:
        return 4.0 * columns * out_features(part.projection)
    assert isinstance(part.block, FeedForward)
    return float((len(part.block.parts) + 1) * part.size)
