"""A model without weights: enough to read its layers and to check what is to be done to it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, first_line

UNREADABLE = (OSError, ValueError, SafetensorError)  # what transformers raises for a model that it cannot load


def skeleton(config: Any, kind: Any = None, trust_remote_code: bool = False) -> Any:
    """The model of a configuration, on the meta device.

    Args:
        config: transformers' configuration; it is copied.
        kind: auto class; default the one that the configuration names (an encoder's own), or what suits it.
        trust_remote_code: as for `from_pretrained`.

    Raises:
        InputError: transformers has no class for it.
    """
    kinds = [k for k in (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModel) if type(config) in k._model_mapping]
    named = [
        k for k in kinds if getattr(k._model_mapping[type(config)], "__name__", "") in (config.architectures or ())
    ]
    kind = kind or next(iter([*named, *kinds]), None)
    if kind is None:
        raise InputError(f"it is a {config.model_type} model, which transformers cannot build")
    with torch.device("meta"):
        model: Any = kind.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
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
        raise InputError(f"the weights of {pretrained} cannot be loaded ({first_line(error)})") from error
