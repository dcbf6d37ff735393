"""Cache of keys and values in slots, one for each running answer, and the attention over the slots.

The cache replaces the model's own attention (`interventions/attention_call.py`). The model runs on a packed batch (1,
tokens): rows of any length one after another, without padding. Each layer writes new keys and values into the slots in
place, and attends over the slots. Key-value heads are not repeated for their groups of query heads.

A token's *offset* in its slot is its *position* in the text, except in layers in which a handler stores only some
tokens. There each slot has its own length. Slots may share a *prefix*, the first tokens of their texts. A short one is
copied into each slot. A long one is stored once, and offsets begin after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch

from lmeval_prune.decoding.attention import (
    AttentionOptions,
    Layout,
    Part,
    Prefix,
    SlotAttention,
    neighbouring_parts,
    padded_parts,
)
from lmeval_prune.interventions.attention_call import (
    AttentionCall,
    Packed,
    SlotState,
    State,
    Store,
    UnsupportedAttention,
)


@dataclass
class SlotCopy:
    """A copy of one slot in one layer."""

    keys: torch.Tensor  # (key-value heads, tokens, width)
    values: torch.Tensor
    positions: torch.Tensor | None  # in the text, (tokens,), if the layer stores only some tokens
    states: dict[Hashable, Any]  # by handler


class KVCache(Store):
    """Store the keys and values of `count` answers with at most `length` tokens each.

    Attention runs block by block: `block` neighbouring slots with equal numbers of new tokens together, over the length
    of the longest. With `block=None`, for a GPU, slots with similar numbers of new tokens run together.

    A layer's storage, (count, key-value heads, length, width) for keys and for values, is allocated when the layer
    first runs.
    """

    def __init__(self, count: int, length: int, block: int | None = 1 << 30) -> None:
        self.count = count
        self.length = length
        self.block = block
        self.prefixes: list[Prefix | None] = [None] * count  # tokens before those of each slot
        self.copied = [0] * count  # tokens of a prefix that was copied into each slot
        self.layout: Layout | None = None  # of the running pass
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        # Layers that store only some tokens: number of stored tokens by slot, and their text positions.
        self.lengths: dict[int, torch.Tensor] = {}
        self.positions: dict[int, torch.Tensor] = {}
        self.states: defaultdict[int, dict[Hashable, SlotState]] = defaultdict(dict)  # by layer and handler
        self._reset_states: set[tuple[int, Hashable]] = set()  # states that this pass has already reset in new slots

    # ------------------------------------------------------------------ attention

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Store keys and values of new tokens, and compute their attention, (1, tokens, heads, width of values)."""
        options, layout = AttentionOptions.of(call), self.layout
        if layout is None:
            raise UnsupportedAttention("pass")
        layer, (query, key, value) = call.module.layer_idx, (x[0] for x in (call.query, call.key, call.value))
        if layer not in self.keys:
            self._allocate(layer, key, value)
        keys, values = self.keys[layer], self.values[layer]
        stored_mask = call.stored_mask
        query_mask = stored_mask if call.query_mask is None else call.query_mask
        if query_mask is None:
            keys[layout.slots, :, layout.offsets] = key.transpose(0, 1)
            values[layout.slots, :, layout.offsets] = value.transpose(0, 1)
            attention = SlotAttention(options, layout, query, keys, values)
            attended = attention.over_prefixes(layer) if layout.prefixes else attention.over_slots()[0]
            return attended.unsqueeze(0), None
        if layout.prefixes:
            raise UnsupportedAttention("prefix")
        offsets, has_query, query_layout = self._filtered_layout(layer, layout, stored_mask, query_mask)
        stored_tokens = slice(None) if stored_mask is None else stored_mask
        keys[layout.slots[stored_tokens], :, offsets] = key[:, stored_tokens].transpose(0, 1)
        values[layout.slots[stored_tokens], :, offsets] = value[:, stored_tokens].transpose(0, 1)
        attended, _ = SlotAttention(options, query_layout, query[:, has_query], keys, values).over_slots()
        out = attended.new_zeros(len(query_mask), *attended.shape[1:])
        out[has_query] = attended
        return out.masked_fill_(~query_mask[:, None, None], 0).unsqueeze(0), None

    def _filtered_layout(
        self, layer: int, layout: Layout, stored_mask: torch.Tensor | None, query_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Layout]:
        """Lay out a pass in which some tokens are not stored or have no query; append stored tokens to their slots.

        Returns the offsets of the stored tokens, a mask of the tokens whose queries are computed, (tokens,), and their
        layout. A slot with a single new token always computes its query: a gap would split the span of its neighbours.
        """
        offsets, stored_positions = layout.offsets, None
        slots, starts, counts = map(torch.tensor, (self.packed.slots, self.packed.starts, self.packed.counts))
        row = torch.arange(len(slots)).repeat_interleave(counts)

        def count_by_slot(mask: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(counts).index_add_(0, row, mask.long())

        ends, has_query = starts + counts, query_mask.cpu() | (counts == 1)[row]
        if stored_mask is not None:
            if layer not in self.lengths:
                self.lengths[layer] = torch.zeros(self.count, dtype=torch.long)
                self.positions[layer] = offsets.new_zeros(self.count, self.length, dtype=torch.int32)
            stored, stored_positions = stored_mask.cpu(), self.positions[layer]
            lengths = torch.where(starts == 0, 0, self.lengths[layer][slots])
            new = count_by_slot(stored)
            # offset = length of the slot + number of stored tokens before this one in the same row
            stored_in_earlier_rows = new.cumsum(0) - new
            offsets = ((lengths - stored_in_earlier_rows)[row] + stored.cumsum(0) - 1).to(offsets.device)
            ends = self.lengths[layer][slots] = lengths + new
            stored_positions[layout.slots[stored_mask], offsets[stored_mask]] = layout.positions[stored_mask].int()
        rows = zip(slots.tolist(), ends.tolist(), count_by_slot(has_query).tolist(), strict=True)
        parts = self._parts([row for row in rows if row[2]], offsets.device)
        has_query = has_query.to(offsets.device)
        tokens = (layout.slots[has_query], offsets[has_query], layout.positions[has_query])
        stored_offsets = offsets if stored_mask is None else offsets[stored_mask]
        return stored_offsets, has_query, Layout(parts, *tokens, stored_positions)

    def _parts(self, rows: Sequence[tuple[int, int, int]], device: torch.device) -> list[Part]:
        """Return the parts of rows (slot, end, number of queries), sorted by slot."""
        if self.block is None:
            slots, _, counts = zip(*rows, strict=True) if rows else ((), (), ())
            if len(set(counts)) > 1 or any(slot != following - 1 for slot, following in pairwise(slots)):
                return padded_parts(rows, device)
        return neighbouring_parts(rows, self.block or 1 << 30)

    def lay_out(self, packed: Packed, device: torch.device) -> Layout:
        """Begin a pass in which each token has a query, and its offset counts all tokens after the prefix."""
        self._reset_states.clear()
        columns = zip(packed.slots, packed.starts, packed.counts, strict=True)
        rows = [(slot, self.copied[slot] + start, count) for slot, start, count in columns]
        slots = [slot for slot, _, count in rows for _ in range(count)]
        offsets = [offset for _, start, count in rows for offset in range(start, start + count)]
        index = torch.tensor([slots, offsets]).to(device)
        parts = self._parts([(slot, start + count, count) for slot, start, count in rows], device)
        by_prefix: defaultdict[Prefix, list[int]] = defaultdict(list)
        for token, slot in enumerate(slots):
            if prefix := self.prefixes[slot]:
                by_prefix[prefix].append(token)
        positions, prefixes = index[1], {}
        if by_prefix:
            positions = positions.clone()
            for prefix, tokens in by_prefix.items():
                prefixes[prefix] = torch.tensor(tokens, device=device)
                positions[prefixes[prefix]] += prefix.length
        return Layout(parts, index[0], index[1], positions, prefixes=prefixes)

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """Return a handler's state in a layer; see `Store`."""
        layer = call.module.layer_idx
        if owner not in self.states[layer]:
            self.states[layer][owner] = make()
        state: Any = self.states[layer][owner]
        if (layer, owner) not in self._reset_states:
            self._reset_states.add((layer, owner))
            starts = zip(self.packed.slots, self.packed.starts, strict=True)
            if new_slots := [slot for slot, start in starts if start == 0]:
                state.begin(new_slots)
        return cast(State, state)

    # ------------------------------------------------------------------ slots

    def _allocate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocate a layer's storage for keys and values like these, (key-value heads, tokens, width)."""
        for storage, new in ((self.keys, key), (self.values, value)):
            # zeros, not uninitialised memory: masked numbers must be finite
            storage[layer] = new.new_zeros(self.count, new.shape[0], self.length, new.shape[-1])

    def begin(self, slot: int, prefix: Prefix | None, is_copied: bool) -> None:
        """Assign a prefix, or none, to a slot for a new sequence; if it `is_copied`, the slot holds its tokens, too."""
        self.prefixes[slot], self.copied[slot] = prefix, 0
        if prefix is None or not is_copied:
            return
        self.prefixes[slot], self.copied[slot] = None, prefix.length
        for layer, (key, value) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            if layer not in self.keys:
                self._allocate(layer, key, value)
            self.keys[layer][slot, :, : prefix.length] = key
            self.values[layer][slot, :, : prefix.length] = value

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of `length` tokens, without its prefix, to another slot."""
        self.prefixes[target], self.copied[target] = self.prefixes[source], self.copied[source]
        for layer in self.keys:
            end = self._stored_length(layer, source, length)
            for storage in (self.keys[layer], self.values[layer]):
                storage[target, :, :end] = storage[source, :, :end]
            if layer in self.lengths:
                self.lengths[layer][target] = end
                self.positions[layer][target, :end] = self.positions[layer][source, :end]
            for state in self.states[layer].values():
                state.move(source, target)

    def snapshot(self, slot: int, length: int, layers: int) -> list[SlotCopy]:
        """Copy a slot with `length` tokens, and its copied prefix, in the first `layers` layers."""
        copies = []
        for layer in range(layers):
            end = self._stored_length(layer, slot, length)
            keys, values = (storage[layer][slot, :, :end].clone() for storage in (self.keys, self.values))
            positions = self.positions[layer][slot, :end].clone() if layer in self.positions else None
            states = {owner: state.snapshot(slot) for owner, state in self.states[layer].items()}
            copies.append(SlotCopy(keys, values, positions, states))
        return copies

    def restore(self, slot: int, copies: Sequence[SlotCopy], length: int, layers: int) -> None:
        """Write the first `length` tokens of copies into a slot, in the first `layers` layers, after its copied prefix.

        Layers that store only some tokens get the whole copy.
        """
        begin = self.copied[slot]  # `begin` has written the prefix
        for layer, copied in zip(range(layers), copies, strict=False):
            for storage, part in ((self.keys, copied.keys), (self.values, copied.values)):
                end = min(begin + length, part.shape[1])
                storage[layer][slot, :, begin:end] = part[:, begin:end]
            if copied.positions is not None:
                self.lengths[layer][slot] = len(copied.positions)
                self.positions[layer][slot, : len(copied.positions)] = copied.positions
            for owner, state in copied.states.items():
                self.states[layer][owner].restore(slot, state)

    def _stored_length(self, layer: int, slot: int, length: int) -> int:
        return int(self.lengths[layer][slot]) if layer in self.lengths else self.copied[slot] + length
