"""Log-probabilities of given continuations, for many contexts under many head masks.

The token sequences of all requests form a tree (`tree.py`), so tokens that several of them begin with are run
once: the examples of a few-shot prompt, the context of a question's choices. A pass runs a few thousand tokens of the
tree, unpruned or under the mask with the highest first pruned layer. It keeps the inputs of the first pruned layer of
each other mask, which then runs from that layer up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.groups import number_masks
from lmeval_prune.decoding.model_runner import GPU_PASS, PASS, Chunk, ModelRunner, Statistics
from lmeval_prune.decoding.request import token_ids
from lmeval_prune.decoding.tree import TokenTree, TreeCache
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask

SEGMENT = 512  # largest number of tokens in a segment: later tokens of a long text are masked by segments
LOGITS, GPU_LOGITS = 1 << 25, 1 << 28  # largest number of logits computed at once
CHUNKS = 8  # a comparison divides this number: its reduction needs several tensors of a chunk's size

# Gets tokens, (rows,), and the logits before them, (rows, vocabulary): of the unpruned model, then of each mask,
# computed when the iterator reaches them. Yields a tensor (rows, columns) for each mask.
Reduce = Callable[[torch.Tensor, Iterator[torch.Tensor]], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class LikelihoodRequest:
    """A continuation whose log-probabilities are computed.

    Attributes:
        context: token ids before the continuation, at least one; any sequence becomes a tuple.
        continuation: token ids, at least one, as `context`.
        mask: heads to prune, or their text as for `HeadMask`; None for no pruning.
        tag: free for the caller; ignored.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    mask: HeadMask | None = None
    tag: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("context", "continuation"):
            object.__setattr__(self, name, token_ids(getattr(self, name)))
        object.__setattr__(self, "mask", HeadMask(self.mask) if isinstance(self.mask, str) else self.mask)
        if not (self.context and self.continuation):
            raise InputError("a log-likelihood needs a context and a continuation of at least one token each")


class Likelihood(NamedTuple):
    """The log-probabilities of a continuation."""

    logprobs: torch.Tensor  # of its tokens, on the CPU
    is_greedy: bool  # whether each token is the most probable


