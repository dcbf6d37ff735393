"""Choose the unit in which heads can be removed for good: single heads, key-value groups, or one head per group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmeval_prune.architectures.blocks import AttentionLayer, attribute_of, projection_in
from lmeval_prune.architectures.table import ALIBI

if TYPE_CHECKING:
    from lmeval_prune.architectures.model_map import ModelMap


def units_of(layer: AttentionLayer) -> tuple[str, ...]:
    """Return the units that a layer's shape allows.

    `head` is any query head; `group`, a key-value head with its query heads; `balanced`, one head of each group.
    """
    if layer.kv_heads == layer.heads:
        return ("head", "group")  # a group is one head
    return ("head", "balanced") if layer.kv_heads == 1 else ("head", "group", "balanced")


def uncuttable(model_map: ModelMap) -> str:
    """Return why heads of a model can be masked but not cut; empty if they can be cut."""
    for layer in model_map.attention:
        if layer.family.uncuttable:
            return layer.family.uncuttable
        if attribute_of(layer.module, "q_layernorm.norms") is not None:
            return "it has a list of query and key norms, one per head"
        if projection_in(layer.module, layer.family.query) is None:
            return "its query projection is unknown"
    return ALIBI if getattr(model_map.model.config, "alibi", False) else ""
