"""The distillation loss (the paper's eq. 7), as sums that add up over the batches of one update.

A host divides them by what it counts over the whole update, so that accumulated batches are one large batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid


def answer_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) of distributions over the vocabulary, summed over tokens.

    Args:
        teacher, student: logits, shape (tokens, vocabulary).
        temperature: τ, by which both are divided.
    """
    expected, got = (log_softmax(_wide(logits) / temperature, dim=-1) for logits in (teacher, student))
    return (expected.exp() * (expected - got)).sum()


def judgement_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) of independent yes-or-no judgements, summed.

    Args:
        teacher, student: logits, one a judgement.
        temperature: τ.
    """
    expected, got = _wide(teacher) / temperature, _wide(student) / temperature
    yes = expected.sigmoid() * (logsigmoid(expected) - logsigmoid(got))
    no = (-expected).sigmoid() * (logsigmoid(-expected) - logsigmoid(-got))
    return (yes + no).sum()


def choice_divergence(teacher: Tensor, student: Tensor, problem: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) of one choice among each problem's thoughts, summed over problems.

    Args:
        teacher, student: logits, one a thought.
        problem: whose thought it is.
        temperature: τ.
    """
    own = problem.unique()[:, None] == problem
    expected, got = (
        log_softmax((_wide(x) / temperature).expand(own.shape).masked_fill(~own, torch.finfo(_wide(x).dtype).min), -1)
        for x in (teacher, student)
    )
    return (expected.exp() * (expected - got)).sum()


def attention_distance(
    teacher: Sequence[Tensor], student: Sequence[Tensor], heads: Sequence[Sequence[int]], real: Tensor
) -> Tensor:
    """Squared differences of attention maps: means over heads and layers of sums over real positions.

    Args:
        teacher, student: of each layer (texts, heads, queries, keys).
        heads: of each layer, for each of the student's heads the teacher's that it was.
        real: which tokens are no padding, (texts, tokens).
    """
    pairs = (real[:, :, None] * real[:, None, :])[:, None].to(student[0].dtype)
    total = torch.zeros((), dtype=torch.promote_types(student[0].dtype, torch.float32), device=student[0].device)
    for expected, got, own in zip(teacher, student, heads, strict=True):
        difference = _wide(expected)[:, torch.tensor(own, device=expected.device)] - _wide(got)
        total = total + (difference.square() * pairs).sum() / len(own)
    return total / len(student)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
