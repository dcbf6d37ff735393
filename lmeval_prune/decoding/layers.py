"""Running some of a stock model's decoder layers: from a given hidden state on, and keeping hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from lmeval_prune.architectures import AttentionMap
from lmeval_prune.errors import InputError


@dataclass
class Route:
    """Which layers a forward pass runs.

    Attributes:
        start: the first layer that runs; those below let the hidden state through.
        hidden: what enters layer `start`, (1, tokens, width); needed if `start` > 0. With `start` the number
            of layers, what leaves the last one.
        keep: layers whose input is kept (the number of layers: the last one's output).
        kept: layer → that input, filled by the pass.
    """

    start: int = 0
    hidden: torch.Tensor | None = None
    keep: frozenset[int] = frozenset()
    kept: dict[int, torch.Tensor] = field(default_factory=dict)


class _Gate(nn.Module):
    """Stands in a decoder layer's place and does what the current route says."""

    def __init__(self, layer: nn.Module, index: int, gates: Gates) -> None:
        super().__init__()
        self.layer = layer
        self._index = index
        self._gates = [gates]  # in a list: not a submodule, no circle of modules
        self._tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # `attention_type` and the like

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gates = self._gates[0]
        route, following = gates.route, self._index + 1
        if self._index == route.start and route.hidden is not None:
            hidden_states = route.hidden
        if self._index >= route.start:
            if self._index in route.keep:
                route.kept[self._index] = hidden_states
            out = self.layer(hidden_states, *args, **kwargs)
            self._tuple = isinstance(out, tuple)
        else:
            passed = route.hidden if following == gates.count == route.start else hidden_states
            out = (passed,) if self._tuple else passed
        if following == gates.count and following in route.keep:
            route.kept[following] = out[0] if self._tuple else out
        return out


_IN_USE: WeakSet[nn.Module] = WeakSet()  # attention modules of models that engines decode on


@contextmanager
def in_use(model: nn.Module, attention: AttentionMap) -> Iterator[None]:
    """The model is one run's as long as the block lasts.

    Raises:
        InputError: it is another run's.
    """
    refuse_in_use(model)
    modules = [layer.attention for layer in attention]
    _IN_USE.update(modules)
    try:
        yield
    finally:
        _IN_USE.difference_update(modules)


def refuse_in_use(model: nn.Module) -> None:
    """Refuse a model that an engine is decoding on.

    Raises:
        InputError: saying what to do.
    """
    if any(module in _IN_USE for module in model.modules()):
        raise InputError("the engine is decoding on this model already; finish or close that run first")


class Gates:
    """Control over a model's decoder layers while `installed`.

    Args:
        model: a stock decoder-only model.
        attention: its attention layers; they name the decoder layers.

    Raises:
        InputError: the decoder layers are not the entries of one list, in order.
    """

    def __init__(self, model: nn.Module, attention: AttentionMap) -> None:
        self.route = Route()
        self.count = len(attention)
        modules = dict(model.named_modules())
        holders = set()
        for layer in attention:
            parts = layer.name.split(".")
            ends = [i for i in range(1, len(parts)) if isinstance(modules.get(".".join(parts[:i])), nn.ModuleList)]
            if not ends or parts[ends[0]] != str(layer.index):
                raise InputError(f"{layer.name} is not in a list of decoder layers")
            holders.add(".".join(parts[: ends[0]]))
        self._list = modules[holders.pop()]
        if holders or not isinstance(self._list, nn.ModuleList) or len(self._list) != self.count:
            raise InputError("the model has decoder layers without attention, or several stacks of layers")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the gates in; take them out at the end."""
        layers = list(self._list)
        for index, layer in enumerate(layers):
            self._list[index] = _Gate(layer, index, self)
        try:
            yield
        finally:
            for index, layer in enumerate(layers):
                self._list[index] = layer

    @contextmanager
    def routed(self, start: int = 0, hidden: torch.Tensor | None = None, keep: Iterable[int] = ()) -> Iterator[Route]:
        """Choose the layers of the forward passes inside the block; see `Route`."""
        before = self.route
        self.route = Route(start, hidden, frozenset(keep))
        try:
            yield self.route
        finally:
            self.route = before
