"""Running requests, and the state that requests with the same prompt share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.kv_cache import SlotCopy
from lmeval_prune.decoding.prefixes import CommonPrefix, SharedPrefix
from lmeval_prune.decoding.request import Request
from lmeval_prune.interventions.head_mask import HeadMask


@dataclass(eq=False)
class Sequence:
    """A request and its answer so far."""

    request: Request
    mask: int  # number of its mask
    first_layer: int  # the first pruned layer; the number of layers if nothing is pruned
    max_tokens: int  # largest length of the answer
    group: PromptGroup = field(init=False)
    prompt: tuple[int, ...] = ()  # tokens of the prompt after the group's prefix
    slot: int = -1  # slot in the cache
    cached: int = 0  # number of tokens of prompt and answer in the slot
    answer: list[int] = field(default_factory=list)  # the last token is not in the cache yet
    ended: bool = False
    end_tokens: tuple[int, ...] = ()  # set when the sequence starts
    kept_layers: frozenset[int] = frozenset()  # layers whose inputs are kept for followers; empty unless it leads

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer, without the prefix."""
        return [*self.prompt, *self.answer]


@dataclass(eq=False)
class PromptGroup:
    """Requests with the same prompt."""

    leader: Sequence
    followers: deque[Sequence]  # not started, by first pruned layer, highest first
    unanswered: int  # number of requests without an answer
    prefix: SharedPrefix | None = None
    # The prompt and answer to check (if `follow=0`: the prompt); set for followers.
    leader_tokens: list[int] = field(default_factory=list)
    # Inputs of `kept_layers` of the leader at its tokens, in pieces (tokens, width).
    layer_inputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    # The leader's keys and values in the layers below the highest `first_layer` of a follower.
    leader_cache: list[SlotCopy] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """The leader and the followers that have not started."""
        return [self.leader, *self.followers]

    @property
    def longest(self) -> int:
        """The largest number of tokens in a slot."""
        copied = len(self.prefix.tokens) if self.prefix and self.prefix.is_copied else 0
        return copied + max(len(sequence.prompt) + sequence.max_tokens for sequence in self.sequences)


def number_masks(masks: Iterable[HeadMask | None], model_map: ModelMap) -> dict[HeadMask | None, tuple[int, int]]:
    """Return the number and the first pruned layer of each mask; no mask is the first."""
    order = {layer.name: number for number, layer in enumerate(model_map.attention)}
    numbers: dict[HeadMask | None, tuple[int, int]] = {None: (0, len(order))}
    for mask in masks:
        if mask and mask not in numbers:
            pruned = [order[layer.name] for layer, _ in mask.by_layer(model_map)]
            numbers[mask] = (len(numbers), min(pruned, default=len(order)))
    return numbers


def prompt_groups(
    requests: Items[Request], model_map: ModelMap, share: bool, context: int
) -> tuple[list[PromptGroup], list[HeadMask | None]]:
    """Group requests by prompt (each alone unless `share`), and number their masks for `Sequence.mask`.

    Prompt and answer have at most `context` tokens.
    """
    numbers = number_masks((request.mask for request in requests), model_map)
    by_prompt: dict[tuple[int, ...] | int, list[Sequence]] = {}
    for i, request in enumerate(requests):
        longest = min(request.params.max_new_tokens, context - len(request.prompt))
        sequence = Sequence(request, *numbers[request.mask], longest, prompt=request.prompt)
        by_prompt.setdefault(request.prompt if share else i, []).append(sequence)
    groups = []
    for sequences in by_prompt.values():
        leader, *followers = sorted(sequences, key=lambda sequence: -sequence.first_layer)
        leader.kept_layers = frozenset(follower.first_layer for follower in followers)
        groups.append(PromptGroup(leader, deque(followers), unanswered=len(sequences)))
        for sequence in sequences:
            sequence.group = groups[-1]
    return groups, list(numbers)


def share_prefixes(
    groups: Items[PromptGroup],
    prefixes: Items[CommonPrefix],
    longest_copy: int,
    size: Callable[[SharedPrefix], int],
    memory: int,
) -> int:
    """Assign common prefixes to the groups whose prompts begin with them.

    Args:
        groups: prompt groups, changed in place.
        prefixes: of their prompts.
        longest_copy: largest number of tokens of a prefix that is copied into slots.
        size: returns the bytes of a prefix.
        memory: bytes for all prefixes. Copied ones, which leave as many tokens in the slots, have a quarter of them.
            Those that save less are left out.

    Returns:
        The bytes of all prefixes.
    """
    by_prompt: dict[tuple[int, ...], list[PromptGroup]] = {}
    for group in groups:
        by_prompt.setdefault(group.leader.request.prompt, []).append(group)
    used = {True: 0, False: 0}  # by whether prefixes are copied
    for common in sorted(prefixes, key=lambda prefix: -prefix.saved):
        sharing = [group for prompt in common.prompts for group in by_prompt[prompt]]
        sequences = [sequence for group in sharing for sequence in group.sequences]
        first_layers = {sequence.mask: sequence.first_layer for sequence in sequences}
        is_copied = len(common.tokens) <= longest_copy
        prefix = SharedPrefix(common.tokens, first_layers, len(sequences), is_copied)
        needed = size(prefix)
        if sum(used.values()) + needed > memory or (is_copied and used[True] + needed > memory // 4):
            continue
        used[is_copied] += needed
        for group in sharing:
            group.prefix = prefix
        for sequence in sequences:
            sequence.prompt = sequence.request.prompt[len(common.tokens) :]
    return sum(used.values())
