"""The distillation loss (the paper's eq. 7), as sums that add up over the batches of one update.

They are divided by counts over the whole update, so that accumulated batches are one large batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid


def answer_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher ‖ student) over the vocabulary, summed over tokens, of logits (tokens, vocabulary) at τ."""
    expected, actual = (log_softmax(_wide(logits) / temperature, dim=-1) for logits in (teacher, student))
    return (expected.exp() * (expected - actual)).sum()


def judgement_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher ‖ student) of independent yes-or-no judgements, summed, of their logits at τ."""
    expected, actual = _wide(teacher) / temperature, _wide(student) / temperature
    yes = expected.sigmoid() * (logsigmoid(expected) - logsigmoid(actual))
    no = (-expected).sigmoid() * (logsigmoid(-expected) - logsigmoid(-actual))
    return (yes + no).sum()


def choice_divergence(teacher: Tensor, student: Tensor, problem: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher ‖ student) of one choice among each problem's thoughts, summed over problems.

    Of logits of thoughts at τ; `problem` is the index of each thought's problem.
    """
    member = problem.unique()[:, None] == problem
    expected, actual = (
        log_softmax((x / temperature).expand(member.shape).masked_fill(~member, torch.finfo(x.dtype).min), -1)
        for x in (_wide(teacher), _wide(student))
    )
    return (expected.exp() * (expected - actual)).sum()


def attention_distance(
    teacher: Sequence[Tensor], student: Sequence[Tensor], heads: Sequence[Sequence[int]], real: Tensor
) -> Tensor:
    """Return squared differences of attention maps: means over heads and layers of sums over real positions.

    Args:
        teacher, student: maps of each layer, shape (texts, heads, queries, keys).
        heads: of each layer, for each of the student's heads the teacher's that it was.
        real: mask of the tokens that are no padding, shape (texts, tokens).
    """
    pairs = (real[:, :, None] * real[:, None, :])[:, None].to(student[0].dtype)
    total = torch.zeros((), dtype=torch.promote_types(student[0].dtype, torch.float32), device=student[0].device)
    for expected, actual, indices in zip(teacher, student, heads, strict=True):
        difference = _wide(expected)[:, torch.tensor(indices, device=expected.device)] - _wide(actual)
        total = total + (difference.square() * pairs).sum() / len(indices)
    return total / len(student)


def _wide(x: Tensor) -> Tensor:
    """Return it in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
