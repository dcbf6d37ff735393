"""First-order scores: what the loss would change by if a head or channel were removed.

With S = W ⊙ ∂L/∂W, a score sums over all weights of a head (rows of its query, key and value projections, columns of
the output projection) or channel (rows of gate and up, a column of down). The sum of a key-value head is divided
equally among its query heads, so that a group's score is the sum over all its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap, Rows
from lmeval_prune.architectures.blocks import in_features, is_transposed, out_features, weight_of
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import Batch, CalibrationText
from lmeval_prune.pruners.parts import Part, Removed

Gradients = dict[nn.Module, Tensor]  # by projection, (outputs, inputs)


@dataclass(frozen=True)
class LlmPruner(Pruner):
    """LLM-Pruner: scores heads and channels by Σ|S| of the loss on calibration text, its first Taylor term."""

    reads_text: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True
    allocation: ClassVar[str] = "uniform"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        found = gradients(model_map, self.require_text(text), projections_of(parts))
        return Scores(structure_sums(parts, lambda module: weight_of(module).double().cpu() * found[module]))


@dataclass(frozen=True)
class Gisp(LlmPruner):
    """GISP, global iterative structured pruning (arXiv 2510.18030): one ranking of all heads and channels.

    Sums are divided by a number of weights, so that all structures can be compared. Scores are computed again at each
    of many steps (`steps`), without training between them.

    Attributes:
        normalize: divisor of a sum: `size`: the number of weights of the head or channel; `released`: the constants of
            the released code, 4·(columns of a head)·(width of the model) and (matrices of the block)·(channels of the
            block); `none`.
    """

    allocation: ClassVar[str] = "joint"
    normalize: Literal["size", "released", "none"] = "size"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        sums = super().scores(model_map, text, parts, removed).values
        divisors: dict[str, Any] = dict.fromkeys(sums, 1.0)
        if self.normalize == "size":
            divisors = structure_sums(parts, lambda module: torch.ones(weight_of(module).shape, dtype=torch.float64))
        elif self.normalize == "released":
            for part in parts:
                if isinstance(part.block, FeedForward):
                    divisors[part.key] = float((len(part.block.parts) + 1) * part.size)
                else:
                    width = in_features(part.projection) // part.size
                    divisors[part.key] = 4.0 * width * out_features(part.projection)
        return Scores({key: total / divisors[key] for key, total in sums.items()})


def projections_of(parts: Sequence[Part]) -> list[nn.Module]:
    """Return all projections with rows or columns of these parts."""
    modules: list[nn.Module] = []
    for part in parts:
        block = part.block
        others = [block.rows(n, 0).module for n in "qkv"] if isinstance(block, AttentionLayer) else block.parts.values()
        modules += [part.projection, *others]
    return list(dict.fromkeys(modules))


def structure_sums(parts: Sequence[Part], terms: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Sum the absolute terms of all weights of each head and channel, by part key; `terms` are (outputs, inputs)."""

    def summed(module: nn.Module, axis: int) -> Tensor:
        return terms(module).abs().sum(axis)

    def row_sum(lines: Gradients, rows: Rows) -> Tensor:
        return lines[rows.module][rows.start : rows.stop].sum()

    sums = {}
    for part in parts:
        block, total = part.block, summed(part.projection, 0).unflatten(0, (part.size, -1)).sum(1)
        if isinstance(block, AttentionLayer):
            lines = {module: summed(module, 1) for module in {block.rows(name, 0).module for name in "qkv"}}
            query = torch.stack([row_sum(lines, block.rows("q", head)) for head in range(block.heads)])
            pairs = [(block.rows("k", group), block.rows("v", group)) for group in range(block.kv_heads)]
            shared = torch.stack([row_sum(lines, key) + row_sum(lines, value) for key, value in pairs])
            total = total + query + shared.repeat_interleave(block.group_size) / block.group_size
        else:
            for name, module in block.parts.items():
                span = block.rows(name)
                total = total + summed(module, 1)[span.start : span.stop]
        sums[part.key] = total
    return sums


def gradients(model_map: ModelMap, text: CalibrationText, projections: Sequence[nn.Module]) -> Gradients:
    """Compute gradients of a text's mean loss on the tokens that count, by projection, in float32 or better."""
    model = model_map.model
    total = sum(int(_predicted(batch).sum()) for batch in text.batches)
    if not total:
        raise InputError("the calibration text has no token that follows another one; give longer windows")
    found: Gradients = {}
    for module in projections:
        weight: Any = weight_of(module)
        found[module] = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))
    with ExitStack() as stack, torch.enable_grad():
        weights = {id(module.weight) for module in projections}
        for parameter in model.parameters():  # gradients of these weights only; the settings are restored
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.requires_grad_(id(parameter) in weights)
            parameter.grad = None
        for batch, inputs in text.inputs(model):
            predicted = _predicted(batch)
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            nn.functional.cross_entropy(logits[predicted], batch.ids[:, 1:][predicted], reduction="sum").backward()
            for module, gradient in found.items():
                weight = module.weight
                grad = weight.grad.T if is_transposed(module) else weight.grad
                gradient += grad.to("cpu", gradient.dtype) / total
                weight.grad = None
    return found


def _predicted(batch: Batch) -> Tensor:
    real = batch.real.bool()
    return batch.counted[:, 1:].bool() & real[:, 1:] & real[:, :-1]
