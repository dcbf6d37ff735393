"""Attention over a tree of token sequences: each token attends to the segments above its own, and causally to its own.

The model runs on a packed batch of segments. Keys and values of segments with descendants in later passes are stored.
The attention of a token is computed in parts, joined by their log-sum-exp:

- small neighbouring subtrees together, with a mask;
- else a segment's own tokens, and then all tokens below it to the segment at once;
- all tokens below a stored segment to this segment at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from lmeval_prune.decoding.kv_cache import AttentionOptions, join_attention
from lmeval_prune.interventions.attention_call import AttentionCall, Packed, Store, UnsupportedAttention, additive_mask

Tokens = tuple[int, ...]


@dataclass
class Segment:
    """Consecutive tokens of the tree without a branch between them."""

    tokens: Tokens
    start: int  # number of tokens before it, in each sequence that has it
    parent: int | None  # number of the segment before it
    end: int  # its descendants are the segments from the next number up to here


class TokenTree:
    """The tree of some sequences, as segments of at most `longest` tokens, numbered depth first."""

    def __init__(self, sequences: Iterable[Tokens], longest: int) -> None:
        self.segments: list[Segment] = []
        self._leaves: list[Tokens] = []  # sequences that are no prefix of another, sorted
        for sequence in sorted(set(sequences), reverse=True):
            if not self._leaves or self._leaves[-1][: len(sequence)] != sequence:
                self._leaves.append(sequence)
        self._leaves.reverse()
        self._last_segments = [0] * len(self._leaves)
        # a range of sorted leaves shares what its first and its last leaf share
        stack: list[tuple[int, int, int, int | None]] = [(0, len(self._leaves), 0, None)]
        while stack:
            first, last, depth, parent = stack.pop()
            leaf = self._leaves[first]
            stop = common_length(leaf, self._leaves[last - 1], depth)
            for start in range(depth, stop, longest):
                number = len(self.segments)
                self.segments.append(Segment(leaf[start : min(start + longest, stop)], start, parent, number + 1))
                parent = number
            if last - first == 1:
                assert parent is not None
                self._last_segments[first] = parent
                continue
            tokens = [leaf[stop] for leaf in self._leaves[first:last]]
            branches = [first, *(first + i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1])]
            for begin, end in reversed(list(zip(branches, [*branches[1:], last], strict=True))):
                stack.append((begin, end, stop, parent))
        for segment in reversed(self.segments):
            if segment.parent is not None:
                parent_segment = self.segments[segment.parent]
                parent_segment.end = max(parent_segment.end, segment.end)

    def path(self, sequence: Tokens) -> list[int]:
        """Return the segments of a sequence, first to last; the last may have more tokens than the sequence."""
        number: int | None = self._last_segments[bisect_left(self._leaves, sequence)]
        path = []
        while number is not None:
            if self.segments[number].start < len(sequence):
                path.append(number)
            number = self.segments[number].parent
        return path[::-1]

    def passes(self, most: int) -> Iterator[range]:
        """Divide the segments, in their order, into ranges of at most `most` tokens, or of a single segment."""
        begin = tokens = 0
        for number, segment in enumerate(self.segments):
            if number > begin and tokens + len(segment.tokens) > most:
                yield range(begin, number)
                begin, tokens = number, 0
            tokens += len(segment.tokens)
        yield range(begin, len(self.segments))


def common_length(tokens: Sequence[int], others: Sequence[int], start: int = 0) -> int:
    """Return the length of the common prefix of two sequences of one type; the first `start` tokens are equal."""
    end = min(len(tokens), len(others))
    if tokens[start:end] == others[start:end]:
        return end
    return next(i for i in range(start, end) if tokens[i] != others[i])


BLOCK = 128  # tokens of neighbouring subtrees that attend together, with a mask


@dataclass(frozen=True, eq=False)
class TreePart:
    """Queries of a pass, and keys that most of them see."""

    queries: slice
    keys: slice | int  # in the pass, or the slot of a stored segment
    key_positions: torch.Tensor  # in their sequences


@dataclass
class TreeLayout:
    """The parts of the attention of a packed batch."""

    slots: list[int]  # of the segments
    starts: list[int]  # index of the first token of each segment, and the number of tokens
    positions: torch.Tensor  # of the tokens in their sequences
    visible_until: torch.Tensor  # for each token, the index after the last token of the segments below its own
    own: list[TreePart] = field(default_factory=list)  # parts that cover each token once
    above: list[TreePart] = field(default_factory=list)  # whose results are joined to these
    _masks: dict[Any, torch.Tensor | None] = field(default_factory=dict, init=False)

    def mask(self, part: TreePart, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the additive mask of a part, (queries, keys); None if each query sees each key."""
        key = (id(part), window, dtype)
        if key not in self._masks:
            positions = self.positions[part.queries, None]
            hidden = torch.zeros(len(positions), len(part.key_positions), dtype=torch.bool, device=positions.device)
            if part.keys == part.queries:
                index = torch.arange(part.queries.start, part.queries.stop, device=positions.device)
                hidden |= (index > index[:, None]) | (index[:, None] >= self.visible_until[part.keys])
            if window is not None:
                hidden |= part.key_positions <= positions - window
            self._masks[key] = additive_mask(hidden, dtype) if hidden.any() else None
        return self._masks[key]


