"""Keys and values of many answers, stored once and read where they are, and the attention over them.

The cache takes the place of the model's own attention (`interventions/attention_call.py`). The model runs on a packed
batch (1, tokens): rows of any length, one after another, no padding. In each layer new keys and values are written into
their slots, and attention reads the slots. Key-value heads are never repeated: the G query heads of a group are G
queries to one head.

A token's *offset* in its slot and its *position* in the text differ in layers where a handler says which tokens stay:
there each slot has a length of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn import functional

from lmeval_prune.interventions.attention_call import AttentionCall, Packed, SlotState, State, UnsupportedAttention


@dataclass(frozen=True)
class Span:
    """Neighbouring slots in which the same number of new tokens attends.

    Attributes:
        slot: the first slot.
        ends: number of tokens that each slot holds, the new ones included.
        tokens: number of new tokens of each slot.
    """

    slot: int
    ends: tuple[int, ...]
    tokens: int


def spans_of(rows: Iterable[tuple[int, int, int]], block: int) -> list[Span]:
    """Join rows (slot, end, tokens) in the order of their slots into spans within blocks."""
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
    """Slots and offsets of a packed batch's tokens that attend, span by span.

    Attributes:
        spans: of slots.
        slots, offsets, positions: of each token, (tokens,).
        stored_positions: of all stored tokens, (slots, length); None if they are their offsets.
    """

    spans: Sequence[Span]
    slots: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    stored_positions: torch.Tensor | None = None
    parts: list[tuple[Span, slice]] = field(init=False)  # each span with its tokens
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, packed: Packed, block: int, device: torch.device) -> Layout:
        """Lay out a pass whose tokens all attend, and whose offsets are their positions."""
        rows = list(zip(packed.slots, packed.starts, packed.counts, strict=True))
        slots = [slot for slot, _, count in rows for _ in range(count)]
        positions = [position for _, start, count in rows for position in range(start, start + count)]
        both = torch.tensor([slots, positions]).to(device)
        return cls(spans_of(((slot, a + n, n) for slot, a, n in rows), block), both[0], both[1], both[1])

    def __post_init__(self) -> None:
        ends = accumulate((len(span.ends) * span.tokens for span in self.spans), initial=0)
        self.parts = list(zip(self.spans, (slice(*pair) for pair in pairwise(ends)), strict=True))

    def mask(self, span: Span, tokens: slice, group: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask of a span: 0 where a query sees a key, else the lowest number.

        Shape (slots, 1, group · tokens, keys), `group` query heads a key-value head; with one token a slot
        (slots, 1, 1, keys).
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
            self._masks[key] = (mask.repeat(1, group, 1) if span.tokens > 1 else mask)[:, None]
        return self._masks[key]


@dataclass
class SlotCopy:
    """A copy of what a slot holds in a layer.

    Attributes:
        tensors: keys and values.
        positions: in the text, where only some tokens stay.
        states: of the layer's handlers, by handler.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor | None = None
    states: dict[Hashable, Any] = field(default_factory=dict)


