"""Terms of the distillation loss (the paper's eq. 7) as sums over a batch.

The trainer divides them by counts over the whole update, so that accumulated batches equal a single large batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid


def answer_divergence(
    teacher: Tensor, student: Tensor, temperature: float, top_k: int = 0, rest: Literal["bucket", "none"] = "bucket"
) -> Tensor:
    """Return Σ_tokens KL(teacher ‖ student) at temperature τ from logits (tokens, vocabulary).

    With `top_k`, the k likeliest tokens of the teacher are compared. `rest="bucket"` adds one outcome for all other
    tokens together; `rest="none"` renormalises both distributions over the k tokens, so that the student may put any
    probability on the others.
    """
    expected, actual = (_wide(logits) / temperature for logits in (teacher, student))
    if 0 < top_k < expected.shape[-1]:
        indices = expected.topk(top_k, dim=-1).indices
        expected, actual = (_reduced(logits, indices, rest == "bucket") for logits in (expected, actual))
    expected, actual = log_softmax(expected, dim=-1), log_softmax(actual, dim=-1)
    return (expected.exp() * (expected - actual)).sum()


def _reduced(logits: Tensor, indices: Tensor, bucket: bool) -> Tensor:
    """Return the logits of some tokens, (tokens, k), and that of all others together, (tokens, k + 1)."""
    chosen = logits.gather(-1, indices)
    if not bucket:
        return chosen
    others = logits.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], dim=-1)


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
            squares = squares / _positive((target.square() * pairs).sum(-1))
        total = total + squares.sum() / len(indices)
    return total / len(student)


def hidden_distance(teacher: Sequence[Tensor], student: Sequence[Tensor], real: Tensor, relative: bool) -> Tensor:
    """Return the squared difference of hidden states, averaged over width and layers, summed over real tokens.

    `relative` divides that of each token by the teacher's mean square: ‖h_s − h_t‖² / ‖h_t‖². So tokens and layers
    with large activations do not outweigh the others, and the sum is 1 per token for a student whose states are zero.

    Args:
        teacher: hidden states of each compared layer, shape (texts, tokens, width).
        student: hidden states of the student.
        real: mask of the tokens without padding, shape (texts, tokens).
        relative: whether to divide by the teacher's mean squares.
    """
    total = torch.zeros((), dtype=torch.promote_types(student[0].dtype, torch.float32), device=student[0].device)
    for expected, actual in zip(teacher, student, strict=True):
        target = _wide(expected)
        squares = (target - _wide(actual)).square().mean(-1)
        if relative:
            squares = squares / _positive(target.square().mean(-1))
        total = total + (squares * real).sum()
    return total / len(student)


def _positive(squares: Tensor) -> Tensor:
    """Keep divisors above zero; those of padding are zero."""
    return squares.clamp(min=torch.finfo(squares.dtype).tiny)


def _wide(x: Tensor) -> Tensor:
    """Convert to at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
