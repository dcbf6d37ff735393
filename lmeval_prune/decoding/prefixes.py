"""Tokens with which several prompts begin, such as few-shot examples: they run once for each mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch

from lmeval_prune.decoding.attention_layout import Prefix
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner

Prompt = tuple[int, ...]
T = TypeVar("T")
PASS = 2048  # largest number of tokens in a pass


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

    def under(self, mask: int, runner: ModelRunner) -> Prefix:
        """Return keys and values under a mask; run the tokens if they have not run yet."""
        if not self._by_mask:
            leader = max(self.first_layers, key=lambda number: self.first_layers[number])
            others = {first for first in self.first_layers.values() if first < runner.layers}
            self._by_mask[leader] = self._run(runner, leader, 0, frozenset(others))
        if mask not in self._by_mask:
            first, base = self.first_layers[mask], next(iter(self._by_mask.values()))
            if first < runner.layers:
                own = self._run(runner, mask, first)
                base = Prefix(own.length, (*base.keys[:first], *own.keys), (*base.values[:first], *own.values))
            self._by_mask[mask] = base
        if len(self._by_mask) == len(self.first_layers):
            self._inputs.clear()
        return self._by_mask[mask]

    def _run(self, runner: ModelRunner, mask: int, start: int, keep: frozenset[int] = frozenset()) -> Prefix:
        """Run the tokens from layer `start` up, and return the keys and values of these layers."""
        length, pieces = len(self.tokens), []
        cache = KVCache(1, length)
        with runner.storing_in(cache):
            for begin in range(0, length, PASS):
                tokens = self.tokens[begin : begin + PASS]
                hidden = self._inputs[start][begin : begin + PASS] if start else None
                chunk = Chunk(0, begin, mask, tokens, len(tokens) - 1, keep)
                pieces.append(runner.forward([chunk], start, hidden)[1][0])
        self._inputs |= {layer: torch.cat([piece[layer] for piece in pieces]) for layer in keep}
        layers = range(start, runner.layers)
        return Prefix(length, *([storage[layer][0] for layer in layers] for storage in (cache.keys, cache.values)))

    def answered(self) -> None:
        """Count an answered request; free the memory after the last."""
        self.unanswered -= 1
        if not self.unanswered:
            self._by_mask.clear()
            self._inputs.clear()

    def size(self, layers: int, stored: int, kept: int) -> int:
        """Return the bytes for all masks; a token has `stored` bytes in a layer, and `kept` bytes if it is an input."""
        others = sorted(self.first_layers.values())[:-1]
        inputs = {first for first in others if first < layers}
        return len(self.tokens) * (stored * (layers + sum(layers - first for first in others)) + kept * len(inputs))


@dataclass(frozen=True)
class _Cluster:
    """Neighbours in the sorted list of prompts; their prefix, or the clusters that are better than it."""

    first: int
    last: int
    depth: int = 0  # tokens of the prefix
    saved: int = 0  # tokens that do not run
    parts: tuple[_Cluster, ...] = ()


def common_prefixes(prompts: Iterable[Prompt], least: int) -> dict[Prompt, int]:
    """Choose a prefix for each prompt, so that few tokens run.

    A prefix is shared by at least two prompts, is shorter than each of them, and saves at least `least` tokens. Of
    nested prefixes, either the shorter one or those within it are chosen.

    Returns:
        Lengths of the prefixes; prompts without a prefix are left out.
    """
    ordered = sorted(set(prompts))
    depths = [min(common_length(a, b), len(a) - 1, len(b) - 1) for a, b in pairwise(ordered)]
    clusters = [_Cluster(i, i) for i in range(len(ordered))]  # valid at the ends of each cluster
    for i in sorted(range(len(depths)), key=lambda i: -depths[i]):
        if depths[i] < 1:
            break
        left, right = clusters[i], clusters[i + 1]
        saved, together = left.saved + right.saved, (right.last - left.first) * depths[i]
        joined = _Cluster(left.first, right.last, 0, saved, (left, right))
        if together >= max(saved, least):
            joined = _Cluster(left.first, right.last, depths[i], together)
        clusters[left.first] = clusters[right.last] = joined
    lengths: dict[Prompt, int] = {}
    position = 0
    while position < len(ordered):
        stack = [clusters[position]]
        position = stack[0].last + 1
        while stack:
            cluster = stack.pop()
            stack += cluster.parts
            if cluster.depth:
                lengths |= dict.fromkeys(ordered[cluster.first : cluster.last + 1], cluster.depth)
    return lengths


def common_length(tokens: Sequence[T], others: Sequence[T]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))
