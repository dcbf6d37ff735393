"""The SPRINT report: its numbers against literal ones, its pictures drawn, its mistakes said in one line."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmeval_prune import InputError
from lmeval_prune.artefacts import digest
from lmeval_prune.cli import main
from lmeval_prune.models.attempts import DENSE
from lmeval_prune.reporting.statistics import mean_interval
from lmeval_prune.sprint import curves, figures, policies
from lmeval_prune.sprint import head_table as heads
from lmeval_prune.sprint.fit import fit
from lmeval_prune.sprint.options import FitOptions, ReportOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, Question
from lmeval_prune.sprint.report import _left_out, write_report
from lmeval_prune.sprint.router import Router
from tests.swept_outcomes import write_outcomes

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
        rows.append(
            {
                **where,
                "question": question,
                "prompt": digest("prompt"),
                "attributes": {"subject": subject, "level": number % 3},
            }
        )
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
            settings = {"do_sample": True, "max_gen_toks": length, **({"heads": POOL[:tries]} if routed else {})}
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
    ordered = curves.policy_curve("best", policies.best(train), test, 3)
    order = policies.best(train).pool
    for i, row in enumerate(test.z):
        tries = [row[POOL.index(head)] for head in order]
        assert ordered.values[i].tolist() == [float(any(tries[: k + 1])) for k in range(3)]
    drawn = curves.random_curve("random", POOL, test, 3)
    for i, row in enumerate(test.z):  # the expectation, by going through all draws
        for k in (1, 2, 3):
            draws = [any(row[list(chosen)]) for chosen in itertools.combinations(range(5), k)]
            assert drawn.values[i, k - 1] == pytest.approx(np.mean(draws))
    right = samples(tmp_path / "s.jsonl", test)
    sampled = curves.samples_curve("T", str(tmp_path / "s.jsonl"), test, 5)
    for i, count in enumerate(right):
        draws = [any(t < count for t in chosen) for chosen in itertools.combinations(range(4), 2)]
        assert sampled.values[i, 1] == pytest.approx(np.mean(draws))
    assert sampled.kind == "unbiased" and np.isnan(sampled.values[:, 4]).all()
    samples(tmp_path / "r.jsonl", test, routed=True)
    routed = curves.samples_curve("R", str(tmp_path / "r.jsonl"), test, 4)
    assert routed.kind == "ordered" and np.isnan(routed.mean).tolist() == [False, False, True, False]
    oracle = curves.oracle_curve("oracle", POOL, test, 3)
    assert (oracle.values == test.z.max(1, keepdims=True)).all()


def test_band_contains_the_mean_and_shrinks(stores: tuple[Outcomes, Outcomes]) -> None:
    train, test = stores
    small, large = (curves.random_curve("r", POOL, o, 2) for o in (test, train))
    widths = []
    for curve in (small, large):
        low, high = mean_interval(curve.values, 1.0)
        assert (low >= 0).all() and (high <= 1).all() and (low <= curve.mean).all() and (curve.mean <= high).all()
        widths.append(high - low)
    assert (widths[1] < widths[0]).all()


def test_names_are_escaped_in_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SUBJECTS", ("<script>x", "=1+2"))
    write(tmp_path / "test", 0, 30)
    write_report(ReportOptions(test=str(tmp_path / "test"), output=str(tmp_path / "out"), n=2))
    report = (tmp_path / "out" / "report.md").read_text()
    assert "**&lt;script&gt;x**" in report and "<script" not in report and "pass@2" in report
    assert "\n'=1+2," in (tmp_path / "out" / "accuracy.csv").read_text()


def test_a_policy_has_one_colour_in_both_pictures(
    stores: tuple[Outcomes, Outcomes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = stores
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda drawing, _: drawn.append(drawing))
    tokens = np.tile(np.arange(1.0, 4), (len(test.texts), 1))
    drawn_curves = [
        curves.policy_curve(name, policies.best(train), test, 3) for name in ("router", "weak", "samples", "strong")
    ]
    drawn_curves = [replace(curve, tokens=None if curve.name == "samples" else tokens) for curve in drawn_curves]
    drawn_curves[3] = replace(drawn_curves[3], values=np.ones_like(tokens))
    figures.pass_at_n(drawn_curves, [mean_interval(curve.values, 1.0) for curve in drawn_curves], 0.3, tmp_path)
    figures.pass_at_tokens(drawn_curves, tmp_path)
    first, second = (
        {text.get_text(): text.get_color() for text in drawing.axes[0].texts if text.get_text()} for drawing in drawn
    )
    assert set(second) == {"router", "weak", "strong"} and second.items() <= first.items()
    assert len(set(second.values())) == 3


def test_the_table_and_its_gains(stores: tuple[Outcomes, Outcomes]) -> None:
    _, test = stores
    table = heads.HeadTable.of(test)
    assert list(table.groups) == ["algebra", "geometry"] and list(table.layers) == ["L5", "L10"]
    rows = [i for i, row in enumerate(test.questions) if row["attributes"]["subject"] == "algebra"]
    assert table.accuracy["algebra", "L5H1"] == pytest.approx(test.z[rows, 2].mean())
    gain = max(test.z[rows, 1].mean(), test.z[rows, 2].mean()) - test.z[rows, 0].mean()
    assert heads.gains(table)["L5"][0] == pytest.approx(gain)
    assert list(heads.groups(test, "level")) == ["0", "1", "2"]
    lines = table.markdown()["algebra"].splitlines()
    (best,) = [line for line in lines if line.split("|")[1].strip() == "1"]  # head 1, the best of layer 5
    assert f"**{test.z[rows, 2].mean():.3f}**" in best and lines[-1].split("|")[1].strip() == "none"
    assert len(table.long()) == 2 * 4


def test_best_head_gains_by_chance() -> None:
    """All columns are equally good: the best column seems better, by as much as the shuffled gain."""
    z = (np.random.default_rng(0).random((60, 5)) < 0.4).astype(np.float32)
    rows = [
        {"task": "toy", "split": "s", "doc_id": i, "question": str(i), "prompt": "", "attributes": {}}
        for i in range(60)
    ]
    outcomes = Outcomes(z, [DENSE, *(f"L0H{h}" for h in range(4))], rows)
    table = heads.HeadTable.of(outcomes)
    luck = heads.gains_by_chance(outcomes, table, draws=2000)["L0"]
    assert 0.03 < np.mean(luck) < 0.15
    assert abs(heads.gains(table)["L0"][0] - np.mean(luck)) < 3 * np.std(luck)


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
        f"{stem}.{kind}"
        for stem in ("pass_at_n", "head_changes", "head_map", "best_head_gains")
        for kind in ("png", "svg")
    }
    assert names == pictures | {"report.md", "report.json", "accuracy.csv", "pass_at_n.csv"}
    assert all((tmp_path / "out" / name).stat().st_size > 3000 for name in pictures)
    result = json.loads((tmp_path / "out/report.json").read_text())
    drawn = (tmp_path / "out/head_map.svg").read_text()
    assert "change in accuracy, points" in drawn
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


def test_mixes_costs_and_votes_are_reported(tmp_path: Path) -> None:
    """From a store that has samples, lengths and extracted answers."""
    pool = (*POOL, *(f"dense@0.6#{draw}" for draw in range(4)), *(f"L5H1@0.6#{draw}" for draw in range(2)))
    write(tmp_path / "train", 100, 40)
    write(tmp_path / "test", 0, 30, 2, pool=pool)
    store = OutcomeStore(tmp_path / "test")
    cells = store.cells()
    for i, cell in enumerate(cells):
        cell |= {
            "length": 3 + i % 4,
            "cut_off": False,
            "extracted": "7" if cell["outcome"] else str(i % 5),
            "logprob": -1.0,
        }
        del cell["text"], cell["tokens"]
    store.add(cells)
    options = {"n": 4, "mixes": ("dense|next", "next+dense@0.6"), "train": str(tmp_path / "train")}
    write_report(ReportOptions(str(tmp_path / "test"), str(tmp_path / "out"), **options))
    result = json.loads((tmp_path / "out/report.json").read_text())
    named = {"best of training", "best of training, dense|next", "greedy cover of training, next+dense@0.6"}
    assert named | {"sampling, T = 0.6"} <= set(result["pass"]) and set(result["tokens"]) == set(result["pass"]) - {
        "oracle (not a method)"
    }
    test = store.read()
    sampled = [test.pool.index(f"dense@0.6#{draw}") for draw in range(4)]
    assert result["pass"]["sampling, T = 0.6"]["values"][3] == pytest.approx(test.z[:, sampled].max(1).mean(), abs=1e-6)
    assert result["tokens"]["sampling, T = 0.6"][3] == pytest.approx(test.tokens[:, sampled].sum(1).mean(), abs=1e-5)
    votes = {(row["policy"], row["rule"], row["n"]): row for row in result["without_gold"]}
    first = test.pool.index(policies.best(OutcomeStore(tmp_path / "train").read()).pool[0])
    for rule in ("majority", "weighted", "variants", "likelihood"):  # one try has no rival
        assert votes["best of training", rule, 1]["accuracy"] == pytest.approx(test.z[:, first].mean())
    assert votes["sampling, T = 0.6", "majority", 1]["replicates"] == 4
    text = (tmp_path / "out/report.md").read_text()
    assert "By generated tokens" in text and "Choosing without the gold answer" in text
    assert {"pass_at_tokens.png", "without_gold.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_store_without_single_heads_is_reported(tmp_path: Path) -> None:
    pool = (DENSE, "L5H0+L5H1", '{"token_filter":{"ratio":0.2}}')
    write(tmp_path / "test", 0, 30, pool=pool)
    write_report(ReportOptions(str(tmp_path / "test"), str(tmp_path / "out"), n=2, shortlist=2))
    text = (tmp_path / "out/report.md").read_text()
    assert "Single heads" not in text and "random of all 3" in text


def forget(folder: Path, is_unknown: Any) -> None:
    """Rewrite a store without the outcomes of (question number, attempt) for which a function says so."""
    store = OutcomeStore(folder)
    cells, content = store.cells(), store.check()
    rows = store.read().questions
    shutil.rmtree(folder)
    known = [cell for cell in cells if not is_unknown(cell["doc_id"], cell["attempt"])]
    store.begin(content["model"], content["tasks"], rows, {cell["attempt"] for cell in known})
    for cell in known:
        del cell["text"], cell["tokens"]
    store.add(known)


@pytest.mark.parametrize(
    ("is_unknown", "kept", "missing", "columns"),
    [
        # one head is not asked everywhere: the pool of the others, and policies that do not try it, are reported
        (lambda n, a: a == "L10H1" and n > 20, {"random of the 4 complete columns"}, {"best of training"}, "L10H1"),
        # as in a race: of the heads only L5H1 and L10H1, which training tries first, and samples
        (
            lambda n, a: a in ("L5H0", "L10H0") and n > 3,
            {"best of training", "greedy cover of training", "sampling, T = 0.6"},
            set(),
            "L5H0, L10H0",
        ),
        # as in a race's training store: some questions have more samples than others
        (
            lambda n, a: a in ("dense@0.6#2", "dense@0.6#3") and n > 9,
            {"random of all 5", "sampling, T = 0.6"},
            set(),
            "",
        ),
        # greedy answers of the unpruned model alone, and samples
        (
            lambda n, a: a.startswith("L") and n % 3 > 0,
            {"sampling, T = 0.6"},
            {"best of training", "greedy cover of training", "random order", "oracle"},
            "L5H0, L5H1, L10H0, … (4 in all)",
        ),
    ],
    ids=["a head", "tries", "samples", "all heads"],
)
def test_what_is_known_of_a_partial_store_is_reported(
    tmp_path: Path, capsys: Any, is_unknown: Any, kept: set[str], missing: set[str], columns: str
) -> None:
    """Values are those of the complete store; what is left out is said in one line, with the fix."""
    pool = (*POOL, *(f"dense@0.6#{draw}" for draw in range(4)))
    write(tmp_path / "train", 100, 60)
    write(tmp_path / "test", 0, 30, 2, pool=pool)
    command = ["report", "sprint", "--train", str(tmp_path / "train"), "--n", "2", "--shortlist", "2"]
    command += ["--test", str(tmp_path / "test"), "--output"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    assert "left out" not in capsys.readouterr().out
    forget(tmp_path / "test", is_unknown)
    assert main([*command, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    whole, result = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "out"))
    page = (tmp_path / "out/report.md").read_text()
    assert kept <= set(result["pass"]) and not missing & set(result["pass"])
    for name in set(result["pass"]) & set(whole["pass"]) - {"sampling, T = 0.6"}:
        assert result["pass"][name] == whole["pass"][name]
    if not columns:
        assert len(said) == 1 and not result["left_out"] and "Left out" not in page
        return
    (line,) = said[1:]
    assert f"columns without outcomes of all questions: {columns}" in line
    assert "lmeval-prune sweep" in line
    assert line.startswith("left out: ") and all(name in line for name in missing) and "Left out: " in page
    assert result["left_out"] == line
    assert ("## Single heads" in page) == ("in all" not in columns)
    assert all(name in page for name in kept)


def test_a_temperature_without_enough_samples_is_said_to_be_left_out(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "test", 0, 30, 2, pool=(*POOL, *(f"dense@0.6#{draw}" for draw in range(3))))
    forget(tmp_path / "test", lambda number, attempt: attempt in ("dense@0.6#1", "dense@0.6#2") and number > 9)
    assert (
        main(["report", "sprint", "--test", str(tmp_path / "test"), "--n", "2", "--output", str(tmp_path / "o")]) == 0
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert "'sampling, T = 0.6'" in line


def test_a_router_is_reported_by_the_tries_that_are_known(tmp_path: Path) -> None:
    """As of a race, whose store has the chosen mix of the router's order, and lacks columns of its pool."""
    write(tmp_path / "train", 100, 80, 1)
    write(tmp_path / "test", 0, 30, 2, pool=(*POOL, *(f"{name}@0.4#0" for name in POOL)))
    fit(OutcomeStore(tmp_path / "train").read(), "all-minilm-l6-v2", FitOptions(epochs=40)).save(tmp_path / "router")
    forget(tmp_path / "test", lambda number, attempt: attempt == "L5H1")  # a column that no question was asked
    options = ReportOptions(str(tmp_path / "test"), str(tmp_path / "out"), None, str(tmp_path / "router"), n=4)
    with pytest.raises(
        InputError, match=r"^the tries of --router are not known at all questions \(.*by --mixes, or leave"
    ):
        write_report(options)
    with pytest.raises(InputError, match=r"^the tries of --mixes next@0.8 are .*; sweep them, or leave out --mixes"):
        write_report(replace(options, router=None, train=str(tmp_path / "train"), mixes=("next@0.8",)))
    _, left_out = write_report(replace(options, mixes=("next@0.4",)))
    assert left_out.startswith("left out: 'SPRINT router' (the test store has no L5H1); from random order, oracle and")
    result, text = json.loads((tmp_path / "out/report.json").read_text()), (tmp_path / "out/report.md").read_text()
    assert set(result["pass"]) == {
        "SPRINT router, next@0.4", "random of the 4 complete columns", "oracle of the 4 complete columns (not a method)",
    }  # fmt: skip
    assert "Paired tests" in text and set(result["router_minus"]) == {"random of the 4 complete columns"}
    assert result["tested_policy"] == "SPRINT router, next@0.4" and "\nSPRINT router, next@0.4 minus …" in text


