"""Keys and values of many answers, stored once and read in place, and the attention over them.

The cache takes the place of the model's own attention (`interventions/attention_call.py`). The model runs on a
packed batch (1, tokens): rows of any length, one after another, no padding. In each layer the new keys and values
are written into their slots, and attention reads the slots. Key-value heads are never repeated: the G query heads
of a group are G queries to one head.

Where a token is stored and its place in the text are two things: in layers where a handler says which tokens stay, each
slot has a length of its own.
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

from lmeval_prune.interventions.attention_call import (
    AttentionCall,
    Packed,
    SlotState,
    State,
    UnsupportedAttention,
)


@dataclass(frozen=True)
class Span:
    """Neighbouring slots in which the same number of new tokens attends.

    Attributes:
        slot: the first slot.
        ends: how many tokens each slot holds, the new ones included.
        tokens: of each that attend.
    """

    slot: int
    ends: tuple[int, ...]
    tokens: int


def spans_of(rows: Iterable[tuple[int, int, int]], block: int) -> list[Span]:
    """Rows (slot, end, tokens) in the order of their slots, neighbours of one block together."""
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
    """Where the tokens of a packed batch that attend belong: those of the first span's first slot, of its second, …

    Attributes:
        spans: of slots.
        slots, positions: of each token, where it is stored, (tokens,).
        texts: its place in its text, (tokens,).
        places: of all stored tokens in their texts, (slots, length); None if they are stored in these places.
    """

    spans: Sequence[Span]
    slots: torch.Tensor
    positions: torch.Tensor
    texts: torch.Tensor
    places: torch.Tensor | None = None
    parts: list[tuple[Span, slice]] = field(init=False)  # each span with its tokens
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, packed: Packed, block: int, device: torch.device) -> Layout:
        """Of a pass whose tokens all attend and are stored in their places."""
        rows = list(zip(packed.slots, packed.starts, packed.counts, strict=True))
        slots = [slot for slot, _, count in rows for _ in range(count)]
        positions = [place for _, start, count in rows for place in range(start, start + count)]
        both = torch.tensor([slots, positions]).to(device)
        return cls(spans_of(((slot, a + n, n) for slot, a, n in rows), block), both[0], both[1], both[1])

    def __post_init__(self) -> None:
        ends = accumulate((len(span.ends) * span.tokens for span in self.spans), initial=0)
        self.parts = list(zip(self.spans, (slice(*pair) for pair in pairwise(ends)), strict=True))

    def mask(self, span: Span, tokens: slice, share: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask of a span: 0 where a query sees a key, else the lowest number.

        Shape (slots, 1, share · tokens, keys), `share` query heads a key-value head; with one token a slot
        (slots, 1, 1, keys).
        """
        key = (tokens.start, share, window, dtype)
        if key not in self._masks:
            query, text = (one[tokens].view(-1, span.tokens, 1) for one in (self.positions, self.texts))
            seen = place = torch.arange(max(span.ends), device=query.device)
            if self.places is not None:
                place = self.places[span.slot : span.slot + len(span.ends), None, : len(seen)]
            hidden = seen > query
            if window is not None:
                hidden |= place <= text - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=query.device)
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            self._masks[key] = (mask.repeat(1, share, 1) if span.tokens > 1 else mask)[:, None]
        return self._masks[key]