class KVCache:
    """Storage for `count` answers of at most `length` tokens each; a `Store`.

    Attention runs block by block, each of `block` slots and as long as the longest of them. A layer's storage, (count,
    key-value heads, length, width) for keys and for values, is made when the layer first runs.
    """

    def __init__(self, count: int, length: int, block: int = 1 << 30) -> None:
        self.count = count
        self.length = length
        self.block = block
        self.packed = Packed((), (), ())  # of the pass that runs
        self.layout: Layout | None = None  # of the same pass
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        # of layers where only some tokens stay: how many each slot holds, and their positions
        self.lengths: dict[int, torch.Tensor] = {}
        self.positions: dict[int, torch.Tensor] = {}
        self.states: defaultdict[int, dict[Hashable, SlotState]] = defaultdict(dict)  # by layer and handler
        self._begun: set[tuple[int, Hashable]] = set()  # of those, which this pass has used

    # ------------------------------------------------------------------ attention

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Store new keys and values, and compute the attention of new tokens over the slots.

        Args:
            call: of a packed batch (1, heads, tokens, width); its module's `layer_idx` names the storage.

        Returns:
            (1, tokens, heads, width of values), and None for the weights.

        Raises:
            UnsupportedAttention: the module needs attention sinks, a bias, or dropout.
        """
        formula, layout = _Formula.of(call), self.layout
        if layout is None:
            raise UnsupportedAttention("a pass that says not whose its tokens are")
        module: Any = call.module
        layer, (query, key, value) = int(module.layer_idx), (x[0] for x in (call.query, call.key, call.value))
        if layer not in self.keys:
            for storage, new in ((self.keys, key), (self.values, value)):
                # zeros, not uninitialised: a masked position must hold a finite number
                storage[layer] = new.new_zeros(self.count, new.shape[0], self.length, new.shape[-1])
        keys, values = self.keys[layer], self.values[layer]
        stored_mask, query_mask = call.stored_mask, call.stored_mask if call.query_mask is None else call.query_mask
        if query_mask is None:
            keys[layout.slots, :, layout.offsets] = key.transpose(0, 1)
            values[layout.slots, :, layout.offsets] = value.transpose(0, 1)
            return _attend(formula, layout, query, keys, values).unsqueeze(0), None
        offsets, chosen, chosen_layout = self._thinned(layer, layout, stored_mask, query_mask)
        kept = slice(None) if stored_mask is None else stored_mask
        keys[layout.slots[kept], :, offsets] = key[:, kept].transpose(0, 1)
        values[layout.slots[kept], :, offsets] = value[:, kept].transpose(0, 1)
        attended = _attend(formula, chosen_layout, query[:, chosen], keys, values)
        out = attended.new_zeros(len(query_mask), *attended.shape[1:])
        out[chosen] = attended
        return out.masked_fill_(~query_mask[:, None, None], 0).unsqueeze(0), None

    def _thinned(
        self, layer: int, layout: Layout, stored_mask: torch.Tensor | None, query_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Layout]:
        """Make room for the tokens that stay (None for all), each slot's after its last one.

        Returns:
            Their offsets; which tokens attend, (tokens,); and the layout of these. A slot's only new token attends even
            if it does not ask: leaving it out would break up blocks.
        """
        offsets, stored_positions = layout.offsets, None
        slots, starts, counts = map(torch.tensor, (self.packed.slots, self.packed.starts, self.packed.counts))
        row = torch.arange(len(slots)).repeat_interleave(counts)

        def by_slot(tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(counts).index_add_(0, row, tokens.long())

        ends, ask = starts + counts, query_mask.cpu() | (counts == 1)[row]
        if stored_mask is not None:
            if layer not in self.lengths:
                self.lengths[layer] = torch.zeros(self.count, dtype=torch.long)
                self.positions[layer] = offsets.new_zeros(self.count, self.length, dtype=torch.int32)
            stay, stored_positions = stored_mask.cpu(), self.positions[layer]
            lengths, new = torch.where(starts == 0, 0, self.lengths[layer][slots]), by_slot(stay)
            offsets = ((lengths - (new.cumsum(0) - new))[row] + stay.cumsum(0) - 1).to(offsets.device)
            ends = self.lengths[layer][slots] = lengths + new
            stored_positions[layout.slots[stored_mask], offsets[stored_mask]] = layout.positions[stored_mask].int()
        chosen = ask.to(offsets.device)
        rows = zip(slots.tolist(), ends.tolist(), by_slot(ask).tolist(), strict=True)
        spans = spans_of((row for row in rows if row[2]), self.block)
        thinned = Layout(spans, layout.slots[chosen], offsets[chosen], layout.positions[chosen], stored_positions)
        return offsets if stored_mask is None else offsets[stored_mask], chosen, thinned

    @contextmanager
    def packing(self, packed: Packed, device: torch.device) -> Iterator[Layout]:
        """Store the tokens of forward passes inside the block, which are packed so."""
        self.packed, self.layout = packed, Layout.of(packed, self.block, device)
        self._begun.clear()
        try:
            yield self.layout
        finally:
            self.layout = None

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """Return what a handler remembers of the sequences in a layer; see `Store`."""
        module: Any = call.module
        layer: int = module.layer_idx
        if owner not in self.states[layer]:
            self.states[layer][owner] = make()
        state: Any = self.states[layer][owner]
        if (layer, owner) not in self._begun:
            self._begun.add((layer, owner))
            if new := [slot for slot, start in zip(self.packed.slots, self.packed.starts, strict=True) if not start]:
                state.begin(new)
        result: State = state
        return result

    # ------------------------------------------------------------------ slots

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another, with what is remembered of them."""
        for layer in self.keys:
            stored = self._stored(layer, source, length)
            for storage in (self.keys[layer], self.values[layer]):
                storage[target, :, :stored] = storage[source, :, :stored]
            if layer in self.lengths:
                self.lengths[layer][target] = stored
                self.positions[layer][target, :stored] = self.positions[layer][source, :stored]
            for state in self.states[layer].values():
                state.move(source, target)

    def snapshot(self, slot: int, length: int, layers: int) -> list[SlotCopy]:
        """Copy a slot's keys and values, (heads, length, width), in the layers below `layers`."""
        copies = []
        for layer in range(layers):
            stored = self._stored(layer, slot, length)
            keys, values = (storage[layer][slot, :, :stored].clone() for storage in (self.keys, self.values))
            positions = self.positions[layer][slot, :stored].clone() if layer in self.positions else None
            states = {owner: state.snapshot(slot) for owner, state in self.states[layer].items()}
            copies.append(SlotCopy((keys, values), positions, states))
        return copies

    def restore(self, slot: int, copies: Sequence[SlotCopy], length: int, layers: int) -> None:
        """Write the first `length` tokens of copies into a slot, in the layers below `layers`.

        Where only some tokens stay, all that were copied are written, with what is remembered of them.
        """
        for layer, copied in zip(range(layers), copies, strict=False):
            for storage, part in zip((self.keys[layer], self.values[layer]), copied.tensors, strict=True):
                stored = min(length, part.shape[1])
                storage[slot, :, :stored] = part[:, :stored]
            if copied.positions is not None:
                self.lengths[layer][slot] = len(copied.positions)
                self.positions[layer][slot, : len(copied.positions)] = copied.positions
            for owner, state in copied.states.items():
                self.states[layer][owner].restore(slot, state)

    def _stored(self, layer: int, slot: int, length: int) -> int:
        """Number of the first `length` tokens of a slot that stay in a layer."""
        return int(self.lengths[layer][slot]) if layer in self.lengths else length


