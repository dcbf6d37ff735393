"""Build models without weights (on the meta device), to read their layers and to check options before loading."""

from __future__ import annotations

import copy
from typing import Any

import torch

from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import (
    architecture_class,
    as_input_error,
    checkpoint_class,
    has_pruned_layers,
    language_auto_class,
    load_weights,
    read_config,
)
from lmeval_prune.errors import InputError


def skeleton(config: Any, auto_class: Any = None, trust_remote_code: bool = False) -> Any:
    """Build the model of a configuration on the meta device, by default with its `checkpoint_class`."""
    config = copy.deepcopy(config)
    model_class = checkpoint_class(config) if auto_class is None or has_pruned_layers(config) else None
    with torch.device("meta"), as_input_error("no model can be built from config.json"):
        if model_class:
            model: Any = model_class._from_config(config)
        else:
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    model.config._name_or_path = getattr(config, "_name_or_path", "")
    return model


def language_skeleton(config: Any, trust_remote_code: bool = False) -> Any:
    """Build the language model that lm-eval loads on the meta device; raise `InputError` if there is none."""
    model = skeleton(config, language_auto_class(config), trust_remote_code)
    check_language_model(config, model)
    return model


def check_language_model(config: Any, language_model: Any) -> None:
    """Refuse a classifier, or a model without a head, which lm-eval would load as a language model.

    `language_model` is the skeleton of the model that lm-eval would load. A model without a head is accepted if the
    language model's head is tied, because the checkpoint then has all parameters.
    """
    named = architecture_class(config)
    if named is None:  # the weights are checked when they are loaded
        return
    try:
        model = language_model if isinstance(language_model, named) else skeleton(config)
    except InputError:  # cannot be built without weights
        return
    has_no_head = model.get_output_embeddings() is None
    if has_no_head and (model is language_model or _parameters(model) != _parameters(language_model)):
        raise InputError(
            f"{getattr(config, '_name_or_path', '') or 'this'} is a {type(model).__name__}, no language model, and "
            f"lm-eval supports no others; name a language model"
        )


def _parameters(model: Any) -> set[str]:
    return {name.removeprefix(f"{model.base_model_prefix}.") for name, _ in model.named_parameters()}


def skeleton_of(pretrained: str, revision: str | None = None) -> Any:
    """Build the model of a name or folder on the meta device."""
    return skeleton(read_config(pretrained, revision))


def with_weights(model: Any, pretrained: str, revision: str | None = None) -> Any:
    """Load the model of `skeleton_of` with its weights in their own dtype; raise `InputError` if that fails."""
    with as_input_error(f"the weights of {pretrained} cannot be loaded"):
        return load_weights(type(model), embedded.resolve(pretrained), revision=revision, dtype="auto")


def is_quantised(model: Any) -> bool:
    """Return whether a model's weights are quantised; the model may have no weights yet."""
    return bool(getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None))


def check_unquantised(model: Any, pretrained: str) -> None:
    """Raise `InputError` for a quantised model, which may have no weights yet."""
    if is_quantised(model):
        raise InputError(f"{pretrained} is quantised, and cannot be cut or rewritten; give its dequantised weights")