@dataclass
class Taken:
    """A copy of what a slot holds in a layer.

    Attributes:
        tensors: keys and values.
        places: in the text, where only some tokens stay.
        states: what the layer's handlers remember, by handler.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    places: torch.Tensor | None = None
    states: dict[Hashable, Any] = field(default_factory=dict)


class KVCache:
    """Storage for `count` answers of at most `length` tokens each; a `Store`.

    Attention runs block by block, each of `block` slots and as long as the longest of them.

    A layer's storage, (count, key-value heads, length, width) for keys and for values, is made when that
    layer first runs, with its own head counts and widths.
    """

    def __init__(self, count: int, length: int, block: int = 1 << 30) -> None:
        self.count = count
        self.length = length
        self.block = block
        self.packed = Packed((), (), ())  # of the pass that runs
        self.layout: Layout | None = None  # the same, in slots
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        # of layers where only some tokens stay: how many each slot holds, and their places in the text
        self.lengths: dict[int, torch.Tensor] = {}
        self.places: dict[int, torch.Tensor] = {}
        self.states: defaultdict[int, dict[Hashable, SlotState]] = defaultdict(dict)  # by layer and owner
        self._begun: set[tuple[int, Hashable]] = set()  # of those, which have been asked for in this pass

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """The attention of new tokens, whose keys and values are stored.

        Args:
            call: of a packed batch (1, heads, tokens, width); its module's `layer_idx` names the storage.

        Returns:
            (1, tokens, heads, width of values), and None for the weights.

        Raises:
            UnsupportedAttention: the module asks for attention sinks, a bias, or dropout.
        """
        module: Any = call.module
        query, key, value, options = call.query, call.key, call.value, call.options
        sliding_window: int | None = options.get("sliding_window")
        for name in ("s_aux", "position_bias", "attention_bias", "head_mask"):
            if options.get(name) is not None:
                raise UnsupportedAttention(name)
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        if kinds and kinds[module.layer_idx] == "sliding_attention" and sliding_window is None:
            raise UnsupportedAttention("its attention modules do not say how wide their window is")
        if self.layout is None:
            raise UnsupportedAttention("a pass that says not whose its tokens are")
        if options.get("dropout") or query.shape[0] != 1 or call.mask is not None:
            raise UnsupportedAttention("dropout, a padded batch or a ready-made mask")
        scaling = options.get("scaling")
        rule = _Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"), sliding_window)
        storage = self._storage(int(module.layer_idx), key, value)
        stays, asks = call.stays, call.stays if call.asks is None else call.asks
        if asks is None:
            self._write(storage, self.layout.slots, self.layout.positions, key[0], value[0])
            return self._attend(rule, self.layout, query[0], *storage).unsqueeze(0), None
        stored, chosen, layout = self._thinned(int(module.layer_idx), stays, asks)
        here = slice(None) if stays is None else stays
        self._write(storage, self.layout.slots[here], stored, key[0, :, here], value[0, :, here])
        attended = self._attend(rule, layout, query[0, :, chosen], *storage)
        out = attended.new_zeros(len(asks), *attended.shape[1:])
        out[chosen] = attended
        return out.masked_fill_(~asks[:, None, None], 0).unsqueeze(0), None

    @staticmethod
    def _write(storage: Iterable[torch.Tensor], slots: torch.Tensor, places: torch.Tensor, *new: torch.Tensor) -> None:
        for whole, part in zip(storage, new, strict=True):
            whole[slots, :, places] = part.transpose(0, 1)

    @staticmethod
    def _attend(
        rule: _Rule, layout: Layout, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Attention of queries (heads, tokens, width) that lie so, (tokens, heads, width of values)."""
        heads, share = query.shape[0], query.shape[0] // keys.shape[1]  # query heads a key-value head
        parts = []
        for span, tokens in layout.parts:
            rows = len(span.ends)
            q = query[:, tokens].reshape(-1, share, rows, span.tokens, query.shape[-1])
            q = q.permute(2, 0, 1, 3, 4).reshape(rows, keys.shape[1], share * span.tokens, query.shape[-1])
            near, end = slice(span.slot, span.slot + rows), max(span.ends)
            mask = layout.mask(span, tokens, share, rule.window, query.dtype)
            out = rule.attend(q, keys[near, :, :end], values[near, :, :end], mask)
            out = out.reshape(rows, heads, span.tokens, -1).transpose(1, 2)  # heads stand together again
            parts.append(out.reshape(rows * span.tokens, heads, -1))
        if not parts:
            return query.new_zeros(0, heads, values.shape[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _thinned(
        self, layer: int, stays: torch.Tensor | None, asks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Layout]:
        """Make room for the tokens that stay (None for all), each slot's after its last one.

        Returns:
            Their positions; which tokens attend, (tokens,); and the layout of these. A slot's only new token attends
            even if it does not ask: leaving it out would break up blocks.
        """
        assert self.layout
        device, texts, positions, places = self.layout.texts.device, self.layout.texts, self.layout.positions, None
        packed = self.packed
        slots, starts, counts = (torch.tensor(one) for one in (packed.slots, packed.starts, packed.counts))
        row = torch.arange(len(slots)).repeat_interleave(counts)

        def by_slot(some: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(counts).index_add_(0, row, some.long())

        ends, ask = starts + counts, asks.cpu() | (counts == 1)[row]
        if stays is not None:
            if layer not in self.lengths:
                self.lengths[layer] = torch.zeros(self.count, dtype=torch.long)
                self.places[layer] = texts.new_zeros(self.count, self.length, dtype=torch.int32)
            stay, places = stays.cpu(), self.places[layer]
            lengths, new = torch.where(starts == 0, 0, self.lengths[layer][slots]), by_slot(stay)
            positions = ((lengths - (new.cumsum(0) - new))[row] + stay.cumsum(0) - 1).to(device)
            ends = self.lengths[layer][slots] = lengths + new
            stored = positions[stays]
            places[self.layout.slots[stays], stored] = texts[stays].int()
        chosen = ask.to(device)
        rows = zip(slots.tolist(), ends.tolist(), by_slot(ask).tolist(), strict=True)
        spans = spans_of((one for one in rows if one[2]), self.block)
        layout = Layout(spans, self.layout.slots[chosen], positions[chosen], texts[chosen], places)
        return positions if stays is None else stored, chosen, layout

    def _storage(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.keys:
            for storage, new in ((self.keys, key), (self.values, value)):
                # zeros, not what lay there: a masked position must hold a finite number
                storage[layer] = new.new_zeros(self.count, new.shape[1], self.length, new.shape[-1])
        return self.keys[layer], self.values[layer]

    @contextmanager
    def packing(self, packed: Packed, device: torch.device) -> Iterator[Layout]:
        """Forward passes inside the block are over such tokens, which are stored."""
        self.packed, self.layout = packed, Layout.of(packed, self.block, device)
        self._begun.clear()
        try:
            yield self.layout
        finally:
            self.layout = None

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
        """What a handler remembers of the sequences in a layer; see `Store`."""
        module: Any = call.module
        layer: int = module.layer_idx
        states = self.states[layer]
        if owner not in states:
            states[owner] = make()
        found: Any = states[owner]
        new = [slot for slot, start in zip(self.packed.slots, self.packed.starts, strict=True) if not start]
        if new and (layer, owner) not in self._begun:
            found.begin(new)
        self._begun.add((layer, owner))
        state: State = found
        return state

    # ------------------------------------------------------------------ slots

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another, and what is remembered of them."""
        for layer in self.keys:
            held = self._held(layer, source, length)
            for storage in (self.keys[layer], self.values[layer]):
                storage[target, :, :held] = storage[source, :, :held]
            if layer in self.lengths:
                self.lengths[layer][target] = held
                self.places[layer][target, :held] = self.places[layer][source, :held]
            for state in self.states[layer].values():
                state.move(source, target)

    def take(self, slot: int, length: int, layers: int) -> list[Taken]:
        """Copies of a slot's keys and values in the layers below `layers`, each (heads, length, width)."""
        found = []
        for layer in range(layers):
            held = self._held(layer, slot, length)
            keys, values = (one[layer][slot, :, :held].clone() for one in (self.keys, self.values))
            places = self.places[layer][slot, :held].clone() if layer in self.places else None
            states = {owner: state.take(slot) for owner, state in self.states[layer].items()}
            found.append(Taken((keys, values), places, states))
        return found

    def put(self, slot: int, taken: Sequence[Taken], length: int, layers: int) -> None:
        """Write the first `length` tokens of what `take` gave into a slot, in the layers below `layers`.

        Where only some tokens stay, that is all that was taken, and what is remembered of them.
        """
        for layer, one in zip(range(layers), taken, strict=False):
            for storage, part in zip((self.keys[layer], self.values[layer]), one.tensors, strict=True):
                held = min(length, part.shape[1])
                storage[slot, :, :held] = part[:, :held]
            if one.places is not None:
                self.lengths[layer][slot] = len(one.places)
                self.places[layer][slot, : len(one.places)] = one.places
            for owner, state in one.states.items():
                self.states[layer][owner].put(slot, state)

    def _held(self, layer: int, slot: int, length: int) -> int:
        """How many of the first `length` tokens of a slot stay in a layer."""
        return int(self.lengths[layer][slot]) if layer in self.lengths else length


@dataclass(frozen=True)
class _Rule:
    scaling: float
    softcap: float | None
    window: int | None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.softcap is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        scores = torch.tanh(q @ k.transpose(-1, -2) * self.scaling / self.softcap) * self.softcap
        return (scores + mask).softmax(-1) @ v
