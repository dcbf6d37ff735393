"""A different head mask for every row of a batch, or for every token of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from lmeval_prune.architectures import AttentionLayer, AttentionMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention, add_input_hook
from lmeval_prune.interventions.head_mask import HeadMask, dropped_columns


@dataclass(frozen=True)
class MaskTable:
    """Masks resolved against a model.

    Attributes:
        count: how many masks, M.
        drops: of each layer that some mask prunes, the columns that each mask drops, (M, width).
    """

    count: int
    drops: dict[tuple[str, int], torch.Tensor]


@dataclass
class RowMasks(Intervention):
    """Prunes other heads in other rows of the same batch.

    ```python
    rows = RowMasks()
    with rows.applied_to(model), rows.using([HeadMask.parse("L5H3"), None]):
        model.generate(**batch_of_two)
    ```

    Outside a `using` block, and on layers where no mask of the block prunes anything, activations pass
    through untouched.
    """

    _attention: AttentionMap | None = field(default=None, init=False, repr=False)
    _drops: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def attach(self, attention: AttentionMap, stack: ExitStack) -> None:
        """Install one hook a layer; see the base class."""
        if self._attention is not None:
            raise InputError("these RowMasks are already applied to a model; make another one")
        self._attention = attention
        stack.callback(self._detach)
        for layer in attention:
            add_input_hook(layer.output, _RowDrop(self, layer), stack)

    def _detach(self) -> None:
        self._attention = None

    def table(self, masks: Sequence[HeadMask | None]) -> MaskTable:
        """Resolve masks against the model once, for many `using` blocks.

        Raises:
            InputError: a mask does not fit the model, or these RowMasks are not applied to one.
        """
        if self._attention is None:
            raise InputError("apply the RowMasks to a model first: with rows.applied_to(model), rows.using(...)")
        drops: dict[tuple[str, int], torch.Tensor] = {}
        for number, mask in enumerate(masks):
            for layer, heads in mask.by_layer(self._attention) if mask else ():
                key = (layer.stack, layer.index)
                if key not in drops:
                    drops[key] = torch.zeros(len(masks), layer.heads * layer.head_dim, dtype=torch.bool)
                drops[key][number] = dropped_columns(layer, heads)
        return MaskTable(len(masks), drops)

    @contextmanager
    def using(
        self, masks: Sequence[HeadMask | None] | MaskTable, index: torch.Tensor | None = None, repeats: int = 1
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
        if self._attention is None:
            raise InputError("apply the RowMasks to a model first: with rows.applied_to(model), rows.using(...)")
        if index is None:
            index = torch.arange(masks.count if isinstance(masks, MaskTable) else len(masks))
        index = index.cpu()
        whole = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        table = masks if isinstance(masks, MaskTable) else self.table(masks)
        fits = table.count and index.dim() in (1, 2) and index.numel() and whole
        if not fits or int(index.min()) < 0 or int(index.max()) >= table.count:
            raise InputError(f"index must be (batch,) or (batch, tokens) with values 0 to {table.count - 1}")
        before = self._drops
        index = index.long().repeat_interleave(repeats, dim=0)
        chosen = {key: drop[index] for key, drop in table.drops.items()}
        self._drops = {key: drop for key, drop in chosen.items() if drop.any()}
        try:
            yield
        finally:
            self._drops = before


class _RowDrop:
    """The hook of one layer: zeroes what the current masks say."""

    def __init__(self, rows: RowMasks, layer: AttentionLayer) -> None:
        self.rows = rows
        self.key = (layer.stack, layer.index)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        drop = self.rows._drops.get(self.key)  # (batch, width) or (batch, tokens, width)
        if drop is None:
            return x
        if drop.device != x.device:
            drop = self.rows._drops[self.key] = drop.to(x.device)
        if drop.dim() == 2:
            drop = drop.unsqueeze(1)
        if x.dim() != 3 or drop.shape[0] != x.shape[0] or drop.shape[1] not in (1, x.shape[1]):
            raise InputError(
                f"masks for {tuple(drop.shape[:2])} rows and tokens do not fit a batch of {tuple(x.shape[:2])}"
            )
        return x.masked_fill(drop, 0)
