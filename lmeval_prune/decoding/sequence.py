"""Answers on their way, and what those with one prompt share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.drafts import GrowingLookup, Lookup
from lmeval_prune.decoding.kv_cache import Taken
from lmeval_prune.decoding.request import Request
from lmeval_prune.interventions.head_mask import HeadMask


@dataclass(eq=False)
class Sequence:
    """A request that is being decoded.

    Attributes:
        request: what is decoded.
        mask: number of its mask.
        first: its first pruned layer; the number of layers, if nothing is pruned.
        group: the requests with its prompt.
        slot: where its keys and values are.
        stored: how many tokens (of prompt and answer) the slot holds.
        answer: the tokens chosen so far; the last one is not stored yet.
        ended: whether the answer is complete.
        own: lookup in prompt and answer; made when drafts are first asked for.
    """

    request: Request
    mask: int
    first: int
    group: PromptGroup = field(init=False)
    slot: int = -1
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    ended: bool = False
    own: GrowingLookup | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *self.answer]

    def kept_layers(self) -> frozenset[int]:
        """Layers whose input is kept for followers while this sequence runs."""
        if self is not self.group.leader or self.group.led:
            return frozenset()
        return frozenset(follower.first for follower in self.group.followers)


@dataclass(eq=False)
class PromptGroup:
    """The requests with one prompt.

    Attributes:
        leader: the sequence that is decoded first.
        followers: sequences that have not started, by first pruned layer, highest first.
        led: the tokens that followers follow: the leader's prompt, and its answer.
        kept: layer → what entered it at the tokens of `led`, in pieces (tokens, width).
        shared: the leader's keys and values below the highest first layer of a follower.
        answers: lookup in the answers so far, for drafts.
        left: requests without an answer yet.
    """

    leader: Sequence
    followers: deque[Sequence]
    led: list[int] = field(default_factory=list)
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    shared: list[Taken] = field(default_factory=list)
    answers: Lookup | None = None
    left: int = 0

    @classmethod
    def of(cls, sequences: list[Sequence]) -> PromptGroup:
        """Group sequences; the first of those with the highest first layer leads."""
        leader, *others = sorted(sequences, key=lambda sequence: -sequence.first)
        group = cls(leader, deque(others), left=len(sequences))
        for sequence in sequences:
            sequence.group = group
        return group


def prompt_groups(
    requests: Items[Request], model_map: ModelMap, share: bool
) -> tuple[list[PromptGroup], list[HeadMask | None]]:
    """Group requests by prompt (each by itself unless `share`), and list their masks in the order of their numbers."""
    order = {layer.name: place for place, layer in enumerate(model_map.attention)}
    numbers: dict[HeadMask | None, tuple[int, int]] = {None: (0, len(order))}
    groups: dict[tuple[int, ...] | int, list[Sequence]] = {}
    for place, request in enumerate(requests):
        if request.mask and request.mask not in numbers:
            lost = [order[layer.name] for layer, _ in request.mask.by_layer(model_map)]
            numbers[request.mask] = (len(numbers), min(lost, default=len(order)))
        groups.setdefault(request.prompt if share else place, []).append(Sequence(request, *numbers[request.mask]))
    return [PromptGroup.of(sequences) for sequences in groups.values()], list(numbers)
