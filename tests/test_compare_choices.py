"""`compare` on samples files written by hand: choices of every form, and questions that several tasks contain."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lmeval_prune.comparison.compare import compare
from lmeval_prune.comparison.samples import question_keys
from lmeval_prune.comparison.tables import POOLED

COUNT = 24
Row = Callable[[int, random.Random], dict[str, Any]]


def write_run(folder: Path, tasks: dict[str, Row], groups: dict[str, list[str]] | None = None, seed: int = 0) -> str:
    """Write a run as lm-eval writes it; each task's function returns the rows of its samples."""
    rng, results = random.Random(seed), {"results": {}, "configs": {}, "config": {"model": "hf", "model_args": "x=1"}}
    folder.mkdir()
    for task, row in tasks.items():
        rows = [{"doc_id": i, "filter": "none", "target": "0", **row(i, rng)} for i in range(COUNT)]
        for sample in rows:
            sample |= {"doc_hash": json.dumps(sample["doc"]), "filtered_resps": [r[0] for r in sample["resps"]]}
        lines = (json.dumps(entry) + "\n" for entry in rows)
        (folder / f"samples_{task}_2026-01-01.jsonl").write_text("".join(lines))
        metric = rows[0]["metrics"][0]
        values = [entry[metric] for entry in rows]
        is_pair = isinstance(values[0], list)
        mean = math.exp(-np.sum(values, 0)[0] / np.sum(values, 0)[1]) if is_pair else float(np.mean(values))
        results["results"][task] = {f"{metric},none": mean}
        results["configs"][task] = {"metric_list": [{"metric": metric}]}
    results["group_subtasks"] = groups or {}
    (folder / "results_2026-01-01.json").write_text(json.dumps(results))
    return str(folder)


def choice(question: str, arguments: list[list[str]], rng: random.Random, **others: Any) -> dict[str, Any]:
    """A row of a choice task whose first choice is right."""
    likelihoods = [-5 * rng.random() for _ in arguments]
    right = float(max(range(len(arguments)), key=lambda i: likelihoods[i]) == 0)
    responses = [[[str(value), "False"]] for value in likelihoods]
    return {
        "doc": {"question": question},
        "arguments": arguments,
        "resps": responses,
        "metrics": ["acc"],
        "acc": right,
    } | others


def several_inputs(i: int, rng: random.Random) -> dict[str, Any]:
    """As winogrande: the choices stand before one continuation."""
    return choice(
        "", [[f"Example.\n\nBo met {name} because {name}", f" won game {i}."] for name in ("Ann", "Anna")], rng
    )


def mutual_information(i: int, rng: random.Random) -> dict[str, Any]:
    """As for `acc_mutual_info`: requests of the choices alone follow."""
    arguments = [[context, f" {name}"] for context in (f"Question {i}?", "") for name in "abc"]
    return choice(f"Question {i}?", arguments, rng, metrics=["acc", "acc_mutual_info"], acc_mutual_info=0.0)


def minimal_pair(name: str) -> Row:
    """As blimp: two sentences and no prompt."""
    return lambda i, rng: choice("", [["", f"{name} {word} {i}"] for word in ("is", "are")], rng)


def generated(text: str) -> Row:
    return lambda i, rng: {
        "doc": {"question": text.format(i)}, "arguments": [[f"{text.format(i)} ", {}]], "resps": [["7"]],
        "metrics": ["exact_match"], "exact_match": float(rng.random() < 0.5),
    }  # fmt: skip


def perplexity(name: str, i: int, rng: random.Random) -> dict[str, Any]:
    pair = [-20 * rng.random() * (i > 0), i]  # the first document has no words
    return {
        "doc": {"text": f"{i}"}, "arguments": [[f"{name} {i}"]], "resps": [[[str(pair[0]), "False"]]],
        "metrics": ["word_perplexity"], "word_perplexity": pair,
    }  # fmt: skip


def rows_of(folder: str, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, f"samples_{task}_2026-01-01.jsonl").read_text().splitlines()]


def runs(tmp_path: Path, tasks: dict[str, Row], groups: dict[str, list[str]] | None = None) -> list[str]:
    return [write_run(tmp_path / name, tasks, groups, seed) for seed, name in enumerate("ab")]


