"""A stock transformers model whose layers have different numbers of heads or channels, or lack blocks.

This file is part of lmeval-prune and is copied into the checkpoints that need it. There it is loaded with
`trust_remote_code=True` and imports only torch and transformers. It builds the stock model, then replaces the modules
that are absent, and changes the shapes of parameters and the counts of modules, as the configuration says under
`pruned_modules`. The files of the weights have names that no stock class looks for, because a stock class would load
the weights that fit and draw the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LAYER_NUMBERS = ("layer_idx", "layer_id")  # attributes in which attention keeps its layer of the cache
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


class Absent(nn.Module):
    """Stands in for a module that was cut out: returns its own inputs, zeros like them, and None.

    The source of each output is None, or `[name, position, is_zero]` of an argument of `forward`.
    """

    is_absent = True

    def __init__(self, outputs: list[Any], is_tuple: bool) -> None:
        super().__init__()
        self.outputs, self.is_tuple = outputs, is_tuple

    def forward(self, *inputs: Any, **named: Any) -> Any:
        values = tuple(None if source is None else self._value(source, inputs, named) for source in self.outputs)
        return values if self.is_tuple else values[0]

    def _value(self, source: list[Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        name, position, is_zero = source
        value: Any = named[name] if name in named else inputs[position] if position < len(inputs) else None
        return torch.zeros_like(value) if is_zero else value


class Pruned:
    """Mixin for a stock model class whose layers may differ: `class PrunedX(Pruned, X)`."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        with without_warnings_of_layers():  # built by values of the whole model; those of layers follow
            super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        model: Any = self
        prefix = f"{model.base_model_prefix}."
        # without a head, the names of the base model's modules lack the prefix
        removed = "" if hasattr(model, model.base_model_prefix) else prefix
        entries = config.pruned_modules
        for name, arguments in entries.get("absent", {}).items():
            path, absent = name.removeprefix(removed), Absent(*arguments)
            for attribute, value in vars(model.get_submodule(path)).items():
                # numbers and names of the layer: the model may read its kind of attention
                if not attribute.startswith("_") and isinstance(value, str | int | float) and attribute != "training":
                    setattr(absent, attribute, value)
            model.set_submodule(path, absent)
        for name, shape in entries["shapes"].items():  # the values are loaded later
            path, _, parameter = name.removeprefix(removed).rpartition(".")
            module = model.get_submodule(path)
            before = getattr(module, parameter)
            before = module.weight if before is None else before  # a bias that the stock model does not have
            setattr(module, parameter, nn.Parameter(torch.empty(shape, dtype=before.dtype, device=before.device)))
            for attributes in (("out_features", "in_features"), ("nx", "nf")):  # Linear, Conv1D
                if parameter == "weight" and all(hasattr(module, attribute) for attribute in attributes):
                    for attribute, size in zip(attributes, shape, strict=True):
                        setattr(module, attribute, size)
        for name, counts in entries["attributes"].items():
            module = model.get_submodule(name.removeprefix(removed))
            for attribute, value in counts.items():
                setattr(module, attribute, LayerConfig(module.config, value) if attribute == "config" else value)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: weights and buffers are initialised by the stock class, in transformers' own way.

        Of custom code, transformers leaves out modules without tensors of their own, and some of these compute the
        buffers of their children, which are then never written.
        """
        return False

    @classmethod
    def from_pretrained(cls, *inputs: Any, **options: Any) -> Any:
        return super().from_pretrained(*inputs, **{"variant": VARIANT, **options})  # type: ignore[misc]

    def save_pretrained(self, *inputs: Any, **options: Any) -> Any:
        return super().save_pretrained(*inputs, **{"variant": VARIANT, **options})  # type: ignore[misc]


@contextmanager
def without_warnings_of_layers() -> Iterator[None]:
    """Leave out transformers' warning that a value of the whole model is read though layers have their own."""

    def is_shown(record: logging.LogRecord) -> bool:
        return "Reading global config value for per-layer attribute" not in str(record.msg)

    logger = logging.getLogger("transformers.integrations.heterogeneity.configuration_utils")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
