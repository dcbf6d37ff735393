"""Cache of keys and values in slots, one for each running answer, and the attention over the slots.

The cache replaces the model's own attention (`interventions/attention_call.py`). The model runs on a packed batch (1,
tokens): rows of any length one after another, without padding. Each layer writes new keys and values into the slots in
place, and attends over the slots. Key-value heads are not repeated for their groups of query heads.

A token's *offset* in its slot is its *position* in the text, except in layers in which a handler stores only some
tokens. There each slot has its own length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch.nn import functional

from lmeval_prune.interventions.attention_call import (
    AttentionCall,
    Packed,
    SlotState,
    State,
    StepRows,
    StoredTokens,
    UnsupportedAttention,
)


@dataclass(frozen=True)
class Span:
    """Neighbouring slots whose queries are computed together: each slot has the same number of queries."""

    slot: int  # the first slot
    ends: tuple[int, ...]  # end of each slot's tokens, the new ones included
    tokens: int  # number of queries in each slot


def spans_of(rows: Iterable[tuple[int, int, int]], block: int) -> list[Span]:
    """Join rows (slot, end, number of queries), sorted by slot, into spans that do not cross blocks."""
    spans: list[Span] = []
    for slot, end, tokens in rows:
        last = spans[-1] if spans else None
        if last and last.slot + len(last.ends) == slot and slot % block and last.tokens == tokens:
            spans[-1] = Span(last.slot, (*last.ends, end), tokens)
        else:
            spans.append(Span(slot, (end,), tokens))
    return spans


@dataclass
class Layout:
    """Slots and offsets of the tokens with a query in a packed batch, in the order of the spans."""

    spans: Sequence[Span]
    slots: torch.Tensor  # (tokens,), like offsets and positions
    offsets: torch.Tensor
    positions: torch.Tensor
    # positions of all stored tokens, (slots, length); None if a token's position is its offset
    stored_positions: torch.Tensor | None = None
    parts: list[tuple[Span, slice]] = field(init=False)  # each span with the slice of its tokens
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, packed: Packed, block: int, device: torch.device) -> Layout:
        """Lay out a pass in which each token has a query, and its offset is its position."""
        rows = list(zip(packed.slots, packed.starts, packed.counts, strict=True))
        slots = [slot for slot, _, count in rows for _ in range(count)]
        positions = [position for _, start, count in rows for position in range(start, start + count)]
        index = torch.tensor([slots, positions]).to(device)
        spans = spans_of(((slot, start + count, count) for slot, start, count in rows), block)
        return cls(spans, index[0], index[1], index[1])

    def __post_init__(self) -> None:
        bounds = accumulate((len(span.ends) * span.tokens for span in self.spans), initial=0)
        self.parts = list(zip(self.spans, (slice(*pair) for pair in pairwise(bounds)), strict=True))

    def mask(self, span: Span, tokens: slice, group: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive attention mask of a span: 0 for visible keys, the lowest number for others.

        Shape (slots, 1, group · tokens, keys), with `group` query heads per key-value head; (slots, 1, 1, keys) if each
        slot has one token.
        """
        key = (tokens.start, group, window, dtype)
        if key not in self._masks:
            query, position = (x[tokens].view(-1, span.tokens, 1) for x in (self.offsets, self.positions))
            offsets = key_positions = torch.arange(max(span.ends), device=query.device)
            if self.stored_positions is not None:
                key_positions = self.stored_positions[span.slot : span.slot + len(span.ends), None, : len(offsets)]
            hidden = offsets > query
            if window is not None:
                hidden |= key_positions <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=query.device)
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            if span.tokens > 1:
                mask = mask.repeat(1, group, 1)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]


@dataclass
class SlotCopy:
    """A copy of one slot in one layer."""

    keys: torch.Tensor  # (key-value heads, tokens, width)
    values: torch.Tensor
    positions: torch.Tensor | None  # in the text, (tokens,), if the layer stores only some tokens
    states: dict[Hashable, Any]  # by handler