@pytest.mark.parametrize(("row", "count"), [(several_inputs, 2), (mutual_information, 3), (minimal_pair("He"), 2)])
def test_the_likeliest_choice_and_the_divergence_are_those_of_the_choices(tmp_path: Path, row: Row, count: int) -> None:
    """Not of texts that all choices share, nor of requests without a context."""
    paths = runs(tmp_path, {"t": row})
    pairs, same, divergences = zip(*(rows_of(path, "t") for path in paths), strict=True), [], []
    for pair in pairs:
        likelihoods = [[float(response[0][0]) for response in sample["resps"][:count]] for sample in pair]
        p, q = ([math.exp(value) / sum(map(math.exp, own)) for value in own] for own in likelihoods)
        same.append(p.index(max(p)) == q.index(max(q)))
        divergences.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    comparison = compare(paths)
    assert comparison.rows["b", "t"].measured["same_answers"] == pytest.approx(np.mean(same)) and 0 < np.mean(same) < 1
    assert comparison.rows["b", "t"].measured["choice_kld"] == pytest.approx(np.mean(divergences))
    shown = {answer.answer for answer in comparison.answers("a", "t")}
    assert len(shown) > 1 and not any(answer.startswith("Example") for answer in shown)
    if row is several_inputs:
        assert all(answer.startswith(("Ann won", "Anna won", "Ann because", "Anna because")) for answer in shown)


def test_questions_are_told_apart_by_their_choices_only_where_they_differ() -> None:
    assert question_keys(["a", "b", "a/1", "c/1", "c/2", "c"]) == ["a", "b", "a", "c/1", "c/2", "c"]


def test_questions_with_one_text_and_other_choices_are_not_one_question(tmp_path: Path) -> None:
    """Without a prompt, as of blimp; or with 'Which is true?', as in several subjects of MMLU."""

    def which(subject: str) -> Row:
        return lambda i, rng: choice("Which is true?", [["Which?", f" {subject} {i} {x}"] for x in "ab"], rng)

    tasks = {"x": minimal_pair("He"), "y": minimal_pair("They"), "law": which("law"), "art": which("art")}
    comparison = compare(runs(tmp_path, tasks))
    assert comparison.rows["b", POOLED].questions == 4 * COUNT


def test_outcomes_of_one_question_are_no_independent_outcomes(tmp_path: Path) -> None:
    """A group whose tasks ask the same questions has a row for each question, as all tasks together have."""

    def multiple_choice(i: int, rng: random.Random) -> dict[str, Any]:
        return choice(f"What is {i}?", [[f"What is {i}?", f" {x}"] for x in "ab"], rng)

    tasks = {"plain": generated("What is {}?"), "choices": multiple_choice, "other": generated("Why is {}?")}
    paths = runs(tmp_path, tasks, {"both": ["plain", "choices"]})
    comparison = compare(paths)
    values = [[np.array([row[m] for row in rows_of(path, task)]) for task, m in
               (("plain", "exact_match"), ("choices", "acc"), ("other", "exact_match"))] for path in paths]  # fmt: skip
    differences = [(b - a) for a, b in zip(*values, strict=True)]
    for name, expected in (
        ("both", (differences[0] + differences[1]) / 2),
        (POOLED, np.concatenate([(differences[0] + differences[1]) / 2, differences[2]])),
    ):
        row = comparison.rows["b", name]
        assert row.questions == len(expected) and row.difference == pytest.approx(expected.mean())
        assert (row.better, row.worse) == ((expected > 0).sum(), (expected < 0).sum())
        flips = np.random.default_rng(1).choice([-1, 1], (20_000, len(expected))) @ expected
        assert row.p == pytest.approx(np.mean(np.abs(flips) >= abs(expected.sum()) - 1e-9), abs=0.02)


def test_perplexities_of_one_text_in_two_tasks_of_a_group(tmp_path: Path) -> None:
    tasks = {name: lambda i, rng: perplexity("same", i, rng) for name in ("first", "second")}
    paths = runs(tmp_path, tasks, {"texts": ["first", "second"]})
    row = compare(paths).rows["b", "texts"]
    pairs = np.array([[row["word_perplexity"] for name in tasks for row in rows_of(path, name)] for path in paths])
    logs = [-own[:, 0].sum() / own[:, 1].sum() for own in pairs]
    assert row.questions == COUNT and row.mean == pytest.approx(math.exp(logs[1]))
    assert row.difference == pytest.approx(math.expm1(logs[1] - logs[0]))
    sums = (pairs[1, :, 0] - pairs[0, :, 0]).reshape(2, COUNT).sum(0)
    tested = stats.permutation_test(
        (sums,), np.mean, permutation_type="samples", n_resamples=10_000, rng=np.random.default_rng(0)
    )
    assert row.p == pytest.approx(tested.pvalue, abs=0.02)
