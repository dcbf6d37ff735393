"""The token filter with everything on a GPU: a decode step launches a decision and an attention a layer, and waits for
nothing. What is done, and what it means, is as in `filtered_attention`; how, is in `kernels/`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from lmeval_prune.interventions.attention_call import AttentionCall
from lmeval_prune.kernels.filtered_attention import ops as attention
from lmeval_prune.kernels.token_filter import ops as token_filter
from lmeval_prune.kernels.token_filter.state import fresh

# What models pass to attention that kernels do, or that says nothing about it.
KNOWN = {
    "scaling",
    "sliding_window",
    "softcap",
    "is_causal",
    "position_ids",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
}
BLOCK = 64  # tokens for which there is room are a multiple of it


@dataclass
class DeviceSequences:
    """What a filtered layer knows of the rows of a batch: `filtered_attention.Sequences`, as tensors.

    Attributes:
        keys, values, places: as there.
        lengths: how many tokens of each row are stored, (rows,).
        anchors: of keys and of values, (rows, key-value heads, width), in float32 at least.
        begun: whether a row has had a token that is no padding, (rows,).
        states: (rows, columns) in float64.
        tokens: length of the rows so far, padding counted.
        bound: no row has more stored tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    anchors: tuple[torch.Tensor, torch.Tensor]
    begun: torch.Tensor
    states: torch.Tensor
    tokens: int = 0
    bound: int = 0

    @classmethod
    def like(cls, key: torch.Tensor, value: torch.Tensor) -> DeviceSequences:
        """Empty ones, for keys and values of this shape (rows, key-value heads, …, width)."""
        rows, heads = key.shape[:2]
        precise = torch.promote_types(key.dtype, torch.float32)
        return cls(
            key.new_empty(rows, heads, 0, key.shape[-1]),
            value.new_empty(rows, heads, 0, value.shape[-1]),
            key.new_zeros(rows, 0, dtype=torch.long),
            key.new_zeros(rows, dtype=torch.int32),
            (
                key.new_zeros(rows, heads, key.shape[-1], dtype=precise),
                value.new_zeros(rows, heads, value.shape[-1], dtype=precise),
            ),
            key.new_zeros(rows, dtype=torch.bool),
            fresh(rows, key.device),
        )

    def make_room(self, new: int) -> None:
        """Have place for so many more tokens a row; waits for the device only where it seems to be lacking."""
        if self.bound + new > self.places.shape[1] and self.bound:
            self.bound = int(self.lengths.max())
        self.bound += new
        capacity = self.places.shape[1]
        if self.bound > capacity:
            wanted = max(self.bound, capacity + capacity // 8)
            more = -(-wanted // BLOCK) * BLOCK - capacity
            self.keys, self.values = (torch.nn.functional.pad(one, (0, 0, 0, more)) for one in (self.keys, self.values))
            self.places = torch.nn.functional.pad(self.places, (0, more))

    def append(self, key: torch.Tensor, value: torch.Tensor, stays: torch.Tensor) -> None:
        """Store the tokens (rows, heads, tokens, width) where `stays` (rows, tokens) is true; waits for the device."""
        rows, tokens = stays.nonzero(as_tuple=True)
        slots = (stays.cumsum(1) - 1 + self.lengths[:, None])[rows, tokens]
        lengths = self.lengths + stays.sum(1, dtype=torch.int32)
        self.bound = 0
        self.make_room(int(lengths.max()))
        self.keys[rows, :, slots] = key[rows, :, tokens]
        self.values[rows, :, slots] = value[rows, :, tokens]
        self.places[rows, slots] = tokens + self.tokens
        self.lengths = lengths

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows only; one may stand several times."""
        rows = rows.to(self.keys.device)
        self.keys, self.values, self.places = self.keys[rows], self.values[rows], self.places[rows]
        self.lengths, self.begun, self.states = self.lengths[rows], self.begun[rows], self.states[rows]
        self.anchors = self.anchors[0][rows], self.anchors[1][rows]


class DeviceFilter:
    """Decides about tokens and stores them, and lets those attend that are not skipped.

    Args:
        rule, shared, keep_skipped_kv, counts: as in `FilteredAttention`; `counts` are given tensors.
    """

    def __init__(
        self, rule: token_filter.Rule, shared: bool, keep_skipped_kv: bool, counts: dict[str, Counter[str]]
    ) -> None:
        self.rule, self.shared, self.keep_skipped_kv, self.counts = rule, shared, keep_skipped_kv, counts
        self.states: dict[str, torch.Tensor] = {}  # by layer, where all sequences share one
        self.totals: dict[str, torch.Tensor] = {}  # by layer, tokens and skipped ones: what `counts` show

    def decide(self, label: str, call: AttentionCall, sequences: DeviceSequences, valid: torch.Tensor) -> torch.Tensor:
        """Which new tokens do not attend, skipped or padding, (rows, tokens); the others are stored."""
        key, value, device = call.key, call.value, call.key.device
        states = self.states.setdefault(label, fresh(1, device)) if self.shared else sequences.states
        totals = self.totals_of(label, device)
        moved = (key, value, valid, sequences.begun, *sequences.anchors, states, self.rule)
        if valid.shape[1] == 1:
            sequences.make_room(1)
            absent = token_filter.decide_and_store(
                *moved,
                store=(sequences.keys, sequences.values, sequences.places, sequences.lengths, totals),
                place=sequences.tokens,
                keep_skipped=self.keep_skipped_kv,
            )
        else:
            skipped = token_filter.decide(*moved)
            absent = skipped | ~valid
            totals += torch.stack([valid.sum(), skipped.sum()])
            sequences.append(key, value, valid if self.keep_skipped_kv else ~absent)
        sequences.tokens += valid.shape[1]
        return absent

    def totals_of(self, label: str, device: torch.device) -> torch.Tensor:
        """A layer's tokens and skipped ones so far, (2,); written."""
        if label not in self.totals:
            totals = self.totals[label] = torch.zeros(2, dtype=torch.long, device=device)
            self.counts[label].update({"tokens": totals[0], "skipped": totals[1]})
        return self.totals[label]

    def attend(
        self,
        call: AttentionCall,
        sequences: DeviceSequences,
        valid: torch.Tensor,
        absent: torch.Tensor,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of the tokens that are not absent, after `decide`; zeros for the others."""
        query, window = call.query, call.options.get("sliding_window")
        keys, values, places, lengths = sequences.keys, sequences.values, sequences.places, sequences.lengths
        scaling = call.options.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if query.shape[2] == 1:
            alone = query[:, :, 0], keys, values, lengths, absent[:, 0]
            return attention.decode(*alone, scaling, window, places, softcap, check=False)[:, None]
        stays = valid if self.keep_skipped_kv else ~absent
        chosen = absent.to(torch.uint8).argsort(dim=1, stable=True)  # those that attend first, in their order
        ends = (lengths[:, None] - stays.sum(1, keepdim=True) + stays.cumsum(1)).gather(1, chosen)
        counts = (~absent).sum(1)
        return attention.prefill(
            query, keys, values, chosen, counts, ends, scaling, window, places, softcap, check=False
        )


def can_attend(call: AttentionCall) -> bool:
    """Whether `DeviceFilter.attend` knows all that this attention asks for."""
    asked = {name for name, value in call.options.items() if value is not None and value is not False}
    if call.options.get("dropout") == 0:
        asked.discard("dropout")
    return asked <= KNOWN
