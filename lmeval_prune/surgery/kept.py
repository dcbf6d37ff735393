"""Heads and channels that stay in a model, and the rows and columns that it stands in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.interventions.plan import Plan


@dataclass(frozen=True)
class KeptHeads:
    """Heads that stay, by the numbers that they had; every key-value head keeps equally many.

    Attributes:
        layer: the layer, as it was.
        heads: query heads, those of one key-value head together.
        kv_heads: key-value heads.
        fillers: those of `heads` that are pruned, and stay with zero weights, so that groups are equal or shapes kept.
    """

    layer: AttentionLayer
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    fillers: tuple[int, ...]

    @classmethod
    def of(cls, layer: AttentionLayer, pruned: Collection[int]) -> KeptHeads:
        """Keep all but some query heads: whole groups go, others are filled up to the largest."""
        share = layer.heads // layer.kv_heads
        groups = {g: range(g * share, (g + 1) * share) for g in range(layer.kv_heads)}
        alive = {g: [head for head in heads if head not in pruned] for g, heads in groups.items()}
        alive = {g: heads for g, heads in alive.items() if heads} or {0: []}  # an empty layer: one filler
        size = max(1, *map(len, alive.values()))
        fillers: list[int] = []
        for g, heads in alive.items():
            fillers += [head for head in groups[g] if head not in heads][: size - len(heads)]
        kept = sorted([*fillers, *(head for heads in alive.values() for head in heads)])
        return cls(layer, tuple(kept), tuple(alive), tuple(fillers))

    @property
    def unchanged(self) -> bool:
        """True if the layer keeps its shape."""
        return len(self.heads) == self.layer.heads

    @property
    def share(self) -> int:
        """Query heads of a key-value head."""
        return len(self.heads) // len(self.kv_heads)

    def columns(self) -> list[int]:
        """Return the inputs of the output projection that stay."""
        slices = (self.layer.columns(head) for head in self.heads)
        return [column for columns in slices for column in range(columns.start, columns.stop)]

    def filler_columns(self) -> list[int]:
        """Return where fillers stand in the inputs that stay."""
        width, indices = self.layer.head_dim, (self.heads.index(head) for head in self.fillers)
        return [column for index in indices for column in range(index * width, (index + 1) * width)]

    def rows(self) -> dict[nn.Module, list[int]]:
        """Return for each input projection the rows that stay, in the order in which they are to stand."""
        pieces: dict[nn.Module, list[tuple[int, range]]] = {}
        for part, numbers in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            for index, number in enumerate(numbers):
                old = self.layer.rows(part, number)
                pieces.setdefault(old.module, []).append((self._start(part, index), range(old.start, old.stop)))
        ordered = {module: sorted(of_module, key=lambda piece: piece[0]) for module, of_module in pieces.items()}
        return {module: [row for _, rows in pieces for row in rows] for module, pieces in ordered.items()}

    def _start(self, part: str, index: int) -> int:
        """Return the first row of a head that stays, in the projection as it will be."""
        if self.layer.family.fused:
            return self.layer.family.fused(part, index, len(self.heads), len(self.kv_heads), self.layer.head_dim)
        return self.layer.rows(part, index).start


@dataclass(frozen=True)
class Kept:
    """Heads and channels that stay in each layer.

    Attributes:
        model_map: of the model, as it was.
        heads: of each attention layer.
        channels: of each feed-forward block, by layer; those of `zeroed` stay with zero weights.
        zeroed: pruned channels that stay.
    """

    model_map: ModelMap
    heads: Sequence[KeptHeads]
    channels: dict[str, list[int]]
    zeroed: dict[str, set[int]]

    @classmethod
    def of(cls, model_map: ModelMap, plan: Plan, keep_shapes: bool = False) -> Kept:
        """Keep what a plan leaves, and with `keep_shapes` the rest with zero weights; of a layer, never nothing."""
        pruned = {layer.label: numbers for layer, numbers in plan.heads_by_layer(model_map)}
        lost = {block.label: set(numbers) for block, numbers in plan.channels_by_layer(model_map)}
        heads = [
            KeptHeads(layer, tuple(range(layer.heads)), tuple(range(layer.kv_heads)), tuple(sorted(numbers)))
            if keep_shapes
            else KeptHeads.of(layer, numbers)
            for layer in model_map.attention
            for numbers in [pruned.get(layer.label, [])]
        ]
        channels = {
            label: [c for c in range(width) if keep_shapes or c not in lost.get(label, ())] or [0]
            for label, width in model_map.channels().items()
        }
        zeroed = {label: lost.get(label, set()) & {*numbers} for label, numbers in channels.items()}
        return cls(model_map, heads, channels, zeroed)

    def layers_differ(self) -> bool:
        """Return whether layers of the model keep different numbers of heads, or layers of a stack of channels."""
        widths = {(block.stack, len(self.channels[block.label])) for block in self.model_map.feed_forward}
        counts = {(len(kept.heads), len(kept.kv_heads)) for kept in self.heads}
        return len(counts) > 1 or len(widths) > len({block.stack for block in self.model_map.feed_forward})


def channel_rows(block: FeedForward, kept: Collection[int]) -> dict[nn.Module, list[int]]:
    """Return for each projection that computes channels the rows that stay."""
    rows: dict[nn.Module, list[int]] = {}
    for part, module in block.parts.items():
        start = block.rows(part).start
        rows.setdefault(module, []).extend(start + channel for channel in kept)
    return rows
