"""A stock transformers model whose layers have lost heads or channels, each layer others.

This file is part of lmeval-prune, and it is copied into the checkpoints that need it: there it is loaded with
`trust_remote_code=True` and imports nothing but torch and transformers. It builds the stock model of the checkpoint's
configuration and gives some of its parameters other shapes, and some of its modules other head counts, both named in
the configuration under `pruned_modules`. The weights' files have names that no stock class looks for: it would load
what fits and make up the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

VARIANT = "pruned"  # of the weights' files: model.pruned.safetensors


class LayerConfig:
    """A model's configuration, but for some values that one layer has for itself."""

    def __init__(self, config: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(_config=config, _own=own)

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_own") or name.startswith("__"):  # not there yet, as while it is copied
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


class Pruned:
    """What makes a stock model class one whose layers differ: `class PrunedX(Pruned, X)`."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        model: Any = self
        prefix = f"{model.base_model_prefix}."
        # the base model alone calls its parts without the name that it has inside a model with a head
        removed = "" if hasattr(model, model.base_model_prefix) else prefix
        with _named("shapes", "attributes"):
            shapes, attributes = (config.pruned_modules[part].items() for part in ("shapes", "attributes"))
        for name, shape in shapes:
            path, _, parameter = name.removeprefix(removed).rpartition(".")
            with _named(name):
                _reshape(model.get_submodule(path), parameter, shape)
        for name, counts in attributes:
            with _named(name):
                module = model.get_submodule(name.removeprefix(removed))
                for attribute, value in counts.items():
                    _set_count(module, attribute, value)

    @classmethod
    def from_pretrained(cls, *inputs: Any, **options: Any) -> Any:
        """As the stock class's, from files of our variant."""
        return super().from_pretrained(*inputs, **{"variant": VARIANT, **options})  # type: ignore[misc]

    def save_pretrained(self, *inputs: Any, **options: Any) -> Any:
        """As the stock class's, into files of our variant."""
        return super().save_pretrained(*inputs, **{"variant": VARIANT, **options})  # type: ignore[misc]


@contextmanager
def _named(*names: str) -> Iterator[None]:
    """Refuse entries of `pruned_modules` that do not fit the stock model."""
    try:
        yield
    except Exception as error:  # torch has many errors for wrong names, types and sizes
        raise ValueError(
            f"config.json: {' or '.join(names)} of pruned_modules does not fit ({error}); fetch or cut the model again"
        ) from error


def _set_count(module: Any, name: str, value: Any) -> None:
    """Give a module another count, or its configuration other counts."""
    if name == "config":
        for own, count in value.items():
            _check_count(getattr(module.config, own), count)
        module.config = LayerConfig(module.config, value)
    else:
        _check_count(getattr(module, name), value)
        setattr(module, name, value)


def _check_count(before: Any, value: Any) -> None:
    if type(before) is not int or type(value) is not int or value < 1:
        raise TypeError(f"{value!r} in place of {before!r} is no count")


def _reshape(module: nn.Module, name: str, shape: list[int]) -> None:
    """Give a parameter of a module another shape; its values are to be loaded."""
    like: Any = getattr(module, name)
    like = module.weight if like is None else like  # a bias that the stock model does not have
    setattr(module, name, nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device)))
    if name == "weight":
        for attributes in (("out_features", "in_features"), ("nx", "nf")):  # of a Linear, of a Conv1D
            if all(hasattr(module, attribute) for attribute in attributes):
                for attribute, size in zip(attributes, shape, strict=True):
                    setattr(module, attribute, size)
