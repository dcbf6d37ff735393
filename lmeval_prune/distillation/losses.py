"""Terms of the distillation loss (the paper's eq. 7) as sums over a batch.

The trainer divides them by counts over the whole update, so that accumulated batches equal a single large batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid


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

    Args:
        teacher: attention maps of each compared layer, shape (texts, heads, queries, keys).
        student: attention maps of the student.
        heads: for each layer, the teacher's head of each student's head.
        real: mask of the tokens without padding, shape (texts, tokens).
        relative: whether to divide by the teacher's squares.
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
    """Convert to at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