class TreeCache(Store):
    """Keys and values of the segments of a tree, for several masks.

    Slot `n * len(tree.segments) + s` is segment `s` under the mask with number `n`.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.size = len(tree.segments)
        self.layout: Any = None  # of the running pass
        self.stop = self.size  # the segments of the running pass are below this number
        self.stored: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}  # by layer and slot

    def start_pass(self, segments: range) -> None:
        """Begin a pass; drop segments without descendants from there on."""
        self.stop = segments.stop
        for stored in self.stored.values():
            for slot in [slot for slot in stored if self.tree.segments[slot % self.size].end <= segments.start]:
                del stored[slot]

    def lay_out(self, packed: Packed, device: torch.device) -> TreeLayout:
        """Lay out segments in the order of their slots."""
        slots, starts = list(packed.slots), list(accumulate(packed.counts, initial=0))
        # after the last segment below each segment, as an index in the batch
        ends = [bisect_left(slots, self._end(slot)) for slot in slots]
        spans = [torch.arange(start, start + n) for start, n in zip(packed.starts, packed.counts, strict=True)]
        until = torch.tensor([starts[end] for end in ends]).repeat_interleave(torch.tensor(packed.counts))
        layout = TreeLayout(slots, starts, torch.cat(spans).to(device), until.to(device))
        i, is_block = 0, False  # whether the last part is a block, which may grow
        while i < len(slots):
            begin, end = starts[i], starts[ends[i]]
            if end - begin <= BLOCK:
                if is_block and end - layout.own[-1].queries.start <= BLOCK:
                    begin = layout.own.pop().queries.start
                block = slice(begin, end)
                layout.own.append(TreePart(block, block, layout.positions[block]))
                i, is_block = ends[i], True
                continue
            own = slice(begin, starts[i + 1])
            layout.own.append(TreePart(own, own, layout.positions[own]))
            if end > own.stop:
                layout.above.append(TreePart(slice(own.stop, end), own, layout.positions[own]))
            i, is_block = i + 1, False
        running, stored = set(slots), set[int]()
        for slot in slots:  # stored segments above those of the batch
            above = self._parent(slot)
            while above is not None and above not in running and above not in stored:
                first, end = bisect_left(slots, above), bisect_left(slots, self._end(above))
                segment = self.tree.segments[above % self.size]
                queries = slice(starts[first], starts[end])
                positions = torch.arange(segment.start, segment.start + len(segment.tokens), device=device)
                layout.above.append(TreePart(queries, above, positions))
                stored.add(above)
                above = self._parent(above)
        return layout

    def _end(self, slot: int) -> int:
        return slot - slot % self.size + self.tree.segments[slot % self.size].end

    def _parent(self, slot: int) -> int | None:
        parent = self.tree.segments[slot % self.size].parent
        return None if parent is None else slot - slot % self.size + parent

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, None]:
        """Compute the attention of a packed batch, (1, tokens, heads, width of values); store what others need."""
        options, layout = AttentionOptions.of(call), self.layout
        if call.stored_mask is not None or call.query_mask is not None:
            raise UnsupportedAttention("a method filters tokens of the texts, and log-likelihoods need all of them")
        query, key, value = (x[0] for x in (call.query, call.key, call.value))
        stored = self.stored.setdefault(call.module.layer_idx, {})
        for slot, (start, end) in zip(layout.slots, pairwise(layout.starts), strict=True):
            if self.tree.segments[slot % self.size].end > self.stop:
                stored[slot] = key[:, start:end].clone(), value[:, start:end].clone()
        group = query.shape[0] // key.shape[0]
        grouped = query.unflatten(0, (-1, group))  # (key-value heads, query heads of each, tokens, width)
        dtype = torch.promote_types(query.dtype, torch.float32)  # parts are joined without rounding
        out = grouped.new_empty(*grouped.shape[:-1], value.shape[-1], dtype=dtype)
        lse = grouped.new_empty(grouped.shape[:-1], dtype=dtype)
        for number, part in enumerate((*layout.own, *layout.above)):
            keys = (key[:, part.keys], value[:, part.keys]) if isinstance(part.keys, slice) else stored[part.keys]
            k, v = (x.unsqueeze(1).expand(-1, group, -1, -1) for x in keys)
            mask, rows = layout.mask(part, options.window, query.dtype), part.queries
            attended, sums = options.attend_with_lse(grouped[:, :, rows], k, v, mask)
            if number >= len(layout.own):
                before = out[:, :, rows], lse[:, :, rows]
                attended, sums = join_attention([before, (attended, sums)]), torch.logaddexp(before[1], sums)
            out[:, :, rows], lse[:, :, rows] = attended, sums
        return out.flatten(0, 1).transpose(0, 1).unsqueeze(0).to(query.dtype), None
