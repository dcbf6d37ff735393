"""A different head mask for each row of a batch, or for each token of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention, change_input
from lmeval_prune.interventions.head_mask import HeadMask, dropped_columns

LayerKey = tuple[str, int]  # stack and number


class MaskTable:
    """Masks resolved for a model."""

    def __init__(self, masks: Sequence[HeadMask | None], model_map: ModelMap) -> None:
        self.count = len(masks)
        self.drops: dict[LayerKey, torch.Tensor] = {}  # columns that each mask drops in a layer, (masks, width)
        self.pruning: dict[LayerKey, set[int]] = {}  # numbers of the masks that prune a layer
        for number, mask in enumerate(masks):
            for layer, heads in mask.by_layer(model_map) if mask else ():
                key = (layer.stack, layer.index)
                if key not in self.drops:
                    self.drops[key] = torch.zeros(self.count, layer.heads * layer.head_dim, dtype=torch.bool)
                    self.pruning[key] = set()
                self.drops[key][number] = dropped_columns(layer, heads)
                self.pruning[key].add(number)

    def rows(self, layer: LayerKey, index: torch.Tensor) -> torch.Tensor:
        """Return the dropped columns of a layer for an index of masks, (*index.shape, width)."""
        if self.drops[layer].device != index.device:
            self.drops[layer] = self.drops[layer].to(index.device)
        return self.drops[layer][index]


@dataclass
class _Block:
    """The masks of a `using` block."""

    table: MaskTable
    layers: frozenset[LayerKey]  # layers in which some row loses a head
    index: torch.Tensor


@dataclass
class _State:
    model_map: ModelMap | None = None
    block: _Block | None = None


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
        """Hook the output projection of each layer."""
        self._state.model_map = model_map
        stack.callback(setattr, self._state, "model_map", None)
        for layer in model_map.attention:
            change_input(layer.o_proj, partial(self._drop, (layer.stack, layer.index)), stack)

    def identity(self, model_map: ModelMap) -> dict[str, Any]:
        """Refuse: the masks change from block to block, so answers cannot be stored under one identity."""
        raise InputError("answers under RowMasks cannot be kept: masks change from block to block; use a HeadMask")

    def table(self, masks: Sequence[HeadMask | None]) -> MaskTable:
        """Resolve masks once for many `using` blocks; they must fit the model that these RowMasks are applied to."""
        return MaskTable(masks, self._applied_map())

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
        model_map = self._applied_map()  # a table, too, has no effect without a model
        table = masks if isinstance(masks, MaskTable) else MaskTable(masks, model_map)
        index = torch.arange(table.count) if index is None else torch.as_tensor(index)
        are_integers = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        used = set(index.flatten().tolist()) if are_integers else set()
        if not used or index.dim() not in (1, 2) or min(used) < 0 or max(used) >= table.count:
            raise InputError(f"index must be (batch,) or (batch, tokens) with values 0 to {table.count - 1}")
        layers = frozenset(layer for layer, pruning in table.pruning.items() if pruning & used)
        with replaced(self._state, block=_Block(table, layers, index.long().repeat_interleave(repeats, dim=0))):
            yield

    def _applied_map(self) -> ModelMap:
        """Return the map of the model that these RowMasks are applied to; refuse to work without one."""
        if self._state.model_map is None:
            raise InputError("apply the RowMasks to a model first: with rows.applied_to(model), rows.using(...)")
        return self._state.model_map

    def _drop(self, layer: LayerKey, x: torch.Tensor) -> torch.Tensor:
        """Zero the pruned heads of each row in the input of a layer's output projection."""
        block = self._state.block
        if block is None or layer not in block.layers:
            return x
        if block.index.device != x.device:
            block.index = block.index.to(x.device)
        drop = block.table.rows(layer, block.index)  # (batch, width) or (batch, tokens, width)
        if drop.dim() == 2:
            drop = drop.unsqueeze(1)
        if x.dim() != 3 or drop.shape[0] != x.shape[0] or drop.shape[1] not in (1, x.shape[1]):
            raise InputError(
                f"masks for {tuple(drop.shape[:2])} rows and tokens do not fit a batch of {tuple(x.shape[:2])}"
            )
        return x.masked_fill(drop, 0)
