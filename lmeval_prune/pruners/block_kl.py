"""Score a layer or block by the distance of the model without it from the unpruned model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import DepthPruner, Scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import DepthPart, Removal
from lmeval_prune.pruners.sequential import make_plan, replace_forward
from lmeval_prune.pruners.stores import Sums


@dataclass(frozen=True)
class BlockKl(DepthPruner):
    """Scores a layer or block by the mean over tokens of KL(p ‖ q), p and q distributions of the next token.

    p is that of the unpruned model, q that of the model without the layer or block and what earlier steps removed.
    """

    reads_text: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True
    compares_with_unpruned: ClassVar[bool] = True

    def depth_scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        parts: Sequence[DepthPart],
        earlier: Removal,
        sums: Sums | None = None,
    ) -> Scores:
        """Average the divergence over the text; see `Pruner.depth_scores`.

        A pass without a part starts at its layer, from the stored outputs of the layers before it. Stored are those of
        one batch: layers · tokens of the batch · width numbers. Beside them stand three tensors of counted tokens ·
        vocabulary numbers in float32, which are larger for models with a large vocabulary. The output head reads
        counted tokens only.
        """
        model, text, sums, count = model_map.model, self.require_text(text), sums or Sums(), 0
        before = make_plan(earlier.removed, True, compensation=earlier.compensation)
        for number, (batch, inputs) in enumerate(text.inputs(model)):
            tokens = batch.counted.bool()
            count += int(tokens.sum())
            if all(sums.has(number, part.key) for part in parts):
                continue
            arguments = {**inputs, "use_cache": False}
            with torch.no_grad(), _gathering_tokens(model.get_output_embeddings(), tokens):
                dense = _log_probabilities(model(**arguments).logits, tokens)
                shares = dense.exp()
                with before.applied_to(model, model_map):
                    outputs = _layer_outputs(model_map, inputs)
                for position, part in enumerate(parts):
                    if sums.has(number, part.key):
                        continue
                    text.report((number + position / len(parts)) / len(text.batches))
                    plan = make_plan({**earlier.removed, part.key: {0}}, True, compensation=earlier.compensation)
                    with plan.applied_to(model, model_map), _starting_at(part, outputs):
                        pruned = _log_probabilities(model(**arguments).logits, tokens)
                    sums.add(number, part.key, float((shares * (dense - pruned)).sum(-1).double().sum()))
        totals = {part.key: sums.total(len(text.batches), part.key) for part in parts}
        return Scores({key: torch.tensor([x / max(1, count)], dtype=torch.float64) for key, x in totals.items()})


@contextmanager
def _gathering_tokens(head: nn.Module | None, tokens: Tensor) -> Iterator[None]:
    """Gather some tokens before the output head inside the block: the model's logits are (1, tokens, vocabulary).

    Args:
        head: the output head; None for a model that computes logits without a module.
        tokens: mask of these tokens, (rows, columns).
    """

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden[tokens.to(hidden.device)][None], *others

    with ExitStack() as stack:
        if head is not None:
            stack.callback(head.register_forward_pre_hook(select).remove)
        yield


def _log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probabilities of the next token after each counted token, (counted tokens, vocabulary).

    Args:
        logits: of the counted tokens, in a single row; of all, if the model computes logits without a module.
        tokens: mask of the counted tokens, (rows, columns).
    """
    logits = logits[tokens.to(logits.device)] if logits.shape[:2] == tokens.shape else logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _layer_outputs(model_map: ModelMap, inputs: dict[str, Any]) -> dict[nn.Module, Any]:
    outputs: dict[nn.Module, Any] = {}
    with ExitStack() as stack:
        for layer in model_map.layers.values():
            handle = layer.register_forward_hook(lambda module, _, output: outputs.__setitem__(module, output))
            stack.callback(handle.remove)
        getattr(model_map.model, "base_model", model_map.model)(**inputs, use_cache=False)
    return outputs


@contextmanager
def _starting_at(part: DepthPart, outputs: dict[nn.Module, Any]) -> Iterator[None]:
    """Return stored outputs of the layers before a part inside the block, instead of computing them again."""
    with ExitStack() as stack:
        for layer, output in outputs.items():
            if any(module is part.sublayers[0].module for module in layer.modules()):
                break
            replace_forward(layer, lambda *_, output=output, **__: output, stack)
        yield
