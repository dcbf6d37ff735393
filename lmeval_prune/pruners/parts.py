"""Parts of a model that a plan removes from: each layer's heads, and each layer's feed-forward channels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import attribute_of, in_features, is_transposed, out_features, projection_in
from lmeval_prune.errors import InputError

HEADS, CHANNELS = "heads", "channels"
KINDS = (HEADS, CHANNELS)

Removed = dict[str, set[int]]  # by part: numbers of its heads or channels that are gone
Units = Sequence[tuple[int, ...]]  # numbers of heads or channels, or of columns, that go together


@dataclass(frozen=True)
class Part:
    """Heads of a layer, or its channels: groups of inputs of one projection.

    Attributes:
        block: attention layer or feed-forward block.
    """

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
        """Name of its scores, `heads.L0` or `channels.L0`."""
        return f"{self.kind}.{self.label}"

    @property
    def name(self) -> str:
        """Name of its projection in a plan, `L0.o_proj` or `L0.down`."""
        return f"{self.label}.{'o_proj' if self.kind == HEADS else 'down'}"

    @property
    def projection(self) -> nn.Module:
        """Projection that reads it."""
        return self.block.o_proj if isinstance(self.block, AttentionLayer) else self.block.down

    @property
    def size(self) -> int:
        """Number of its heads or channels."""
        return self.block.heads if isinstance(self.block, AttentionLayer) else self.block.channels

    @property
    def weight(self) -> Tensor:
        """Weight of the projection, (outputs, inputs) in float64 on the processor."""
        return weight_of(self.projection).double().cpu()

    @property
    def share(self) -> int:
        """Query heads of a key-value head; 1 for channels."""
        return self.block.heads // self.block.kv_heads if isinstance(self.block, AttentionLayer) else 1

    def units(self, unit: str = "head") -> Units:
        """Return its channels, heads or groups of heads, each as the numbers of its members."""
        count = self.share if unit == "group" else 1
        return [tuple(range(start, start + count)) for start in range(0, self.size, count)]

    def columns(self, members: Iterable[int]) -> list[int]:
        """Return the inputs of the projection that some heads or channels fill."""
        slices = (self.block.columns(member) for member in members)
        return [column for columns in slices for column in range(columns.start, columns.stop)]

    def cost(self, unit: str) -> int:
        """Return how many parameters go with one unit.

        Raises:
            InputError: the layer's projections are not known.
        """
        if isinstance(self.block, FeedForward):
            rows = sum(in_features(module) + _bias(module) for module in self.block.parts.values())
            return rows + out_features(self.block.down)
        layer = self.block
        if projection_in(layer.module, layer.family.query) is None:
            raise InputError(
                f"a budget of parameters needs the query projection of {layer.name}, which is not known; give "
                f"--budget heads"
            )
        query = _rows(layer, "q") + layer.head_dim * out_features(layer.o_proj) + _further(layer, "q", layer.heads)
        shared = _rows(layer, "k") + _rows(layer, "v") + _further(layer, "k", layer.kv_heads)
        if unit == "group":
            return self.share * query + shared
        if unit == "balanced":
            return layer.kv_heads * query
        return query + (shared if self.share == 1 else 0)  # multi-query: its own alone


def parts_of(model_map: ModelMap, kinds: Collection[str] = KINDS) -> list[Part]:
    """Return a model's parts, layer by layer, heads before channels."""
    blocks = {block.label: block for block in model_map.feed_forward}
    both = [Part(block) for layer in model_map.attention for block in (layer, blocks.pop(layer.label, None)) if block]
    return [part for part in both if part.kind in kinds]


def weight_of(module: nn.Module) -> Tensor:
    """Return a projection's weight as (outputs, inputs).

    Raises:
        InputError: it is quantised.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    if not weight.is_floating_point():
        raise InputError("the weights of a quantised model cannot be read; load it in float32 or bfloat16")
    weight = weight.detach()
    return weight.T if is_transposed(module) else weight


def _rows(layer: AttentionLayer, projection: str) -> int:
    """Count the parameters of one head's rows in the query, key or value projection."""
    rows = layer.rows(projection, 0)
    return (rows.stop - rows.start) * (in_features(rows.module) + _bias(rows.module))


def _further(layer: AttentionLayer, projection: str, count: int) -> int:
    """Count the entries of further parameters that belong to one head."""
    values = (attribute_of(layer.module, path) for path, name in layer.family.head_parameters if name == projection)
    return sum(value.numel() // count for value in values if isinstance(value, Tensor))


def _bias(module: torch.nn.Module) -> int:
    return int(getattr(module, "bias", None) is not None)
