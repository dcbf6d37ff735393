"""Compute which heads, channels and blocks stay in a cut model, and their rows and columns in the projections."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import ATTENTION, Sublayer
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.surgery.depth import Depth, depth_of


@dataclass(frozen=True)
class KeptHeads:
    """Heads of one layer that stay, by their original numbers; every key-value head keeps the same number of them."""

    layer: AttentionLayer  # the original layer
    heads: tuple[int, ...]  # query heads, grouped by key-value head
    kv_heads: tuple[int, ...]
    fillers: tuple[int, ...]  # pruned heads that stay with zero weights, so that groups are equal or shapes stay

    @classmethod
    def of(cls, layer: AttentionLayer, pruned: Collection[int]) -> KeptHeads:
        """Remove query heads: drop empty groups, and give the others as many heads as the largest has, with fillers."""
        size = layer.group_size
        groups = {g: range(g * size, (g + 1) * size) for g in range(layer.kv_heads)}
        remaining = {g: [head for head in heads if head not in pruned] for g, heads in groups.items()}
        remaining = {g: heads for g, heads in remaining.items() if heads} or {0: []}  # an empty layer: one filler
        largest = max(1, *map(len, remaining.values()))
        fillers: list[int] = []
        for g, heads in remaining.items():
            fillers += [head for head in groups[g] if head not in heads][: largest - len(heads)]
        staying = sorted([*fillers, *(head for heads in remaining.values() for head in heads)])
        return cls(layer, tuple(staying), tuple(remaining), tuple(fillers))

    @property
    def unchanged(self) -> bool:
        """True if the layer keeps its shape."""
        return len(self.heads) == self.layer.heads

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return len(self.heads) // len(self.kv_heads)

    def rows(self) -> dict[nn.Module, list[int]]:
        """Return the rows of each input projection that stay, in their new order."""
        fused = self.layer.family.fused
        pieces: dict[nn.Module, list[tuple[int, range]]] = {}
        for part, numbers in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            for index, number in enumerate(numbers):
                if fused:
                    start = fused(part, index, len(self.heads), len(self.kv_heads), self.layer.head_dim)
                else:
                    start = self.layer.rows(part, index).start
                old = self.layer.rows(part, number)
                pieces.setdefault(old.module, []).append((start, range(old.start, old.stop)))
        return {
            module: [row for _, rows in sorted(parts, key=lambda piece: piece[0]) for row in rows]
            for module, parts in pieces.items()
        }


@dataclass(frozen=True)
class Kept:
    """Heads, channels and blocks of a model that stay."""

    model_map: ModelMap  # the original model
    heads: Sequence[KeptHeads]  # of each attention block that stays
    channels: dict[str, list[int]]  # of each dense feed-forward block that stays, by layer label
    zeroed: dict[str, set[int]]  # pruned channels that stay with zero weights
    zeroed_outputs: Sequence[nn.Module] = ()  # output projections whose weights become zero
    depth: Depth = field(default_factory=Depth)  # modules that are absent

    @classmethod
    def of(cls, model_map: ModelMap, plan: Plan, keep_shapes: bool = False) -> Kept:
        """Remove what a plan removes; with `keep_shapes`, zero weights instead.

        A block that loses all its heads or channels is removed, unless its output projection has a bias.
        """
        pruned_heads = {layer.label: numbers for layer, numbers in plan.heads_by_layer(model_map)}
        pruned_channels = {block.label: set(numbers) for block, numbers in plan.channels_by_layer(model_map)}
        removed = list(plan.sublayers(model_map))
        if keep_shapes:
            if whole := [str(sublayer) for sublayer in removed if sublayer.block is None]:
                raise InputError(f"{whole[0]} has experts, whose weights cannot be zeroed; cut it out instead")
            heads = [
                KeptHeads(
                    layer,
                    (*range(layer.heads),),
                    (*range(layer.kv_heads),),
                    (*sorted(pruned_heads.get(layer.label, [])),),
                )
                for layer in model_map.attention
            ]
            channels = {label: [*range(width)] for label, width in model_map.channels().items()}
            zeroed = {label: pruned_channels.get(label, set()) for label in channels}
            outputs = [sublayer.output for sublayer in removed]
            return cls(model_map, heads, channels, zeroed, outputs, depth_of(model_map, plan, []))
        emptied = [*_emptied(model_map, plan, pruned_heads, pruned_channels)]
        gone_or_empty = [*removed, *emptied]
        for sublayer in emptied:  # a stack keeps its last attention block, with a head without an effect
            alike = [x for x in model_map.sublayers if (x.stack, x.kind) == (sublayer.stack, sublayer.kind)]
            if sublayer.kind != ATTENTION or any(other not in gone_or_empty for other in alike):
                removed.append(sublayer)
        gone = {sublayer.output for sublayer in removed}
        heads = [
            KeptHeads.of(layer, pruned_heads.get(layer.label, []))
            for layer in model_map.attention
            if layer.o_proj not in gone
        ]
        channels = {
            block.label: [c for c in range(block.channels) if c not in pruned_channels.get(block.label, ())] or [0]
            for block in model_map.feed_forward
            if block.down not in gone
        }
        zeroed = {label: pruned_channels.get(label, set()) & {*numbers} for label, numbers in channels.items()}
        return cls(model_map, heads, channels, zeroed, depth=depth_of(model_map, plan, removed))

    def layers_differ(self) -> bool:
        """Return whether layers keep different numbers of heads, or in one stack different channels, or lack blocks."""
        blocks = [block for block in self.model_map.feed_forward if block.label in self.channels]
        widths = {(block.stack, len(self.channels[block.label])) for block in blocks}
        counts = {(len(layer.heads), len(layer.kv_heads)) for layer in self.heads}
        return bool(self.depth.absent) or len(counts) > 1 or len(widths) > len({block.stack for block in blocks})


def _emptied(
    model_map: ModelMap, plan: Plan, pruned_heads: Mapping[str, list[int]], pruned_channels: Mapping[str, set[int]]
) -> Iterator[Sublayer]:
    """Yield the blocks without heads or channels that add nothing, because their output projection has no bias."""
    for sublayer in model_map.sublayers:
        block = sublayer.block
        if isinstance(block, AttentionLayer):
            is_empty, name = len(pruned_heads.get(block.label, ())) == block.heads, "o_proj"
        elif isinstance(block, FeedForward):
            is_empty, name = len(pruned_channels.get(block.label, ())) == block.channels, "down"
        else:
            continue
        has_bias = getattr(sublayer.output, "bias", None) is not None
        if is_empty and not has_bias and f"{block.label}.{name}.bias" not in plan.compensation:
            yield sublayer
