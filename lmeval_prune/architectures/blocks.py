"""Read a live model's attention and feed-forward blocks: projections, heads, channels, rows and columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.table import Family
from lmeval_prune.errors import InputError

if TYPE_CHECKING:  # head names work without torch
    from torch import Tensor, nn

ATTENTION, FEED_FORWARD = "attention", "feed_forward"
_EXPERTS = "mlp|block_sparse_moe|feed_forward|moe|ffn"  # usual names of feed-forward blocks, also of experts
_ORDER = {"": 0, "encoder": 0, "decoder": 1, "cross": 2}


def label_of(stack: str, layer: int | str) -> str:
    """Return `"L5"`, or `"encoder.L5"` in a model with several stacks; `layer` may be a range, `"5-7"`."""
    return f"{stack}.L{layer}" if stack else f"L{layer}"


@dataclass(frozen=True)
class Rows:
    """Output rows of a projection that belong to one head, one channel, or all channels."""

    module: nn.Module  # projection: nn.Linear, Conv1D, or a wrapper around either
    start: int  # row range in module.weight (Linear) or module.weight.T (Conv1D)
    stop: int


@dataclass(frozen=True)
class Block:
    """Attention or feed-forward block of one layer."""

    stack: str  # "" in a model with one stack, else "encoder", "decoder" or "cross" (cross-attention)
    index: int  # zero-based layer number, as in L5H3
    name: str  # dotted name of the module
    module: nn.Module  # holds the projections

    @cached_property
    def label(self) -> str:
        return label_of(self.stack, self.index)


@dataclass(frozen=True)
class AttentionLayer(Block):
    """Attention of one layer; key-value head g serves query heads g·G … g·G+G−1, G = heads / kv_heads."""

    o_proj: nn.Module  # output projection
    heads: int  # number of query heads
    kv_heads: int  # number of key-value heads
    head_dim: int  # width of one head in the input of the output projection
    key_dim: int  # width of one key; differs from head_dim in latent attention
    family: Family  # names of the projections

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads

    def columns(self, head: int) -> slice:
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def kv_head_of(self, head: int) -> int:
        return head // self.group_size

    def rows(self, part: str, index: int) -> Rows:
        """Return the rows of query head `index` (`part="q"`), or of key-value head `index` (`"k"`, `"v"`)."""
        names = {"q": self.family.query, "k": self.family.key, "v": self.family.value}
        module = projection_in(self.module, names[part])
        assert module is not None
        if self.family.fused:
            start = self.family.fused(part, index, self.heads, self.kv_heads, self.head_dim)
            return Rows(module, start, start + self.head_dim)
        if self.family.key_value_pairs and part != "q":
            pair = out_features(module) // self.kv_heads
            start = index * pair + (pair - self.head_dim if part == "v" else 0)
            return Rows(module, start, start + (self.head_dim if part == "v" else pair - self.head_dim))
        # rows of a query head may hold a gate, too
        size = out_features(module) // self.heads if part == "q" else self.key_dim if part == "k" else self.head_dim
        return Rows(module, index * size, (index + 1) * size)


@dataclass(frozen=True)
class FeedForward(Block):
    """Dense feed-forward block of one layer: `down(activation(gate) * up)`, or `down(activation(up))`.

    Channel c is input column c of `down`, and one row of each projection in `parts`.
    """

    gate: nn.Module | None  # the same module as up if one projection computes both
    up: nn.Module
    down: nn.Module
    channels: int  # number of channels

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Projections that compute the channels: `{"gate": …, "up": …}`, or `{"up": …}`."""
        return {"up": self.up} if self.gate is None else {"gate": self.gate, "up": self.up}

    def columns(self, channel: int) -> slice:
        return slice(channel, channel + 1)

    def rows(self, part: str, channel: int | None = None) -> Rows:
        """Return the row of `gate` or `up` that computes a channel; without a channel, the rows of all of them."""
        start = self.channels if part == "up" and self.gate is self.up else 0
        if channel is None:
            return Rows(self.parts[part], start, start + self.channels)
        return Rows(self.parts[part], start + channel, start + channel + 1)


@dataclass(frozen=True)
class Sublayer(Block):
    """Attention or feed-forward block of a layer; what it adds to the residual stream is computed from one output."""

    kind: str  # `attention` or `feed_forward`
    layer: str  # dotted name of the layer's module
    output: nn.Module  # output projection; of experts, the whole block
    block: AttentionLayer | FeedForward | None  # None: experts, or a block whose projections are unknown

    def __str__(self) -> str:
        return f"{self.label}.{self.kind}"


def is_absent(module: Any) -> bool:
    return bool(getattr(module, "is_absent", False))


def has_absent(layer: nn.Module) -> bool:
    return any(map(is_absent, layer.modules()))


def columns_of(block: AttentionLayer | FeedForward, members: Iterable[int]) -> list[int]:
    """Return the input columns of several heads or channels, in order."""
    slices = map(block.columns, members)
    return [column for columns in slices for column in range(columns.start, columns.stop)]