@dataclass(frozen=True)
class _Formula:
    """Scaling, soft cap and window of a layer's attention."""

    scaling: float
    softcap: float | None
    window: int | None

    @classmethod
    def of(cls, call: AttentionCall) -> _Formula:
        """Read a call's options; refuse those that are not known here."""
        module: Any = call.module
        options, window = call.options, call.options.get("sliding_window")
        for name in ("s_aux", "position_bias", "attention_bias", "head_mask"):
            if options.get(name) is not None:
                raise UnsupportedAttention(name)
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        if kinds and kinds[module.layer_idx] == "sliding_attention" and window is None:
            raise UnsupportedAttention("its attention modules do not say how wide their window is")
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
    formula: _Formula, layout: Layout, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute the attention of laid-out queries (heads, tokens, width), (tokens, heads, width of values)."""
    heads, group = query.shape[0], query.shape[0] // keys.shape[1]  # query heads a key-value head
    parts = []
    for span, tokens in layout.parts:
        rows = len(span.ends)
        q = query[:, tokens].reshape(-1, group, rows, span.tokens, query.shape[-1])
        q = q.permute(2, 0, 1, 3, 4).reshape(rows, keys.shape[1], group * span.tokens, query.shape[-1])
        slots, end = slice(span.slot, span.slot + rows), max(span.ends)
        mask = layout.mask(span, tokens, group, formula.window, query.dtype)
        out = formula.attend(q, keys[slots, :, :end], values[slots, :, :end], mask)
        out = out.reshape(rows, heads, span.tokens, -1).transpose(1, 2)  # heads stand together again
        parts.append(out.reshape(rows * span.tokens, heads, -1))
    if not parts:
        return query.new_zeros(0, heads, values.shape[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
