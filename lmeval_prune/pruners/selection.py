"""Which heads and channels go: the lowest scores, in whole units, never the last of a layer unless that is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, ModelMap, check_unit
from lmeval_prune.errors import InputError

Removed = dict[str, set[int]]  # by layer


@dataclass(frozen=True)
class Unit:
    """Heads of one layer that go together.

    Attributes:
        label: the layer.
        heads: their numbers.
        score: the mean of their scores.
    """

    label: str
    heads: tuple[int, ...]
    score: float


def share_of(ratio: float, count: int) -> int:
    """`floor(ratio · count)`, where 0.3 of 270 is 81."""
    return math.floor(ratio * count + 1e-9)


def select_heads(
    model_map: ModelMap,
    scores: Mapping[str, Tensor],
    ratio: float,
    unit: str = "head",
    allocation: str = "global",
    removed: Mapping[str, Collection[int]] | None = None,
    allow_empty_layer: bool = False,
) -> Removed:
    """The heads that are removed in all, when a share of all heads goes.

    Args:
        model_map: of the model.
        scores: of each head, by layer; or of each of its columns in the output projection, (heads, columns).
        ratio: share of the query heads; as many whole units go as fit in it.
        unit: `head`, `group` or `balanced`.
        allocation: `global`: scores of all layers are compared; `uniform`: each layer loses its share.
        removed: heads that are removed already; they stay so, and count.
        allow_empty_layer: a layer may lose all its heads.

    Raises:
        InputError: the model's layers have no such unit.
    """
    check_unit(model_map, unit)
    found: Removed = {layer.label: set((removed or {}).get(layer.label, ())) for layer in model_map.attention}
    layers = {layer.label: layer for layer in model_map.attention}
    units = [
        one for layer in model_map.attention for one in units_in(layer, scores[layer.label], unit, found[layer.label])
    ]
    if allocation == "uniform":
        budgets = {label: share_of(ratio, layer.heads) - len(found[label]) for label, layer in layers.items()}
    else:
        budgets = {"": share_of(ratio, model_map.total_heads) - sum(map(len, found.values()))}
    for one in sorted(units, key=lambda one: one.score):
        pot = one.label if allocation == "uniform" else ""
        left = layers[one.label].heads - len(found[one.label]) - len(one.heads)
        if len(one.heads) <= budgets[pot] and (left > 0 or allow_empty_layer):
            found[one.label] |= set(one.heads)
            budgets[pot] -= len(one.heads)
    return {label: heads for label, heads in found.items() if heads}


def units_in(layer: AttentionLayer, scores: Tensor, unit: str, removed: Collection[int] = ()) -> list[Unit]:
    """The units of a layer's heads that are still there, lowest first within it."""
    share = layer.heads // layer.kv_heads
    groups = [range(g * share, (g + 1) * share) for g in range(layer.kv_heads)]
    alive = [[head for head in group if head not in removed] for group in groups]
    members: list[tuple[int, ...]]
    if unit == "head":
        members = [(head,) for group in alive for head in group]
    elif unit == "group":
        members = [tuple(group) for group in alive if group]
    else:  # the n-th lowest head of each group, as long as every group has one
        ordered = [sorted(group, key=lambda head: float(scores[head].mean())) for group in alive if group]
        members = list(zip(*ordered, strict=False))
    found = [Unit(layer.label, heads, float(scores[list(heads)].mean())) for heads in members]
    return found if unit == "balanced" else sorted(found, key=lambda one: one.score)


def select_channels(
    model_map: ModelMap,
    scores: Mapping[str, Tensor],
    ratio: float,
    multiple: int = 1,
    allocation: str = "global",
    removed: Mapping[str, Collection[int]] | None = None,
) -> Removed:
    """The channels that are removed in all, when a share of all channels goes.

    Args:
        model_map: of the model.
        scores: of each channel, by layer.
        ratio: share of the channels.
        multiple: as many stay in each block as make a multiple of it: fewer go.
        allocation: as of `select_heads`.
        removed: channels that are removed already; they stay so, and count.

    Raises:
        InputError: the model has no dense feed-forward blocks.
    """
    check_channels(model_map)
    blocks = model_map.channels()
    before = {label: set((removed or {}).get(label, ())) for label in blocks}
    ranked = {label: _ranked(scores[label], before[label]) for label in blocks}
    if allocation == "uniform":
        counts = {label: share_of(ratio, width) for label, width in blocks.items()}
    else:
        counts = _lowest_of_all(ranked, share_of(ratio, sum(blocks.values())))
    found: Removed = {}
    for label, width in blocks.items():
        kept = max(1, width - max(counts[label], len(before[label])))
        kept = min(width - len(before[label]), -(-kept // multiple) * multiple)
        found[label] = before[label] | set(ranked[label].argsort(stable=True)[: width - kept].tolist())
    return {label: channels for label, channels in found.items() if channels}


def check_channels(model_map: ModelMap) -> None:
    """Refuse a model that has no channels.

    Raises:
        InputError: it has no dense feed-forward blocks.
    """
    if not model_map.channels():
        raise InputError(f"this {model_map.model_type} model has no dense feed-forward blocks; leave out ffn_ratio")


def _ranked(scores: Tensor, removed: Collection[int]) -> Tensor:
    """Scores with those that are removed already below all others."""
    found = scores.clone()
    found[list(removed)] = -torch.inf
    return found


def _lowest_of_all(scores: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """How many of the lowest scores each layer has."""
    owner = torch.cat([torch.full((len(one),), place) for place, one in enumerate(scores.values())])
    lowest = torch.cat(list(scores.values())).argsort(stable=True)[:count]
    counts = torch.bincount(owner[lowest], minlength=len(scores)).tolist()
    return dict(zip(scores, counts, strict=True))
