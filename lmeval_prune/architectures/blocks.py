"""Blocks of a layer, attention and feed-forward, and what can be read from their modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.table import Family

if TYPE_CHECKING:  # heads are named and counted without torch, too
    from torch import nn


def label_of(stack: str, layer: int) -> str:
    """Return `"L5"`, or `"encoder.L5"` in a model with several stacks."""
    return f"{stack}.L{layer}" if stack else f"L{layer}"


@dataclass(frozen=True)
class Rows:
    """Rows of a projection's output that belong to one head, one channel, or all channels.

    Attributes:
        module: the projection (`nn.Linear`, `Conv1D`, or a wrapper of one).
        start, stop: the rows; of `module.weight` for a Linear, of `module.weight.T` for a Conv1D.
    """

    module: nn.Module
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """A part of one layer.

    Attributes:
        stack: `""` in a model with one stack, else `"encoder"`, `"decoder"` or, for attention, `"cross"`.
        index: layer number, zero-based, as in `L5H3`.
        name, module: dotted name of the module that holds the projections, and that module.
    """

    stack: str
    index: int
    name: str
    module: nn.Module

    @cached_property
    def label(self) -> str:
        """`"L5"`, or `"encoder.L5"` in a model with several stacks."""
        return label_of(self.stack, self.index)


@dataclass(frozen=True)
class AttentionLayer(Block):
    """The attention of one layer.

    Attributes:
        o_proj: its output projection.
        heads: number of query heads.
        kv_heads: number of key-value heads; number g serves query heads g·G … g·G+G−1, G = heads / kv_heads.
        head_dim: width of one head's slice of the output projection's input.
        query_dim: rows of one head in the query projection (differs from `head_dim` in latent attention).
    """

    o_proj: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    query_dim: int
    family: Family

    def columns(self, head: int) -> slice:
        """Return the columns of the output projection's input that a head fills."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def kv_head_of(self, head: int) -> int:
        """Return the key-value head that a query head reads."""
        return head // (self.heads // self.kv_heads)

    def rows(self, part: str, index: int) -> Rows:
        """Return the rows that compute query head `index` (`part="q"`) or key-value head `index` (`"k"`, `"v"`)."""
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
        size = self.head_dim if part == "v" else self.query_dim
        return Rows(module, index * size, (index + 1) * size)


@dataclass(frozen=True)
class FeedForward(Block):
    """The dense feed-forward block of one layer: `down(activation(gate) * up)`, or `down(activation(up))`.

    Channel c is column c of the input of `down`, and one row of each of its `parts`.

    Attributes:
        gate: None if it has no gate; the same module as `up` if one projection computes both.
        up, down: its projections.
        channels: how many there are.
    """

    gate: nn.Module | None
    up: nn.Module
    down: nn.Module
    channels: int

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Projections that compute the channels: `{"gate": …, "up": …}`, or `{"up": …}`."""
        return {"up": self.up} if self.gate is None else {"gate": self.gate, "up": self.up}

    def columns(self, channel: int) -> slice:
        """Return the column of the input of `down` that a channel fills."""
        return slice(channel, channel + 1)

    def rows(self, part: str, channel: int | None = None) -> Rows:
        """Return the row of a part that computes a channel; by default the rows of all channels, in order."""
        start = self.channels if part == "up" and self.gate is self.up else 0
        if channel is None:
            return Rows(self.parts[part], start, start + self.channels)
        return Rows(self.parts[part], start + channel, start + channel + 1)


def find_in(module: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """Find the first of the alternatives in `path` (separated by `|`) that is a submodule: its name and itself."""
    for name in path.split("|"):
        submodule = attribute_of(module, name)
        if hasattr(submodule, "named_parameters"):
            return name, submodule
    return None


def projection_in(module: nn.Module, path: str | None) -> nn.Module | None:
    """Find a submodule as `find_in` does, without its name; None at no path."""
    match = find_in(module, path) if path else None
    return match and match[1]


def attribute_of(module: nn.Module, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is (inputs, outputs), as in GPT-2's `Conv1D`, and not (outputs, inputs)."""
    return type(getattr(module, "base_layer", module)).__name__ == "Conv1D"  # PEFT calls what it wraps base_layer


def in_features(module: nn.Module) -> int:
    """Return the width of a projection's input."""
    return _features(module, "in_features", 0)


def out_features(module: nn.Module) -> int:
    """Return the width of a projection's output."""
    return _features(module, "out_features", 1)


def _features(module: nn.Module, attribute: str, axis: int) -> int:
    size = getattr(module, attribute, None)
    if size is None:
        weight: Any = module.weight
        size = weight.shape[axis if is_transposed(module) else 1 - axis]
    return int(size)
