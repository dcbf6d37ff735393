"""Head pruning of SPRINT §3: the output of a pruned head is zero before the output projection.

With `a_h` the output of head h and `W_O` the output projection, a layer computes `W_O · concat(a_1, …, 0, …, a_H)`
instead of `W_O · concat(a_1, …, a_h, …, a_H)`. Keys and values are computed and cached as usual. With grouped-query
attention a head is a query head.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

import torch

from lmeval_prune.architectures import AttentionLayer, FeedForward, Head, ModelMap, head_names
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError, first_few
from lmeval_prune.interventions.base import Intervention, change_input
from lmeval_prune.interventions.table import method_name


@dataclass(frozen=True)
class HeadMask(Intervention):
    """Prune a fixed set of heads.

    Attributes:
        heads: names `L5H3` and ranges `L5H0-3`, `L5H*`, joined by `+`; or a list of names or of `[layer, head]`. Stored
            as a tuple of names.
        allow_empty_layer: allow a layer to lose all its heads.
    """

    tokenwise = True
    heads: Any
    allow_empty_layer: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", head_names(self.heads))
        super().__post_init__()

    @classmethod
    def random(cls, count: int, seed: int | str, model_map: ModelMap) -> Self:
        """Draw heads of a model at random, but never the last remaining head of a layer."""
        heads = [(layer, head) for layer in model_map.attention for head in range(layer.heads)]
        random.Random(seed).shuffle(heads)
        left = {layer.label: layer.heads for layer in model_map.attention}
        chosen: list[str] = []
        for layer, head in heads:
            if len(chosen) < count and left[layer.label] > 1:
                left[layer.label] -= 1
                chosen.append(f"{layer.label}H{head}")
        if len(chosen) < max(count, 1):
            most = len(heads) - len(left)
            raise InputError(f"{count} random heads cannot be pruned: the model has {len(heads)}; give 1 to {most}")
        return cls(chosen)

    def __str__(self) -> str:
        return "+".join(self.heads)

    def __or__(self, other: HeadMask) -> HeadMask:
        """Return the union of two masks, with the options of the first."""
        return replace(self, heads=(*self.heads, *other.heads))

    def merged_with(self, other: Intervention) -> HeadMask | None:
        """Return the union with another mask, so that a layer without heads is noticed."""
        if not isinstance(other, HeadMask):
            return None
        either = self.allow_empty_layer or other.allow_empty_layer
        return replace(self | other, allow_empty_layer=either, origin=self.origin or other.origin)

    def converted(self, kind: type[Intervention]) -> Intervention | None:
        """Return the mask itself, or a plan that removes its heads."""
        if isinstance(self, kind) or method_name(kind) != "plan":
            return super().converted(kind)
        plan: Any = kind
        converted: Intervention = plan.from_mask(self)
        return converted

    def heads_of(self, model_map: ModelMap) -> tuple[Head, ...]:
        """Return the pruned heads of a model, sorted, without duplicates."""
        return tuple(
            Head(layer.stack, layer.index, number) for layer, numbers in self.by_layer(model_map) for number in numbers
        )

    def by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Return the layers that lose heads, and the numbers of these heads; errors as in `heads_of`."""
        if self.origin:
            self.origin.check(model_map)
        layers = model_map.once(self.heads, lambda: self._by_layer(model_map))
        for layer, numbers in () if self.allow_empty_layer else layers:
            if len(numbers) == layer.heads:
                raise InputError(
                    f"all {layer.heads} heads of layer {layer.label} would be pruned; "
                    f"give allow_empty_layer=true if that is meant"
                )
        return layers

    def _by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        heads = groupby(Head.parse(self.heads, model_map), key=lambda head: (head.stack, head.layer))
        lost = {key: [head.head for head in layer_heads] for key, layer_heads in heads}
        return [(layer, lost[key]) for layer in model_map.attention if (key := (layer.stack, layer.index)) in lost]

    def resolve(self, model_map: ModelMap) -> Self:
        """Expand ranges of heads."""
        names = tuple(map(str, self.heads_of(model_map)))
        return self if names == self.heads else replace(self, heads=names)

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Hook the output projection of each layer that loses heads."""
        for layer, numbers in self.by_layer(model_map):
            zero_columns(layer, numbers, stack)

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return the heads, their number, and the number of all heads."""
        heads = self.heads_of(model_map)
        report: dict[str, Any] = {
            "heads": [str(head) for head in heads],
            "heads_pruned": len(heads),
            "heads_total": model_map.total_heads,
            "mask_fingerprint": self.fingerprint(model_map),
        }
        if self.origin:
            report |= {"mask_file": self.origin.path, "mask_file_sha256": self.origin.sha256}
        return report

    def summary(self, model_map: ModelMap) -> str:
        """Return the number of pruned heads, and the first of them, in one line."""
        heads = self.heads_of(model_map)
        return f"{len(heads)} of {model_map.total_heads} heads masked: {first_few(heads)}"

    def fingerprint(self, model_map: ModelMap) -> str:
        """Return a digest of the resolved heads, modules and shapes, the same for every notation of a mask."""
        lost = [[layer.name, layer.heads, layer.head_dim, heads] for layer, heads in self.by_layer(model_map)]
        return digest({"heads": lost, "model": model_map.signature()})


def dropped_columns(block: AttentionLayer | FeedForward, numbers: Iterable[int]) -> torch.Tensor:
    """Return a boolean mask of the columns of heads of `o_proj`, or of channels of `down`, (columns,)."""
    units = (block.heads, block.head_dim) if isinstance(block, AttentionLayer) else (block.channels, 1)
    drop = torch.zeros(units, dtype=torch.bool)
    drop[list(numbers)] = True
    return drop.flatten()


def zero_columns(block: AttentionLayer | FeedForward, numbers: Iterable[int], stack: ExitStack) -> None:
    """Zero the columns of heads in the input of `o_proj`, or of channels in that of `down`, until `stack` closes."""
    drop = dropped_columns(block, numbers)

    def zero(x: torch.Tensor) -> torch.Tensor:
        nonlocal drop
        drop = columns = drop.to(x.device)
        return x.masked_fill(columns, 0)

    change_input(block.o_proj if isinstance(block, AttentionLayer) else block.down, zero, stack)