@dataclass(eq=False)
class Variant:
    """A mask, the requests under it, and their results so far."""

    mask: int
    first_layer: int  # the first pruned layer; the number of layers if nothing is pruned
    requests: dict[int, list[LikelihoodRequest]]  # by number of the text
    scored: np.ndarray  # whether it has the text, by index of log-probabilities
    needs: np.ndarray  # whether it has a text through a segment, by number of the segment
    values: torch.Tensor | None = None  # (log-probabilities, columns)

    def store(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Store values, (index, columns)."""
        if self.values is None:
            self.values = torch.zeros(len(self.scored), values.shape[1], dtype=values.dtype)
        self.values[index] = values.cpu()


class Texts:
    """The distinct texts of some requests, and where their logits are in the tree.

    Attributes:
        numbers: of the texts, by context and continuation.
        parts: of each text, in the log-probabilities of all texts.
        count: of log-probabilities.
        tree: of the texts without their last tokens, whose logits are not needed.
        paths: of each text in the tree.
        complete: texts by their last segment.
        rows: by segment: offset of a token with logits, the token whose log-probability is needed, and the index of
            this.
    """

    def __init__(self, requests: Iterable[LikelihoodRequest], longest: int) -> None:
        texts = list(dict.fromkeys((request.context, request.continuation) for request in requests))
        self.numbers = {text: number for number, text in enumerate(texts)}
        ends = list(accumulate((len(continuation) for _, continuation in texts), initial=0))
        self.parts, self.count = [slice(*part) for part in pairwise(ends)], ends[-1]
        tokens = [(context + continuation)[:-1] for context, continuation in texts]
        self.tree = TokenTree(tokens, longest)
        self.paths = [self.tree.path(sequence) for sequence in tokens]
        self.complete: dict[int, list[int]] = defaultdict(list)
        rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, ((context, continuation), path) in enumerate(zip(texts, self.paths, strict=True)):
            self.complete[path[-1]].append(number)
            first, last = len(context) - 1, len(tokens[number])  # the tokens with logits
            for segment in reversed(path):
                start = self.tree.segments[segment].start
                for position in range(max(start, first), min(start + len(self.tree.segments[segment].tokens), last)):
                    i = position - first
                    rows[segment].append((position - start, continuation[i], ends[number] + i))
                if start <= first:
                    break
        self.rows = {segment: np.array(sorted(values)) for segment, values in rows.items()}


class LikelihoodRun:
    """Computes the log-probabilities of requests, pass by pass.

    Args:
        model_map: the model.
        requests: all requests.
        memory: bytes for keys, values and kept hidden states; masks that do not fit together run one group after
            another.
        statistics: counts what runs.
        dtype: of the log-softmax; None: of the logits.
        most_tokens: largest number of tokens in a pass.

    Attributes:
        leaders: masks that lead each group of masks that fit into memory, without requests of their own.
        kept_inputs: how often a mask keeps the hidden states of a pass.
    """

    leaders: tuple[None, ...] = ()
    kept_inputs = 1
    texts: Texts  # of the running group of masks
    runner: ModelRunner

    def __init__(
        self,
        model_map: ModelMap,
        requests: Sequence[LikelihoodRequest],
        memory: int,
        statistics: Statistics,
        dtype: torch.dtype | None = None,
        most_tokens: int | None = None,
    ) -> None:
        self.model_map, self.requests, self.memory, self.dtype = model_map, requests, memory, dtype
        self.statistics = statistics
        model: Any = model_map.model
        parameter, config = next(model.parameters()), model.config.get_text_config()
        self.is_gpu, self.element_size, self.width = parameter.is_cuda, parameter.element_size(), config.hidden_size
        self.most_tokens = most_tokens or (GPU_PASS if self.is_gpu else PASS)
        self.most_rows = max((GPU_LOGITS if self.is_gpu else LOGITS) // config.vocab_size, 1)

    def results(self) -> Generator[tuple[LikelihoodRequest, Any]]:
        """Yield each request and its result after the pass of its last token."""
        numbers = number_masks((request.mask for request in self.requests), self.model_map)
        masks = sorted({request.mask for request in self.requests}, key=lambda mask: (-numbers[mask][1], numbers[mask]))
        by_mask: dict[HeadMask | None, list[LikelihoodRequest]] = {None: [], **{mask: [] for mask in masks}}
        for request in self.requests:
            by_mask[request.mask].append(request)
        longest = max(len(request.context) + len(request.continuation) for request in self.requests)
        for group in self._groups([(mask, numbers[mask][1]) for mask in masks], longest):
            longest_segment = min(SEGMENT, self.most_tokens)
            self.texts = texts = Texts((request for mask in group for request in by_mask[mask]), longest_segment)
            cache: Any = TreeCache(texts.tree)
            with ExitStack() as stack:
                self.runner = ModelRunner(self.model_map, cache, group, self.statistics, stack)
                variants = []
                for number, mask in enumerate(group):
                    by_text = defaultdict[int, list[LikelihoodRequest]](list)
                    scored, needs = np.zeros(texts.count, bool), np.zeros(len(texts.tree.segments), bool)
                    for request in by_mask[mask]:
                        text = texts.numbers[request.context, request.continuation]
                        by_text[text].append(request)
                        scored[texts.parts[text]] = needs[texts.paths[text]] = True
                    variants.append(Variant(number, numbers[mask][1], by_text, scored, needs))
                for segments in texts.tree.passes(self.most_tokens):
                    cache.start_pass(segments)
                    yield from self._run_pass(variants, segments)

    def _groups(self, masks: Sequence[tuple[HeadMask | None, int]], longest: int) -> list[list[HeadMask | None]]:
        """Divide masks with their first layers, highest first, into groups whose stored tokens fit into memory."""
        stored = longest + min(longest, self.most_tokens)  # the tokens before a pass, and its own
        layer_bytes = [
            stored * self.element_size * layer.kv_heads * (layer.key_dim + layer.head_dim)
            for layer in self.model_map.attention
        ]
        inputs = self.most_tokens * self.element_size * self.width * self.kept_inputs
        groups: list[list[HeadMask | None]] = []
        free = 0
        for mask, first in masks:
            needed = sum(layer_bytes[first:]) + inputs
            if not groups or needed > free:
                full_bytes = sum(layer_bytes) + inputs  # the first of a group runs all layers
                groups.append([*self.leaders])
                free = self.memory - full_bytes * len(self.leaders)
                needed = needed if self.leaders else full_bytes
            groups[-1].append(mask)
            free -= needed
        return groups

    def _run_pass(self, variants: Sequence[Variant], segments: range) -> Generator[tuple[LikelihoodRequest, Any]]:
        """Run segments under each mask that needs them, and yield the results that are complete."""
        first, *others = variants
        with torch.inference_mode():
            layer_inputs = self._forward(first, segments, frozenset(other.first_layer for other in others))
            self._read(first, layer_inputs)
        yield from self._complete(first, segments)
        for variant in others:
            if needed := [segment for segment in segments if variant.needs[segment]]:
                with torch.inference_mode():
                    self._read(variant, self._forward(variant, needed, frozenset(), layer_inputs))
                yield from self._complete(variant, needed)

    def _forward(
        self,
        variant: Variant,
        segments: Sequence[int],
        keep: frozenset[int],
        layer_inputs: dict[int, dict[int, torch.Tensor]] | None = None,
    ) -> dict[int, dict[int, torch.Tensor]]:
        """Run segments under a mask; return the inputs of the layers `keep` and the last layer's outputs.

        With `layer_inputs`, start at the mask's first pruned layer with these inputs. Results and `layer_inputs` are by
        segment and layer; outputs of the last layer count as inputs of a further one.
        """
        tree = self.texts.tree
        chunks = [
            Chunk(
                slot=variant.mask * len(tree.segments) + number,
                cached=tree.segments[number].start,
                mask=variant.mask,
                tokens=tree.segments[number].tokens,
                skip=len(tree.segments[number].tokens),
                keep=keep | {self.runner.layers},
            )
            for number in segments
        ]
        start, hidden = 0, None
        if layer_inputs is not None:
            start = variant.first_layer
            hidden = torch.cat([layer_inputs[number][start] for number in segments])
        _, inputs = self.runner.forward(chunks, start, hidden)
        return dict(zip(segments, inputs, strict=True))

    def _read(self, variant: Variant, outputs: dict[int, dict[int, torch.Tensor]]) -> None:
        """Compute the log-probabilities of a pass from the last layer's outputs."""
        texts, runner = self.texts, self.runner
        hidden, tables, count = [], [], 0
        for segment, by_layer in outputs.items():
            if (table := texts.rows.get(segment)) is not None:
                table = table[variant.scored[table[:, 2]]]
                offsets, index = np.unique(table[:, 0], return_inverse=True)
                hidden.append(by_layer[runner.layers][torch.from_numpy(offsets).to(runner.device)])
                tables.append(np.stack([index + count, table[:, 1], table[:, 2]]))
                count += len(offsets)
        if not count:
            return
        states, rows = torch.cat(hidden), torch.from_numpy(np.concatenate(tables, axis=1))
        for begin in range(0, count, self.most_rows):
            end = min(begin + self.most_rows, count)
            row, token, index = rows[:, (rows[0] >= begin) & (rows[0] < end)]
            row, token = (row - begin).to(runner.device), token.to(runner.device)
            logprobs = torch.log_softmax(runner.head(states[begin:end], variant.mask), -1, dtype=self.dtype)
            is_greedy = logprobs.argmax(-1)[row] == token
            values = torch.stack([logprobs[row, token], is_greedy.to(logprobs.dtype)], dim=1)
            variant.store(index, values)

    def _complete(self, variant: Variant, segments: Iterable[int]) -> Generator[tuple[LikelihoodRequest, Any]]:
        for segment in segments:
            for number in self.texts.complete.get(segment, ()):
                if requests := variant.requests.get(number):
                    assert variant.values is not None
                    result = self._result(variant.values[self.texts.parts[number]].clone())
                    yield from ((request, result) for request in requests)

    def _result(self, values: torch.Tensor) -> Any:
        return Likelihood(values[:, 0].contiguous(), bool(values[:, 1].all()))


class ComparisonRun(LikelihoodRun):
    """Reduces the logits of the unpruned model and of masks, side by side at the same positions of the texts.

    All masks run a pass before its logits are computed, chunk by chunk.

    Args:
        args: as for `LikelihoodRun`; a result is a tensor (tokens of its continuation, columns), on the CPU.
        reduce: called with each chunk.
    """

    leaders = (None,)
    kept_inputs = 2  # also the last layer's outputs, until all masks have run

    def __init__(self, *args: Any, reduce: Reduce) -> None:
        super().__init__(*args)
        self.reduce = reduce
        self.most_rows = max(self.most_rows // CHUNKS, 1)

    def _run_pass(self, variants: Sequence[Variant], segments: range) -> Generator[tuple[LikelihoodRequest, Any]]:
        """Run segments under all masks, reduce their logits, and yield the results that are complete."""
        dense, *others = variants
        with torch.inference_mode():
            layer_inputs = self._forward(dense, segments, frozenset(other.first_layer for other in others))
            outputs = [layer_inputs, *(self._forward(other, segments, frozenset(), layer_inputs) for other in others)]
            self._reduce(variants, outputs)
        for variant in others:
            yield from self._complete(variant, segments)

    def _reduce(self, variants: Sequence[Variant], outputs: Sequence[dict[int, dict[int, torch.Tensor]]]) -> None:
        """Reduce the logits of a pass, given the last layer's outputs by mask and segment."""
        texts, runner = self.texts, self.runner
        tables = {segment: texts.rows[segment] for segment in outputs[0] if segment in texts.rows}
        if not tables:
            return
        _, tokens, index = torch.from_numpy(np.concatenate(list(tables.values()))).T
        offsets = {segment: torch.from_numpy(table[:, 0]).to(runner.device) for segment, table in tables.items()}
        states = [
            torch.cat([by_segment[segment][runner.layers][rows] for segment, rows in offsets.items()])
            for by_segment in outputs
        ]
        for begin in range(0, len(tokens), self.most_rows):
            chunk = slice(begin, begin + self.most_rows)
            logits = (runner.head(rows[chunk], variant.mask) for rows, variant in zip(states, variants, strict=True))
            reduced = self.reduce(tokens[chunk].to(runner.device), logits)
            for variant, values in zip(variants[1:], reduced, strict=True):
                variant.store(index[chunk], values)

    def _result(self, values: torch.Tensor) -> torch.Tensor:
        return values
