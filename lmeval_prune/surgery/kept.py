"""What stays of a layer's attention, and the rows and columns that it stands in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from lmeval_prune.architectures import AttentionLayer, FeedForward


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
        """What stays when these query heads go: whole groups go, others are filled up to the largest."""
        share = layer.heads // layer.kv_heads
        groups = {g: list(range(g * share, (g + 1) * share)) for g in range(layer.kv_heads)}
        alive = {g: [head for head in heads if head not in pruned] for g, heads in groups.items()}
        alive = {g: heads for g, heads in alive.items() if heads} or {0: []}  # an empty layer: one filler
        size = max(1, *map(len, alive.values()))
        fillers = [head for g, heads in alive.items() for head in _pruned_of(groups[g], pruned)[: size - len(heads)]]
        kept = sorted({head for heads in alive.values() for head in heads} | {*fillers})
        return cls(layer, tuple(kept), tuple(alive), tuple(fillers))

    @classmethod
    def zeroed(cls, layer: AttentionLayer, pruned: Collection[int]) -> KeptHeads:
        """All heads of a layer, these with zero weights."""
        return cls(layer, tuple(range(layer.heads)), tuple(range(layer.kv_heads)), tuple(sorted(pruned)))

    @property
    def unchanged(self) -> bool:
        """Whether the layer keeps its shape."""
        return len(self.heads) == self.layer.heads

    def columns(self) -> list[int]:
        """Inputs of the output projection that stay."""
        return [column for head in self.heads for column in _range(self.layer.columns(head))]

    def filler_columns(self) -> list[int]:
        """Where fillers stand in the inputs that stay."""
        width = self.layer.head_dim
        places = [self.heads.index(head) for head in self.fillers]
        return [column for place in places for column in range(place * width, (place + 1) * width)]

    def rows(self) -> dict[nn.Module, list[int]]:
        """Of each input projection, the rows that stay, in the order in which they are to stand."""
        pieces: dict[nn.Module, list[tuple[int, range]]] = {}
        for part, numbers in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            for place, number in enumerate(numbers):
                old = self.layer.rows(part, number)
                pieces.setdefault(old.module, []).append((self._start(part, place), range(old.start, old.stop)))
        return {
            module: [row for _, rows in sorted(found, key=_first) for row in rows] for module, found in pieces.items()
        }

    def _start(self, part: str, place: int) -> int:
        """First row of a head that stays, in the projection as it will be."""
        if self.layer.family.fused:
            return self.layer.family.fused(part, place, len(self.heads), len(self.kv_heads), self.layer.head_dim)
        return self.layer.rows(part, place).start


def channel_rows(block: FeedForward, kept: Collection[int]) -> dict[nn.Module, list[int]]:
    """Of each projection that computes channels, the rows that stay."""
    found: dict[nn.Module, list[int]] = {}
    for part, module in block.parts.items():
        start = block.rows(part).start
        found.setdefault(module, []).extend(start + channel for channel in kept)
    return found


def _pruned_of(heads: list[int], pruned: Collection[int]) -> list[int]:
    return [head for head in heads if head in pruned]


def _range(columns: slice) -> range:
    return range(columns.start, columns.stop)


def _first(piece: tuple[int, range]) -> int:
    return piece[0]
