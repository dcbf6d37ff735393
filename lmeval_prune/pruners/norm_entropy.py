"""Weight norm and attention entropy: the score of dynamic pruning (its eqs. 1, 3 and 4).

How they are read where the paper is silent: docs/pruning.md.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, ModelMap, Rows
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.pruners.attention_statistics import AttentionRows, attention_statistic
from lmeval_prune.pruners.base import Pruner, Scores, needed
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import weight_of
from lmeval_prune.pruners.selection import Removed


@dataclass(frozen=True)
class NormEntropy(Pruner):
    """Mixes weight norm and attention entropy: S = α·w + (1−α)·H.

    Attributes:
        alpha: α, from 0 (entropy only) to 1 (norm only).
        normalize: `standard`: both standardised over all heads before they are mixed; `none`: as printed.
        entropy: `normalized`: by the logarithm of how many keys a query sees; `raw`: as printed.
    """

    parts: ClassVar[str] = "heads"  # what the paper removes; the score of channels is an extension
    alpha: float = 0.5
    normalize: str = "standard"
    entropy: str = "normalized"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha must be from 0 to 1, not {self.alpha}")
        if self.normalize not in ("standard", "none"):
            raise InputError(f"normalize={self.normalize!r} is not known; use standard or none")
        if self.entropy not in ("normalized", "raw"):
            raise InputError(f"entropy={self.entropy!r} is not known; use normalized or raw")

    def needs_text(self, heads: bool, channels: bool) -> bool:
        """For the entropy, unless α leaves it out; see the base class."""
        return self.alpha < 1

    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """Eq. 4; see the base class."""
        norms = head_norms(model_map)
        if self.alpha == 1:
            return norms
        return self._mixed(norms, attention_statistic(model_map, needed(self, text), self._entropies), removed)

    def channel_scores(
        self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None
    ) -> Scores:
        """The same of channels: the norm of the rows that compute one, the entropy of its activation over tokens."""
        norms = channel_norms(model_map)
        if self.alpha == 1:
            return norms
        entropies = activation_entropies(model_map, needed(self, text), self.entropy == "normalized")
        return self._mixed(norms, entropies, removed)

    def _entropies(self, rows: AttentionRows) -> tuple[Tensor, Tensor]:
        """Eq. 3 of each query."""
        entropy = torch.special.entr(rows.weights).sum(-1)
        seen = rows.visible.sum(-1).expand(len(entropy), -1, entropy.shape[2])
        if self.entropy == "raw":
            return entropy, (seen > 0).any(1)
        return entropy / seen.clamp(min=2).log(), (seen > 1).any(1)

    def _mixed(self, norms: Scores, entropies: Scores, removed: Removed | None) -> Scores:
        if self.normalize == "standard":
            norms, entropies = standardised(norms, removed), standardised(entropies, removed)
        return {label: self.alpha * norm + (1 - self.alpha) * entropies[label] for label, norm in norms.items()}


@dataclass(frozen=True)
class GlobalThreshold(Pruner):
    """Eq. 1 alone, one threshold over all layers: α = 1 of `NormEntropy`, to be used without a schedule."""

    parts: ClassVar[str] = "heads"  # as of `NormEntropy`

    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """Eq. 1; see the base class."""
        return head_norms(model_map)

    def channel_scores(
        self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None
    ) -> Scores:
        """The norm of the rows that compute a channel; see the base class."""
        return channel_norms(model_map)


def head_norms(model_map: ModelMap) -> Scores:
    """Eq. 1 of each head: over its rows of the query, key and value projections, mean of sums of absolute values."""
    return {
        layer.label: torch.stack([_head_norm(layer, head) for head in range(layer.heads)])
        for layer in model_map.attention
    }


def _head_norm(layer: AttentionLayer, head: int) -> Tensor:
    group = layer.kv_head_of(head)
    return sum(
        (row_sums(layer.rows(part, index)).mean() for part, index in (("q", head), ("k", group), ("v", group))),
        torch.zeros((), dtype=torch.float64),
    )


def channel_norms(model_map: ModelMap) -> Scores:
    """Of each channel, the sum of absolute values of the rows that compute it."""
    return {
        block.label: sum((row_sums(block.rows(part)) for part in block.parts), torch.zeros((), dtype=torch.float64))
        for block in model_map.feed_forward
    }


def row_sums(rows: Rows) -> Tensor:
    """The sum of absolute values of each of some rows, in float64."""
    return weight_of(rows.module)[rows.start : rows.stop].abs().double().sum(1).cpu()


def standardised(scores: Scores, removed: Removed | None = None) -> Scores:
    """With mean 0 and deviation 1 over all layers together, over those that are still there."""
    removed = removed or {}
    alive = [[place for place in range(len(one)) if place not in removed.get(x, ())] for x, one in scores.items()]
    every = torch.cat([one[places] for one, places in zip(scores.values(), alive, strict=True)])
    deviation = every.std(correction=0)
    return {label: (one - every.mean()) / (deviation if deviation > 0 else 1) for label, one in scores.items()}


def activation_entropies(model_map: ModelMap, text: CalibrationText, normalized: bool) -> Scores:
    """Of each channel, the entropy over tokens of how its activation's size is spread: low if a few have it all.

    With a_t its size at token t and S their sum it is log S − (Σ a_t log a_t) / S, so that two sums are enough.
    """
    sums = {block.label: torch.zeros(2, block.channels, dtype=torch.float64) for block in model_map.feed_forward}
    counts = dict.fromkeys(sums, 0)
    real = torch.ones(0)

    def collect(label: str, x: Tensor) -> Tensor:
        size = x.detach().flatten(0, -2)[real.flatten().bool()].abs().double()
        sums[label] += torch.stack([size.sum(0), torch.xlogy(size, size).sum(0)]).cpu()
        counts[label] += len(size)
        return x

    with ExitStack() as stack:
        for block in model_map.feed_forward:
            change_input(block.down, partial(collect, block.label), stack)
        for _, real in text.run(model_map.model):  # noqa: B007 - read by the hooks
            pass
    found: Scores = {}
    for label, (total, weighted) in sums.items():
        alive = total > 0
        entropy = torch.where(alive, total.log() - weighted / total.where(alive, torch.ones(()).double()), 0.0)
        found[label] = entropy / math.log(max(2, counts[label])) if normalized else entropy
    return found
