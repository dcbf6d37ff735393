"""Head pruning of SPRINT §3: the output of a pruned head is zero before the output projection.

With `a_h` the output of head h and `W_O` the output projection, a layer computes `W_O · concat(a_1, …, 0, …, a_H)`
instead of `W_O · concat(a_1, …, a_h, …, a_H)`. Keys and values are computed and cached as usual. With grouped-query
attention a head is a query head. `RowMasks` prunes other heads in each row of a batch, or token of a packed batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Self

import torch

from lmeval_prune.architectures import AttentionLayer, FeedForward, Head, ModelMap, head_names
from lmeval_prune.artefacts import digest
from lmeval_prune.attributes import replaced
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

    def merged_with(self, other: Intervention) -> HeadMask | None:
        """Return the union with another mask, so that a layer without heads is noticed."""
        if not isinstance(other, HeadMask):
            return None
        heads, either = (*self.heads, *other.heads), self.allow_empty_layer or other.allow_empty_layer
        return replace(self, heads=heads, allow_empty_layer=either, origin=self.origin or other.origin)

    def converted(self, kind: Any) -> Intervention | None:
        plan: Intervention | None = kind.from_mask(self) if method_name(kind) == "plan" else super().converted(kind)
        return plan

    def heads_of(self, model_map: ModelMap) -> tuple[Head, ...]:
        """Return the pruned heads of a model, sorted, without duplicates."""
        return tuple(
            Head(layer.stack, layer.index, number) for layer, numbers in self.by_layer(model_map) for number in numbers
        )

    def by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Return the layers that lose heads, and the numbers of these heads; errors as in `heads_of`."""
        if self.origin:
            self.origin.check(model_map)

        def resolved() -> list[tuple[AttentionLayer, list[int]]]:
            heads = groupby(Head.parse(self.heads, model_map), key=lambda head: (head.stack, head.layer))
            lost = {key: [head.head for head in layer_heads] for key, layer_heads in heads}
            return [(layer, lost[key]) for layer in model_map.attention if (key := (layer.stack, layer.index)) in lost]

        layers = model_map.once(self.heads, resolved)
        for layer, numbers in () if self.allow_empty_layer else layers:
            if len(numbers) == layer.heads:
                raise InputError(
                    f"all {layer.heads} heads of layer {layer.label} would be pruned; "
                    f"give allow_empty_layer=true if that is meant"
                )
        return layers

    def resolve(self, model_map: ModelMap) -> Self:
        names = tuple(map(str, self.heads_of(model_map)))
        return self if names == self.heads else replace(self, heads=names)

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        for layer, numbers in self.by_layer(model_map):
            zero_columns(layer, numbers, stack)

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return the heads, their number, and the number of all heads.

        The fingerprint, of resolved heads, modules and shapes, is the same for every notation of a mask.
        """
        heads = self.heads_of(model_map)
        lost = [[layer.name, layer.heads, layer.head_dim, numbers] for layer, numbers in self.by_layer(model_map)]
        report: dict[str, Any] = {
            "heads": [str(head) for head in heads],
            "heads_pruned": len(heads),
            "heads_total": model_map.total_heads,
            "mask_fingerprint": digest({"heads": lost, "model": model_map.signature()}),
        }
        if self.origin:
            report |= {"mask_file": self.origin.path, "mask_file_sha256": self.origin.sha256}
        return report

    def summary(self, model_map: ModelMap) -> str:
        heads = self.heads_of(model_map)
        return f"{len(heads)} of {model_map.total_heads} heads masked: {first_few(heads)}"


class MaskTable:
    """Masks resolved for a model."""

    def __init__(self, masks: Sequence[HeadMask | None], model_map: ModelMap) -> None:
        self.count = len(masks)
        self.drops: dict[str, torch.Tensor] = {}  # by layer, the columns that each mask drops, (masks, width)
        self.pruning: dict[str, set[int]] = {}  # by layer, the numbers of the masks that prune it
        for number, mask in enumerate(masks):
            for layer, heads in mask.by_layer(model_map) if mask else ():
                if layer.name not in self.drops:
                    self.drops[layer.name] = torch.zeros(self.count, layer.heads * layer.head_dim, dtype=torch.bool)
                    self.pruning[layer.name] = set()
                self.drops[layer.name][number] = dropped_columns(layer, heads)
                self.pruning[layer.name].add(number)


@dataclass
class _State:
    """The model of applied `RowMasks`, and the masks of a `using` block."""

    model_map: ModelMap | None = None
    table: Any = None
    layers: frozenset[str] = frozenset()  # in which some row loses a head
    index: Any = None


@dataclass(frozen=True)
class RowMasks(Intervention):
    """Prune different heads in different rows of a batch.

    ```python
    rows = RowMasks()
    with rows.applied_to(model), rows.using([HeadMask("L5H3"), None]):
        model.generate(**batch_of_two)
    ```

    Outside a `using` block, and in layers that no mask of the block prunes, activations are unchanged.
    """

    tokenwise = True  # outside of `using` blocks
    _state: _State = field(default_factory=_State, init=False, compare=False, repr=False)

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        self._state.model_map = model_map
        stack.callback(setattr, self._state, "model_map", None)
        for layer in model_map.attention:
            change_input(layer.o_proj, partial(self._drop, layer.name), stack)

    def identity(self, model_map: ModelMap) -> dict[str, Any]:
        raise InputError("answers under RowMasks cannot be kept: masks change from block to block; use a HeadMask")

    def table(self, masks: Sequence[HeadMask | None] | MaskTable) -> MaskTable:
        """Resolve masks once for many `using` blocks; they must fit the model that these RowMasks are applied to."""
        if self._state.model_map is None:
            raise InputError("apply the RowMasks to a model first: with rows.applied_to(model), rows.using(...)")
        return masks if isinstance(masks, MaskTable) else MaskTable(masks, self._state.model_map)

    @contextmanager
    def using(
        self,
        masks: Sequence[HeadMask | None] | MaskTable,
        index: torch.Tensor | Sequence[int] | None = None,
        repeats: int = 1,
    ) -> Iterator[None]:
        """Set the masks of the forward passes inside the block.

        Args:
            masks: M masks, None for no pruning, or a `table` of them.
            index: number of the mask of each row, (batch,), or of each token, (batch, tokens) as in packed batches
                (1, tokens). Default: row i has mask i, for M rows.
            repeats: copies of each row, one after another: `generate` with `num_return_sequences=k` or `num_beams=k`
                repeats each row k times.
        """
        table = self.table(masks)
        index = torch.arange(table.count) if index is None else torch.as_tensor(index)
        are_integers = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        used = set(index.flatten().tolist()) if are_integers else set()
        if not used or index.dim() not in (1, 2) or min(used) < 0 or max(used) >= table.count:
            raise InputError(f"index must be (batch,) or (batch, tokens) with values 0 to {table.count - 1}")
        layers = frozenset(layer for layer, pruning in table.pruning.items() if pruning & used)
        with replaced(self._state, table=table, layers=layers, index=index.long().repeat_interleave(repeats, dim=0)):
            yield

    def _drop(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        state = self._state
        if layer not in state.layers:
            return x
        state.index = state.index.to(x.device)
        state.table.drops[layer] = drops = state.table.drops[layer].to(x.device)
        drop = drops[state.index]  # (batch, width) or (batch, tokens, width)
        drop = drop.unsqueeze(1) if drop.dim() == 2 else drop
        if x.dim() != 3 or drop.shape[0] != x.shape[0] or drop.shape[1] not in (1, x.shape[1]):
            raise InputError(
                f"masks for {tuple(drop.shape[:2])} rows and tokens do not fit a batch of {tuple(x.shape[:2])}"
            )
        return x.masked_fill(drop, 0)


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
