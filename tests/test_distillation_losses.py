"""The terms of the distillation loss, against literal formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lmeval_prune.distillation.losses import (
    answer_divergence,
    attention_distance,
    choice_divergence,
    judgement_divergence,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(row: list[float], temperature: float) -> list[float]:
    powers = [math.exp(x / temperature) for x in row]
    return [power / sum(powers) for power in powers]


def divergence(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_answers(temperature: float) -> None:
    teacher, student = drawn(4, 7), drawn(4, 7, seed=1)
    expected = sum(
        divergence(softmax(a, temperature), softmax(b, temperature))
        for a, b in zip(teacher.tolist(), student.tolist(), strict=True)
    )
    assert float(answer_divergence(teacher, student, temperature)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_judgements(temperature: float) -> None:
    teacher, student = drawn(9), drawn(9, seed=1)

    def both(x: float) -> list[float]:
        return [1 / (1 + math.exp(-x / temperature)), 1 / (1 + math.exp(x / temperature))]

    expected = sum(divergence(both(a), both(b)) for a, b in zip(teacher.tolist(), student.tolist(), strict=True))
    assert float(judgement_divergence(teacher, student, temperature)) == pytest.approx(expected, abs=1e-12)


def test_choices_are_among_the_thoughts_of_one_problem() -> None:
    teacher, student = drawn(8), drawn(8, seed=1)
    problem = torch.tensor([0, 2, 0, 2, 2, 1, 0, 2])  # not in order, one with a single thought
    expected = 0.0
    for number in range(3):
        rows = [index for index, owner in enumerate(problem.tolist()) if owner == number]
        p, q = (softmax([float(x[row]) for row in rows], 2.0) for x in (teacher, student))
        expected += divergence(p, q)
    assert float(choice_divergence(teacher, student, problem, 2.0)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("relative", [False, True])
def test_attention_distance_of_remaining_heads_at_real_positions(relative: bool) -> None:
    """The relative one is divided query by query."""
    teacher = [drawn(2, 4, 5, 5, seed=layer).softmax(-1) for layer in range(2)]
    student = [drawn(2, 2, 5, 5, seed=7).softmax(-1), drawn(2, 3, 5, 5, seed=8).softmax(-1)]
    heads = [[1, 3], [0, 1, 3]]
    lengths = [5, 3]
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    expected = 0.0
    for layer, layer_heads in enumerate(heads):
        for text, length in enumerate(lengths):
            for index, kept in enumerate(layer_heads):
                for q in range(length):
                    a, b = (
                        x[text, head, q, :length].tolist()
                        for x, head in ((teacher[layer], kept), (student[layer], index))
                    )
                    square = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
                    expected += (square / sum(x * x for x in a) if relative else square) / len(layer_heads) / len(heads)
    assert float(attention_distance(teacher, student, heads, real, relative)) == pytest.approx(expected, abs=1e-12)


def test_maps_of_zeros_have_finite_gradients() -> None:
    maps = torch.zeros(1, 1, 3, 3, requires_grad=True)
    loss = attention_distance([torch.zeros(1, 1, 3, 3)], [maps], [[0]], torch.tensor([[1, 1, 0]]), True)
    (slope,) = torch.autograd.grad(loss, maps)
    assert bool(slope.isfinite().all())


def test_equal_outputs_have_no_loss_and_no_gradient() -> None:
    logits, problem = drawn(6, 5), torch.tensor([0, 0, 1, 1, 1, 2])
    maps = [drawn(2, 3, 4, 4).softmax(-1)]
    for term, arguments in (
        (lambda x: answer_divergence(logits, x, 2.0), logits),
        (lambda x: judgement_divergence(logits[:, 0], x, 2.0), logits[:, 0]),
        (lambda x: choice_divergence(logits[:, 0], x, problem, 2.0), logits[:, 0]),
        (lambda x: attention_distance(maps, [x], [[0, 1, 2]], torch.ones(2, 4)), maps[0]),
        (lambda x: attention_distance(maps, [x], [[0, 1, 2]], torch.ones(2, 4), True), maps[0]),
    ):
        student = arguments.clone().requires_grad_()
        loss = term(student)
        loss.backward()
        assert float(loss.detach()) == 0
        assert student.grad is not None
        assert float(student.grad.abs().max()) < 1e-15


def test_logits_of_half_precision_are_compared_in_float32() -> None:
    teacher, student = drawn(4, 9).bfloat16(), drawn(4, 9, seed=1).bfloat16()
    actual = answer_divergence(teacher, student, 2.0)
    assert actual.dtype == torch.float32
    assert float(actual) == pytest.approx(float(answer_divergence(teacher.double(), student.double(), 2.0)), rel=1e-4)


def test_extreme_logits_stay_finite() -> None:
    teacher, student = torch.tensor([300.0, -300.0]), torch.tensor([-300.0, 300.0], requires_grad=True)
    for loss in (
        judgement_divergence(teacher, student, 1.0),
        choice_divergence(teacher, student, torch.tensor([0, 0]), 1.0),
        answer_divergence(teacher[None], student[None], 1.0),
    ):
        (slope,) = torch.autograd.grad(loss, student)
        assert float(loss.detach()) == pytest.approx(600, rel=0.01)
        assert bool(slope.isfinite().all())
