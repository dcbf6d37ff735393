"""Units in which heads can be removed for good: what a layer's shape allows, and what a family forbids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmeval_prune.architectures.blocks import AttentionLayer, attribute_of, projection_in
from lmeval_prune.architectures.table import ALIBI
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lmeval_prune.architectures.model_map import ModelMap

UNITS = ("head", "group", "balanced")


def units_of(layer: AttentionLayer) -> tuple[str, ...]:
    """Return the units of a layer.

    `head` is any query head; `group`, a key-value head with its query heads; `balanced`, one head of each group.
    """
    if layer.kv_heads == layer.heads:
        return ("head", "group")  # the same
    return ("head", "balanced") if layer.kv_heads == 1 else UNITS


def uncuttable(model_map: ModelMap) -> str:
    """Return why no head can be cut out of a model, only masked; empty if they can be."""
    for layer in model_map.attention:
        if layer.family.uncuttable:
            return layer.family.uncuttable
        if attribute_of(layer.module, "q_layernorm.norms") is not None:
            return "its query and key norms stand in a list by head"
        if projection_in(layer.module, layer.family.query) is None:
            return "its query projection is not known"
    return ALIBI if getattr(model_map.model.config, "alibi", False) else ""


def check_unit(model_map: ModelMap, unit: str) -> None:
    """Refuse a unit that none of a model's layers has; layers that were cut down to their last one lose no more.

    Raises:
        InputError: naming those that they have.
    """
    reason = uncuttable(model_map)
    possible = {"head"} if reason else {known for layer in model_map.attention for known in units_of(layer)}
    if unit in possible:
        return
    if unit not in UNITS:
        raise InputError(f"unit={unit!r} is not known; use {', '.join(UNITS)}")
    shape = model_map.attention[0]
    reason = reason or f"{shape.heads} query heads read {shape.kv_heads} key-value heads"
    use = " or ".join(known for known in UNITS if known in possible)
    raise InputError(f"unit={unit} does not suit this {model_map.model_type} model ({reason}); use {use}")
