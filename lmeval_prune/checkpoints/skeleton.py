"""A model without weights: enough to read its layers and to check what is to be done to it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from lmeval_prune.checkpoints import embedded, pruned
from lmeval_prune.checkpoints.pruned import UNREADABLE
from lmeval_prune.errors import InputError, first_line


def skeleton(config: Any, kind: Any = None, trust_remote_code: bool = False) -> Any:
    """The model of a configuration, on the meta device.

    Args:
        config: transformers' configuration; it is copied.
        kind: auto class; default the one that the configuration names (an encoder's own), or what suits it.
        trust_remote_code: as for `from_pretrained`.

    Raises:
        InputError: transformers has no class for it.
    """
    if pruned.has_own_layers(config):
        return _empty(pruned.model_class(config), config)
    kinds = (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModel)
    if kind is None and (encoder := _encoder(config)) is not None:
        return _empty(encoder, config)
    kind = kind or next((k for k in kinds if type(config) in k._model_mapping), None)
    if kind is None:
        raise InputError(f"it is a {config.model_type} model, which transformers cannot build")
    with torch.device("meta"):
        model: Any = kind.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    model.config._name_or_path = getattr(config, "_name_or_path", "")
    return model


def _encoder(config: Any) -> Any:
    """The class that a configuration names, if it is an encoder's, which also could be built as a language model."""
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    kinds = (AutoModel, AutoModelForMaskedLM)
    return named if named in [k._model_mapping.get(type(config), None) for k in kinds] and named else None


def _empty(kind: Any, config: Any) -> Any:
    """A model of a class, on the meta device."""
    with torch.device("meta"):
        model: Any = kind._from_config(copy.deepcopy(config))
    model.config._name_or_path = getattr(config, "_name_or_path", "")
    return model


def skeleton_of(pretrained: str, revision: str | None = None) -> Any:
    """As `skeleton`, by a model's name or folder.

    Raises:
        InputError: its configuration cannot be read, or transformers has no class for it.
    """
    embedded.check_name(pretrained)
    try:
        config = AutoConfig.from_pretrained(embedded.resolve(pretrained), revision=revision)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read the model {pretrained}: {first_line(error)}") from error
    return skeleton(config)


def with_weights(bare: Any, pretrained: str, revision: str | None = None) -> Any:
    """The model of `skeleton_of`, with its weights in their own type.

    Raises:
        InputError: they cannot be loaded.
    """
    try:
        return type(bare).from_pretrained(embedded.resolve(pretrained), revision=revision, dtype="auto").eval()
    except UNREADABLE as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the weights of {pretrained} cannot be loaded ({first_line(error)})") from error
