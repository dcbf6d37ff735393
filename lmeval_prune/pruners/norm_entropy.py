"""Weight norm and attention entropy: the score of dynamic pruning (its eqs. 1, 3 and 4).

docs/pruning.md says how details that the paper leaves open are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap, Rows
from lmeval_prune.pruners.attention_statistics import AttentionRows, attention_statistic
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import read_inputs
from lmeval_prune.pruners.parts import CHANNELS, HEADS, KINDS, Part, Removed, weight_of
from lmeval_prune.settings import Share


@dataclass(frozen=True)
class NormEntropy(Pruner):
    """Mixes weight norm w and entropy H of a head's attention or a channel's activation: S = α·w + (1−α)·H.

    Attributes:
        alpha: α, from 0 (entropy only) to 1 (norm only).
        normalize: `standard`: standardise w and H over all heads before they are mixed; `none`: as printed.
        entropy: `normalized`: divide by the logarithm of the number of visible keys; `raw`: as printed.
    """

    parts: ClassVar[str] = "heads"  # the paper prunes heads; scores of channels are our extension
    alpha: Share = 0.5
    normalize: Literal["standard", "none"] = "standard"
    entropy: Literal["normalized", "raw"] = "normalized"

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        """True unless α = 1 leaves the entropy out."""
        return self.alpha < 1

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Compute eq. 4; see `Pruner.scores`."""
        norms = weight_norms(parts)
        if self.alpha == 1:
            return Scores(norms)
        text, entropies = self.require_text(text), dict[str, Tensor]()
        if any(part.kind == HEADS for part in parts):
            entropies |= attention_statistic(model_map, text, self._entropies)
        entropies |= activation_entropies(model_map, text, parts, self.entropy == "normalized")
        if self.normalize == "standard":
            norms, entropies = _standardised(norms, removed), _standardised(entropies, removed)
        return Scores({key: self.alpha * norm + (1 - self.alpha) * entropies[key] for key, norm in norms.items()})

    def _entropies(self, rows: AttentionRows) -> tuple[Tensor, Tensor]:
        """Compute eq. 3 for each query: (batch, heads, queries), and a mask of queries that count, (batch, queries)."""
        entropy = torch.special.entr(rows.weights).sum(-1)
        visible_keys = rows.visible.sum(-1).expand(len(entropy), -1, entropy.shape[2])
        if self.entropy == "raw":
            return entropy, (visible_keys > 0).any(1)
        return entropy / visible_keys.clamp(min=2).log(), (visible_keys > 1).any(1)


@dataclass(frozen=True)
class GlobalThreshold(Pruner):
    """Scores by eq. 1 alone, with one threshold for all layers: `NormEntropy` with α = 1, used without a schedule."""

    parts: ClassVar[str] = "heads"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Compute eq. 1; see `Pruner.scores`."""
        return Scores(weight_norms(parts))


def weight_norms(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Compute eq. 1: L1 norms of the rows that compute a head (mean over rows) or a channel (sum)."""
    return {
        part.key: _head_norms(part.block) if isinstance(part.block, AttentionLayer) else _channel_norms(part.block)
        for part in parts
    }


def _head_norms(layer: AttentionLayer) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    rows = ((("q", head), *((part, layer.kv_head_of(head)) for part in "kv")) for head in range(layer.heads))
    return torch.stack([sum((_row_norms(layer.rows(*row)).mean() for row in head), zero) for head in rows])


def _channel_norms(block: FeedForward) -> Tensor:
    return sum((_row_norms(block.rows(part)) for part in block.parts), torch.zeros((), dtype=torch.float64))


def _row_norms(rows: Rows) -> Tensor:
    return weight_of(rows.module)[rows.start : rows.stop].abs().double().sum(1).cpu()


def _standardised(scores: dict[str, Tensor], removed: Removed) -> dict[str, Tensor]:
    """Standardise scores over the remaining members of all layers, separately for heads and channels."""
    result: dict[str, Tensor] = {}
    for kind in KINDS:
        of_kind = {key: values for key, values in scores.items() if key.startswith(f"{kind}.")}
        remaining = [
            values[[member for member in range(len(values)) if member not in removed.get(key, ())]]
            for key, values in of_kind.items()
        ]
        if remaining:
            pooled = torch.cat(remaining)
            deviation = pooled.std(correction=0)
            result |= {k: (v - pooled.mean()) / (deviation if deviation > 0 else 1) for k, v in of_kind.items()}
    return result


def activation_entropies(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], normalized: bool
) -> dict[str, Tensor]:
    """Return the entropy over tokens of each channel's absolute activation: low if a few tokens have most of it.

    With a_t the absolute activation at token t and S = Σ a_t, it is log S − (Σ a_t log a_t) / S.
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
        active = total > 0
        entropy = torch.where(active, total.log() - weighted / total.where(active, torch.ones(()).double()), 0.0)
        entropies[key] = entropy / math.log(max(2, counts[key])) if normalized else entropy
    return entropies