def test_each_reason_is_named_with_the_curves_that_it_leaves_out(tmp_path: Path) -> None:
    write(tmp_path / "test", 0, 30, 2)
    missing = {
        "one curve": "the test store has no L5H1",
        "another": "no samples",
        "third": "the test store has no L5H1",
    }
    options = ReportOptions(str(tmp_path / "test"), str(tmp_path / "out"))
    line = _left_out(options, OutcomeStore(tmp_path / "test").read(), None, missing)
    assert line.startswith(
        "left out: 'one curve', 'third' (the test store has no L5H1); 'another' (no samples); `lmeval"
    )


def test_nothing_to_report_names_the_fix(tmp_path: Path) -> None:
    write(tmp_path / "test", 0, 30)
    forget(tmp_path / "test", lambda number, attempt: attempt != DENSE and number > 3)
    with pytest.raises(
        InputError, match=r"^nothing can be reported: left out: random order and oracle .*--train"
    ) as error:
        write_report(ReportOptions(str(tmp_path / "test"), str(tmp_path / "out"), n=2))
    assert "\n" not in str(error.value)


def test_held_out_questions_are_the_test(tmp_path: Path) -> None:
    write(tmp_path / "s", 0, 60)
    router = fit(OutcomeStore(tmp_path / "s").read(), "all-minilm-l6-v2", FitOptions(epochs=3, holdout=0.5))
    router.save(tmp_path / "r")
    assert router.about["questions"] == 30 and router.about["held_out"] == 30
    write_report(ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), router=str(tmp_path / "r"), n=3))
    text = (tmp_path / "out/report.md").read_text()
    assert "Test: 30 questions" in text and "Training: 30 questions" in text
    write(tmp_path / "other", 100, 40)  # another store for the baselines changes nothing about what is tested
    write_report(
        ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), str(tmp_path / "other"), str(tmp_path / "r"), n=3)
    )
    text = (tmp_path / "out/report.md").read_text()
    assert "Test: 30 questions" in text and "Training: 40 questions" in text


