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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, cast

import torch
from torch.nn import functional

from lmeval_prune.interventions.attention_call import (
    AttentionCall,
    Packed,
    SlotState,
    State,
    Store,
    UnsupportedAttention,
    additive_mask,
)

_COMPILED = (torch.float32, torch.bfloat16)  # types of the compiled kernel
_UNKNOWN_OPTIONS = {
    "s_aux": "has sinks",
    "position_bias": "adds a bias to its scores",
    "attention_bias": "adds a bias to its scores",
    "head_mask": "multiplies its heads by a mask",
}
Attention = tuple[torch.Tensor, torch.Tensor]  # attention over some keys, and the log-sum-exp of their scores


@dataclass(frozen=True)
class AttentionOptions:
    """Scaling, soft cap and window of a layer's attention."""

    scaling: float
    softcap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionOptions:
        options, window = call.options, call.options.get("sliding_window")
        for name, reason in _UNKNOWN_OPTIONS.items():
            if options.get(name) is not None:
                raise UnsupportedAttention(f"the model's attention {reason}, which the engine does not compute")
        layer_types = getattr(getattr(call.module, "config", None), "layer_types", None)
        if layer_types and layer_types[call.module.layer_idx] == "sliding_attention" and window is None:
            raise UnsupportedAttention(
                "the model has layers with a sliding window whose size it does not pass to its attention"
            )
        if options.get("dropout") or call.query.shape[0] != 1 or call.mask is not None:
            raise UnsupportedAttention("the model passes dropout, a padded batch or a mask of its own to its attention")
        scaling = options.get("scaling")
        return cls(call.query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"), window)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the attention of queries to keys, (…, queries, width of values)."""
        if self.softcap is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        return self._scores(q, k, mask).softmax(-1).to(v.dtype) @ v

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> Attention:
        """Compute the attention of queries to keys, and the log-sum-exp of each query's scores.

        Args:
            q, k, v: (batch, heads, queries or keys, width).
            mask: added to the scores; broadcast to (batch, heads, queries, keys).

        Returns:
            (batch, heads, queries, width of values), and (batch, heads, queries) in float32 or float64.
        """
        if self.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return cast(Attention, attend(q, k, v, attn_mask=mask, scale=self.scaling))
        scores = self._scores(q, k, mask)
        lse = scores.logsumexp(-1)
        base = lse.clamp(min=torch.finfo(lse.dtype).min)  # scores that are all minus infinity have weights of 0
        return (scores - base[..., None]).exp().to(v.dtype) @ v, lse

    def _scores(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * self.scaling
        scores = scores.float() if scores.element_size() < 4 else scores
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores if mask is None else scores + mask


def join_attention(parts: Sequence[Attention]) -> torch.Tensor:
    """Join the attention over parts of the keys: softmax attention over all keys is their mean, weighted by exp(lse).

    Args:
        parts: attention, (…, width), and log-sum-exp, (…). Minus infinity stands for no keys.
    """
    sums = torch.stack([lse for _, lse in parts])
    weights = sums.softmax(0).masked_fill(sums == -torch.inf, 0)[..., None]
    joined = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    return cast(torch.Tensor, joined).to(parts[0][0].dtype)


@dataclass(frozen=True)
class Part:
    """Queries of a pass that are computed together: each of some slots has the same number of them.

    On a GPU, slots with fewer tokens repeat their last query, and the results of the repetitions are dropped.
    """

    slots: slice | torch.Tensor
    rows: int  # number of slots
    tokens: int  # number of queries in each slot
    end: int  # end of the tokens of the longest slot
    queries: slice | torch.Tensor  # indices in the pass, (rows · tokens,)
    targets: slice | torch.Tensor  # those of `queries` that are no repetitions
    unrepeated: slice | torch.Tensor  # where these are among the queries


def neighbouring_parts(rows: Sequence[tuple[int, int, int]], block: int) -> list[Part]:
    """Join rows (slot, end, number of queries), sorted by slot: neighbours with equal numbers, not across blocks."""
    parts, first = list[Part](), 0
    for _, neighbours in groupby(enumerate(rows), lambda row: (row[1][0] - row[0], row[1][0] // block, row[1][2])):
        slots, ends, counts = zip(*(row for _, row in neighbours), strict=True)
        queries = slice(first, first + sum(counts))
        span = slice(slots[0], slots[-1] + 1)
        parts.append(Part(span, len(slots), counts[0], max(ends), queries, queries, unrepeated=slice(None)))
        first = queries.stop
    return parts


def padded_parts(rows: Sequence[tuple[int, int, int]], device: torch.device) -> list[Part]:
    """Return few parts of rows (slot, end, number of queries): numbers that differ by less than half are joined."""
    firsts = list(accumulate((tokens for _, _, tokens in rows), initial=0))
    groups: dict[int, list[tuple[int, int, int, int]]] = {}
    for first, (slot, end, tokens) in zip(firsts, rows, strict=False):
        groups.setdefault(tokens.bit_length(), []).append((slot, end, tokens, first))
    parts = []
    for group in groups.values():
        slots, ends, counts, starts = torch.tensor(group).unbind(1)
        tokens = int(counts.max())
        offsets = torch.arange(tokens)
        queries = starts[:, None] + torch.minimum(offsets, counts[:, None] - 1)
        unrepeated = (offsets < counts[:, None]).flatten().nonzero()[:, 0]
        slots, queries, unrepeated = (indices.to(device) for indices in (slots, queries.flatten(), unrepeated))
        parts.append(Part(slots, len(group), tokens, int(ends.max()), queries, queries[unrepeated], unrepeated))
    return parts


@dataclass(frozen=True)
class SlotCopy:
    """A copy of one slot in one layer."""

    keys: torch.Tensor  # (key-value heads, tokens, width)
    values: torch.Tensor
    positions: torch.Tensor | None = None  # in the text, (tokens,), if the layer stores only some tokens
    states: dict[Hashable, Any] = field(default_factory=dict)  # by handler


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of several sequences under one mask; layers below it are those of other masks."""

    length: int  # number of tokens
    layers: Sequence[SlotCopy]


@dataclass
class Layout:
    """Slots and offsets of the tokens with a query in a packed batch, in the order of the rows."""

    parts: Sequence[Part]
    slots: torch.Tensor  # (tokens,), like offsets and positions
    offsets: torch.Tensor
    positions: torch.Tensor
    # positions of all stored tokens, (slots, length); None if a token's position is its offset
    stored_positions: torch.Tensor | None = None
    prefixes: Mapping[Prefix, torch.Tensor] = field(default_factory=dict)  # and the indices of the tokens after them
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, init=False)

    def mask(self, part: Part, group: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive attention mask of a part: 0 for visible keys, the lowest number for others.

        Shape (slots, 1, group · tokens, keys), with `group` query heads per key-value head; (slots, 1, 1, keys) if each
        slot has one token.
        """
        key = (id(part), group, window, dtype)
        if key not in self._masks:
            query = position = self.offsets[part.queries].view(-1, part.tokens, 1)
            offsets = key_positions = torch.arange(part.end, device=query.device)
            if self.stored_positions is not None:
                position = self.positions[part.queries].view(-1, part.tokens, 1)
                key_positions = self.stored_positions[part.slots, None, : part.end]
            hidden = offsets > query
            if window is not None:
                hidden |= key_positions <= position - window
            mask = additive_mask(hidden, dtype)
            if part.tokens > 1:
                mask = mask.repeat(1, group, 1)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]


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
        self.layout: Any = None  # of the running pass
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
        layer, (query, key, value) = call.module.layer_idx, (x[0] for x in (call.query, call.key, call.value))
        if layer not in self.keys:
            self._allocate(layer, key, value)
        keys, values = self.keys[layer], self.values[layer]
        query_mask = call.stored_mask if call.query_mask is None else call.query_mask
        offsets, query_layout = layout.offsets, layout
        has_query: Any = slice(None)
        if query_mask is not None:
            if layout.prefixes:
                raise UnsupportedAttention("a method skips tokens of the model's prompts after a common prefix")
            offsets, has_query, query_layout = self._filtered_layout(layer, layout, call.stored_mask, query_mask)
        stored = slice(None) if call.stored_mask is None else call.stored_mask
        keys[layout.slots[stored], :, offsets] = key[:, stored].transpose(0, 1)
        values[layout.slots[stored], :, offsets] = value[:, stored].transpose(0, 1)
        query = query[:, has_query]
        if layout.prefixes:
            attended = self._over_prefixes(layer, options, layout, query)
        else:
            attended, _ = self._over_slots(layer, options, query_layout, query)
        if query_mask is None:
            return attended.unsqueeze(0), None
        out = attended.new_zeros(len(query_mask), *attended.shape[1:])
        out[has_query] = attended
        return out.masked_fill_(~query_mask[:, None, None], 0).unsqueeze(0), None

    def _over_prefixes(
        self, layer: int, options: AttentionOptions, layout: Layout, query: torch.Tensor
    ) -> torch.Tensor:
        """Compute the attention over the slots and their prefixes: each prefix once for all of its queries."""
        slot_attention = self._over_slots(layer, options, layout, query, with_lse=True)
        out, lse = torch.zeros_like(slot_attention[0]), torch.full_like(slot_attention[1], -torch.inf)
        kv_heads = self.keys[layer].shape[1]
        shared: dict[int, tuple[SlotCopy, list[torch.Tensor]]] = {}  # several masks may share a layer's numbers
        for prefix, indices in layout.prefixes.items():
            copied = prefix.layers[layer]
            shared.setdefault(id(copied), (copied, []))[1].append(indices)
        for copied, parts in shared.values():
            tokens, length = torch.cat(parts), copied.keys.shape[1]
            q = query[:, tokens].reshape(1, kv_heads, -1, query.shape[-1])  # the heads of a group become queries
            mask = None
            if options.window is not None:
                hidden = torch.arange(length, device=q.device) <= layout.positions[tokens, None] - options.window
                mask = additive_mask(hidden, q.dtype).repeat(q.shape[2] // len(tokens), 1)
            attended, sums = options.attend_with_lse(q, copied.keys[None], copied.values[None], mask)
            out[tokens] = attended.reshape(len(query), len(tokens), -1).transpose(0, 1)
            lse[tokens] = sums.reshape(len(query), len(tokens)).T
        return join_attention([slot_attention, (out, lse)])

    def _over_slots(
        self, layer: int, options: AttentionOptions, layout: Layout, query: torch.Tensor, with_lse: bool = False
    ) -> Attention:
        """Compute the attention of queries, (heads, tokens, width), over a layer's slots.

        Returns:
            (tokens, heads, width of values), and the log-sum-exp, (tokens, heads), if requested; else no numbers.
        """
        keys, values, (heads, tokens, width) = self.keys[layer], self.values[layer], query.shape
        is_compiled = query.device.type == "cpu" and query.dtype in _COMPILED and options.softcap is None
        is_compiled &= options.window is None or layout.stored_positions is None
        if is_compiled and all(part.tokens == 1 for part in layout.parts):
            from lmeval_prune.kernels.decode_attention import decode  # numba takes a while to import

            arguments = query.transpose(0, 1), keys, values, layout.slots, layout.offsets + 1
            out, lse = decode(*arguments, options.scaling, options.window)
            return out.to(query.dtype), lse

        def by_token(x: torch.Tensor, part: Part) -> torch.Tensor:
            x = x.reshape(part.rows, heads, part.tokens, -1).transpose(1, 2)
            return x.reshape(part.rows * part.tokens, heads, -1)[part.unrepeated]

        group = heads // keys.shape[1]
        joined = query.new_empty(tokens, heads, values.shape[-1])
        sums = query.new_empty(tokens, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        for part in layout.parts:
            # the query heads of a group become queries of their key-value head
            q = query[:, part.queries].reshape(-1, group, part.rows, part.tokens, width)
            q = q.permute(2, 0, 1, 3, 4).reshape(part.rows, -1, group * part.tokens, width)
            k, v = keys[part.slots, :, : part.end], values[part.slots, :, : part.end]
            mask = layout.mask(part, group, options.window, query.dtype)
            if with_lse:
                out, lse = options.attend_with_lse(q, k, v, mask)
                sums[part.targets] = by_token(lse, part).squeeze(-1)
            else:
                out = options.attend(q, k, v, mask)
            joined[part.targets] = by_token(out, part)
        return joined, sums

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
        prefixes = {prefix: torch.tensor(tokens, device=device) for prefix, tokens in by_prefix.items()}
        positions = index[1].clone()
        for prefix, at in prefixes.items():
            positions[at] += prefix.length
        return Layout(parts, index[0], index[1], positions, prefixes=prefixes)

    def state(self, call: AttentionCall, owner: Hashable, make: Callable[[], State]) -> State:
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
        for storage, new in ((self.keys, key), (self.values, value)):
            # zeros, not uninitialised memory: masked numbers must be finite
            storage[layer] = new.new_zeros(self.count, new.shape[0], self.length, new.shape[-1])

    def begin(self, slot: int, prefix: Prefix | None, is_copied: bool) -> None:
        """Assign a prefix, or none, to a slot for a new sequence; if it `is_copied`, the slot holds its tokens, too."""
        self.prefixes[slot], self.copied[slot] = prefix, 0
        if prefix and is_copied:
            self.prefixes[slot], self.copied[slot] = None, prefix.length
            self.restore(slot, prefix.layers)

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

    def restore(self, slot: int, copies: Sequence[SlotCopy]) -> None:
        """Write copies of the first layers into a slot."""
        for layer, copied in enumerate(copies):
            if layer not in self.keys:
                self._allocate(layer, copied.keys, copied.values)
            for storage, part in ((self.keys, copied.keys), (self.values, copied.values)):
                storage[layer][slot, :, : part.shape[1]] = part
            if copied.positions is not None:
                self.lengths[layer][slot] = len(copied.positions)
                self.positions[layer][slot, : len(copied.positions)] = copied.positions
            for owner, state in copied.states.items():
                self.states[layer][owner].restore(slot, state)

    def _stored_length(self, layer: int, slot: int, length: int) -> int:
        return int(self.lengths[layer][slot]) if layer in self.lengths else self.copied[slot] + length
