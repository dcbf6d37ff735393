"""Forward passes that start at a later decoder layer of a stock model, and return inputs of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.architectures.blocks import has_absent
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError


@dataclass
class PartialPass:
    """The attention layers that a forward pass runs. Number N of N layers stands for the output of the last layer."""

    start: int = 0  # the first layer to run
    hidden: torch.Tensor | None = None  # input of layer `start`, (1, tokens, width), if `start` > 0
    keep: frozenset[int] = frozenset()  # layers whose inputs are kept
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # these inputs, filled by the pass


@dataclass(frozen=True)
class _Position:
    """Position of a decoder layer: layers whose attention was cut out count with the attention layer before them."""

    number: int  # of the attention layer
    is_first: bool  # of the layers with this number
    is_last: bool  # of all layers


class _SkippableLayer(nn.Module):
    """A decoder layer that runs only if the current pass includes it."""

    def __init__(self, layer: nn.Module, position: _Position, skip: LayerSkip) -> None:
        super().__init__()
        self.layer = layer
        self._position = position
        self._skip = [skip]  # in a list, so that it is no submodule
        self._tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # `attention_type` and the like

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        skip, position = self._skip[0], self._position
        current = skip.current
        if position.is_first and position.number == current.start and current.hidden is not None:
            hidden_states = current.hidden
        if position.number >= current.start:
            if position.is_first and position.number in current.keep:
                current.layer_inputs[position.number] = hidden_states
            out = self.layer(hidden_states, *args, **kwargs)
            self._tuple = isinstance(out, tuple)
        else:
            passed = current.hidden if position.is_last and skip.count == current.start else hidden_states
            out = (passed,) if self._tuple else passed
        if position.is_last and skip.count in current.keep:
            current.layer_inputs[skip.count] = out[0] if self._tuple else out
        return out


class LayerSkip:
    """Choose which decoder layers of a model run, while `installed`. The layers must be the entries of one list."""

    def __init__(self, model_map: ModelMap) -> None:
        self.current = PartialPass()
        self.count = len(model_map.attention)
        modules = dict(model_map.model.named_modules())
        entries: dict[tuple[str, int], AttentionLayer] = {}  # by name of the list and number
        for layer in model_map.attention:
            parts = layer.name.split(".")
            ends = [i for i in range(1, len(parts)) if isinstance(modules.get(".".join(parts[:i])), nn.ModuleList)]
            if not ends or parts[ends[0]] != str(layer.index):
                raise InputError(f"{layer.name} is not in a list of decoder layers")
            entries[".".join(parts[: ends[0]]), layer.index] = layer
        holder = modules[next(iter(entries))[0]]
        self._list = holder if isinstance(holder, nn.ModuleList) else nn.ModuleList()
        with_attention = {index for _, index in entries}
        self._positions = self._positions_of(with_attention)
        gaps = [layer for index, layer in enumerate(self._list) if index not in with_attention]
        if len({name for name, _ in entries}) > 1 or not len(self._list) or not all(map(has_absent, gaps)):
            raise InputError("the model has decoder layers without attention, or several stacks of layers")
        numbers = [getattr(layer.module, "layer_idx", number) for number, layer in enumerate(model_map.attention)]
        if gaps and numbers != [*range(self.count)]:
            raise InputError("the model has layers of several types, and lacks the attention of some")

    def _positions_of(self, with_attention: set[int]) -> list[_Position]:
        positions: list[_Position] = []
        for index in range(len(self._list)):
            before = sum(other < index for other in with_attention)
            number = before if index in with_attention else max(0, before - 1)
            is_first = not positions or number > positions[-1].number
            positions.append(_Position(number, is_first, index == len(self._list) - 1))
        return positions

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the decoder layers inside the block."""
        layers = list(self._list)
        for index, layer in enumerate(layers):
            self._list[index] = _SkippableLayer(layer, self._positions[index], self)
        try:
            yield
        finally:
            for index, layer in enumerate(layers):
                self._list[index] = layer

    @contextmanager
    def running(
        self, start: int = 0, hidden: torch.Tensor | None = None, keep: Iterable[int] = ()
    ) -> Iterator[PartialPass]:
        """Set the layers of the forward passes inside the block; see `PartialPass`."""
        with replaced(self, current=PartialPass(start, hidden, frozenset(keep))):
            yield self.current
