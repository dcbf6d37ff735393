"""A stock model made to run packed batches of differently pruned rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface

from lmeval_prune.architectures import AttentionMap
from lmeval_prune.decoding.layers import Gates, in_use
from lmeval_prune.decoding.slots import Layout, Slots, Span, UnsupportedError
from lmeval_prune.interventions.row_masks import RowMasks

ATTENTION = "lmeval_prune_slots"  # our name among transformers' attention functions


@dataclass(frozen=True)
class New:
    """New tokens of one slot.

    Attributes:
        slot: where the row's keys and values are.
        stored: tokens that the slot holds already.
        mask: number of the row's mask.
        tokens: token ids, at least one.
        skip: so many of the tokens, from the first on, need no logits.
        keep: layers whose input is wanted (the number of layers: the last one's output).
    """

    slot: int
    stored: int
    mask: int
    tokens: Sequence[int]
    skip: int = 0
    keep: frozenset[int] = frozenset()


class Machine:
    """A model with our attention, gates and row masks in it; made by `machine`.

    Attributes:
        slots: the stored keys and values.
        layer_tokens: tokens × layers run so far.
        head_tokens: tokens whose logits were computed.
    """

    def __init__(self, model: Any, attention: AttentionMap, slots: Slots, gates: Gates, rows: RowMasks) -> None:
        self._model, self._gates, self._rows = model, gates, rows
        self._device = next(model.parameters()).device
        self.layers = len(attention)
        self.slots = slots
        self.layer_tokens = self.head_tokens = 0

    def number(self, masks: Sequence[Any]) -> None:
        """Give masks their numbers: that of their places.

        Raises:
            InputError: a mask does not fit the model.
        """
        self._table = self._rows.table(masks)

    def forward(
        self, batch: Sequence[New], start: int = 0, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
        """Run new tokens and store their keys and values.

        Args:
            batch: in the order of the slots.
            start: the first layer to run.
            hidden: what enters it, (all tokens, width); needed if `start` > 0.

        Returns:
            Logits, (tokens but the skipped ones, vocabulary), and of each row what entered the layers that it
            wants kept, (tokens, width).
        """
        spans: list[Span] = []
        flat: list[int] = []
        masks: list[int] = []
        wanted: list[int] = []
        for new in batch:
            count = len(new.tokens)
            last = spans[-1] if spans else None
            near = last is not None and last.slot + len(last.starts) == new.slot and new.slot % self.slots.block
            if last and near and last.tokens == count:
                spans[-1] = Span(last.slot, (*last.starts, new.stored), count)
            else:
                spans.append(Span(new.slot, (new.stored,), count))
            wanted += range(len(flat) + new.skip, len(flat) + count)
            flat += new.tokens
            masks += [new.mask] * count
        layout = Layout(spans, self._device)
        keep = frozenset[int]().union(*(new.keep for new in batch))
        hidden = None if hidden is None else hidden.unsqueeze(0)
        with self._gates.routed(start, hidden, keep) as route, self.slots.laid_out(layout):
            logits = self._logits(flat, masks, layout.positions, wanted)
        self.layer_tokens += len(flat) * (self.layers - start)
        self.head_tokens += len(wanted)
        kept = []
        at = 0
        for new in batch:
            # copies: a view would hold on to the whole batch
            kept.append({layer: route.kept[layer][0, at : at + len(new.tokens)].clone() for layer in new.keep})
            at += len(new.tokens)
        return logits, kept

    def alone(self, tokens: Sequence[int], mask: int) -> torch.Tensor:
        """Logits after `tokens`, run by themselves, stored nowhere; they depend on nothing else. (vocabulary,)."""
        positions = torch.arange(len(tokens), device=self._device)
        with self._gates.routed():
            return self._logits(tokens, [mask] * len(tokens), positions, [len(tokens) - 1])[0]

    def _logits(
        self, tokens: Sequence[int], masks: Sequence[int], positions: torch.Tensor, wanted: Sequence[int]
    ) -> torch.Tensor:
        everything = len(wanted) == len(tokens)
        with self._rows.using(self._table, torch.tensor([masks])):
            out = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=slice(None) if everything else torch.tensor(wanted, device=self._device),
            )
        if len(out.logits[0]) != len(wanted):
            raise UnsupportedError("it does not know logits_to_keep")
        return out.logits[0]


@contextmanager
def machine(model: Any, attention: AttentionMap, slots: Slots) -> Iterator[Machine]:
    """Put attention, gates and masks into the model; take them out at the end.

    Raises:
        InputError: the model's layers do not stand in one list, or the model is in another machine.
    """
    gates, rows = Gates(model, attention), RowMasks()
    AttentionInterface.register(ATTENTION, _attend)
    before = model.config._attn_implementation
    with in_use(model, attention), ExitStack() as stack:
        for layer in attention:
            _SLOTS[layer.attention] = slots
            stack.callback(_SLOTS.pop, layer.attention)
        stack.enter_context(rows.applied_to(model, attention))
        stack.enter_context(gates.installed())
        stack.callback(setattr, model.config, "_attn_implementation", before)
        model.config._attn_implementation = ATTENTION
        yield Machine(model, attention, slots, gates, rows)


_SLOTS: WeakKeyDictionary[nn.Module, Slots] = WeakKeyDictionary()  # of the attention modules of models in machines


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What transformers calls; one for all machines."""
    if module not in _SLOTS:
        raise UnsupportedError("its attention is computed by modules that are not known")
    return _SLOTS[module].attend(module, *args, **kwargs)
