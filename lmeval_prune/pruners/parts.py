"""Prunable parts of a model: the heads and feed-forward channels of each layer; whole layers and blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

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

HEADS, CHANNELS = "heads", "channels"
KINDS = (HEADS, CHANNELS)
LAYERS = "layers"
DEPTH_KINDS = (LAYERS, ATTENTION, FEED_FORWARD)  # whole layers, their attention blocks, their feed-forward blocks

Removed = dict[str, set[int]]  # removed heads or channels by part key; {0} for a removed layer or block
Units = Sequence[tuple[int, ...]]  # heads, channels or columns that are removed together


@dataclass
class Removal:
    """Removed parts of some layers, and the compensation for them."""

    removed: Removed = field(default_factory=dict)
    compensation: dict[str, Tensor] = field(default_factory=dict)  # named as in a plan
    damping: dict[str, float] = field(default_factory=dict)  # by projection, where it was raised

    def add(self, other: Removal) -> None:
        """Add the removed units of other layers."""
        self.removed |= other.removed
        self.compensation |= other.compensation
        self.damping |= other.damping


@dataclass(frozen=True)
class Part:
    """The heads of one layer, or its channels: groups of input columns of one projection."""

    block: AttentionLayer | FeedForward

    @property
    def label(self) -> str:
        """Label of the layer, `L0`."""
        return self.block.label

    @property
    def kind(self) -> str:
        """`heads` or `channels`."""
        return HEADS if isinstance(self.block, AttentionLayer) else CHANNELS

    @property
    def key(self) -> str:
        """Key of its scores, `heads.L0` or `channels.L0`."""
        return f"{self.kind}.{self.label}"

    @property
    def projection(self) -> nn.Module:
        """Projection that reads the heads or channels."""
        return self.block.o_proj if isinstance(self.block, AttentionLayer) else self.block.down

    @property
    def projection_name(self) -> str:
        """Name of the projection in a plan, `L0.o_proj` or `L0.down`."""
        return f"{self.label}.{'o_proj' if self.kind == HEADS else 'down'}"

    @property
    def size(self) -> int:
        """Number of heads or channels."""
        return self.block.heads if isinstance(self.block, AttentionLayer) else self.block.channels

    @property
    def weight(self) -> Tensor:
        """Weight of the projection, (outputs, columns), in float64 on the CPU."""
        return weight_of(self.projection).double().cpu()

    @property
    def group_size(self) -> int:
        """Query heads per key-value head; 1 for channels."""
        return self.block.group_size if isinstance(self.block, AttentionLayer) else 1

    def units(self, unit: str = "head") -> Units:
        """Return the members of each unit: single channels, single heads, or groups of heads."""
        count = self.group_size if unit == "group" else 1
        return [tuple(range(start, start + count)) for start in range(0, self.size, count)]

    def columns(self, members: Iterable[int]) -> list[int]:
        """Return the input columns of the projection that belong to some heads or channels."""
        return columns_of(self.block, members)

    def cost(self, unit: str) -> int:
        """Return the number of parameters that one unit has."""
        if isinstance(self.block, FeedForward):
            rows = sum(in_features(module) + _bias(module) for module in self.block.parts.values())
            return rows + out_features(self.block.down)
        layer = self.block
        query = (
            _row_parameters(layer, "q")
            + layer.head_dim * out_features(layer.o_proj)
            + _other_parameters(layer, "q", layer.heads)
        )
        shared = (
            _row_parameters(layer, "k") + _row_parameters(layer, "v") + _other_parameters(layer, "k", layer.kv_heads)
        )
        if unit == "group":
            return self.group_size * query + shared
        if unit == "balanced":
            return layer.kv_heads * query
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
        """Key of its score, e.g. `layers.L0`."""
        return f"{self.kind}.{self.label}"

    @property
    def block(self) -> str:
        """Name in a plan, `L0` or `L0.attention`."""
        return self.label if self.kind == LAYERS else f"{self.label}.{self.kind}"

    def cost(self, unit: str) -> int:
        """Return the number of parameters of its blocks, without norms outside of them."""
        modules = [module for sublayer in self.sublayers for module in _modules_of(sublayer)]
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _modules_of(sublayer: Sublayer) -> list[nn.Module]:
    block = sublayer.block
    if isinstance(block, FeedForward):
        return [*dict.fromkeys(block.parts.values()), block.down]
    return [sublayer.module]


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


def _row_parameters(layer: AttentionLayer, projection: str) -> int:
    rows = layer.rows(projection, 0)
    return (rows.stop - rows.start) * (in_features(rows.module) + _bias(rows.module))


def _other_parameters(layer: AttentionLayer, projection: str, count: int) -> int:
    values = (attribute_of(layer.module, path) for path, name in layer.family.head_parameters if name == projection)
    return sum(value.numel() // count for value in values if isinstance(value, Tensor))


def _bias(module: nn.Module) -> int:
    return int(getattr(module, "bias", None) is not None)
