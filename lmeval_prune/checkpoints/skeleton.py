"""A model without weights: enough to read its layers and to check what is to be done to it."""

from __future__ import annotations

import copy
from typing import Any

import torch

from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import (
    class_of,
    has_own_layers,
    language_kind,
    load_weights,
    named_class,
    read_config,
    refused_as,
)
from lmeval_prune.errors import InputError


def skeleton(config: Any, kind: Any = None, trust_remote_code: bool = False) -> Any:
    """Return the model of a configuration, on the meta device.

    Args:
        config: transformers' configuration; it is copied.
        kind: auto class; default the class of the checkpoint's weights, `class_of`.
        trust_remote_code: as for `from_pretrained`.

    Raises:
        InputError: transformers has no class for it, or the class refuses its values.
    """
    config = copy.deepcopy(config)
    exact = class_of(config) if kind is None or has_own_layers(config) else None
    with torch.device("meta"), refused_as("no model can be built from config.json"):
        if exact:
            model: Any = exact._from_config(config)
        else:
            model = kind.from_config(config, trust_remote_code=trust_remote_code)
    model.config._name_or_path = getattr(config, "_name_or_path", "")
    return model


def language_skeleton(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the language model that lm-eval makes of a configuration, on the meta device; arguments as of `skeleton`.

    Raises:
        InputError: as of `skeleton`, or it is the configuration of no language model.
    """
    bare = skeleton(config, language_kind(config), trust_remote_code)
    check_language_model(config, bare)
    return bare


def check_language_model(config: Any, bare: Any) -> None:
    """Refuse a classifier, or a model without a head, of which lm-eval would make a language model.

    A model without a head has all that a language model has where the head is tied.

    Args:
        config: of the checkpoint.
        bare: the skeleton of what lm-eval would load.

    Raises:
        InputError: naming its class.
    """
    named = named_class(config)
    if named is None:  # its weights tell
        return
    try:
        exact = bare if isinstance(bare, named) else skeleton(config)
    except InputError:  # it cannot be built without weights, and they tell
        return
    if exact.get_output_embeddings() is None and (exact is bare or _parameters(exact) != _parameters(bare)):
        raise InputError(
            f"{getattr(config, '_name_or_path', '') or 'this'} is a {type(exact).__name__}, no language model, and "
            f"lm-eval asks no others; name a language model"
        )


def _parameters(bare: Any) -> set[str]:
    """Return the names of a model's parameters, tied ones once, as the model without a head has them."""
    return {name.removeprefix(f"{bare.base_model_prefix}.") for name, _ in bare.named_parameters()}


def skeleton_of(pretrained: str, revision: str | None = None) -> Any:
    """Return the model of a name or folder, on the meta device.

    Raises:
        InputError: its configuration cannot be read, or transformers has no class for it.
    """
    config = read_config(pretrained, revision)
    try:
        return skeleton(config)
    except InputError as error:
        raise InputError(f"cannot read the model {pretrained}: {error}") from error


def with_weights(bare: Any, pretrained: str, revision: str | None = None) -> Any:
    """Return the model of `skeleton_of`, with its weights in their own type.

    Raises:
        InputError: they cannot be loaded.
    """
    with refused_as(f"the weights of {pretrained} cannot be loaded"):
        return load_weights(type(bare), embedded.resolve(pretrained), revision=revision, dtype="auto")


def is_quantised(model: Any) -> bool:
    """Return whether a model's weights are, or would be when loaded, no plain numbers."""
    return bool(getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None))


def check_plain(bare: Any, pretrained: str) -> None:
    """Refuse a quantised model, before its weights are loaded.

    Raises:
        InputError: it is one.
    """
    if is_quantised(bare):
        raise InputError(f"{pretrained} is quantised, and cannot be cut or written anew; give its dequantised weights")
