"""LLM-Pruner: by how much the loss would change, to first order, if a head or channel were not there.

With S = W ⊙ ∂L/∂W, summed over all that goes with a head (rows of its query, key and value projections, columns of the
output projection) or a channel (rows of gate and up, a column of down). A key-value head belongs to its query heads in
equal parts, so that a group's score is the sum over all that goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap, Rows
from lmeval_prune.architectures.blocks import is_transposed, projection_in
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.base import ReadingPruner, Scored, Scores, needed, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import weight_of
from lmeval_prune.pruners.selection import Removed

Gradients = dict[nn.Module, Tensor]  # of projections, (outputs, inputs)
IMPORTANCES = ("first", "second", "mix", "vectorize")


@dataclass(frozen=True)
class LlmPruner(ReadingPruner):
    """Scores heads and channels by a Taylor expansion of the loss on calibration text.

    Attributes:
        importance: `first`: Σ|S|; `second`: ½·Σ|W²·Ĥ|, Ĥ the mean over windows of the squared gradient; `mix`:
            Σ|S − ½·W²·Ĥ|; `vectorize`: the sum over rows and columns of |ΣS| of each.
    """

    allocation: ClassVar[str] = "uniform"
    importance: str = "first"

    def __post_init__(self) -> None:
        if self.importance not in IMPORTANCES:
            raise InputError(f"importance={self.importance!r} is not known; use {', '.join(IMPORTANCES)}")

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse what has no gradients, no next token or unknown projections; see the base class."""
        name = pruner_name(self)
        if getattr(model_map.model, "is_quantized", False):
            raise InputError(f"{name} needs gradients, which a quantised model lacks; load it in float32 or bfloat16")
        if not model_map.predicts_next_token:
            raise InputError(
                f"{name} needs the loss of a causal language model; this {model_map.model_type} model is none"
            )
        for layer in model_map.attention:
            if projection_in(layer.module, layer.family.query) is None:
                raise InputError(f"{name} needs the query projection of {layer.name}, which is not known")

    def scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        heads: bool,
        channels: bool,
        removed: tuple[Removed, Removed] = ({}, {}),
    ) -> Scored:
        """Both from one pass; see the base class."""
        self.check_model(model_map)
        projections = [*(_of_heads(model_map) if heads else ()), *(_of_channels(model_map) if channels else ())]
        squared = self.importance in ("second", "mix")
        first, second = gradients(model_map, needed(self, text), projections, squared)

        def terms(module: nn.Module) -> Tensor:
            weight = weight_of(module).double().cpu()
            taken = weight * first[module] if self.importance != "second" else torch.zeros_like(weight)
            return taken - 0.5 * weight.square() * second[module] if squared else taken

        return structure_sums(model_map, terms, heads, channels, self.importance == "vectorize")


def structure_sums(
    model_map: ModelMap,
    terms: Callable[[nn.Module], Tensor],
    heads: bool,
    channels: bool,
    by_line: bool = False,
    size: Callable[[Tensor], Tensor] = torch.abs,
) -> Scored:
    """Sums over all weights that go with each head and channel.

    Args:
        model_map: of the model.
        terms: of each weight of a projection, (outputs, inputs).
        heads, channels: which are asked for.
        by_line: sum each row of those that compute, and each column of those that read, before its size is taken.
        size: of a term, or of such a sum.
    """

    def summed(module: nn.Module, axis: int) -> Tensor:
        found = terms(module)
        return size(found.sum(axis)) if by_line else size(found).sum(axis)

    of_heads: Scores = {}
    for layer in model_map.attention if heads else ():
        lines: dict[nn.Module, Tensor] = {}

        def rows(rows: Rows, lines: dict[nn.Module, Tensor] = lines) -> Tensor:
            if rows.module not in lines:
                lines[rows.module] = summed(rows.module, 1)
            return lines[rows.module][rows.start : rows.stop].sum()

        read = summed(layer.o_proj, 0).unflatten(0, (layer.heads, -1)).sum(1)
        share = layer.heads // layer.kv_heads
        own = torch.stack([rows(layer.rows("q", head)) for head in range(layer.heads)])
        shared = torch.stack([rows(layer.rows("k", g)) + rows(layer.rows("v", g)) for g in range(layer.kv_heads)])
        of_heads[layer.label] = read + own + shared.repeat_interleave(share) / share
    of_channels: Scores = {}
    for block in model_map.feed_forward if channels else ():
        found = summed(block.down, 0)
        for part, module in block.parts.items():
            place = block.rows(part)
            found = found + summed(module, 1)[place.start : place.stop]
        of_channels[block.label] = found
    return Scored(of_heads, of_channels)


def gradients(
    model_map: ModelMap, text: CalibrationText, projections: list[nn.Module], squared: bool = False
) -> tuple[Gradients, Gradients]:
    """The gradient of the mean next-token loss of a text with respect to projections' weights, in float32 or better.

    Args:
        model_map: of a causal model.
        text: calibration text.
        projections: whose weights.
        squared: also the mean over windows of the square of each window's own gradient; window by window.

    Raises:
        InputError: no token has one before it.
    """
    model = model_map.model
    modules = list(dict.fromkeys(projections))
    total = sum(int((real[:, 1:] & real[:, :-1]).sum()) for _, real in text.batches)
    if not total:
        raise InputError("the calibration text has no token with one before it; give longer windows")
    first = {module: torch.zeros(weight_of(module).shape, dtype=_kind(module)) for module in modules}
    second = {module: torch.zeros_like(one) for module, one in first.items()} if squared else {}
    rows = tuple((ids[n : n + 1], real[n : n + 1]) for ids, real in text.batches for n in range(len(ids)))
    windows = CalibrationText(text.name, rows)
    with _only_these_learn(model, modules), torch.enable_grad():
        for _, real, inputs in (windows if squared else text).inputs(model):
            ids, predicted = inputs["input_ids"], real[:, 1:].bool() & real[:, :-1].bool()
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            nn.functional.cross_entropy(logits[predicted], ids[:, 1:][predicted], reduction="sum").backward()
            count = int(predicted.sum())
            for module in modules:
                weight: Any = module.weight
                grad = weight.grad.T if is_transposed(module) else weight.grad
                grad = grad.to("cpu", first[module].dtype)
                first[module] += grad / total
                if squared and count:
                    second[module] += (grad / count).square() / len(rows)
                weight.grad = None
    return first, second


@contextmanager
def _only_these_learn(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Inside the block, gradients are computed of these modules' weights only; afterwards all is as it was."""
    with ExitStack() as stack:
        own = {id(module.weight) for module in modules}
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.requires_grad_(id(parameter) in own)
            parameter.grad = None
        yield


def _of_heads(model_map: ModelMap) -> Iterator[nn.Module]:
    for layer in model_map.attention:
        yield layer.o_proj
        yield from (layer.rows(part, 0).module for part in "qkv")


def _of_channels(model_map: ModelMap) -> Iterator[nn.Module]:
    for block in model_map.feed_forward:
        yield block.down
        yield from block.parts.values()


def _kind(module: nn.Module) -> torch.dtype:
    return torch.promote_types(weight_of(module).dtype, torch.float32)
