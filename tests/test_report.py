"""The SPRINT report: its numbers against literal ones, its pictures drawn, its mistakes said in one line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmeval_prune import InputError
from lmeval_prune.artefacts import digest
from lmeval_prune.cli import main
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.sprint import report
from lmeval_prune.sprint import router as policies
from lmeval_prune.sprint.options import FitOptions, ReportOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.report import write_report
from lmeval_prune.sprint.router import Router, fit

POOL = [DENSE, "L5H0", "L5H1", "L10H0", "L10H1"]
SUBJECTS = ("algebra", "geometry")
TASKS = {"toy": {"generation": {"max_gen_toks": 8}, "question_field": "question"}}


def write(
    folder: Path,
    first: int,
    count: int,
    seed: int = 0,
    weights: str = "w",
    pool: tuple = tuple(POOL),
    tasks: dict | None = None,
    model: dict | None = None,
) -> np.ndarray:
    """A store of `count` questions; L5H1 is the best head for algebra, L10H1 for geometry."""
    generator = np.random.default_rng(seed)
    store = OutcomeStore(folder)
    rows, cells = [], []
    z = np.zeros((count, len(pool)), np.float32)
    for i in range(count):
        number = first + i
        subject = SUBJECTS[number % 2]
        where = {"task": "toy", "split": "test", "doc_id": number}
        question = f"Question {number}: a problem of {subject} number {number}"
        attributes = {"subject": subject, "level": number % 3}
        rows.append({**where, "question": question, "prompt": digest("prompt"), "attributes": attributes})
        for j, head in enumerate(pool):
            good = head == ("L5H1" if subject == "algebra" else "L10H1")
            z[i, j] = generator.random() < (0.8 if good else 0.3)
            cells.append({**where, "attempt": head, "extracted": "", "outcome": bool(z[i, j]), "answer": ""})
    store.begin({"name": "toy", "weights": weights, **(model or {})}, tasks or TASKS, rows, pool)
    store.add(cells)
    return z


def samples(
    path: Path, outcomes: Outcomes, tries: int = 4, routed: bool = False, prompt: str = "prompt", length: int = 8
) -> np.ndarray:
    right = np.random.default_rng(7).integers(0, tries + 1, len(outcomes.texts))
    with path.open("w") as file:
        for text, count in zip(outcomes.texts, right.tolist(), strict=True):
            settings = {"do_sample": True, "max_gen_toks": length, **({"attempts": POOL[:tries]} if routed else {})}
            sample = {
                "doc": {"question": text},
                "resps": [["x\u2028\u0085"] * tries * 2],
                "filtered_resps": [["x"] * tries],
                "pass@1_unbiased": count / tries,
            }
            sample["arguments"] = {"gen_args_0": {"arg_0": prompt, "arg_1": settings}}
            sample |= {f"pass@{k}": float(count >= tries / k) for k in (1, 2, 4)}
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
    return right


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Outcomes, Outcomes]:
    write(tmp_path / "train", 100, 80, 1)
    write(tmp_path / "test", 0, 30, 2)
    return OutcomeStore(tmp_path / "train").read(), OutcomeStore(tmp_path / "test").read()


def test_curves(stores: tuple[Outcomes, Outcomes], tmp_path: Path) -> None:
    train, test = stores
    ordered = report.policy_curve("best", policies.best(train), test, 3)
    order = policies.best(train).pool
    for i, row in enumerate(test.z):
        tries = [row[POOL.index(head)] for head in order]
        assert ordered.values[i].tolist() == [float(any(tries[: k + 1])) for k in range(3)]
    drawn = report.random_curve("random", POOL, test, 3)
    for i, row in enumerate(test.z):  # the expectation, by going through all draws
        for k in (1, 2, 3):
            draws = [any(row[list(chosen)]) for chosen in itertools.combinations(range(5), k)]
            assert drawn.values[i, k - 1] == pytest.approx(np.mean(draws))
    right = samples(tmp_path / "s.jsonl", test)
    sampled = report.samples_curve("T", str(tmp_path / "s.jsonl"), test, 5)
    for i, count in enumerate(right):
        draws = [any(t < count for t in chosen) for chosen in itertools.combinations(range(4), 2)]
        assert sampled.values[i, 1] == pytest.approx(np.mean(draws))
    assert sampled.kind == "unbiased" and np.isnan(sampled.values[:, 4]).all()
    samples(tmp_path / "r.jsonl", test, routed=True)
    routed = report.samples_curve("R", str(tmp_path / "r.jsonl"), test, 4)
    assert routed.kind == "ordered" and np.isnan(routed.mean).tolist() == [False, False, True, False]
    oracle = report.oracle_curve("oracle", POOL, test, 3)
    assert (oracle.values == test.z.max(1, keepdims=True)).all()


def test_the_table_and_its_gains(stores: tuple[Outcomes, Outcomes]) -> None:
    _, test = stores
    groups = report.groups_of(test)
    table = report.head_table(test, groups)
    assert list(groups) == ["algebra", "geometry"] and list(dict.fromkeys(table["layer"])) == ["L5", "L10"]
    rows = [i for i, row in enumerate(test.questions) if row["attributes"]["subject"] == "algebra"]
    accuracy = table.set_index(["group", "layer", "head"])["accuracy"]
    assert accuracy["algebra", "L5", 1] == pytest.approx(test.z[rows, 2].mean())
    gain = max(test.z[rows, 1].mean(), test.z[rows, 2].mean()) - test.z[rows, 0].mean()
    assert report.gains(table)["L5"][0] == pytest.approx(gain)
    assert list(report.groups_of(test, "level")) == ["0", "1", "2"]
    lines = report.head_tables(table)["algebra"].splitlines()
    (best,) = [line for line in lines if line.split("|")[1].strip() == "1"]  # head 1, the best of layer 5
    assert f"**{test.z[rows, 2].mean():.3f}**" in best and lines[-1].split("|")[1].strip() == "none"
    assert len(table) == 2 * 4


def test_best_head_gains_by_chance() -> None:
    """All columns are equally good: the best column seems better, by as much as the shuffled gain."""
    z = (np.random.default_rng(0).random((60, 5)) < 0.4).astype(np.float32)
    rows = [{"question": str(i), "task": "toy", "attributes": {}} for i in range(60)]
    outcomes = Outcomes(z, [DENSE, *(f"L0H{h}" for h in range(4))], rows)
    groups = report.groups_of(outcomes)
    luck = report.gains_by_chance(outcomes, groups, draws=2000)["L0"]
    assert 0.03 < np.mean(luck) < 0.15
    assert abs(report.gains(report.head_table(outcomes, groups))["L0"][0] - np.mean(luck)) < 3 * np.std(luck)


def test_report(stores: tuple[Outcomes, Outcomes], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train, test = stores
    fit(train, "all-minilm-l6-v2", FitOptions(epochs=40)).save(tmp_path / "router")
    samples(tmp_path / "s.jsonl", test)
    command = ["report", "sprint", "--test", str(tmp_path / "test"), "--train", str(tmp_path / "train"), "--n", "4"]
    command += ["--router", str(tmp_path / "router"), "--samples", f"T = 0.6={tmp_path / 's.jsonl'}"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 2  # the name ends at the first =
    command[-1] = f"sampling={tmp_path / 's.jsonl'}"
    capsys.readouterr()
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {
        f"{stem}.{kind}" for stem in ("pass_at_n", "head_changes", "best_head_gains") for kind in ("png", "svg")
    }
    assert names == pictures | {"report.md", "report.json", "accuracy.csv", "pass_at_n.csv"}
    assert all((tmp_path / "out" / name).stat().st_size > 3000 for name in pictures)
    result = json.loads((tmp_path / "out/report.json").read_text())
    assert set(result["pass"]) >= {"SPRINT router", "sampling", "oracle (not a method)", "best of training"}
    assert len(result["router_minus"]["sampling"]) == 4
    orders = Router.load(tmp_path / "router").order(test.texts)
    for k, counts in enumerate(result["choices"]):
        assert counts == {head: sum(order[k] == head for order in orders) for head in counts}
        assert sum(counts.values()) == len(test.texts)
    text = (tmp_path / "out/report.md").read_text()
    assert "Paired tests" in text and "not a method" in text and "optimistic" in text
    assert not any(question in text for question in test.texts)  # no text of the data set
    again = tmp_path / "again"
    assert main([*command, "--output", str(again)]) == 0
    assert (again / "report.json").read_text() == (tmp_path / "out/report.json").read_text()


def test_columns_of_some_questions_are_left_out(tmp_path: Path) -> None:
    """All other figures are those of the whole store."""
    write(tmp_path / "test", 0, 30, 2)
    (tmp_path / "partial").mkdir()
    store, whole = OutcomeStore(tmp_path / "partial"), OutcomeStore(tmp_path / "test").read()
    store.begin(whole.model, whole.tasks, whole.questions, POOL)
    cells = OutcomeStore(tmp_path / "test").cells()
    store.add(cell for cell in cells if cell["attempt"] != "L10H1" or cell["doc_id"] <= 20)
    results = []
    for name in ("test", "partial"):
        options = ReportOptions(str(tmp_path / name), str(tmp_path / "out"), n=2, shortlist=2)
        results.append(json.loads(write_report(options).with_name("report.json").read_text()))
    whole, partial = results
    assert not whole["notes"] and "questions: L10H1;" in partial["notes"][0]
    assert set(partial["pass"]) == {"random of all 4", "oracle (not a method)"}
    assert partial["changes"] == {name: change for name, change in whole["changes"].items() if name != "L10H1"}


def test_held_out_questions_are_the_test(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "s", 0, 40)
    fit(OutcomeStore(tmp_path / "s").read(), "all-minilm-l6-v2", FitOptions(epochs=1, holdout=0.25)).save(
        tmp_path / "r"
    )
    command = ["questions", "--outcomes", str(tmp_path / "s"), "--task", "toy_pass8"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"toy_pass8": list(range(40))}
    assert main([*command, "--router", str(tmp_path / "r")]) == 0
    assert len(json.loads(capsys.readouterr().out)["toy_pass8"]) == 10
    write(tmp_path / "other", 100, 40)  # another store for the baselines changes nothing about what is tested
    for train in (None, str(tmp_path / "other")):
        write_report(ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), train, str(tmp_path / "r"), n=2))
        assert "Test: 10 questions" in (tmp_path / "out/report.md").read_text()


def test_fitted_questions_are_refused_as_test(tmp_path: Path) -> None:
    write(tmp_path / "s", 0, 60)
    write(tmp_path / "elsewhere", 100, 30)
    fit(OutcomeStore(tmp_path / "s").read(), "all-minilm-l6-v2", FitOptions(epochs=3)).save(tmp_path / "r")
    for train in (None, str(tmp_path / "elsewhere")):
        with pytest.raises(InputError):
            write_report(ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), train, str(tmp_path / "r"), n=3))


def test_stores_and_samples_that_do_not_belong_together_are_refused(
    stores: tuple[Outcomes, Outcomes], tmp_path: Path
) -> None:
    train, test = stores
    fit(train, "all-minilm-l6-v2", FitOptions(epochs=1)).save(tmp_path / "router")
    write(tmp_path / "other", 0, 30, weights="others")
    write(tmp_path / "overlap", 20, 30)
    write(tmp_path / "unlike", 200, 30, tasks={"toy": {**TASKS["toy"], "metric": "other"}})
    write(tmp_path / "masked", 200, 30, model={"interventions": [{"method": "heads", "version": 1, "heads": ["L1H0"]}]})
    samples(tmp_path / "s.jsonl", test)
    samples(tmp_path / "few.jsonl", test.rows(range(10)))
    samples(tmp_path / "prompts.jsonl", test, prompt="another")
    samples(tmp_path / "limit.jsonl", test, length=9)
    named: list[dict[str, Any]] = [{"test": "other", "router": "router"}, {"test": "unlike", "router": "router"}]
    named += [{"train": name} for name in ("overlap", "unlike", "masked")]
    wrong = [{kind: str(tmp_path / name) for kind, name in pair.items()} for pair in named]
    wrong += [{"samples": [("T", str(tmp_path / f"{name}.jsonl"))]} for name in ("few", "prompts", "limit")]
    wrong += [{"samples": [("T", str(tmp_path / "s.jsonl"))] * 2}, {"by": "colour"}]
    for options in wrong:
        arguments: dict[str, Any] = {"test": str(tmp_path / "test"), "output": str(tmp_path / "out"), "n": 2, **options}
        with pytest.raises(InputError):
            write_report(ReportOptions(**arguments))
