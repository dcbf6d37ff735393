"""ShortGPT's block influence: score a layer or block by the angle between what goes into it and what comes out of it.

Men et al., ShortGPT: Layers in Large Language Models are More Redundant Than You Expect (arXiv 2403.03853), eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from lmeval_prune.architectures import ModelMap
from lmeval_prune.interventions.base import change_output
from lmeval_prune.pruners.base import DepthPruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import LAYERS, DepthPart, Removal
from lmeval_prune.pruners.stores import Sums


@dataclass(frozen=True)
class BlockInfluence(DepthPruner):
    """Scores a layer or block by 1 − mean over tokens of cos(x, y), x the residual stream before it and y after it.

    The residual stream after a block is the output of its layer without the layer's later blocks.
    """

    reads_text: ClassVar[bool] = True

    def depth_scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        parts: Sequence[DepthPart],
        earlier: Removal,
        sums: Sums | None = None,
    ) -> Scores:
        """Average the similarities over the text; see `Pruner.depth_scores`."""
        totals = dict.fromkeys([part.key for part in parts], 0.0)
        left_out: set[nn.Module] = set()  # outputs of blocks that are left out at the moment
        counted = torch.ones(0)
        with ExitStack() as stack:
            for sublayer in model_map.sublayers:
                zero = partial(_zero_if, left_out, sublayer.output)
                change_output(sublayer.output, zero, stack)

            def add(part: DepthPart, before: Tensor, after: Tensor) -> None:
                cosines = nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
                totals[part.key] += float(cosines[counted.bool()].sum())

            def hook(
                layer_parts: _LayerParts, module: nn.Module, inputs: Any, named: dict[str, Any], output: Any
            ) -> None:
                if not left_out:
                    layer_parts.compare(module, inputs, named, output, left_out, add)

            for layer_parts in _layers_of(model_map, parts):
                module = model_map.model.get_submodule(layer_parts.name)
                handle = module.register_forward_hook(partial(hook, layer_parts), with_kwargs=True)
                stack.callback(handle.remove)
            count = 0
            for batch in self.require_text(text).run(model_map.model):
                counted = batch.counted
                count += int(counted.sum())
        return Scores(
            {key: torch.tensor([1 - total / max(1, count)], dtype=torch.float64) for key, total in totals.items()}
        )


def _zero_if(left_out: set[nn.Module], output: nn.Module, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if output in left_out else x


@dataclass(frozen=True)
class _LayerParts:
    """The scored parts of one layer."""

    name: str  # of its module
    outputs: tuple[nn.Module, ...]  # of its blocks, in order
    parts: tuple[DepthPart, ...]

    def compare(
        self,
        module: Any,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
        left_out: set[nn.Module],
        add: Any,
    ) -> None:
        """Call `add` with each part and the residual stream before and after it."""
        streams = {0: _first(inputs or tuple(named.values())), len(self.outputs): _first(output)}
        for part in self.parts:
            if part.kind == LAYERS:
                add(part, streams[0], streams[len(self.outputs)])
                continue
            number = self.outputs.index(part.sublayers[0].output)
            for end in (number, number + 1):
                if end not in streams:
                    left_out.update(self.outputs[end:])
                    try:
                        new_output = module.forward(
                            *map(_uncached, inputs), **{k: _uncached(v) for k, v in named.items()}
                        )
                    finally:
                        left_out.clear()
                    streams[end] = _first(new_output)
            add(part, streams[number], streams[number + 1])


def _layers_of(model_map: ModelMap, parts: Sequence[DepthPart]) -> list[_LayerParts]:
    outputs: dict[str, list[nn.Module]] = {}
    for sublayer in model_map.sublayers:
        outputs.setdefault(sublayer.layer, []).append(sublayer.output)
    by_layer: dict[str, list[DepthPart]] = {}
    for part in parts:
        by_layer.setdefault(part.sublayers[0].layer, []).append(part)
    return [_LayerParts(name, tuple(outputs[name]), tuple(layer_parts)) for name, layer_parts in by_layer.items()]


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.detach()


def _uncached(value: Any) -> Any:
    return None if isinstance(value, Cache) else value
