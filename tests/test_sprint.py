"""SPRINT: the loss against a literal reference, the router in worlds whose structure is known, policies, store."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lmeval_prune import InputError
from lmeval_prune.models.answer_store import AnswerStore
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.sprint import router as policies
from lmeval_prune.sprint.options import FitOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.router import Router, fit, number_questions, split
from lmeval_prune.sprint.routers import contrastive as losses
from lmeval_prune.sprint.routers.contrastive import NearestHeads
from tests.conftest import file_contents

POOL = [DENSE, *(f"L{layer}H{head}" for layer in (5, 10) for head in range(3))]


def random_z(generator: torch.Generator, questions: int, heads: int, unknown: bool) -> torch.Tensor:
    z = torch.randint(0, 2, (questions, heads), generator=generator).double()
    z[0], z[1] = 0, 1  # solved by none, by all
    if unknown:
        z[torch.rand(z.shape, generator=generator) < 0.2] = math.nan
    return z


# --------------------------------------------------------------------------- the loss


def literal_loss(q: list, v: list, z: list, weight: float) -> float:
    """Eq. 1, number by number."""

    def distance(a: list, b: list) -> float:
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    terms = []
    for index, row in zip(q, z, strict=True):
        every = positive = 0.0
        for head, outcome in zip(v, row, strict=True):
            if math.isnan(outcome):
                continue
            weight_of = math.exp(-distance(index, head))
            every += weight_of
            positive += weight_of if outcome == 1 else 0.0
        if positive:
            terms.append(-math.log(positive / every))
    total = sum(terms) / len(terms)
    for j, k in itertools.combinations(range(len(v)), 2):
        observed = [row for row in z if not math.isnan(row[j]) and not math.isnan(row[k])]
        s = sum(row[j] == row[k] for row in observed) / len(observed) if observed else 0.0
        total -= weight * s * distance(v[j], v[k])
    return total


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("diversity", ["ball", "sphere", "unbounded"])
def test_the_loss_and_its_gradients_are_eq_1(unknown: bool, weight: float, diversity: str) -> None:
    generator = torch.Generator().manual_seed(1)
    z = random_z(generator, 9, 5, unknown)
    x = torch.randn(9, 6, dtype=torch.float64, generator=generator)
    theta = torch.randn(3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    raw = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)

    def loss(theta: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        heads = losses.constrain(raw, diversity, 0.8)
        return losses.contrastive_loss(x @ theta.T, heads, z, losses.agreement(z), weight)

    def placed(row: list) -> list:
        length = math.sqrt(sum(value**2 for value in row))
        if diversity == "unbounded" or (diversity == "ball" and length <= 0.8):
            return row
        return [value * 0.8 / length for value in row]

    def literal() -> float:
        q = [[sum(a * b for a, b in zip(t, row, strict=True)) for t in theta.tolist()] for row in x.tolist()]
        return literal_loss(q, [placed(row) for row in raw.tolist()], z.tolist(), weight)

    result = loss(theta, raw)
    assert float(result) == pytest.approx(literal(), rel=1e-10)
    result.backward()
    for parameter in (theta, raw):  # the gradient, against the literal's finite differences
        for index in [(0, 0), (2, 1), (1, 2)]:
            with torch.no_grad():
                parameter[index] += 1e-6
                above = literal()
                parameter[index] -= 2e-6
                below = literal()
                parameter[index] += 1e-6
            assert float(parameter.grad[index]) == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-7)


def test_unsolved_questions_are_skipped_and_questions_solved_by_all_add_zero() -> None:
    q, v = torch.randn(3, 2), torch.randn(4, 2)
    z = torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]])
    result = losses.ranking_losses(q, v, z)
    assert len(result) == 2 and float(result[0]) == 0 and float(result[1]) > 0
    none = losses.contrastive_loss(q[:1].requires_grad_(), v, z[:1], losses.agreement(z), 0.0)
    assert float(none) == 0 and none.requires_grad


def test_large_distances_stay_finite_in_float32() -> None:
    q, v = torch.full((1, 8), 100.0), torch.stack([torch.full((8,), -100.0), torch.full((8,), -99.0)])
    result = losses.ranking_losses(q, v, torch.tensor([[1.0, 0.0]]))
    assert torch.isfinite(result).all() and float(result) > 1000


# --------------------------------------------------------------------------- worlds of known structure


def world(questions: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three kinds of questions; kind i is nearly always solved by heads 2i and 2i+1, rarely by others."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(size=(3, 24))
    kind = generator.integers(0, 3, questions)
    x = centres[kind] + 0.3 * generator.normal(size=(questions, 24))
    chance = np.where(np.arange(6)[None, :] // 2 == kind[:, None], 0.95, 0.05)
    z = (generator.random((questions, 6)) < chance).astype(np.float32)
    return torch.from_numpy(x).float(), torch.from_numpy(z)


def test_split_keeps_rows_of_a_question_together() -> None:
    texts = [f"question {i // 2}" for i in range(60)]  # two tasks that ask the same
    kept, rest = split(number_questions(texts), 0.3, 0)
    assert len(kept) == 18 and sorted(kept + rest) == list(range(60))
    assert not {texts[i] for i in kept} & {texts[i] for i in rest}


def test_ties_are_broken_by_attempt_order() -> None:
    router = Router(NearestHeads(torch.eye(2), torch.tensor([[1.0, 0], [0, 1], [1, 0], [5, 5]])), POOL[:4], "none")
    assert router.ranking(torch.tensor([[1.0, 0.0], [0.5, 0.5]])) == [[0, 2, 1, 3], [0, 1, 2, 3]]


# --------------------------------------------------------------------------- policies


def outcomes(z: list, texts: list[str] | None = None, pool: list[str] | None = None) -> Outcomes:
    array = np.array(z, np.float32)
    names = texts or [f"question {i}" for i in range(len(array))]
    rows = [{**row(i, ""), "question": text, "attributes": {"subject": "ab"[i % 2]}} for i, text in enumerate(names)]
    return Outcomes(array, pool or POOL[: array.shape[1]], rows, {"weights": "w", "name": "toy"}, {"toy": {}})


def test_policies_order_the_pool_without_repeats() -> None:
    known = outcomes([[0, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [1, 0, 0, 1]])
    questions = known.texts
    assert policies.best(known).order(questions)[0] == ["L5H2", "L5H0", "dense", "L5H1"]
    oracle = policies.oracle(known)
    assert [row[0] for row in oracle.order(questions)] == ["L5H0", "L5H0", "L5H2", "dense"]
    first, second = policies.random_order(known.pool, 0), policies.random_order(known.pool, 1)
    assert first.order(questions) == first.order(questions) != second.order(questions)
    assert first.order(questions[2:]) == first.order(questions)[2:]  # a question's order is its own
    for policy in (first, oracle, policies.best(known)):
        assert all(sorted(row) == sorted(known.pool) for row in policy.order(questions))


def literal_cover(z: np.ndarray, size: int) -> list[int]:
    """Greedy coverage, question by question."""
    chosen: list[int] = []
    for _ in range(size):

        def gain(j: int) -> int:
            return sum(z[i, j] == 1 and not any(z[i, k] == 1 for k in chosen) for i in range(len(z)))

        best = None
        for j in range(z.shape[1]):
            key = (gain(j), int((z[:, j] == 1).sum()))
            if j not in chosen and (best is None or key > best[0]):
                best = key, j
        assert best is not None
        chosen.append(best[1])
    return chosen


def test_greedy_coverage_is_greedy_and_near_the_best_set() -> None:
    generator = np.random.default_rng(3)
    for _ in range(40):
        z = (generator.random((12, 7)) < 0.2).astype(float)
        z[generator.random(z.shape) < 0.1] = math.nan
        for size in (1, 2, 3, 7):
            chosen = policies.greedy_cover(z, size)
            assert chosen == literal_cover(z, size)
            best = max((z[:, list(s)] == 1).any(1).sum() for s in itertools.combinations(range(7), size))
            covered = (z[:, chosen] == 1).any(1).sum()
            assert (1 - (1 - 1 / size) ** size) * best <= covered <= best  # the bound of greedy coverage


# --------------------------------------------------------------------------- the store


MODEL = {"name": "toy", "weights": "w"}
TASKS = {"toy": {"metric": "exact_match,none"}}


def row(number: int, prompt: str = "p") -> dict:
    key = {"task": "toy", "split": "test", "doc_id": number}
    return {**key, "question": f"q{number}", "prompt": prompt, "attributes": {}}


def filled(
    folder: Path, answers: list[tuple[int, str, str]], questions: int = 3, pool: tuple = ("dense", "L5H1")
) -> None:
    texts, store = AnswerStore(folder), OutcomeStore(folder)
    store.begin(MODEL, TASKS, [row(i) for i in range(questions)], pool)
    cells = []
    for number, head, text in answers:
        texts.add(f"{number}{head}", text, {"task": "toy", "head": head, "tokens": [1, 2, number]})
        where = {"task": "toy", "split": "test", "doc_id": number}
        cells.append(
            {**where, "attempt": head, "outcome": text == "yes", "extracted": text, "answer": f"{number}{head}"}
        )
    texts.close()
    if cells:
        store.add(cells)
    texts.compact()


CELLS = [(i, head, "yes" if (i + len(head)) % 2 else "no") for i in range(3) for head in ("dense", "L5H1")]


def test_store_round_trip(tmp_path: Path) -> None:
    filled(tmp_path / "a", CELLS[:-1])
    result = OutcomeStore(tmp_path / "a").read()
    assert result.pool == ["dense", "L5H1"] and result.texts == ["q0", "q1", "q2"]
    expected = [[1, 0], [0, 1], [1, math.nan]]
    assert np.array_equal(result.z, np.array(expected, np.float32), equal_nan=True)
    cells = OutcomeStore(tmp_path / "a").cells()
    assert cells[0]["text"] == "yes" and cells[0]["tokens"] == [1, 2, 0]
    assert result.accuracy().tolist() == pytest.approx([2 / 3, 1 / 2])


def test_a_sweep_that_was_never_finished_leaves_nothing(tmp_path: Path) -> None:
    """It has extended the store by questions and attempts; then a smaller one was run to its end."""
    filled(tmp_path / "a", CELLS)
    filled(tmp_path / "b", [], questions=5, pool=("dense", "L9H0", "L9H1"))
    OutcomeStore(tmp_path / "b").begin(MODEL, {"other": TASKS["toy"]}, [{**row(0), "task": "other"}], ["dense"])
    filled(tmp_path / "b", CELLS)
    expected, outcomes = (OutcomeStore(tmp_path / name).read() for name in "ab")
    assert outcomes.pool == expected.pool and outcomes.texts == expected.texts and outcomes.tasks == expected.tasks
    assert np.array_equal(outcomes.z, expected.z) and outcomes.accuracy().tolist() == expected.accuracy().tolist()


def test_store_does_not_depend_on_order_or_interruptions(tmp_path: Path) -> None:
    filled(tmp_path / "a", CELLS)
    filled(tmp_path / "b", CELLS[4:])  # a run that was stopped, then one that went on
    filled(tmp_path / "b", CELLS[:4])
    filled(tmp_path / "c", [c for c in CELLS if c[0] == 2 and c[1] == "dense"], pool=("dense",))  # extended by a head
    filled(tmp_path / "c", [c for c in CELLS if c[:2] != (2, "dense")])
    filled(tmp_path / "d", [], questions=0)  # and by questions
    filled(tmp_path / "d", CELLS)
    first = file_contents(tmp_path / "a")
    assert set(first) == {"store.json", "questions.parquet", "cells.parquet", "answers.json", "answers.jsonl"}
    assert all(file_contents(tmp_path / other) == first for other in "bcd")


def test_a_model_folder_may_be_renamed(tmp_path: Path) -> None:
    filled(tmp_path, CELLS)
    before = file_contents(tmp_path)
    OutcomeStore(tmp_path).begin({**MODEL, "name": "renamed"}, TASKS, [row(0)], ["dense"])
    assert file_contents(tmp_path) == before


def test_store_refuses_other_prompts(tmp_path: Path) -> None:
    """Other models and settings are refused by `sweep`, too."""
    filled(tmp_path, CELLS)
    before = file_contents(tmp_path)
    with pytest.raises(InputError):
        OutcomeStore(tmp_path).begin(MODEL, TASKS, [row(0, "another")], ["dense"])
    assert file_contents(tmp_path) == before


# --------------------------------------------------------------------------- fitting and the artefact


@pytest.mark.parametrize("z", [[[0, 0], [0, 0], [math.nan, 0]], [[1, 1], [1, 1], [1, math.nan]]])
def test_outcomes_that_teach_nothing_are_refused(z: list) -> None:
    with pytest.raises(InputError):
        fit(outcomes(z), "all-minilm-l6-v2")


def test_fit_counts_skipped_questions(tmp_path: Path) -> None:
    texts = ["How many apples?", "What is two plus two?", "A train goes 60 miles.", "Ten birds fly.", "Six by seven?"]
    texts = [f"{text} ({i})" for i, text in enumerate(texts * 2)]
    z = [[0, 0, 0], [1, 1, 1], *([[0, 1, 0], [1, 0, 0]] * 4)]
    router = fit(outcomes(z, texts), "all-minilm-l6-v2", FitOptions(epochs=3))
    about = router.about
    assert (about["questions"], about["questions_no_head_solves"], about["questions_all_heads_solve"]) == (10, 1, 1)
    assert about["training_questions"] + about["validation_questions"] == 10
    assert json.dumps(about)
    router.save(tmp_path)
    order = Router.load(tmp_path).order(texts[:3])
    assert order == router.order(texts[:3])
    assert router.order(texts[2:3])[0] == order[2]  # not changed by neighbours
    without = fit(outcomes(z, texts), "all-minilm-l6-v2", FitOptions(epochs=1, dense=False))
    assert DENSE not in without.pool
