"""Running requests, and the state that requests with the same prompt share."""

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
    """A request and its answer so far.

    Attributes:
        request: prompt and parameters.
        mask: number of its mask.
        first_layer: its first pruned layer; the number of layers if nothing is pruned.
        group: the requests with the same prompt.
        slot: slot in the cache.
        cached: number of tokens of prompt and answer in the cache.
        answer: tokens so far; the last one is not in the cache yet.
        ended: whether the answer is complete.
        end_tokens, max_tokens: end tokens and largest length of the answer, set when the sequence starts.
        kept_layers: layers whose inputs are kept for followers; empty unless the sequence is a leader.
    """

    request: Request
    mask: int
    first_layer: int
    group: PromptGroup = field(init=False)
    slot: int = -1
    cached: int = 0
    answer: list[int] = field(default_factory=list)
    ended: bool = False
    end_tokens: tuple[int, ...] = ()
    max_tokens: int = 0
    kept_layers: frozenset[int] = frozenset()

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.request.prompt, *self.answer]


@dataclass(eq=False)
class PromptGroup:
    """Requests with the same prompt.

    Attributes:
        leader: the sequence that decodes first.
        followers: the sequences that have not started, by first pruned layer, highest first.
        unanswered: number of requests without an answer.
        leader_tokens: prompt and answer of the leader, for followers to check.
        layer_inputs: by layer, its inputs at `leader_tokens`, in pieces (tokens, width).
        leader_cache: the leader's keys and values below the highest first pruned layer of a follower.
    """

    leader: Sequence
    followers: deque[Sequence]
    unanswered: int
    leader_tokens: list[int] = field(default_factory=list)
    layer_inputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    leader_cache: list[SlotCopy] = field(default_factory=list)


def prompt_groups(
    requests: Items[Request], model_map: ModelMap, share: bool
) -> tuple[list[PromptGroup], list[HeadMask | None]]:
    """Group requests by prompt (each alone unless `share`), and number their masks for `Sequence.mask`."""
    order = {layer.name: number for number, layer in enumerate(model_map.attention)}
    numbers: dict[HeadMask | None, tuple[int, int]] = {None: (0, len(order))}  # number and first pruned layer
    by_prompt: dict[tuple[int, ...] | int, list[Sequence]] = {}
    for i, request in enumerate(requests):
        if request.mask and request.mask not in numbers:
            pruned = [order[layer.name] for layer, _ in request.mask.by_layer(model_map)]
            numbers[request.mask] = (len(numbers), min(pruned, default=len(order)))
        by_prompt.setdefault(request.prompt if share else i, []).append(Sequence(request, *numbers[request.mask]))
    groups = []
    for sequences in by_prompt.values():
        leader, *followers = sorted(sequences, key=lambda sequence: -sequence.first_layer)
        leader.kept_layers = frozenset(follower.first_layer for follower in followers)
        groups.append(PromptGroup(leader, deque(followers), unanswered=len(sequences)))
        for sequence in sequences:
            sequence.group = groups[-1]
    return groups, list(numbers)
