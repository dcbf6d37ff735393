"""The cache of a filtered layer: keys and values of the tokens that later ones see, and the filter's memory.

Rows are stored without gaps, each with a length of its own, and with the positions of their tokens in the text. Rotary
positions stay those of the text, since keys are rotated before they are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.token_filter import ops
from lmeval_prune.kernels.token_filter.state import Memory, Rule

BLOCK = 16  # capacities are a multiple of it


class FilteredLayer(CacheLayerMixin):
    """A layer of a `DynamicCache` in which some tokens are not stored.

    Its `update` returns the new tokens alone; the filter stores them when attention is called.

    Attributes:
        replaced: the cache layer in whose place this one is: masks are as long as it would make them.
        owner: the filter that fills it.
        is_awaited: whether the filter is about to store what `update` receives.
        memory: anchors and thresholds of the rows; None before the first token.
        keys, values: (rows, key-value heads, capacity, width).
        positions: of stored tokens in the text, padding counted, (rows, capacity).
        lengths: number of stored tokens of each row, (rows,).
        tokens: length of the text so far, padding counted.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, replaced: Any, owner: Any) -> None:
        super().__init__()
        self.replaced, self.owner, self.is_sliding = replaced, owner, replaced.is_sliding
        self.is_awaited = False
        self.memory: Memory | None = None
        self.tokens = self.longest = 0  # no row has more than `longest` stored tokens

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        valid: torch.Tensor,
        rule: Rule,
        memory: Memory,
        totals: torch.Tensor,
        keep_skipped: bool,
    ) -> torch.Tensor:
        """Decide about new tokens, and store those that later tokens see.

        Args:
            key, value: (rows, key-value heads, tokens, width).
            valid: (rows, tokens), false for padding.
            rule, memory: of the layer and its rows.
            totals: tokens and skipped ones so far, (2,); written.
            keep_skipped: whether later tokens see skipped ones.

        Returns:
            (rows, tokens), true where a token is skipped or padding.
        """
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
                keep_skipped=keep_skipped,
            )
        else:
            skipped = ops.decide(key, value, valid, memory, rule)
            totals += torch.stack([valid.sum(), skipped.sum()])
            absent = skipped | ~valid
            self._append(key, value, valid if keep_skipped else ~absent)
        self.tokens += valid.shape[1]
        return absent

    def begin(self, key: torch.Tensor, value: torch.Tensor) -> Memory:
        """Make room for keys and values of this shape before the first tokens; return the memory of the rows.

        It is called at attention, not at `update`, which some families give latents.
        """
        if self.memory is None:
            rows, heads = key.shape[:2]
            self.keys, self.values = (x.new_empty(rows, heads, 0, x.shape[-1]) for x in (key, value))
            self.positions = torch.zeros(rows, 0, dtype=torch.long, device=key.device)
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=key.device)
            self.memory = Memory.fresh(rows, key, value)
        return self.memory

    def _append(self, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor) -> None:
        rows, tokens = kept.nonzero(as_tuple=True)
        offsets = (kept.cumsum(1) - 1 + self.lengths[:, None])[rows, tokens]
        self.lengths = self.lengths + kept.sum(1, dtype=torch.int32)
        self.longest = 0
        self._reserve(int(self.lengths.max()))
        self.keys[rows, :, offsets] = key[rows, :, tokens]
        self.values[rows, :, offsets] = value[rows, :, tokens]
        self.positions[rows, offsets] = tokens + self.tokens

    def _reserve(self, tokens: int) -> None:
        """Make room for so many more tokens a row; wait for the device only where it seems to be lacking."""
        capacity = self.positions.shape[1]
        if self.longest and self.longest + tokens > capacity:
            self.longest = int(self.lengths.max())
        self.longest += tokens
        if self.longest > capacity:  # a prompt's exact need, then a little more at a time
            more = -(-max(self.longest, capacity + capacity // 16) // BLOCK) * BLOCK - capacity
            self.keys, self.values = pad(self.keys, (0, 0, 0, more)), pad(self.values, (0, 0, 0, more))
            self.positions = pad(self.positions, (0, more))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take note of the type and device; see the base class and `begin`."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new tokens as they are.

        Raises:
            InputError: the filter that began this cache is not applied any more.
        """
        if not self.is_awaited:
            raise InputError("this cache was filled under a token filter that is not applied now; begin a new one")
        self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the length of the text so far, skipped tokens and padding counted."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return those of the layer that it replaces."""
        if not isinstance(self.replaced, DynamicSlidingWindowLayer):
            return self.tokens + query_length, 0
        self.replaced.cumulative_length = self.tokens
        return self.replaced.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """Return that of the layer that it replaces."""
        return int(self.replaced.get_max_length())

    def reset(self) -> None:
        """Forget everything."""
        self.memory, self.tokens, self.longest, self.is_initialized = None, 0, 0, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows of the beams that go on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.memory:
            self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, some of them several times."""
        if self.memory:
            rows = indices.to(self.keys.device)
            self.keys, self.values, self.positions = self.keys[rows], self.values[rows], self.positions[rows]
            self.lengths, self.memory = self.lengths[rows], self.memory.rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back: a threshold has seen them.

        Raises:
            InputError: always, but for 0 tokens.
        """
        if tokens_to_remove:
            raise InputError("a token filter cannot take tokens back; leave out assisted decoding and prompt lookup")