def test_questions_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path / "s", 0, 40)
    fit(OutcomeStore(tmp_path / "s").read(), "all-minilm-l6-v2", FitOptions(epochs=1, holdout=0.25)).save(
        tmp_path / "r"
    )
    command = ["questions", "--outcomes", str(tmp_path / "s"), "--task", "toy_pass8"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"toy_pass8": list(range(40))}
    assert main([*command, "--router", str(tmp_path / "r")]) == 0
    held = json.loads(capsys.readouterr().out)["toy_pass8"]
    assert len(held) == 10
    write_report(ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), router=str(tmp_path / "r"), n=2))
    assert "Test: 10 questions" in (tmp_path / "out/report.md").read_text()
    (tmp_path / "file").write_text("")
    assert main(["fit", "--outcomes", str(tmp_path / "s"), "--output", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


@pytest.mark.parametrize(("split", "note"), [("train", "give lm_eval --metadata data_split=train, or"), ("test", "")])
def test_questions_of_a_split_that_the_task_does_not_score_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture, split: str, note: str
) -> None:
    settings = {"scored_splits": ["test"]}
    folder = write_outcomes(tmp_path / "s", {DENSE: [0, 1]}, {"name": "toy"}, split=split, settings=settings)
    assert main(["questions", "--outcomes", str(folder), "--task", "toy_pass8"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"toy_pass8": [0, 1]} and bool(printed.err) == bool(note) and note in printed.err


def test_fitted_questions_are_refused_as_test(tmp_path: Path) -> None:
    write(tmp_path / "s", 0, 60)
    write(tmp_path / "elsewhere", 100, 30)
    fit(OutcomeStore(tmp_path / "s").read(), "all-minilm-l6-v2", FitOptions(epochs=3)).save(tmp_path / "r")
    for train in (None, str(tmp_path / "elsewhere")):
        with pytest.raises(InputError, match="60 of the test store's 60 questions were used to fit"):
            write_report(ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), train, str(tmp_path / "r"), n=3))


