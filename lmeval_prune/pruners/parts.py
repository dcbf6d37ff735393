"""Prunable parts of a model: the heads and feed-forward channels of each layer; whole layers and blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import (
    ATTENTION,
    FEED_FORWARD,
    Sublayer,
    attribute_of,
    columns_of,
    in_features,
    out_features,
    weight_of,
)
from lmeval_prune.interventions.plan import Plan

HEADS, CHANNELS = "heads", "channels"
KINDS = (HEADS, CHANNELS)
LAYERS = "layers"
DEPTH_KINDS = (LAYERS, ATTENTION, FEED_FORWARD)  # whole layers, their attention blocks, their feed-forward blocks

Removed = dict[str, set[int]]  # removed heads or channels by part key; {0} for a removed layer or block
Units = Sequence[tuple[int, ...]]  # heads, channels or columns that are removed together


class Part:
    """The heads of one layer, or its channels: groups of input columns of one projection."""

    def __init__(self, block: Any) -> None:
        is_attention = isinstance(block, AttentionLayer)
        self.block: AttentionLayer | FeedForward = block
        self.label: str = block.label  # L0
        self.kind = HEADS if is_attention else CHANNELS
        self.key = f"{self.kind}.{self.label}"  # of its scores
        self.projection: nn.Module = block.o_proj if is_attention else block.down  # reads the heads or channels
        self.projection_name = f"{block.label}.{'o_proj' if is_attention else 'down'}"  # in a plan
        self.size: int = block.heads if is_attention else block.channels
        self.group_size: int = block.group_size if is_attention else 1  # query heads per key-value head

    @property
    def weight(self) -> Tensor:
        """Weight of the projection, (outputs, columns), in float64 on the CPU."""
        return weight_of(self.projection).double().cpu()

    def units(self, unit: str = "head") -> Units:
        """Return the members of each unit: single channels, single heads, or groups of heads."""
        count = self.group_size if unit == "group" else 1
        return [tuple(range(start, start + count)) for start in range(0, self.size, count)]

    def columns(self, members: Iterable[int]) -> list[int]:
        return columns_of(self.block, members)

    def cost(self, unit: str) -> int:
        """Return the number of parameters that one unit has."""
        layer = self.block
        if isinstance(layer, FeedForward):
            rows = sum(in_features(module) + _bias(module) for module in layer.parts.values())
            return rows + out_features(layer.down)

        def head_parameters(projection: str, count: int) -> int:
            rows = layer.rows(projection, 0)
            own = (rows.stop - rows.start) * (in_features(rows.module) + _bias(rows.module))
            names = (path for path, name in layer.family.head_parameters if name == projection)
            values = (attribute_of(layer.module, path) for path in names)
            return own + sum(value.numel() // count for value in values if isinstance(value, Tensor))

        query = head_parameters("q", layer.heads) + layer.head_dim * out_features(layer.o_proj)
        if unit == "balanced":
            return layer.kv_heads * query
        shared = head_parameters("k", layer.kv_heads) + head_parameters("v", layer.kv_heads)
        if unit == "group":
            return self.group_size * query + shared
        return query + (shared if self.group_size == 1 else 0)  # multi-query heads share key and value


@dataclass(frozen=True)
class DepthPart:
    """A whole layer, or its attention or feed-forward block: a part with a single unit."""

    kind: str  # `layers`, `attention` or `feed_forward`
    label: str  # of the layer, `L0`
    sublayers: tuple[Sublayer, ...]  # blocks that go with it
    size: ClassVar[int] = 1
    group_size: ClassVar[int] = 1

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.label}"

    @property
    def block(self) -> str:
        return self.label if self.kind == LAYERS else f"{self.label}.{self.kind}"

    def cost(self, unit: str) -> int:
        """Return the number of parameters of its blocks, without norms outside of them."""
        modules: list[nn.Module] = []
        for sublayer in self.sublayers:
            block = sublayer.block
            if isinstance(block, FeedForward):
                modules += [*dict.fromkeys(block.parts.values()), block.down]
            else:
                modules.append(sublayer.module)
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


def parts_of(model_map: ModelMap, kinds: Collection[str] = KINDS) -> list[Part]:
    """Return a model's heads and channels, layer by layer, heads before channels."""
    stacks = {stack: number for number, stack in enumerate(model_map.stacks)}
    parts = [*map(Part, model_map.attention), *map(Part, model_map.feed_forward)]
    parts.sort(key=lambda part: (stacks[part.block.stack], part.block.index))  # heads stay before channels
    return [part for part in parts if part.kind in kinds]


def depth_parts_of(model_map: ModelMap, kinds: Collection[str] = DEPTH_KINDS) -> list[DepthPart]:
    """Return a model's whole layers and blocks, layer by layer."""
    layers: dict[str, list[Sublayer]] = {}
    for sublayer in model_map.sublayers:
        layers.setdefault(sublayer.layer, []).append(sublayer)
    parts: list[DepthPart] = []
    for sublayers in layers.values():
        parts.append(DepthPart(LAYERS, sublayers[0].label, tuple(sublayers)))
        parts += [DepthPart(sublayer.kind, sublayer.label, (sublayer,)) for sublayer in sublayers]
    return [part for part in parts if part.kind in kinds]


def make_plan(removed: Mapping[str, Iterable[int]], allow_empty_layer: bool, **fields: Any) -> Plan:
    """Return a plan that removes these members of parts; `fields` are other fields of the plan."""
    members = {tuple(key.split(".", 1)): sorted(numbers) for key, numbers in removed.items() if numbers}
    blocks = tuple(label if kind == LAYERS else f"{label}.{kind}" for kind, label in members if kind in DEPTH_KINDS)
    heads = tuple(f"{label}H{n}" for (kind, label), numbers in members.items() if kind == HEADS for n in numbers)
    channels = {label: numbers for (kind, label), numbers in members.items() if kind == CHANNELS}
    return Plan(heads, channels, blocks, allow_empty_layer=allow_empty_layer, **fields)


def count_removed(removed: Removed) -> dict[str, int]:
    """Return the numbers of removed members by kind: `{"heads": 2, "channels": 24}`; layers and blocks if there are."""
    counts = dict.fromkeys(KINDS, 0)
    for kind in (*KINDS, *DEPTH_KINDS):
        if count := sum(len(members) for key, members in removed.items() if key.startswith(f"{kind}.")):
            counts[kind] = count
    return counts


def _bias(module: nn.Module) -> int:
    return int(getattr(module, "bias", None) is not None)