def find_in(module: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """Return the first alternative in `path` (separated by `|`) that is a submodule, as (name, submodule)."""
    for name in path.split("|"):
        submodule = attribute_of(module, name)
        if hasattr(submodule, "named_parameters"):
            return name, submodule
    return None


def projection_in(module: nn.Module, path: str | None) -> nn.Module | None:
    match = find_in(module, path) if path else None
    return match[1] if match else None


def attribute_of(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight has shape (inputs, outputs), as in GPT-2's `Conv1D`."""
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"  # PEFT wraps the module as `base_layer`


def weight_of(module: nn.Module) -> Tensor:
    """Return a projection's weight with shape (outputs, inputs); read it if it is offloaded, refuse a quantised one."""
    import torch
    from accelerate.utils import align_module_device, has_offloaded_params

    owner = getattr(module, "base_layer", module)  # PEFT wraps the module
    with align_module_device(owner) if has_offloaded_params(owner) else nullcontext():
        weight = getattr(owner, "weight", None)
    # numbers of one byte have their scales elsewhere
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise InputError("the weights of a quantised model cannot be read; load it in float32 or bfloat16")
    weight = weight.detach()
    return weight.T if is_transposed(module) else weight


def in_features(module: nn.Module) -> int:
    return _width(module, "in_features", 0)


def out_features(module: nn.Module) -> int:
    return _width(module, "out_features", 1)


def _width(module: nn.Module, attribute: str, axis: int) -> int:
    size = getattr(module, attribute, None)
    weight: Any = module.weight if size is None else None
    return int(weight.shape[axis if is_transposed(module) else 1 - axis] if size is None else size)


def layers_in(model: nn.Module, family: Family) -> Iterator[Block]:
    """Yield the layers of a model as blocks, by the family's name pattern."""
    matcher = re.compile(rf"(?:^|.*\.){family.layer}$")
    for name, module in model.named_modules():
        if match := matcher.match(name):
            yield Block(match.groupdict().get("stack") or "", int(match["layer"]), name, module)


def read_blocks(
    model: nn.Module, family: Family, count: int | None = None
) -> tuple[list[AttentionLayer], list[FeedForward], list[Sublayer]]:
    """Return a model's attention layers and feed-forward blocks, and the blocks of all layers, each in order.

    `count` is the number of heads if given.
    """
    attention: dict[tuple[str, int], AttentionLayer] = {}
    feed_forward, sublayers, names = list[FeedForward](), list[Sublayer](), family.feed_forward
    experts_paths = "|".join(filter(None, (names.block if names else "", _EXPERTS)))
    for layer in layers_in(model, family):
        found: list[tuple[Block, str, nn.Module, Any]] = []
        own = _read_attention(layer, family.attention, family, count)
        cross = _read_attention(replace(layer, stack="cross"), family.cross_attention, family, count)
        for block in filter(None, (own, cross)):
            found.append((block, ATTENTION, block.o_proj, block))
            other = attention.setdefault((block.stack, block.index), block)
            if other is not block:
                raise InputError(f"{other.name} and {block.name} both look like attention layer {block.label}")
        # a layer without attention belongs to another tower, e.g. an image encoder, unless the attention was cut out
        is_layer, dense = bool(found) or has_absent(layer.module), None
        if names and is_layer and (place := _submodule_at(layer, names.block)):
            gate, up, down = (projection_in(place.module, path) for path in (names.gate, names.up, names.down))
            if up is not None and down is not None and not is_absent(down):
                located = (place.stack, place.index, place.name, place.module)
                dense = FeedForward(*located, gate, up, down, in_features(down))
                feed_forward.append(dense)
                found.append((dense, FEED_FORWARD, down, dense))
        experts = _submodule_at(layer, experts_paths) if is_layer and not dense else None
        if experts and not is_absent(experts.module):
            found.append((experts, FEED_FORWARD, experts.module, None))
        for at, kind, output, known in found:
            sublayers.append(Sublayer(at.stack, at.index, at.name, at.module, kind, layer.name, output, known))

    def position(block: Block) -> tuple[int, int]:
        return _ORDER[block.stack], block.index

    return sorted(attention.values(), key=position), sorted(feed_forward, key=position), sublayers


def _submodule_at(layer: Block, path: str) -> Block | None:
    """Return the submodule at a path in a layer; the layer itself for an empty path."""
    if not path:
        return layer
    match = find_in(layer.module, path)
    return Block(layer.stack, layer.index, f"{layer.name}.{match[0]}", match[1]) if match else None


def _read_attention(layer: Block, path: str | None, family: Family, count: int | None) -> AttentionLayer | None:
    block = None if path is None else _submodule_at(layer, path)
    output = None if block is None else projection_in(block.module, family.output)
    if block is None or output is None or is_absent(output):
        return None
    module, inputs = block.module, in_features(output)
    width = inputs // count if count else attribute_of(module, family.width)
    if not isinstance(width, int) or width <= 0 or inputs % width:
        raise InputError(f"{block.name}: {inputs} inputs cannot be divided into heads (width {width}, heads {count})")
    heads = inputs // width
    query, key = (projection_in(module, name) for name in (family.query, family.key))
    # heads are named by the output's inputs if these are no matrix products
    query, key = (
        part if hasattr(part, "in_features") or getattr(getattr(part, "weight", None), "ndim", 0) == 2 else None
        for part in (query, key)
    )
    kv_heads, key_dim = heads, width
    if query is not None and key is not None:
        if family.fused:
            kv_heads = (out_features(query) // width - heads) // 2
        elif family.key_value_pairs:
            key_dim = out_features(query) // heads
        else:
            value = projection_in(module, family.value)
            kv_heads = out_features(key if value is None else value) // width
            key_dim = out_features(key) // max(1, kv_heads)
    place = (block.stack, block.index, block.name, module)
    return AttentionLayer(*place, output, heads, kv_heads, width, key_dim, family)
