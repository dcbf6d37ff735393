"""The token filter in front of a store of many sequences, the decoding engine's: what it remembers, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from lmeval_prune.interventions.attention_call import Packed
from lmeval_prune.kernels.token_filter import ops
from lmeval_prune.kernels.token_filter.state import SEEN, SKIPPED, fresh


def on_device(tensor: torch.Tensor) -> bool:
    """Whether decisions about this are made where it is, by kernels; else by a compiled loop on the CPU."""
    return tensor.is_cuda


class SlotStates:
    """Anchors and thresholds of the sequences in a store's slots, in one layer; a `SlotState`.

    Args:
        slots: how many there are.
        key, value: of any tokens, (batch, key-value heads, tokens, width).
        count: is told of tokens and of skipped ones that were not run here: of a prompt that another sequence shares.
    """

    def __init__(self, slots: int, key: torch.Tensor, value: torch.Tensor, count: Callable[..., None]) -> None:
        self.on_device = on_device(key)
        precise = torch.promote_types(key.dtype, torch.float32) if self.on_device else torch.float64
        anchors = [one.new_zeros(slots, one.shape[1], one.shape[-1], dtype=precise) for one in (key, value)]
        self._states = fresh(slots, key.device)
        self._tensors = (key.new_zeros(slots, dtype=torch.bool), *anchors, self._states)
        self._count = count

    def decide(self, packed: Packed, key: torch.Tensor, value: torch.Tensor, rule: ops.Rule) -> torch.Tensor:
        """Which tokens of a packed batch are skipped, (tokens,); `rule` is the last arguments of `compiled.decide`."""
        parts, at = [], 0
        for count, same in groupby(zip(packed.slots, packed.counts, strict=True), key=itemgetter(1)):
            slots = [slot for slot, _ in same]
            here = slice(at, at + len(slots) * count)
            keys, values = (one[0, :, here].unflatten(1, (-1, count)).transpose(0, 1) for one in (key, value))
            parts.append(self._decide(torch.tensor(slots, device=key.device), keys, values, rule).flatten())
            at = here.stop
        return torch.cat(parts)

    def _decide(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ops.Rule) -> torch.Tensor:
        """Which of as many tokens a slot, (slots, key-value heads, tokens, width), are skipped, (slots, tokens)."""
        moved: tuple[Any, ...] = tuple(one[slots] for one in self._tensors)
        valid = torch.ones(len(slots), key.shape[2], dtype=torch.bool, device=key.device)
        if self.on_device:
            begun, anchor_key, anchor_value, states = moved
            skipped = ops.decide(key, value, valid, begun, anchor_key, anchor_value, states, rule)
        else:
            from lmeval_prune.kernels.token_filter import compiled

            arguments: tuple[Any, ...] = (valid.numpy(), *(one.numpy() for one in moved), *rule)
            skipped = torch.from_numpy(compiled.decide(array(key), array(value), *arguments))
        for one, new in zip(self._tensors, moved, strict=True):
            one[slots] = new
        return skipped

    def begin(self, slots: Sequence[int]) -> None:
        """Forget the sequences that were there."""
        chosen = list(slots)
        for one in self._tensors:
            one[chosen] = 0
        self._states[chosen] = fresh(len(chosen), self._states.device)

    def move(self, source: int, target: int) -> None:
        """Go on in another slot."""
        for one in self._tensors:
            one[target] = one[source]

    def take(self, slot: int) -> list[torch.Tensor]:
        """A copy of a sequence's."""
        return [one[slot].clone() for one in self._tensors]

    def put(self, slot: int, taken: list[torch.Tensor]) -> None:
        """Go on in this slot from what was taken; its tokens are this sequence's, too, and are counted."""
        for one, part in zip(self._tensors, taken, strict=True):
            one[slot] = part
        self._count(self._states[slot, SEEN].long(), self._states[slot, SKIPPED].long())


def array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's numbers for compiled loops."""
    found: np.ndarray = tensor.detach().to("cpu", torch.float64).contiguous().numpy()
    return found
