"""Forward passes that start at a later decoder layer of a stock model, and return inputs of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError


@dataclass
class PartialPass:
    """The layers that a forward pass runs. Layer number N of N layers stands for the output of the last layer."""

    start: int = 0  # the first layer to run
    hidden: torch.Tensor | None = None  # input of layer `start`, (1, tokens, width), if `start` > 0
    keep: frozenset[int] = frozenset()  # layers whose inputs are kept
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # these inputs, filled by the pass


class _SkippableLayer(nn.Module):
    """A decoder layer that runs only if the current pass includes it."""

    def __init__(self, layer: nn.Module, index: int, skip: LayerSkip) -> None:
        super().__init__()
        self.layer = layer
        self._index = index
        self._skip = [skip]  # in a list, so that it is no submodule
        self._tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # `attention_type` and the like

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        skip = self._skip[0]
        current, following = skip.current, self._index + 1
        if self._index == current.start and current.hidden is not None:
            hidden_states = current.hidden
        if self._index >= current.start:
            if self._index in current.keep:
                current.kept[self._index] = hidden_states
            out = self.layer(hidden_states, *args, **kwargs)
            self._tuple = isinstance(out, tuple)
        else:
            passed = current.hidden if following == skip.count == current.start else hidden_states
            out = (passed,) if self._tuple else passed
        if following == skip.count and following in current.keep:
            current.kept[following] = out[0] if self._tuple else out
        return out


class LayerSkip:
    """Choose which decoder layers of a model run, while `installed`. The layers must be the entries of one list."""

    def __init__(self, model_map: ModelMap) -> None:
        self.current = PartialPass()
        self.count = len(model_map.attention)
        modules = dict(model_map.model.named_modules())
        holders = set()
        for layer in model_map.attention:
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
        """Wrap the decoder layers inside the block."""
        layers = list(self._list)
        for index, layer in enumerate(layers):
            self._list[index] = _SkippableLayer(layer, index, self)
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
        before = self.current
        self.current = PartialPass(start, hidden, frozenset(keep))
        try:
            yield self.current
        finally:
            self.current = before
