"""Locks on models: the engine wraps modules of a model, so only one run may use the model at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from torch import nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError

_LOCKED: WeakSet[nn.Module] = WeakSet()  # attention modules of models that engines decode on


@contextmanager
def locked(model_map: ModelMap) -> Iterator[None]:
    """Lock a model for the block.

    Raises:
        InputError: another run uses the model.
    """
    refuse_locked(model_map.model)
    modules = [layer.module for layer in model_map.attention]
    _LOCKED.update(modules)
    try:
        yield
    finally:
        _LOCKED.difference_update(modules)


def refuse_locked(model: nn.Module) -> None:
    """Refuse a model that an engine is decoding on."""
    if any(module in _LOCKED for module in model.modules()):
        raise InputError("the engine is decoding on this model already; finish or close that run first")
