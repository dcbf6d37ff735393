"""Cache layer of a filtered attention layer: keys and values of the stored tokens, and the filter's memory.

Each row stores its tokens without gaps, with their positions in the text, so rows have different lengths. Keys are
rotated before they are stored, so rotary positions are those of the text.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.token_filter import ops
from lmeval_prune.kernels.token_filter.state import Memory, Rule

BLOCK = 16  # capacities are multiples of it


class FilteredCacheLayer(CacheLayerMixin):
    """A layer of a `DynamicCache` that does not store every token.

    `update` returns the new tokens only; the filter stores tokens when attention is called.

    Attributes:
        replaced: the replaced cache layer, which determines the length of masks.
        owner: the filter that fills the cache.
        is_awaited: whether the filter will store the tokens of the next `update`.
        memory: anchors and thresholds of the rows; None before the first token.
        keys, values: (rows, key-value heads, capacity, width).
        positions: text positions of stored tokens, including padding, (rows, capacity).
        lengths: number of stored tokens of each row, (rows,).
        tokens: length of the text so far, including padding.
        window: largest number of tokens that a mask of the replaced layer lets a token attend to.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, replaced: Any, owner: Any) -> None:
        super().__init__()
        self.replaced, self.owner, self.is_sliding = replaced, owner, replaced.is_sliding
        self.window = replaced.sliding_window if isinstance(replaced, DynamicSlidingWindowLayer) else math.inf
        self.is_awaited = False
        self.memory: Memory | None = None
        self.tokens = self.longest = 0  # `longest`: upper bound of `lengths`, known without waiting for the device

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor,
        memory: Memory,
        totals: torch.Tensor,
    ) -> torch.Tensor:
        """Decide about new tokens, and store those that later tokens attend to.

        `key` and `value` are (rows, key-value heads, tokens, width), `valid` is (rows, tokens), false for padding.
        Updates `memory` and `totals`, (2,). Returns (rows, tokens), true for skipped tokens and padding.
        """
        rule: Rule = self.owner.rule
        if valid.shape[1] == 1:
            self._reserve(1)
            absent = ops.decide_and_store(
                key,
                value,
                valid,
                memory,
                rule,
                store=(self.keys, self.values, self.positions, self.lengths, totals),
                position=self.tokens,
                keep_skipped=self.owner.keep_skipped_kv,
            )
        else:
            skipped = ops.decide(key, value, valid, memory, rule)
            totals += torch.stack([valid.sum(), skipped.sum()])
            absent = skipped | ~valid
            self._append(key, value, valid if self.owner.keep_skipped_kv else ~absent)
        self.tokens += valid.shape[1]
        return absent

    def begin(self, key: torch.Tensor, value: torch.Tensor) -> Memory:
        """Return the rows' memory; before the first tokens, create it and the storage.

        Called at attention, not at `update`, which gets latents in some families.
        """
        if self.memory is None:
            rows, heads = key.shape[:2]
            self.keys, self.values = (x.new_empty(rows, heads, 0, x.shape[-1]) for x in (key, value))
            self.positions = torch.zeros(rows, 0, dtype=torch.long, device=key.device)
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=key.device)
            self.memory = Memory.fresh(rows, key, value)
        return self.memory

    def _append(self, key: torch.Tensor, value: torch.Tensor, is_stored: torch.Tensor) -> None:
        rows, tokens = is_stored.nonzero(as_tuple=True)
        offsets = (is_stored.cumsum(1) - 1 + self.lengths[:, None])[rows, tokens]
        self.lengths = self.lengths + is_stored.sum(1, dtype=torch.int32)
        self.longest = 0
        self._reserve(int(self.lengths.max()))
        self.keys[rows, :, offsets] = key[rows, :, tokens]
        self.values[rows, :, offsets] = value[rows, :, tokens]
        self.positions[rows, offsets] = tokens + self.tokens

    def _reserve(self, tokens: int) -> None:
        """Make room for this many tokens per row; wait for the device only if the room may be exhausted."""
        capacity = self.positions.shape[1]
        if self.longest and self.longest + tokens > capacity:
            self.longest = int(self.lengths.max())
        self.longest += tokens
        if self.longest > capacity:  # exact for a prompt, later by a sixteenth
            extra = -(-max(self.longest, capacity + capacity // 16) // BLOCK) * BLOCK - capacity
            self.keys, self.values = pad(self.keys, (0, 0, 0, extra)), pad(self.values, (0, 0, 0, extra))
            self.positions = pad(self.positions, (0, extra))

    # ------------------------------------------------------------------ transformers' interface

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Record dtype and device."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new tokens unchanged; refuse them if the filter is not applied any more."""
        if not self.is_awaited:
            raise InputError("this cache was filled under a token filter that is not applied now; begin a new one")
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the length of the text so far, including skipped tokens and padding."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask sizes of the replaced layer."""
        if not isinstance(self.replaced, DynamicSlidingWindowLayer):
            return self.tokens + query_length, 0
        self.replaced.cumulative_length = self.tokens
        return self.replaced.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """Return the maximum length of the replaced layer."""
        return int(self.replaced.get_max_length())

    def reset(self) -> None:
        """Remove all tokens."""
        self.memory, self.tokens, self.longest, self.is_initialized = None, 0, 0, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Select the rows of the beams that continue."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.memory:
            self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows, possibly several times."""
        if self.memory:
            rows = indices.to(self.keys.device)
            self.keys, self.values, self.positions = self.keys[rows], self.values[rows], self.positions[rows]
            self.lengths, self.memory = self.lengths[rows], self.memory.rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: thresholds cannot be rolled back."""
        if tokens_to_remove:
            raise InputError("a token filter cannot take tokens back; leave out assisted decoding and prompt lookup")