def test_router_gains_nothing_if_outcomes_do_not_depend_on_questions(tmp_path: Path) -> None:
    """Outcomes shuffled among questions, heads of different accuracy: held out, the router is no better than `best`."""
    write(tmp_path / "s", 0, 400)
    store = OutcomeStore(tmp_path / "s")
    cells = store.cells()
    generator = np.random.default_rng(1)
    chance = dict(zip(POOL, (0.2, 0.3, 0.4, 0.5, 0.6), strict=True))
    for cell in cells:
        cell["outcome"] = bool(generator.random() < chance[cell["attempt"]])
        del cell["text"], cell["tokens"]
    store.add(cells)
    fit(store.read(), "all-minilm-l6-v2", FitOptions(holdout=0.5)).save(tmp_path / "r")
    write_report(ReportOptions(str(tmp_path / "s"), str(tmp_path / "out"), router=str(tmp_path / "r"), n=3))
    result = json.loads((tmp_path / "out/report.json").read_text())
    router, best = (result["pass"][name]["values"][0] for name in ("SPRINT router", "best of training"))
    assert 0.5 < best < 0.7 and router < best + 0.05


@pytest.mark.parametrize(("first", "second", "warns"), [("a", "b", True), ("a", "a", False), ("a", None, False)])
def test_stores_that_other_code_scored_are_compared_with_a_warning(
    tmp_path: Path, first: str, second: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name, start, code in (("train", 0, first), ("test", 200, second)):
        write(tmp_path / name, start, 30, tasks={"toy": {**TASKS["toy"], **({"code": code} if code else {})}})
    options = ReportOptions(str(tmp_path / "test"), str(tmp_path / "out"), train=str(tmp_path / "train"), n=2)
    write_report(options)
    assert ("the code of toy has changed between sweeps" in caplog.text) == warns


@pytest.mark.parametrize("other", [{"chat_template": "other"}, {"generation": {"max_gen_toks": 9}}])
def test_an_order_made_from_other_answers_is_reported_with_a_note(
    stores: tuple[Outcomes, Outcomes], tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As a routed run with such prompts or limits is, which it gives the result of."""
    train, _ = stores
    fit(train, "all-minilm-l6-v2", FitOptions(epochs=1)).save(tmp_path / "router")
    write(tmp_path / "unlike", 400, 30, tasks={"toy": {**TASKS["toy"], **other}})
    options = ReportOptions(str(tmp_path / "unlike"), str(tmp_path / "out"), router=str(tmp_path / "router"), n=2)
    write_report(options)
    write_report(replace(options, router=None, train=str(tmp_path / "train")))
    ending = f" have different settings of toy ({', '.join(other)}): an order made from the one may not suit the other"
    for subject in ("the test store and the router's outcomes", "the two stores"):
        assert f"{subject}{ending}" in caplog.text
    assert f"The two stores{ending}" in (tmp_path / "out/report.md").read_text()


def test_invalid_reports_are_refused(stores: tuple[Outcomes, Outcomes], tmp_path: Path) -> None:
    train, test = stores
    fit(train, "all-minilm-l6-v2", FitOptions(epochs=1)).save(tmp_path / "router")
    write(tmp_path / "other", 0, 30, weights="others")
    write(tmp_path / "overlap", 20, 30)
    write(tmp_path / "few", 0, 30, pool=("dense", "L5H0"))
    samples(tmp_path / "s.jsonl", test.rows(range(10)))
    (tmp_path / "not.jsonl").write_text('{"doc": 1}\n')

    def report(message: str, **options: object) -> None:
        arguments = {"test": str(tmp_path / "test"), "output": str(tmp_path / "out"), "n": 2, **options}
        with pytest.raises(InputError, match=message):
            write_report(ReportOptions(**arguments))

    report(
        r"different models \(test: toy with weights others, router: toy with weights w\)",
        test=str(tmp_path / "other"),
        router=str(tmp_path / "router"),
    )
    report("also training questions", train=str(tmp_path / "overlap"))
    report("the tries of --router are not", test=str(tmp_path / "few"), router=str(tmp_path / "router"))
    report("the pool has 5", n=6)
    report("n=0 must be", n=0)
    report("lacks 20 of the test store's 30", samples=[("T", str(tmp_path / "s.jsonl"))])
    report("not.jsonl is damaged or of another kind", samples=[("T", str(tmp_path / "not.jsonl"))])
    report("two curves have the name 'T'", samples=[("T", str(tmp_path / "s.jsonl"))] * 2)
    report("two curves have the name 'oracle", samples=[("oracle (not a method)", str(tmp_path / "s.jsonl"))])
    for wrong in ({"prompt": "another"}, {"length": 9}):
        samples(tmp_path / "w.jsonl", test, **wrong)
        report("other prompts or another max_gen_toks", samples=[("T", str(tmp_path / "w.jsonl"))])
    write(tmp_path / "unlike", 200, 30, tasks={"toy": {**TASKS["toy"], "metric": "other"}})
    report("the two stores have different settings of toy", train=str(tmp_path / "unlike"))
    unlike = {"test": str(tmp_path / "unlike"), "router": str(tmp_path / "router")}
    report(r"test store and the router's outcomes have different settings of toy \(metric\)", **unlike)
    masked = {"interventions": [{"method": "heads", "version": 1, "heads": ["L1H0"]}]}
    write(tmp_path / "masked", 200, 30, model=masked)
    for other in ({"train": str(tmp_path / "masked")}, {**unlike, "test": str(tmp_path / "masked")}):
        report(r"one model under different pruning \(.*heads \(heads=\['L1H0'\]\)", **other)
    report("shortlist .* has 1", shortlist=1)
    report("no such file", samples=[("T", str(tmp_path / "gone.jsonl"))])
    report("not all questions have 'colour'", by="colour")
    report("not an outcome store", test=str(tmp_path / "router"))
    store = OutcomeStore(tmp_path / "test")
    row = {
        **Question("toy", "test", 999)._asdict(),
        "question": "new",
        "prompt": "p",
        "attributes": {"subject": "algebra"},
    }
    store.begin(test.model, test.tasks, [row], POOL)
    report("no outcome of the unpruned model, .* at 1 of 31 questions; run `lmeval-prune sweep` into it to its end")
