"""Head masks that differ from row to row of a batch, or from token to token of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lmeval_prune.architectures import AttentionLayer, ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention, change_input
from lmeval_prune.interventions.head_mask import HeadMask, dropped_columns

Layer = tuple[str, int]  # stack and number


class MaskTable:
    """Masks resolved against a model.

    Attributes:
        count: how many masks, M.
        drops: of each layer that some mask prunes, the columns that each mask drops, (M, width), where that layer's
            activations are.
        pruning: of each such layer, the numbers of the masks that prune something there.
    """

    def __init__(self, masks: Sequence[HeadMask | None], model_map: ModelMap) -> None:
        self.count = len(masks)
        self.drops: dict[Layer, torch.Tensor] = {}
        self.pruning: dict[Layer, set[int]] = {}
        for number, mask in enumerate(masks):
            for layer, heads in mask.by_layer(model_map) if mask else ():
                key = (layer.stack, layer.index)
                if key not in self.drops:
                    self.drops[key] = torch.zeros(self.count, layer.heads * layer.head_dim, dtype=torch.bool)
                    self.pruning[key] = set()
                self.drops[key][number] = dropped_columns(layer, heads)
                self.pruning[key].add(number)

    def rows_of(self, layer: Layer, index: torch.Tensor) -> torch.Tensor:
        """Return the columns that each row drops in a layer: the index's shape and (width,), on the index's device."""
        if self.drops[layer].device != index.device:
            self.drops[layer] = self.drops[layer].to(index.device)
        return self.drops[layer][index]


@dataclass
class _Current:
    """Masks of the forward passes of a `using` block."""

    table: MaskTable
    layers: frozenset[Layer]  # where some row loses something
    index: torch.Tensor


@dataclass
class _State:
    model_map: ModelMap | None = None
    current: _Current | None = None


@dataclass(frozen=True)
class RowMasks(Intervention):
    """Prunes other heads in other rows of the same batch.

    ```python
    rows = RowMasks()
    with rows.applied_to(model), rows.using([HeadMask("L5H3"), None]):
        model.generate(**batch_of_two)
    ```

    Outside a `using` block, and on layers where no mask of the block prunes anything, activations pass
    through untouched.
    """

    tokenwise = True
    _state: _State = field(default_factory=_State, init=False, compare=False, repr=False)

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Install one hook a layer; see the base class."""
        if self._state.model_map is not None:
            raise InputError("these RowMasks are already applied to a model; make another one")
        self._state.model_map = model_map
        stack.callback(setattr, self._state, "model_map", None)
        for layer in model_map.attention:
            change_input(layer.o_proj, _RowDrop(self._state, layer), stack)

    def identity(self, model_map: ModelMap) -> dict[str, Any]:
        """Refuse to name what may be another thing in every block; see the base class."""
        raise InputError("answers under RowMasks cannot be kept: masks change from block to block; use a HeadMask")

    def table(self, masks: Sequence[HeadMask | None]) -> MaskTable:
        """Resolve masks against the model once, for many `using` blocks.

        Raises:
            InputError: a mask does not fit the model, or these RowMasks are not applied to one.
        """
        if self._state.model_map is None:
            raise InputError("apply the RowMasks to a model first: with rows.applied_to(model), rows.using(...)")
        return MaskTable(masks, self._state.model_map)

    @contextmanager
    def using(
        self,
        masks: Sequence[HeadMask | None] | MaskTable,
        index: torch.Tensor | Sequence[int] | None = None,
        repeats: int = 1,
    ) -> Iterator[None]:
        """Choose the masks of the forward passes inside the block.

        Args:
            masks: M masks; None prunes nothing. A `table` of them, where the same masks serve many blocks.
            index: which mask each row (shape (batch,)) or each token (shape (batch, tokens), for packed
                batches (1, tokens)) runs under, whole numbers. Default: row i under mask i, M rows.
            repeats: how many times in a row the model sees each row: `generate` with
                `num_return_sequences=k` or `num_beams=k` repeats each k times.

        Raises:
            InputError: a mask does not fit the model, `index` points outside `masks`, or (in the forward
                pass) its shape does not fit the batch.
        """
        table = masks if isinstance(masks, MaskTable) else self.table(masks)
        if self._state.model_map is None:
            raise InputError("apply the RowMasks to a model first: with rows.applied_to(model), rows.using(...)")
        index = torch.arange(table.count) if index is None else torch.as_tensor(index)
        whole = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        used = set(index.flatten().tolist()) if whole else set()
        if not used or index.dim() not in (1, 2) or min(used) < 0 or max(used) >= table.count:
            raise InputError(f"index must be (batch,) or (batch, tokens) with values 0 to {table.count - 1}")
        layers = frozenset(layer for layer, pruning in table.pruning.items() if pruning & used)
        before = self._state.current
        self._state.current = _Current(table, layers, index.long().repeat_interleave(repeats, dim=0))
        try:
            yield
        finally:
            self._state.current = before


class _RowDrop:
    """The hook of one layer: zeroes what the current masks say."""

    def __init__(self, state: _State, layer: AttentionLayer) -> None:
        self.state = state
        self.key = (layer.stack, layer.index)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        current = self.state.current
        if current is None or self.key not in current.layers:
            return x
        if current.index.device != x.device:
            current.index = current.index.to(x.device)
        drop = current.table.rows_of(self.key, current.index)  # (batch, width) or (batch, tokens, width)
        if drop.dim() == 2:
            drop = drop.unsqueeze(1)
        if x.dim() != 3 or drop.shape[0] != x.shape[0] or drop.shape[1] not in (1, x.shape[1]):
            raise InputError(
                f"masks for {tuple(drop.shape[:2])} rows and tokens do not fit a batch of {tuple(x.shape[:2])}"
            )
        return x.masked_fill(drop, 0)
