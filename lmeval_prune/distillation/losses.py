"""Terms of the distillation loss (the paper's eq. 7) as sums over a batch, and which heads the feature term compares.

The trainer divides them by counts over the whole update, so that accumulated batches equal a single large batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from lmeval_prune.architectures import ModelMap
from lmeval_prune.checkpoints.loading import first_labels, kept_layers

_OTHER_DROPOUT = ("resid", "hidden", "output")  # dropout in attention modules that is not applied to the maps


def answer_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return Σ_tokens KL(teacher ‖ student) at temperature τ from logits (tokens, vocabulary)."""
    expected, actual = (log_softmax(_wide(logits) / temperature, dim=-1) for logits in (teacher, student))
    return (expected.exp() * (expected - actual)).sum()


def judgement_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return Σ KL(teacher ‖ student) of independent binary judgements at temperature τ from logits (judgements,)."""
    expected, actual = _wide(teacher) / temperature, _wide(student) / temperature
    yes = expected.sigmoid() * (logsigmoid(expected) - logsigmoid(actual))
    no = (-expected).sigmoid() * (logsigmoid(-expected) - logsigmoid(-actual))
    return (yes + no).sum()


def choice_divergence(teacher: Tensor, student: Tensor, problem: Tensor, temperature: float) -> Tensor:
    """Return Σ_problems KL(teacher ‖ student) of the choice among a problem's thoughts at temperature τ.

    The logits and the problem index `problem` of each thought have the shape (thoughts,).
    """
    member = problem.unique()[:, None] == problem
    expected, actual = (
        log_softmax((x / temperature).expand(member.shape).masked_fill(~member, torch.finfo(x.dtype).min), -1)
        for x in (_wide(teacher), _wide(student))
    )
    return (expected.exp() * (expected - actual)).sum()


def attention_distance(
    teacher: Sequence[Tensor],
    student: Sequence[Tensor],
    heads: Sequence[Sequence[int]],
    real: Tensor,
    relative: bool = False,
) -> Tensor:
    """Return the squared difference of attention maps, averaged over heads and layers, summed over real positions.

    `relative` divides the squared difference of each query by the teacher's square, Σ_k (A_s − A_t)² / Σ_k A_t², so
    that the sum over queries is 1 per token for a student whose maps are zero.

    The maps of each compared layer have the shape (texts, heads, queries, keys). `heads` are, for each layer, the
    teacher's heads of the student's; `real` is the mask of the tokens without padding, shape (texts, tokens).
    """
    real = real.to(student[0].dtype)
    pairs = (real[:, :, None] * real[:, None, :])[:, None]
    total = torch.zeros((), dtype=torch.promote_types(student[0].dtype, torch.float32), device=student[0].device)
    for expected, actual, indices in zip(teacher, student, heads, strict=True):
        target = _wide(expected)[:, torch.tensor(indices, device=expected.device)]
        squares = ((target - _wide(actual)).square() * pairs).sum(-1)
        if relative:
            of_teacher = (target.square() * pairs).sum(-1)
            squares = squares / of_teacher.clamp(min=torch.finfo(of_teacher.dtype).tiny)  # of padding 0
        total = total + squares.sum() / len(indices)
    return total / len(student)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class LayerMap:
    """The teacher's layer of each layer of the student, and the teacher's head of each head of the student.

    Labels (`L5`) and numbers are each model's own.
    """

    layers: dict[str, str]
    heads: dict[str, list[int]]

    @classmethod
    def of(cls, stages: Sequence[Mapping[str, Any]]) -> LayerMap:
        """Follow the manifest's stages from the teacher, the model before the first of them, to the student."""
        heads: dict[str, list[int]] = {}
        for stage in stages:
            heads = {
                child: [heads[parent][head] if parent in heads else head for head in kept_heads]
                for child, parent in kept_layers(stage).items()
                if (kept_heads := stage["kept_heads"].get(parent)) is not None
            }
        return cls(first_labels(stages), heads)


class Features:
    """The feature term: attention maps of a student, which lose their dropout, beside those of its teacher's heads."""

    def __init__(self, layers: LayerMap, student: ModelMap, teacher: ModelMap, relative: bool) -> None:
        self.relative = relative
        self.heads = [layers.heads[layer.label] for layer in student.attention]
        numbers = {layer.label: number for number, layer in enumerate(teacher.attention)}
        self.teacher_numbers = [numbers[layers.layers[layer.label]] for layer in student.attention]
        turn_off_map_dropout(student)

    def term(self, target: Any, outputs: Any, real: Tensor) -> Tensor:
        expected = [target.attentions[number] for number in self.teacher_numbers]
        return attention_distance(expected, outputs.attentions, self.heads, real, self.relative)


def turn_off_map_dropout(model_map: ModelMap) -> None:
    """Turn off the dropout of attention maps, but not of residual streams.

    Models return their maps after dropout, so the feature term would compare random draws.
    """
    for layer in model_map.attention:
        for path, module in layer.module.named_modules():
            if any(other in path for other in _OTHER_DROPOUT):
                continue
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float) and not any(other in name for other in _OTHER_DROPOUT):
                    setattr(module, name, 0.0)
