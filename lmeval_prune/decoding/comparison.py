"""Logits of the unpruned model and of many head masks, side by side at the same positions of given texts.

The masks run as for log-likelihoods (`likelihood.py`). All of them run a pass before its logits are computed, chunk by
chunk, and a function reduces each chunk to a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.likelihood import LikelihoodRequest, LikelihoodRun, Variant

CHUNKS = 8  # a chunk of a log-likelihood's logits is divided by this: a reduction needs several tensors of its size

# Gets tokens, (rows,), and the logits before them, (rows, vocabulary): of the unpruned model, then of each mask,
# computed when the iterator reaches them. Yields a tensor (rows, columns) for each mask.
Reduce = Callable[[torch.Tensor, Iterator[torch.Tensor]], Iterator[torch.Tensor]]


class ComparisonRun(LikelihoodRun):
    """Reduces the logits of the unpruned model and of masks.

    Args:
        model_map, memory: as for `LikelihoodRun`.
        requests: all requests; the result of each is a tensor (tokens of its continuation, columns), on the CPU.
        reduce: called with each chunk.
    """

    leaders = (None,)
    kept_inputs = 2  # also the last layer's outputs, until all masks have run

    def __init__(self, model_map: ModelMap, requests: Sequence[LikelihoodRequest], memory: int, reduce: Reduce) -> None:
        super().__init__(model_map, requests, memory)
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
                if variant.values is None:
                    variant.values = torch.zeros(texts.count, *values.shape[1:], dtype=values.dtype)
                variant.values[index[chunk]] = values.cpu()

    def _result(self, variant: Variant, part: slice) -> torch.Tensor:
        assert variant.values is not None
        return variant.values[part].clone()
