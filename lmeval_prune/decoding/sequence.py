"""Answers that are being decoded, and what those with one prompt share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.kv_cache import SlotCopy
from lmeval_prune.decoding.request import Request
from lmeval_prune.interventions.head_mask import HeadMask


@dataclass(eq=False)
class Sequence:
    """A request that is being decoded.

    Attributes:
        request: with prompt and parameters.
        mask: number of its mask.
        first_layer: its first pruned layer; the number of layers, if nothing is pruned.
        group: the requests with its prompt.
        slot: of its keys and values.
        stored: number of tokens (of prompt and answer) that the slot holds.
        answer: tokens chosen so far; the last one is not stored yet.
        ended: whether the answer is complete.
        ends, limit: end tokens, and the largest number of tokens in the answer; set when the sequence starts.
        kept_layers: layers whose input is kept for followers while this sequence runs; empty unless it is a leader.
    """

    request: Request
    mask: int
    first_layer: int
    group: PromptGroup = field(init=False)
    slot: int = -1
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    ended: bool = False
    ends: tuple[int, ...] = ()
    limit: int = 0
    kept_layers: frozenset[int] = frozenset()

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *self.answer]


@dataclass(eq=False)
class PromptGroup:
    """Requests with one prompt.

    Attributes:
        leader: the sequence that is decoded first.
        followers: sequences that have not started, by first pruned layer, highest first.
        leader_tokens: the tokens that followers check: the leader's prompt and answer.
        kept: by layer, its inputs at the tokens of `leader_tokens`, in pieces (tokens, width).
        shared: the leader's keys and values below the highest first layer of a follower.
        left: number of requests without an answer yet.
    """

    leader: Sequence
    followers: deque[Sequence]
    leader_tokens: list[int] = field(default_factory=list)
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    shared: list[SlotCopy] = field(default_factory=list)
    left: int = 0

    @classmethod
    def of(cls, sequences: list[Sequence]) -> PromptGroup:
        """Group sequences; the first of those with the highest first layer leads."""
        leader, *others = sorted(sequences, key=lambda sequence: -sequence.first_layer)
        leader.kept_layers = frozenset(follower.first_layer for follower in others)
        group = cls(leader, deque(others), left=len(sequences))
        for sequence in sequences:
            sequence.group = group
        return group


def prompt_groups(
    requests: Items[Request], model_map: ModelMap, share: bool
) -> tuple[list[PromptGroup], list[HeadMask | None]]:
    """Group requests by prompt (each by itself unless `share`), and list their masks in the order of their numbers."""
    order = {layer.name: number for number, layer in enumerate(model_map.attention)}
    numbers: dict[HeadMask | None, tuple[int, int]] = {None: (0, len(order))}
    groups: dict[tuple[int, ...] | int, list[Sequence]] = {}
    for i, request in enumerate(requests):
        if request.mask and request.mask not in numbers:
            pruned = [order[layer.name] for layer, _ in request.mask.by_layer(model_map)]
            numbers[request.mask] = (len(numbers), min(pruned, default=len(order)))
        groups.setdefault(request.prompt if share else i, []).append(Sequence(request, *numbers[request.mask]))
    return [PromptGroup.of(sequences) for sequences in groups.values()], list(numbers)