class KVCache:
    """Store the keys and values of `count` answers with at most `length` tokens each (implements `Store`).

    Attention runs block by block: `block` slots together, over the length of the longest. A layer's storage, (count,
    key-value heads, length, width) for keys and for values, is allocated when the layer first runs.
    """

    def __init__(self, count: int, length: int, block: int = 1 << 30) -> None:
        self.count = count
        self.length = length
        self.block = block
        self.packed = Packed((), (), ())  # of the running pass
        self.rows: StepRows | None = None  # not a static step
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
            raise UnsupportedAttention("a forward pass that is not the engine's")
        module: Any = call.module
        layer, (query, key, value) = int(module.layer_idx), (x[0] for x in (call.query, call.key, call.value))
        if layer not in self.keys:
            for storage, new in ((self.keys, key), (self.values, value)):
                # zeros, not uninitialised memory: masked numbers must be finite
                storage[layer] = new.new_zeros(self.count, new.shape[0], self.length, new.shape[-1])
        keys, values = self.keys[layer], self.values[layer]
        stored_mask = call.stored_mask
        query_mask = stored_mask if call.query_mask is None else call.query_mask
        if query_mask is None:
            keys[layout.slots, :, layout.offsets] = key.transpose(0, 1)
            values[layout.slots, :, layout.offsets] = value.transpose(0, 1)
            return _attend(options, layout, query, keys, values).unsqueeze(0), None
        offsets, has_query, query_layout = self._filtered_layout(layer, layout, stored_mask, query_mask)
        stored_tokens = slice(None) if stored_mask is None else stored_mask
        keys[layout.slots[stored_tokens], :, offsets] = key[:, stored_tokens].transpose(0, 1)
        values[layout.slots[stored_tokens], :, offsets] = value[:, stored_tokens].transpose(0, 1)
        attended = _attend(options, query_layout, query[:, has_query], keys, values)
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
        spans = spans_of(((slot, end, queries) for slot, end, queries in rows if queries), self.block)
        has_query = has_query.to(offsets.device)
        tokens = (layout.slots[has_query], offsets[has_query], layout.positions[has_query])
        stored_offsets = offsets if stored_mask is None else offsets[stored_mask]
        return stored_offsets, has_query, Layout(spans, *tokens, stored_positions)

    @contextmanager
    def packing(self, packed: Packed, device: torch.device) -> Iterator[Layout]:
        """Set the packed batch of the forward passes in this context."""
        self.packed, self.layout = packed, Layout.of(packed, self.block, device)
        self._reset_states.clear()
        try:
            yield self.layout
        finally:
            self.layout = None

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """Return a handler's state in a layer; see `Store`."""
        module: Any = call.module
        layer: int = module.layer_idx
        if owner not in self.states[layer]:
            self.states[layer][owner] = make()
        state: Any = self.states[layer][owner]
        if (layer, owner) not in self._reset_states:
            self._reset_states.add((layer, owner))
            starts = zip(self.packed.slots, self.packed.starts, strict=True)
            if new_slots := [slot for slot, start in starts if start == 0]:
                state.begin(new_slots)
        return cast(State, state)

    def stored_tokens(self, call: AttentionCall) -> StoredTokens:
        """Return the storage of a layer that stores only some tokens."""
        module: Any = call.module
        layer: int = module.layer_idx
        return StoredTokens(self.keys[layer], self.values[layer], self.positions[layer], self.lengths[layer])

    # ------------------------------------------------------------------ slots

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of `length` tokens to another slot."""
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
        """Copy a slot with `length` tokens in the first `layers` layers."""
        copies = []
        for layer in range(layers):
            end = self._stored_length(layer, slot, length)
            keys, values = (storage[layer][slot, :, :end].clone() for storage in (self.keys, self.values))
            positions = self.positions[layer][slot, :end].clone() if layer in self.positions else None
            states = {owner: state.snapshot(slot) for owner, state in self.states[layer].items()}
            copies.append(SlotCopy(keys, values, positions, states))
        return copies

    def restore(self, slot: int, copies: Sequence[SlotCopy], length: int, layers: int) -> None:
        """Write the first `length` tokens of copies into a slot, in the first `layers` layers.

        Layers that store only some tokens get the whole copy.
        """
        for layer, copied in zip(range(layers), copies, strict=False):
            for storage, part in ((self.keys, copied.keys), (self.values, copied.values)):
                end = min(length, part.shape[1])
                storage[layer][slot, :, :end] = part[:, :end]
            if copied.positions is not None:
                self.lengths[layer][slot] = len(copied.positions)
                self.positions[layer][slot, : len(copied.positions)] = copied.positions
            for owner, state in copied.states.items():
                self.states[layer][owner].restore(slot, state)

    def _stored_length(self, layer: int, slot: int, length: int) -> int:
        """Return how many of a slot's `length` tokens a layer stores."""
        return int(self.lengths[layer][slot]) if layer in self.lengths else length


@dataclass(frozen=True)
class AttentionOptions:
    """Scaling, soft cap and window of a layer's attention."""

    scaling: float
    softcap: float | None
    window: int | None

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionOptions:
        """Read the options of a call; refuse unsupported ones."""
        module: Any = call.module
        options, window = call.options, call.options.get("sliding_window")
        for name in ("s_aux", "position_bias", "attention_bias", "head_mask"):
            if options.get(name) is not None:
                raise UnsupportedAttention(name)
        layer_types = getattr(getattr(module, "config", None), "layer_types", None)
        if layer_types and layer_types[module.layer_idx] == "sliding_attention" and window is None:
            raise UnsupportedAttention("sliding-window attention without a window size")
        if options.get("dropout") or call.query.shape[0] != 1 or call.mask is not None:
            raise UnsupportedAttention("dropout, a padded batch or a ready-made mask")
        scaling = options.get("scaling")
        return cls(call.query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"), window)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the attention of queries to keys."""
        if self.softcap is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        scores = torch.tanh(q @ k.transpose(-1, -2) * self.scaling / self.softcap) * self.softcap
        return (scores + mask).softmax(-1) @ v


def _attend(
    options: AttentionOptions, layout: Layout, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute the attention of queries (heads, tokens, width) over the slots, (tokens, heads, width of values)."""
    heads, group = query.shape[0], query.shape[0] // keys.shape[1]
    parts = []
    for span, tokens in layout.parts:
        rows = len(span.ends)
        # the query heads of a group become queries of their key-value head
        q = query[:, tokens].reshape(-1, group, rows, span.tokens, query.shape[-1])
        q = q.permute(2, 0, 1, 3, 4).reshape(rows, keys.shape[1], group * span.tokens, query.shape[-1])
        slots, end = slice(span.slot, span.slot + rows), max(span.ends)
        mask = layout.mask(span, tokens, group, options.window, query.dtype)
        out = options.attend(q, keys[slots, :, :end], values[slots, :, :end], mask)
        out = out.reshape(rows, heads, span.tokens, -1).transpose(1, 2)
        parts.append(out.reshape(rows * span.tokens, heads, -1))
    if not parts:
        return query.new_zeros(0, heads, values.shape[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
