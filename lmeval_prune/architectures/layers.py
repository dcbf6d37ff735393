"""Read the attention layers and feed-forward blocks of a live model by the names in a family's entry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmeval_prune.architectures.blocks import (
    AttentionLayer,
    Block,
    FeedForward,
    attribute_of,
    find_in,
    has_absent,
    in_features,
    is_absent,
    is_projection,
    out_features,
    projection_in,
)
from lmeval_prune.architectures.table import Family, FeedForwardNames
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from torch import nn

_ORDER = {"": 0, "encoder": 0, "decoder": 1, "cross": 2}


def read_blocks(
    model: nn.Module, family: Family, count: int | None = None
) -> tuple[list[AttentionLayer], list[FeedForward]]:
    """Return a model's attention layers and feed-forward blocks, in order; `count` is the number of heads if given."""
    attention: dict[tuple[str, int], AttentionLayer] = {}
    feed_forward: list[FeedForward] = []
    for layer in layers_in(model, family):
        self_attention = _read_attention(layer, family.attention, family, count)
        cross = _read_attention(replace(layer, stack="cross"), family.cross_attention, family, count)
        for block in filter(None, (self_attention, cross)):
            other = attention.setdefault((block.stack, block.index), block)
            if other is not block:
                raise InputError(
                    f"{other.name} and {block.name} both look like attention layer {block.label} of this model"
                )
        channels = _read_feed_forward(layer, family.feed_forward)
        # a layer without attention belongs to another tower, e.g. an image encoder, unless the attention was cut out
        if channels and (self_attention or has_absent(layer.module)):
            feed_forward.append(channels)
    return sorted(attention.values(), key=_position), sorted(feed_forward, key=_position)


def _position(block: Block) -> tuple[int, int]:
    return _ORDER[block.stack], block.index


def layers_in(model: nn.Module, family: Family) -> Iterator[Block]:
    """Yield the layers of a model as blocks, by the family's name pattern."""
    matcher = re.compile(rf"(?:^|.*\.){family.layer}$")
    for name, module in model.named_modules():
        if match := matcher.match(name):
            yield Block(match.groupdict().get("stack") or "", int(match["layer"]), name, module)


def submodule_at(layer: Block, path: str) -> Block | None:
    """Return the submodule at a path in a layer; the layer itself for an empty path."""
    if not path:
        return layer
    match = find_in(layer.module, path)
    return Block(layer.stack, layer.index, f"{layer.name}.{match[0]}", match[1]) if match else None


def _read_attention(layer: Block, path: str | None, family: Family, count: int | None) -> AttentionLayer | None:
    block = None if path is None else submodule_at(layer, path)
    output = None if block is None else projection_in(block.module, family.output)
    if block is None or output is None or is_absent(output):
        return None
    module, inputs = block.module, in_features(output)
    width = inputs // count if count else attribute_of(module, family.width)
    if not isinstance(width, int) or width <= 0 or inputs % width:
        raise InputError(
            f"{block.name}: {inputs} inputs of {family.output} cannot be divided into heads "
            f"(width {width}, heads {count})"
        )
    heads = inputs // width
    query, key = (
        part if part is not None and is_projection(part) else None  # heads are named by the output's inputs then
        for part in (projection_in(module, family.query), projection_in(module, family.key))
    )
    kv_heads, query_dim, key_dim = heads, width, width
    if query is not None and key is not None:
        if family.fused:
            kv_heads = (out_features(query) // width - heads) // 2
        elif family.key_value_pairs:
            query_dim = key_dim = out_features(query) // heads
        else:
            value = projection_in(module, family.value)
            query_dim, kv_heads = out_features(query) // heads, out_features(key if value is None else value) // width
            key_dim = out_features(key) // max(1, kv_heads)
    return AttentionLayer(
        block.stack, block.index, block.name, module, output, heads, kv_heads, width, query_dim, key_dim, family
    )


def _read_feed_forward(layer: Block, names: FeedForwardNames | None) -> FeedForward | None:
    block = None if names is None else submodule_at(layer, names.block)
    if names is None or block is None:
        return None
    gate, up, down = (projection_in(block.module, path) for path in (names.gate, names.up, names.down))
    if up is None or down is None or is_absent(down):
        return None
    return FeedForward(block.stack, block.index, block.name, block.module, gate, up, down, in_features(down))
