"""Weight norm and attention entropy: the score of dynamic pruning (its eqs. 1, 3 and 4).

How they are read where the paper is silent: docs/pruning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap, Rows
from lmeval_prune.pruners.attention_statistics import AttentionRows, attention_statistic
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import read_inputs
from lmeval_prune.pruners.parts import CHANNELS, HEADS, KINDS, Part, Removed, weight_of
from lmeval_prune.settings import Share


@dataclass(frozen=True)
class NormEntropy(Pruner):
    """Mixes weight norm and entropy of a head's attention or a channel's activation: S = α·w + (1−α)·H.

    Attributes:
        alpha: α, from 0 (entropy only) to 1 (norm only).
        normalize: `standard`: both standardised over all heads before they are mixed; `none`: as printed.
        entropy: `normalized`: by the logarithm of how many keys a query sees; `raw`: as printed.
    """

    parts: ClassVar[str] = "heads"  # what the paper removes; the score of channels is an extension
    alpha: Share = 0.5
    normalize: Literal["standard", "none"] = "standard"
    entropy: Literal["normalized", "raw"] = "normalized"

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        """Read it for the entropy, unless α leaves it out."""
        return self.alpha < 1

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: Sequence[Part], removed: Removed
    ) -> Scores:
        """Compute eq. 4; see the base class."""
        norms = weight_norms(parts)
        if self.alpha == 1:
            return Scores(norms)
        text, entropies = self.required(text), dict[str, Tensor]()
        if any(part.kind == HEADS for part in parts):
            entropies |= attention_statistic(model_map, text, self._entropies)
        entropies |= activation_entropies(model_map, text, parts, self.entropy == "normalized")
        if self.normalize == "standard":
            norms, entropies = _standardised(norms, removed), _standardised(entropies, removed)
        return Scores({key: self.alpha * norm + (1 - self.alpha) * entropies[key] for key, norm in norms.items()})

    def _entropies(self, rows: AttentionRows) -> tuple[Tensor, Tensor]:
        """Compute eq. 3 of each query."""
        entropy = torch.special.entr(rows.weights).sum(-1)
        seen = rows.visible.sum(-1).expand(len(entropy), -1, entropy.shape[2])
        if self.entropy == "raw":
            return entropy, (seen > 0).any(1)
        return entropy / seen.clamp(min=2).log(), (seen > 1).any(1)


@dataclass(frozen=True)
class GlobalThreshold(Pruner):
    """Eq. 1 alone, one threshold over all layers: α = 1 of `NormEntropy`, to be used without a schedule."""

    parts: ClassVar[str] = "heads"  # as of `NormEntropy`

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: Sequence[Part], removed: Removed
    ) -> Scores:
        """Compute eq. 1; see the base class."""
        return Scores(weight_norms(parts))


def weight_norms(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Compute eq. 1: over the rows that compute a head or a channel, sums of absolute values, their mean for a head."""
    return {part.key: _head_norms(part.block) if part.kind == HEADS else _channel_norms(part.block) for part in parts}


def _head_norms(layer: Any) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    rows = ((("q", head), *((part, layer.kv_head_of(head)) for part in "kv")) for head in range(layer.heads))
    return torch.stack([sum((row_sums(layer.rows(*row)).mean() for row in head), zero) for head in rows])


def _channel_norms(block: Any) -> Tensor:
    return sum((row_sums(block.rows(part)) for part in block.parts), torch.zeros((), dtype=torch.float64))


def row_sums(rows: Rows) -> Tensor:
    """Return the sum of absolute values of each of some rows, in float64."""
    return weight_of(rows.module)[rows.start : rows.stop].abs().double().sum(1).cpu()


def _standardised(scores: dict[str, Tensor], removed: Removed) -> dict[str, Tensor]:
    """Return scores with mean 0 and deviation 1 over what is left of all layers, heads and channels apart."""
    result: dict[str, Tensor] = {}
    for kind in KINDS:
        of_kind = {key: values for key, values in scores.items() if key.startswith(f"{kind}.")}
        gone = {key: removed.get(key, ()) for key in of_kind}
        left = [v[[m for m in range(len(v)) if m not in gone[key]]] for key, v in of_kind.items()]
        if left:
            pooled = torch.cat(left)
            deviation = pooled.std(correction=0)
            result |= {k: (v - pooled.mean()) / (deviation if deviation > 0 else 1) for k, v in of_kind.items()}
    return result


def activation_entropies(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], normalized: bool
) -> dict[str, Tensor]:
    """Return the entropy over tokens of how a channel's activation's size is spread: low if a few have it all.

    With a_t its size at token t and S their sum it is log S − (Σ a_t log a_t) / S, so that two sums are enough.
    """
    blocks = [part for part in parts if part.kind == CHANNELS]
    if not blocks:
        return {}
    sums = {part.key: torch.zeros(2, part.size, dtype=torch.float64) for part in blocks}
    counts = dict.fromkeys(sums, 0)

    def collect(part: Part, x: Tensor, real: Tensor) -> None:
        size = x[real].abs().double()
        sums[part.key] += torch.stack([size.sum(0), torch.xlogy(size, size).sum(0)]).cpu()
        counts[part.key] += len(size)

    read_inputs(model_map, text, blocks, collect)
    entropies = {}
    for key, (total, weighted) in sums.items():
        alive = total > 0
        entropy = torch.where(alive, total.log() - weighted / total.where(alive, torch.ones(()).double()), 0.0)
        entropies[key] = entropy / math.log(max(2, counts[key])) if normalized else entropy
    return entropies
