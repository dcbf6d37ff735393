"""Describe one layer's attention and feed-forward block: projections, heads, channels, rows and columns."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.table import Family
from lmeval_prune.errors import InputError

if TYPE_CHECKING:  # head names work without torch
    from torch import Tensor, nn


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
        """`"L5"`, or `"encoder.L5"` in a model with several stacks."""
        return label_of(self.stack, self.index)


@dataclass(frozen=True)
class AttentionLayer(Block):
    """Attention of one layer; key-value head g serves query heads g·G … g·G+G−1, G = heads / kv_heads."""

    o_proj: nn.Module  # output projection
    heads: int  # number of query heads
    kv_heads: int  # number of key-value heads
    head_dim: int  # width of one head in the input of the output projection
    query_dim: int  # rows of one head in the query projection; more than key_dim if they hold a gate, too
    key_dim: int  # width of one key; differs from head_dim in latent attention
    family: Family  # names of the projections

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def columns(self, head: int) -> slice:
        """Return the input columns of the output projection that belong to a head."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def kv_head_of(self, head: int) -> int:
        """Return the key-value head that a query head reads."""
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
        size = {"q": self.query_dim, "k": self.key_dim, "v": self.head_dim}[part]
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
        """Return the input column of `down` that belongs to a channel."""
        return slice(channel, channel + 1)

    def rows(self, part: str, channel: int | None = None) -> Rows:
        """Return the row of `gate` or `up` that computes a channel; without a channel, the rows of all of them."""
        start = self.channels if part == "up" and self.gate is self.up else 0
        if channel is None:
            return Rows(self.parts[part], start, start + self.channels)
        return Rows(self.parts[part], start + channel, start + channel + 1)


def is_absent(module: Any) -> bool:
    """Return whether a module stands in for a block that was cut out of the model."""
    return bool(getattr(module, "is_absent", False))


def has_absent(layer: nn.Module) -> bool:
    """Return whether a block was cut out of a layer."""
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
    """Return the submodule that `find_in` finds, without its name; None if `path` is None."""
    match = find_in(module, path) if path else None
    return match[1] if match else None


def attribute_of(module: nn.Module, path: str) -> Any:
    """Return the value at a dotted path, or None."""
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


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is a matrix product: it has sizes or a weight of two dimensions."""
    return hasattr(module, "in_features") or getattr(getattr(module, "weight", None), "ndim", 0) == 2


def in_features(module: nn.Module) -> int:
    """Return the input width of a projection."""
    return _features(module, "in_features", 0)


def out_features(module: nn.Module) -> int:
    """Return the output width of a projection."""
    return _features(module, "out_features", 1)


def _features(module: nn.Module, attribute: str, axis: int) -> int:
    size = getattr(module, attribute, None)
    if size is None:
        weight: Any = module.weight
        size = weight.shape[axis if is_transposed(module) else 1 - axis]
    return int(size)
