"""Score whole layers and blocks: by the angle between what goes in and comes out, or by the model without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from lmeval_prune.architectures import ModelMap
from lmeval_prune.attributes import replaced
from lmeval_prune.interventions.base import change_output
from lmeval_prune.pruners.base import Pruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import DEPTH_KINDS, LAYERS, DepthPart, Removed, make_plan


@dataclass(frozen=True)
class BlockInfluence(Pruner):
    """Scores a layer or block by 1 − mean over tokens of cos(x, y), x the residual stream before it and y after it.

    Men et al., ShortGPT: Layers in Large Language Models are More Redundant Than You Expect (arXiv 2403.03853), eq. 1.
    The residual stream after a block is the output of its layer without the layer's later blocks.
    """

    kinds: ClassVar[tuple[str, ...]] = DEPTH_KINDS
    parts: ClassVar[str] = "layers"
    reads_text: ClassVar[bool] = True

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: list[DepthPart], removed: Removed
    ) -> Scores:
        totals = dict.fromkeys([part.key for part in parts], 0.0)
        outputs: dict[str, list[nn.Module]] = {}  # of the blocks of each layer, in order
        left_out: set[nn.Module] = set()  # outputs of blocks that are left out at the moment
        counted, count = torch.ones(0), 0

        def zero(output: nn.Module, x: Tensor) -> Tensor:
            return torch.zeros_like(x) if output in left_out else x

        def compare(layer: str, module: Any, inputs: Any, named: dict[str, Any], output: Any) -> None:
            if left_out:  # run by this function
                return
            blocks = outputs[layer]
            streams = {0: _first(inputs or tuple(named.values())), len(blocks): _first(output)}
            for part in parts:
                if part.sublayers[0].layer != layer:
                    continue
                is_layer = part.kind == LAYERS
                start = 0 if is_layer else blocks.index(part.sublayers[0].output)
                stop = len(blocks) if is_layer else start + 1
                for end in {start, stop} - streams.keys():
                    left_out.update(blocks[end:])
                    try:
                        arguments = {name: _uncached(value) for name, value in named.items()}
                        streams[end] = _first(module.forward(*map(_uncached, inputs), **arguments))
                    finally:
                        left_out.clear()
                before, after = streams[start].double(), streams[stop].double()
                cosines = nn.functional.cosine_similarity(before, after, dim=-1)
                totals[part.key] += float(cosines[counted.bool()].sum())

        with ExitStack() as stack:
            for sublayer in model_map.sublayers:
                outputs.setdefault(sublayer.layer, []).append(sublayer.output)
                change_output(sublayer.output, partial(zero, sublayer.output), stack)
            for layer in outputs:
                module = model_map.model.get_submodule(layer)
                stack.callback(module.register_forward_hook(partial(compare, layer), with_kwargs=True).remove)
            for batch in self.require_text(text).run(model_map.model):
                counted = batch.counted  # read by the hooks
                count += int(counted.sum())
        return Scores({key: torch.tensor([1 - x / max(1, count)], dtype=torch.float64) for key, x in totals.items()})


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first.detach()


def _uncached(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


@dataclass(frozen=True)
class BlockKl(Pruner):
    """Scores a layer or block by the mean over tokens of KL(p ‖ q), p and q distributions of the next token.

    p is that of the unpruned model, q that of the model without the layer or block and what earlier steps removed.
    """

    kinds: ClassVar[tuple[str, ...]] = DEPTH_KINDS
    parts: ClassVar[str] = "layers"
    reads_text: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True
    compares_with_unpruned: ClassVar[bool] = True

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: list[DepthPart], removed: Removed
    ) -> Scores:
        """Average the divergence over the text.

        A pass without a part starts at its layer, from the stored outputs of the layers before it. Stored are those of
        one batch: layers · tokens of the batch · width numbers. Beside them stand three tensors of counted tokens ·
        vocabulary numbers in float32, which are larger for models with a large vocabulary. The output head reads
        counted tokens only.
        """
        model, text, count = model_map.model, self.require_text(text), 0
        totals = dict.fromkeys([part.key for part in parts], 0.0)
        outputs: dict[nn.Module, Any] = {}  # of the layers for one batch, without what earlier steps removed
        for number, (batch, inputs) in enumerate(text.inputs(model)):
            tokens = batch.counted.bool()
            count += int(tokens.sum())
            sums = text.work.tensors(f"batch {number}") if text.work else None
            if sums is None:
                sums, arguments = {}, {**inputs, "use_cache": False}
                with torch.no_grad(), _gathering_tokens(model.get_output_embeddings(), tokens):
                    dense = _log_probabilities(model(**arguments).logits, tokens)
                    shares = dense.exp()
                    with make_plan(removed, True).applied_to(model, model_map), ExitStack() as stack:
                        for layer in model_map.layers.values():
                            handle = layer.register_forward_hook(lambda x, _, output: outputs.update({x: output}))
                            stack.callback(handle.remove)
                        getattr(model, "base_model", model)(**arguments)
                    for part in parts:
                        plan = make_plan({**removed, part.key: {0}}, True)
                        with plan.applied_to(model, model_map), ExitStack() as stack:
                            for layer, output in outputs.items():  # of layers before the part
                                if any(module is part.sublayers[0].module for module in layer.modules()):
                                    break
                                stack.enter_context(replaced(layer, forward=lambda *_, output=output, **__: output))
                            pruned = _log_probabilities(model(**arguments).logits, tokens)
                        sums[part.key] = (shares * (dense - pruned)).sum(-1).double().sum()
                if text.work:
                    text.work.write_tensors(f"batch {number}", sums)
            for key in totals:
                totals[key] += float(sums[key])
        return Scores({key: torch.tensor([x / max(1, count)], dtype=torch.float64) for key, x in totals.items()})


@contextmanager
def _gathering_tokens(head: nn.Module | None, tokens: Tensor) -> Iterator[None]:
    """Gather some tokens, of a mask (rows, columns), before the output head: logits are (1, tokens, vocabulary).

    A model that computes logits without a module has no head.
    """

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden[tokens.to(hidden.device)][None], *others

    with ExitStack() as stack:
        if head is not None:
            stack.callback(head.register_forward_pre_hook(select).remove)
        yield


def _log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probabilities of the next token after each token of the mask, (counted tokens, vocabulary)."""
    logits = logits[tokens.to(logits.device)] if logits.shape[:2] == tokens.shape else logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
