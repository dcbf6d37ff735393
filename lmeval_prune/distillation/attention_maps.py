"""Check the attention maps of teacher and student, and turn off their dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import eager_attention

_OTHER_DROPOUT = ("resid", "hidden", "output", "lora_")  # dropout in attention modules that is not applied to the maps


def check_returns_maps(skeleton: Any) -> None:
    """Raise an `InputError` if a model, given without weights, does not return the attention maps of its heads."""
    model_map = map_model(skeleton)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), eager_attention(skeleton):
            maps = getattr(skeleton(input_ids=ids, output_attentions=True), "attentions", None)
    except Exception:  # some models do not run without weights; training checks the maps again
        return
    check_maps(maps, model_map.model_type, [layer.heads for layer in model_map.attention])


def check_maps(maps: Sequence[Tensor | None] | None, model_type: str, heads: Sequence[int]) -> None:
    """Raise an `InputError` if attention maps are missing or have another number of heads per layer."""
    if maps is None or [None if layer is None else layer.shape[1] for layer in maps] != list(heads):
        raise InputError(
            f"feature needs attention maps, and this {model_type} model does not return those of its heads; give "
            f"--feature false"
        )


def turn_off_map_dropout(model_map: ModelMap) -> None:
    """Turn off the dropout of attention maps, but not of residual streams and LoRA updates.

    Models return their maps after dropout, so the feature term would compare random draws.
    """
    modules = [pair for layer in model_map.attention for pair in layer.module.named_modules()]
    for path, module in modules:
        if _is_other(path):
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and not _is_other(name):
                setattr(module, name, 0.0)


def _is_other(name: str) -> bool:
    return any(other in name for other in _OTHER_DROPOUT)
