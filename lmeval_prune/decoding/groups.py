"""Running requests, and what they share: the prompt of a group, and tokens with which several prompts begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.kv_cache import KVCache, Prefix, SlotCopy
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.request import Request
from lmeval_prune.decoding.tree import common_length
from lmeval_prune.interventions.head_mask import HeadMask

Prompt = tuple[int, ...]


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
    answer: list[int] = field(default_factory=list)  # the last token is not in the cache yet
    ended: bool = False

    @property
    def cached(self) -> int:
        """The number of tokens of prompt and answer in the slot."""
        return len(self.prompt) + len(self.answer) - 1


@dataclass(eq=False)
class PromptGroup:
    """Requests with the same prompt."""

    leader: Sequence
    followers: deque[Sequence]  # not started, by first pruned layer, highest first
    prefix: SharedPrefix | None = None
    # of the leader at the prompt: inputs of the followers' first layers, (tokens, width); keys and values below these
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
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
    by_prompt: dict[Prompt | int, list[Sequence]] = {}
    for i, request in enumerate(requests):
        longest = min(request.params.max_new_tokens, context - len(request.prompt))
        sequence = Sequence(request, *numbers[request.mask], longest, prompt=request.prompt)
        by_prompt.setdefault(request.prompt if share else i, []).append(sequence)
    groups = []
    for sequences in by_prompt.values():
        leader, *followers = sorted(sequences, key=lambda sequence: -sequence.first_layer)
        groups.append(PromptGroup(leader, deque(followers)))
        for sequence in sequences:
            sequence.group = groups[-1]
    return groups, list(numbers)


@dataclass(eq=False)
class SharedPrefix:
    """The first tokens of several prompts, with their keys and values under each mask.

    The mask with the highest first pruned layer runs first, through all layers. Each other mask runs from its first
    pruned layer up, on the inputs that the first run kept, when a request needs it.
    """

    tokens: Prompt
    first_layers: Mapping[int, int]  # by number of the mask: its first pruned layer
    unanswered: int  # number of requests without an answer; 0 frees the memory
    is_copied: bool  # into the slots of the sequences
    _by_mask: dict[int, Prefix] = field(default_factory=dict)
    _inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # of layers, (tokens, width)

    def for_mask(self, mask: int, runner: ModelRunner) -> Prefix:
        """Return keys and values under a mask; run the tokens if they have not run yet."""
        if not self._by_mask:
            leader = max(self.first_layers, key=lambda number: self.first_layers[number])
            others = {first for number, first in self.first_layers.items() if number != leader}
            self._by_mask[leader] = self._run(runner, leader, 0, frozenset(others - {0, runner.layers}))
        if mask not in self._by_mask:
            first, base = self.first_layers[mask], next(iter(self._by_mask.values()))
            if first < runner.layers:
                base = Prefix(base.length, [*base.layers[:first], *self._run(runner, mask, first).layers])
            self._by_mask[mask] = base
        if len(self._by_mask) == len(self.first_layers):
            self._inputs.clear()
        return self._by_mask[mask]

    def _run(self, runner: ModelRunner, mask: int, start: int, keep: frozenset[int] = frozenset()) -> Prefix:
        """Run the tokens from layer `start` up, and return the keys and values of these layers."""
        length, pieces = len(self.tokens), []
        cache = KVCache(1, length)
        with runner.storing_in(cache):
            for begin in range(0, length, runner.largest_pass):
                part = slice(begin, begin + runner.largest_pass)
                tokens, hidden = self.tokens[part], self._inputs[start][part] if start else None
                chunk = Chunk(0, begin, mask, tokens, len(tokens), keep)
                pieces.append(runner.forward([chunk], start, hidden)[1][0])
        self._inputs |= {layer: torch.cat([piece[layer] for piece in pieces]) for layer in keep}
        layers = range(start, runner.layers)
        return Prefix(length, [SlotCopy(cache.keys[layer][0], cache.values[layer][0]) for layer in layers])

    def answered(self) -> None:
        """Count an answered request; free the memory after the last."""
        self.unanswered -= 1
        if not self.unanswered:
            self._by_mask.clear()
            self._inputs.clear()

    def size(self, layers: int, stored_bytes: int, input_bytes: int) -> int:
        """Return the bytes for all masks; a token has `stored_bytes` in a layer, `input_bytes` if it is an input."""
        others = sorted(self.first_layers.values())[:-1]
        inputs = {*others} - {0, layers}
        return len(self.tokens) * (
            stored_bytes * (layers + sum(layers - first for first in others)) + input_bytes * len(inputs)
        )


@dataclass(frozen=True)
class CommonPrefix:
    """The first tokens of several prompts."""

    tokens: Prompt
    prompts: Items[Prompt]
    saved: int  # tokens × layers that do not run


@dataclass(frozen=True)
class _Cluster:
    """Neighbours in the sorted list of prompts, with a prefix or divided into parts, whichever saves more."""

    first: int
    last: int
    masks: Mapping[int, int]  # first pruned layers
    layers_run: int  # layers that run the first token of each prompt, summed over prompts and masks
    saved: int = 0  # tokens × layers that do not run
    depth: int = 0  # tokens of the prefix; 0: each part has its own
    parts: tuple[_Cluster, ...] = ()


def common_prefixes(prompts: Mapping[Prompt, Items[tuple[int, int]]], layers: int, least: int) -> list[CommonPrefix]:
    """Choose at most one prefix for each prompt, so that few tokens run.

    A prefix is shared by at least two prompts, is shorter than each of them, and saves at least `least` tokens in all
    layers. Of nested prefixes, either the shorter one or those within it are chosen.

    Args:
        prompts: by prompt, the mask of each sequence: its number and its first pruned layer.
        layers: number of layers.
        least: smallest number of tokens.
    """

    def count_layers(first_layers: Iterable[int]) -> int:
        """Return the layers that run a token: all for the highest mask, and those from its first up for each other."""
        counts = sorted(layers - first for first in first_layers)
        return layers + sum(counts[1:])

    ordered = sorted(prompts)
    depths = [min(common_length(a, b), len(a) - 1, len(b) - 1) for a, b in pairwise(ordered)]
    clusters = []  # valid at the ends of each cluster
    for i, prompt in enumerate(ordered):
        masks = dict(prompts[prompt])
        clusters.append(_Cluster(i, i, masks, count_layers(first for _, first in prompts[prompt])))
    for i in sorted(range(len(depths)), key=lambda i: -depths[i]):
        left, right = clusters[i], clusters[i + 1]
        masks = {**left.masks, **right.masks}
        layers_run, saved = left.layers_run + right.layers_run, left.saved + right.saved
        saved_together = depths[i] * (layers_run - count_layers(masks.values()))
        joined = _Cluster(left.first, right.last, masks, layers_run, saved, 0, (left, right))
        if saved_together >= max(saved, least * layers, 1):
            joined = _Cluster(left.first, right.last, masks, layers_run, saved_together, depths[i])
        clusters[left.first] = clusters[right.last] = joined
    chosen, stack = [], clusters[-1:]
    while stack:
        cluster = stack.pop()
        stack += cluster.parts
        if cluster.depth:
            sharing = ordered[cluster.first : cluster.last + 1]
            chosen.append(CommonPrefix(sharing[0][: cluster.depth], sharing, cluster.saved))
    return chosen


def share_prefixes(
    groups: Items[PromptGroup], layers: int, least: int, longest_copy: int, sizes: tuple[int, int], memory: int
) -> int:
    """Assign common prefixes to the groups whose prompts begin with them, those that save most first.

    Args:
        groups: with distinct prompts; changed in place.
        layers: number of the model's layers.
        least: smallest number of tokens that a prefix saves.
        longest_copy: largest number of tokens of a prefix that is copied into slots.
        sizes: bytes of a token that is stored in a layer, and of a layer's input.
        memory: bytes for all prefixes. Copied ones, which leave as many tokens in the slots, have a quarter of them.

    Returns:
        The bytes of all prefixes.
    """
    by_prompt = {group.leader.request.prompt: group for group in groups}
    masks = {
        prompt: [(sequence.mask, sequence.first_layer) for sequence in group.sequences]
        for prompt, group in by_prompt.items()
    }
    used = {True: 0, False: 0}  # by whether prefixes are copied
    for common in sorted(common_prefixes(masks, layers, least), key=lambda prefix: -prefix.saved):
        sequences = [sequence for prompt in common.prompts for sequence in by_prompt[prompt].sequences]
        first_layers = {sequence.mask: sequence.first_layer for sequence in sequences}
        is_copied = len(common.tokens) <= longest_copy
        prefix = SharedPrefix(common.tokens, first_layers, len(sequences), is_copied)
        needed = prefix.size(layers, *sizes)
        if sum(used.values()) + needed > memory or (is_copied and used[True] + needed > memory // 4):
            continue
        used[is_copied] += needed
        for sequence in sequences:
            sequence.group.prefix = prefix
            sequence.prompt = sequence.request.prompt[len(common.tokens) :]
    return sum(used.values())
