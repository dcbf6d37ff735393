"""A stock transformers model whose layers have different numbers of heads or channels.

This file is part of lmeval-prune and is copied into the checkpoints that need it. There it is loaded with
`trust_remote_code=True` and imports only torch and transformers. It builds the stock model, then changes the shapes of
parameters and the head counts of modules that the configuration lists under `pruned_modules`. The files of the weights
have names that no stock class looks for, because a stock class would load the weights that fit and draw the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

VARIANT = "pruned"  # file name of the weights: model.pruned.safetensors


class LayerConfig:
    """A model's configuration with some values replaced for one layer."""

    def __init__(self, config: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(_config=config, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_own") or name.startswith("__"):  # not set yet while the object is copied
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class Pruned:
    """Mixin for a stock model class whose layers may differ: `class PrunedX(Pruned, X)`."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        model: Any = self
        prefix = f"{model.base_model_prefix}."
        # without a head, the names of the base model's modules lack the prefix
        removed = "" if hasattr(model, model.base_model_prefix) else prefix
        with _checked_entries("shapes", "attributes"):
            shapes, attributes = (config.pruned_modules[part].items() for part in ("shapes", "attributes"))
        for name, shape in shapes:
            path, _, parameter = name.removeprefix(removed).rpartition(".")
            with _checked_entries(name):
                _reshape(model.get_submodule(path), parameter, shape)
        for name, counts in attributes:
            with _checked_entries(name):
                module = model.get_submodule(name.removeprefix(removed))
                for attribute, value in counts.items():
                    _set_count(module, attribute, value)

    @classmethod
    def from_pretrained(cls, *inputs: Any, **options: Any) -> Any:
        """Load weights from `model.pruned.safetensors`; see the stock class."""
        return super().from_pretrained(*inputs, **{"variant": VARIANT, **options})  # type: ignore[misc]

    def save_pretrained(self, *inputs: Any, **options: Any) -> Any:
        """Save weights to `model.pruned.safetensors`; see the stock class."""
        return super().save_pretrained(*inputs, **{"variant": VARIANT, **options})  # type: ignore[misc]


@contextmanager
def _checked_entries(*names: str) -> Iterator[None]:
    """Raise `ValueError` with the names of entries of `pruned_modules` that do not fit the stock model."""
    try:
        yield
    except Exception as error:  # torch raises errors of many types for wrong names, types and sizes
        raise ValueError(
            f"config.json: {' or '.join(names)} of pruned_modules does not fit ({error}); fetch or cut the model again"
        ) from error


def _set_count(module: Any, name: str, value: Any) -> None:
    """Set a count of a module, or counts of its configuration."""
    if name == "config":
        for own, count in value.items():
            _check_count(getattr(module.config, own), count)
        module.config = LayerConfig(module.config, value)
    else:
        _check_count(getattr(module, name), value)
        setattr(module, name, value)


def _check_count(before: Any, value: Any) -> None:
    if type(before) is not int or type(value) is not int or value < 1:
        raise TypeError(f"{value!r} cannot replace {before!r}: it is no count")


def _reshape(module: nn.Module, name: str, shape: list[int]) -> None:
    """Change the shape of a parameter; its values are loaded later."""
    before: Any = getattr(module, name)
    before = module.weight if before is None else before  # a bias that the stock model does not have
    setattr(module, name, nn.Parameter(torch.zeros(shape, dtype=before.dtype, device=before.device)))
    if name == "weight":
        for attributes in (("out_features", "in_features"), ("nx", "nf")):  # Linear, Conv1D
            if all(hasattr(module, attribute) for attribute in attributes):
                for attribute, size in zip(attributes, shape, strict=True):
                    setattr(module, attribute, size)
