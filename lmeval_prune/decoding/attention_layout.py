"""Which queries of a packed pass are computed together, and which keys they may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from lmeval_prune.interventions.attention_call import additive_mask


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
    unrepeated: torch.Tensor | None = None  # indices of queries that are no repetitions, in rows · tokens; None: all


def neighbouring_parts(rows: Sequence[tuple[int, int, int]], block: int) -> list[Part]:
    """Join rows (slot, end, number of queries), sorted by slot: neighbours with equal numbers, not across blocks."""
    groups: list[list[tuple[int, int, int]]] = []
    for slot, end, tokens in rows:
        last = groups[-1][-1] if groups else None
        if last and last[0] + 1 == slot and slot % block and last[2] == tokens:
            groups[-1].append((slot, end, tokens))
        else:
            groups.append([(slot, end, tokens)])
    bounds = accumulate((len(group) * group[0][2] for group in groups), initial=0)
    return [
        Part(
            slots=slice(group[0][0], group[-1][0] + 1),
            rows=len(group),
            tokens=group[0][2],
            end=max(end for _, end, _ in group),
            queries=slice(*queries),
        )
        for group, queries in zip(groups, pairwise(bounds), strict=True)
    ]


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
        parts.append(Part(slots, len(group), tokens, int(ends.max()), queries, unrepeated))
    return parts


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the first tokens of several sequences under one mask; layers below it share tensors."""

    length: int  # number of tokens
    keys: Sequence[torch.Tensor]  # by layer, (key-value heads, length, width)
    values: Sequence[torch.Tensor]


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
    _prefix_tokens: dict[tuple[int, ...], list[tuple[Prefix, torch.Tensor]]] = field(default_factory=dict, init=False)

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

    def prefix_parts(self, layer: int) -> list[tuple[Prefix, torch.Tensor]]:
        """Return the distinct prefixes in a layer, and the indices of the tokens after each."""
        first: dict[int, int] = {}
        owners = tuple(first.setdefault(id(prefix.keys[layer]), i) for i, prefix in enumerate(self.prefixes))
        if owners not in self._prefix_tokens:
            prefixes, tokens = list(self.prefixes), list(self.prefixes.values())
            self._prefix_tokens[owners] = [
                (prefixes[owner], torch.cat([t for t, other in zip(tokens, owners, strict=True) if other == owner]))
                for owner in first.values()
            ]
        return self._prefix_tokens[owners]
