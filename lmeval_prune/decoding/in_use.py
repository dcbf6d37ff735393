"""Locks on models: the engine puts modules of its own into a model, so that one run has it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError

_IN_USE: WeakSet[nn.Module] = WeakSet()  # attention modules of models that engines decode on


@contextmanager
def in_use(model_map: ModelMap) -> Iterator[None]:
    """Lock a model for the block.

    Raises:
        InputError: another run has it.
    """
    refuse_in_use(model_map.model)
    modules = [layer.module for layer in model_map.attention]
    _IN_USE.update(modules)
    try:
        yield
    finally:
        _IN_USE.difference_update(modules)


def refuse_in_use(model: nn.Module) -> None:
    """Refuse a model that an engine is decoding on."""
    if any(module in _IN_USE for module in model.modules()):
        raise InputError("the engine is decoding on this model already; finish or close that run first")
