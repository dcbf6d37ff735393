"""Weight norm and attention entropy: the head score of the dynamic pruning paper (eqs. 1, 3 and 4); and confidence.

docs/pruning.md lists the details that the paper leaves open, and what is done here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, ModelMap, Rows
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.artefacts import NONFINITE_REMEDY, check_finite
from lmeval_prune.config import Share
from lmeval_prune.pruners.attention_statistics import AttentionRows, attention_statistic
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import read_inputs
from lmeval_prune.pruners.parts import CHANNELS, HEADS, KINDS, Part, Removed


@dataclass(frozen=True)
class NormEntropy(Pruner):
    """Mix the weight norm w with the entropy H of a head's attention or a channel's activations: S = α·w + (1−α)·H.

    Attributes:
        alpha: α, from 0 (entropy only) to 1 (norm only).
        normalize: `standard` standardises w and H over all heads before mixing; `none` does not, as in the paper.
        entropy: `normalized` divides H by the logarithm of the number of visible keys; `raw` does not, as in the paper.
    """

    parts: ClassVar[str] = "heads"  # what the paper prunes; scores of channels are not in the paper
    alpha: Share = 0.5
    normalize: Literal["standard", "none"] = "standard"
    entropy: Literal["normalized", "raw"] = "normalized"

    @property
    def reads_text(self) -> bool:  # type: ignore[override]
        return self.alpha < 1

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Compute eq. 4."""
        norms = weight_norms(parts)
        if self.alpha == 1:
            return Scores(norms)
        text, entropies = self.require_text(text), dict[str, Tensor]()
        if any(part.kind == HEADS for part in parts):
            entropies |= attention_statistic(model_map, text, self._entropies)
        entropies |= activation_entropies(model_map, text, parts, self.entropy == "normalized")
        if self.normalize == "standard":
            norms, entropies = _standardize(norms, removed), _standardize(entropies, removed)
        return Scores({key: self.alpha * norm + (1 - self.alpha) * entropies[key] for key, norm in norms.items()})

    def _entropies(self, rows: AttentionRows) -> tuple[Tensor, Tensor]:
        entropy = torch.special.entr(rows.weights).sum(-1)
        visible_keys = rows.visible.sum(-1).expand(len(entropy), -1, entropy.shape[2])
        if self.entropy == "raw":
            return entropy, (visible_keys > 0).any(1)
        return entropy / visible_keys.clamp(min=2).log(), (visible_keys > 1).any(1)


@dataclass(frozen=True)
class GlobalThreshold(Pruner):
    """Score by the weight norm alone (eq. 1), with one threshold for all layers: `NormEntropy` with α = 1."""

    parts: ClassVar[str] = "heads"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        return Scores(weight_norms(parts))


@dataclass(frozen=True)
class Confidence(Pruner):
    """Scores a head by the mean over queries of its largest attention weight, without first key and first query.

    An interpretation of "attention visualisation". It and the entropy rank heads in opposite order: entropy removes
    heads with concentrated attention first, confidence removes them last.
    """

    reads_text: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = (HEADS,)
    parts: ClassVar[str] = "heads"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        return Scores(attention_statistic(model_map, self.require_text(text), confidences))


def confidences(rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """Return each query's largest weight without its text's first key, (batch, heads, queries); which count."""
    largest = rows.weights.masked_fill(rows.first_keys[:, None, None], 0).amax(-1)
    several_keys = (rows.visible.sum(-1) > 1).any(1).expand(len(largest), largest.shape[2])
    return largest, several_keys & ~rows.first


def weight_norms(parts: Sequence[Part]) -> dict[str, Tensor]:
    """Compute eq. 1: the sum over q, k and v of a head's mean row norm (L1), or the sum of a channel's row norms."""

    def row_norms(rows: Rows) -> Tensor:
        return weight_of(rows.module)[rows.start : rows.stop].abs().double().sum(1).cpu()

    norms: dict[str, Tensor] = {}
    for part in parts:
        block, total = part.block, torch.zeros(part.size, dtype=torch.float64)
        if isinstance(block, AttentionLayer):
            for head in range(block.heads):
                kv_head = block.kv_head_of(head)
                for projection, index in (("q", head), ("k", kv_head), ("v", kv_head)):
                    total[head] += row_norms(block.rows(projection, index)).mean()
        else:
            for name in block.parts:
                total += row_norms(block.rows(name))
        norms[part.key] = total
    return norms


def _standardize(scores: dict[str, Tensor], removed: Removed) -> dict[str, Tensor]:
    """Standardise scores over the remaining heads of all layers, and likewise over the remaining channels."""
    result: dict[str, Tensor] = {}
    for kind in KINDS:
        kind_scores = {key: values for key, values in scores.items() if key.startswith(f"{kind}.")}
        remaining = [
            values[[index for index in range(len(values)) if index not in removed.get(key, ())]]
            for key, values in kind_scores.items()
        ]
        if remaining:
            pooled = torch.cat(remaining)
            mean, deviation = pooled.mean(), pooled.std(correction=0)
            scale = deviation if deviation > 0 else 1
            result |= {key: (values - mean) / scale for key, values in kind_scores.items()}
    return result


def activation_entropies(
    model_map: ModelMap, text: CalibrationText, parts: Sequence[Part], normalized: bool
) -> dict[str, Tensor]:
    """Return the entropy of each channel's absolute activations over tokens; it is low if few tokens are active.

    With a_t the absolute activation at token t and S = Σ a_t, it is log S − (Σ a_t log a_t) / S.
    """
    blocks = [part for part in parts if part.kind == CHANNELS]
    if not blocks:
        return {}
    sums = {part.key: torch.zeros(2, part.size, dtype=torch.float64) for part in blocks}
    counts = dict.fromkeys(sums, 0)

    def collect(part: Part, x: Tensor, mask: Tensor) -> None:
        activations = x[mask].abs().double()  # without padding
        sums[part.key] += torch.stack([activations.sum(0), torch.xlogy(activations, activations).sum(0)]).cpu()
        counts[part.key] += len(activations)

    read_inputs(model_map, text, blocks, collect)
    check_finite({part.projection_name: sums[part.key] for part in blocks}, "the calibration run", NONFINITE_REMEDY)
    entropies = {}
    for key, (total, weighted) in sums.items():
        divisor = torch.where(total > 0, total, 1.0)  # no division by zero for channels that are never active
        entropy = torch.where(total > 0, total.log() - weighted / divisor, 0.0)
        entropies[key] = entropy / math.log(max(2, counts[key])) if normalized else entropy
    return entropies
