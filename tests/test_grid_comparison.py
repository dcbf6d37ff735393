"""Comparing a grid: statistics against scipy and brute force, what is refused, size."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import xlogy

from lmeval_prune import InputError
from lmeval_prune.artefacts import digest, file_name, new_folder, write_artefact
from lmeval_prune.cli import main
from lmeval_prune.comparison.columns import pareto_fronts
from lmeval_prune.comparison.tables import POOLED
from lmeval_prune.grid.cells import selected_questions
from lmeval_prune.grid.comparison import compare_grid
from lmeval_prune.grid.folder import CELL, MEASURE, VERSION, GridFolder
from lmeval_prune.reporting.statistics import (
    detectable,
    difference_interval,
    holm,
    mcnemar_power,
    mcnemar_test,
    mean_interval,
    noninferiority_test,
    pareto,
    sign_flip_test,
)

RNG = np.random.default_rng(0)

# ---------------------------------------------------------------------- statistics


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 9), (12, 2), (40, 55), (0, 25)])
def test_the_test_of_a_margin_against_the_likeliest_shares_on_a_grid(better: int, worse: int) -> None:
    """Tango's score test: the shares of the three outcomes that are likeliest, given that the variant loses 5 points."""
    questions, margin = 200, 0.05
    worse_shares = np.linspace(margin + 1e-9, (1 + margin) / 2 - 1e-9, 200_001)
    better_shares = worse_shares - margin
    same = questions - better - worse
    likelihood = xlogy(better, better_shares) + xlogy(worse, worse_shares)
    likelihood += xlogy(same, 1 - better_shares - worse_shares)
    most = likelihood.argmax()
    variance = (better_shares[most] + worse_shares[most] - margin**2) / questions
    z = ((better - worse) / questions + margin) / variance**0.5
    p = noninferiority_test(np.array(better), np.array(worse), questions, margin)
    assert float(p) == pytest.approx(stats.norm.sf(z), abs=1e-4)


def test_holm_by_its_definition() -> None:
    for _ in range(20):
        ps = RNG.random(7) ** 2
        order = np.argsort(ps)
        literal = np.empty(7)
        for rank, i in enumerate(order):
            literal[i] = min(1.0, max((7 - j) * ps[order[j]] for j in range(rank + 1)))
        np.testing.assert_allclose(holm(ps.tolist()), literal)
        np.testing.assert_allclose(holm([np.nan, *ps]), [np.nan, *literal])


def test_an_interval_of_figures_is_students_where_they_are_not_skewed() -> None:
    values = RNG.normal(size=(40, 2))
    values = np.concatenate([values, -values]) + 3
    literal = stats.t.interval(0.95, 79, values.mean(0), stats.sem(values))
    np.testing.assert_allclose(mean_interval(values, np.inf), literal)
    values = RNG.exponential(size=(40, 2))  # Johnson's: longer by skewness, on that side alone
    low, high = stats.t.interval(0.95, 39, values.mean(0), stats.sem(values))
    more = (
        (1 + 2 * stats.t.isf(0.025, 39) ** 2) * ((values - values.mean(0)) ** 3).mean(0) / values.var(0, ddof=1) / 240
    )
    np.testing.assert_allclose(mean_interval(values, np.inf), (low, high + more))


def test_an_interval_of_right_and_wrong_is_scipys_exact_one() -> None:
    right = np.array([0, 1, 7, 19, 20])
    low, high = mean_interval((np.arange(20)[:, None] < right).astype(float), 1.0)
    literal = [stats.binomtest(k, 20).proportion_ci(method="exact") for k in right]
    np.testing.assert_allclose([low, high], np.transpose(literal), atol=1e-9)


@pytest.mark.parametrize("n", [20, 100])
def test_intervals_hold_the_mean_as_often_as_they_say(n: int) -> None:
    """Shares of eight tries, of which most are none or all, and differences of which most are none or all."""
    rng, columns = np.random.default_rng(n), 600
    least = 0.95 - 3 * (0.05 * 0.95 / columns) ** 0.5
    for a, b in ((0.15, 1.5), (3, 0.2), (2, 2)):
        low, high = mean_interval(rng.binomial(8, rng.beta(a, b, size=(n, columns))) / 8, 1.0)
        assert ((low <= a / (a + b)) & (a / (a + b) <= high)).mean() > least, (a, b)
    for choices, chances in (
        ((0, 1, -1), (0.9, 0.08, 0.02)),
        ((0, 0.5, -0.5, 1, -1), (0.85, 0.06, 0.03, 0.04, 0.02)),
        ((1, 0.875, 0.5, 0, -0.5), (0.85, 0.05, 0.05, 0.03, 0.02)),
    ):
        differences = rng.choice(choices, p=chances, size=(n, columns))
        low, high = difference_interval(differences, 1.0, sign_flip_test(differences, draws=1999))
        mean = float(np.dot(choices, chances))
        assert ((low <= mean) & (mean <= high)).mean() > least, choices


def test_an_interval_and_its_test_do_not_contradict_each_other() -> None:
    """It holds 0 just where the test does not say that there is a difference, and always what was observed."""

    def check(differences: np.ndarray, ps: np.ndarray, unit: float) -> None:
        low, high = difference_interval(differences, unit, ps)
        assert (((low <= 0) & (high >= 0)) == (ps >= 0.05)).all()
        means = differences.mean(0)
        assert (low <= means + 1e-12).all() and (means <= high + 1e-12).all() and (np.abs([low, high]) <= unit).all()

    for n in (1, 5, 6, 7, 12, 48):
        better, worse = np.array([(b, w) for b in range(n + 1) for w in range(n + 1 - b)]).T
        position = np.arange(n)[:, None]
        differences = (position < better).astype(float) - ((position >= better) & (position < better + worse))
        check(differences, mcnemar_test(better, worse), 1.0)
    for n, chance in ((8, 0.9), (20, 0.4), (100, 0.08), (100, 0.9)):
        there = RNG.random((n, 600)) < chance
        eighths = there * RNG.integers(-3, 9, (n, 600)) / 8
        skewed = there * (RNG.lognormal(size=(n, 600)) * RNG.choice((1, -1), p=(0.8, 0.2), size=(n, 600)))
        for differences, unit in ((eighths, 1.0), (skewed, np.inf)):
            check(differences, sign_flip_test(differences, draws=1999), unit)


@pytest.mark.parametrize("level", [0.05, 0.05 / 12])
@pytest.mark.parametrize("n", [20, 48, 400])
def test_a_detectable_difference_of_right_and_wrong_is_detected_four_times_in_five(n: int, level: float) -> None:
    rng = np.random.default_rng(n)
    for discordant in (0, n // 10, n // 4, n // 2):
        differences = np.where(np.arange(n) < discordant, 1.0, 0.0) * np.where(np.arange(n) % 2, 1, -1)
        least = float(detectable(differences[:, None], 1.0, level)[0])
        share = max(discordant / n, least)
        kinds = rng.multinomial(n, [(share + least) / 2, (share - least) / 2, 1 - share], size=20_000)
        power = (mcnemar_test(kinds[:, 0], kinds[:, 1]) < level).mean()
        error = (0.8 * 0.2 / 20_000) ** 0.5
        assert 0.8 - 3 * error < power < 0.8 + 4 * error, (discordant, least)  # and no smaller one is
    assert mcnemar_test(np.array([6]), np.array([0]))[0] < 0.05 < mcnemar_test(np.array([5]), np.array([0]))[0]


def test_mcnemars_power_by_brute_force() -> None:
    """All ways that five questions can go: p is below 0.1 only where all five go one way."""
    better, worse, neither = 0.5, 0.2, 0.3
    literal = 0.0
    for way in itertools.product((1, -1, 0), repeat=5):
        if mcnemar_test(np.array([way.count(1)]), np.array([way.count(-1)]))[0] < 0.1:
            literal += better ** way.count(1) * worse ** way.count(-1) * neither ** way.count(0)
    assert mcnemar_power(5, 0.7, 0.3, 0.1) == pytest.approx(literal)
    assert literal == pytest.approx(0.5**5 + 0.2**5)


@pytest.mark.parametrize("kind", ["eighths", "halves", "normal"])
def test_a_detectable_difference_of_figures_is_detected_four_times_in_five(kind: str) -> None:
    """Of questions that differ as much as those that were seen, in directions that make the difference."""
    rng, n, columns = np.random.default_rng(9), 48, 1500
    sizes = {
        "eighths": rng.integers(0, 9, (n, columns)) / 8 * (rng.random((n, columns)) < 0.6),
        "halves": rng.choice((0, 0.5, 1.0), p=(0.7, 0.2, 0.1), size=(n, columns)),
        "normal": np.abs(rng.normal(size=(n, columns))),
    }[kind]
    seen = sizes.ravel()[: n * 100].reshape(-1, 1)  # many, so that they are as the population
    seen = np.quantile(seen, (np.arange(n) + 0.5) / n)[:, None]
    least = float(detectable(seen, np.inf)[0])
    more = 0.5 + least / sizes.mean() / 2
    flipped = sizes * np.where(rng.random((n, columns)) < more, 1, -1)
    assert (sign_flip_test(flipped, draws=1999) < 0.05).mean() > 0.8 - 3 * (0.16 / columns) ** 0.5


def test_pareto_by_brute_force() -> None:
    for _ in range(30):
        costs, gains = RNG.integers(0, 6, 25).astype(float), RNG.integers(0, 6, 25).astype(float)
        costs[3] = np.nan
        known = ~np.isnan(costs)

        def beaten(i: int, costs: np.ndarray = costs, gains: np.ndarray = gains, known: np.ndarray = known) -> bool:
            as_good = known & (costs <= costs[i]) & (gains >= gains[i])
            return bool((as_good & ((costs < costs[i]) | (gains > gains[i]))).any())

        front = pareto(np.stack([costs, costs], 1), gains)
        assert front.tolist() == [bool(known[i] and not beaten(i)) for i in range(25)]
        highs = costs + RNG.integers(0, 3, 25)

        def is_beaten(i: int, lows: np.ndarray = costs, highs: np.ndarray = highs, gains: np.ndarray = gains) -> bool:
            """Whatever the costs are within their ranges, another is as good in both, and better in one."""
            ends = [(own, other) for own in (lows[i], highs[i]) for other in (lows, highs)]
            as_good = [(other <= own) & (gains >= gains[i]) for own, other in ends]
            better = [(other < own) | (gains > gains[i]) for own, other in ends]
            return bool((np.all(as_good, 0) & np.all(better, 0)).any())

        front = pareto(np.stack([costs, highs], 1), gains)
        assert front.tolist() == [bool(known[i] and not is_beaten(i)) for i in range(25)]


# ---------------------------------------------------------------------- grids made by hand


def question(task: str, number: int, value: float, text: str = "", metric: str = "exact_match") -> dict[str, Any]:
    """A row of lm-eval's samples."""
    return {
        "doc_id": number,
        "doc": {"question": f"{task} question {number}?"},
        "target": "42",
        "arguments": [[f"prompt {number}", {"until": []}]],
        "resps": [[text or f"answer {value}"]],
        "filter": "none",
        "metrics": [metric],
        "doc_hash": f"hash {number}",
        metric: value,
        "extracted": "42",
    }


def write_cell(
    folder: GridFolder, key: str, tasks: dict[str, list[dict[str, Any]]], selected_questions: tuple[str, ...] = ()
) -> None:
    """A cell's folder with these rows of samples by task."""
    with new_folder(folder.place("evaluate", key)) as cell:
        higher = {task: {"error": False, "exact_match": True} for task in tasks}
        results = {"results": {task: {"alias": task} for task in tasks}, "configs": {task: {} for task in tasks}}
        name = folder.results(key).name
        (cell / name).write_text(json.dumps({**results, "higher_is_better": higher}))
        for task, rows in tasks.items():
            samples = name.replace("results_", f"samples_{file_name(task)}_").replace(".json", ".jsonl")
            (cell / samples).write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_artefact(cell / "cell.json", CELL, VERSION, {"selected_questions": list(selected_questions)})


def key_of(variant: str, task: str) -> str:
    return digest([variant, task])


def write_grid(
    path: Path,
    values: dict[str, dict[str, Any]],
    baseline: str | None = None,
    questions: dict[str, tuple[str, ...]] | None = None,
    **entries: Any,
) -> Path:
    """A grid's folder with these outcomes, by variant and task; `questions` are those that a variant was selected on."""
    folder, cells = GridFolder(path), []
    for variant, tasks in values.items():
        for task, own in tasks.items():
            key = key_of(variant, task)
            rows = own if isinstance(own, list) and own and isinstance(own[0], dict) else None
            rows = rows or [question(task, i, float(value)) for i, value in enumerate(own)]
            write_cell(folder, key, {task: rows}, (questions or {}).get(variant, ()))
            entry = {"key": key, "variant": variant, "task": task, "metric": None, "selected_on": [], "prepared": ""}
            entry |= {"model_args": {"pretrained": "m"}, "prepare": {}, "costs": variant}
            entry |= {"command": f"lm_eval --x {variant}-{task}"}
            cells.append({**entry, **entries.get(variant, {})})
        cost = {"parameters": 100, "flops_per_token": float(200 - len(variant)), "device": "cpu", "threads": 1}
        write_artefact(folder.place("measure", variant), MEASURE, VERSION, cost)
    folder.create("By hand", baseline, cells)
    return path


def test_differences_are_those_of_the_questions(tmp_path: Path) -> None:
    a, b, c = (RNG.random((3, 60)) < [[0.5], [0.7], [0.5]]).astype(float)
    grades = {name: RNG.random(30) for name in "abc"}
    values = {n: {"one": v.tolist(), "two": grades[n].tolist()} for n, v in zip("abc", (a, b, c), strict=True)}
    comparison = compare_grid(write_grid(tmp_path / "g", values), "a")
    row = comparison.rows["b", "one"]
    better, worse = int(((b == 1) & (a == 0)).sum()), int(((a == 1) & (b == 0)).sum())
    assert (row.better, row.worse, row.test) == (better, worse, "McNemar")
    assert row.difference == pytest.approx(b.mean() - a.mean())
    assert row.p == pytest.approx(stats.binomtest(better, better + worse).pvalue)
    assert comparison.rows["b", "two"].test == "sign flips"
    pooled, whole = comparison.rows["b", POOLED], np.concatenate([b, grades["b"]]) - np.concatenate([a, grades["a"]])
    assert pooled.questions == 90 and pooled.difference == pytest.approx(whole.mean())
    tested = [entry for entry in comparison.rows.values() if entry.p is not None]
    assert len(tested) == 6 and [entry.p_holm for entry in tested] == holm([entry.p for entry in tested])
    assert comparison.rows["a", "one"].p is None and comparison.rows["a", "one"].mean == pytest.approx(a.mean())
    assert row.difference_low < row.difference < row.difference_high


def test_lower_may_be_better(tmp_path: Path) -> None:
    def rows(value: float) -> list[dict[str, Any]]:
        return [question("words", i, value + i % 3, metric="error") for i in range(20)]

    values = {name: {"words": rows(v), "t": [1.0] * 9, "u": [0.0] * 9} for name, v in (("dense", 1.0), ("bad", 9.0))}
    path = write_grid(tmp_path / "g", values)
    comparison = compare_grid(path)
    row = comparison.rows["bad", "words"]
    assert (row.difference, row.better, row.worse, row.lower_is_better) == (8.0, 0, 20, True)
    assert comparison.rows["bad", POOLED].questions == 18 and comparison.rows["bad", POOLED].difference == 0
    only = {name: {"words": own["words"]} for name, own in values.items()}
    assert compare_grid(write_grid(tmp_path / "h", only)).fronts["words"]["flops_per_token"] == [
        "dense"
    ]  # bad has more of both


@pytest.mark.long
def test_many_sign_flips_can_pass_holms_correction(tmp_path: Path) -> None:
    """As many flips are drawn as the tests of the table need: a sure difference stays one among 600 variants."""
    grades = RNG.random(60)
    values = {
        "dense": {"t": grades.tolist()},
        **{f"v{i}": {"t": (grades + RNG.normal(0, 0.1, 60)).tolist()} for i in range(600)},
    }
    values["better"] = {"t": (grades + 0.5 + 0.01 * RNG.random(60)).tolist()}
    row = compare_grid(write_grid(tmp_path / "g", values)).rows["better", "t"]
    assert row.test == "sign flips" and row.p_holm < 0.05


def test_a_group_is_compared_as_a_whole_and_by_its_tasks(tmp_path: Path) -> None:
    """A cell has all tasks of a group; another cell has one of them under a name of its own."""
    folder, entries = GridFolder(tmp_path), []
    for variant, right in (("dense", 1.0), ("x", 0.0)):
        parts = {task: [question(task, i, right * (i % 2)) for i in range(8)] for task in ("one", "two")}
        for name, tasks in (("both", parts), ("alone", {"two": parts["two"][:5]})):
            write_cell(folder, key_of(variant, name), tasks)
            entry = {"key": key_of(variant, name), "variant": variant, "task": name, "metric": None, "costs": "c"}
            entries.append(
                {**entry, "selected_on": ["two"], "model_args": {}, "prepare": {}, "prepared": "", "command": ""}
            )
    folder.create("Groups", None, entries)
    comparison = compare_grid(tmp_path)
    counts = {task: comparison.rows["x", task].worse for task in comparison.tasks}
    assert counts == {"both::one": 4, "both::two": 4, "alone": 2, "both": 8, POOLED: 8}
    assert [comparison.tables[task].is_part for task in counts] == [True, True, False, False, False]
    assert comparison.rows["x", "both"].chosen_on == 8


def test_cells_that_are_not_done_are_missing(tmp_path: Path) -> None:
    path = write_grid(tmp_path / "g", {"dense": {"t": [1.0]}, "x": {"t": [0.0]}})
    shutil.rmtree(path / "cells" / key_of("x", "t"))
    comparison = compare_grid(path)
    assert [cell[:2] for cell in comparison.missing] == [("x", "t")] and ("x", "t") not in comparison.rows
    shutil.rmtree(path / "cells" / key_of("dense", "t"))
    with pytest.raises(InputError):
        compare_grid(path)


def test_what_was_chosen_on_these_questions_is_marked(tmp_path: Path) -> None:
    router = tmp_path / "router"
    router.mkdir()
    (router / "router.json").write_text(json.dumps({"seen": [digest(f"t question {i}?") for i in (0, 2, 9)]}))
    seen = tuple(selected_questions({"router": str(router)}))
    values = {name: {"t": [1.0, 0.0, 1.0]} for name in ("dense", "best", "routed")}
    path = write_grid(tmp_path / "g", values, questions={"routed": seen}, best={"selected_on": ["t"]})
    rows = compare_grid(path).rows
    assert [rows[name, "t"].chosen_on for name in values] == [0, 3, 2]
    assert main(["grid", "compare", str(path)]) == 0
    assert "routed †" in (path / "compare" / "report.md").read_text()


# ---------------------------------------------------------------------- mistakes in the YAML and on the command line


def test_a_speed_is_better_only_beyond_what_its_runs_differ_by() -> None:
    means = {"a": 0.5, "b": 0.5, "c": 0.5}

    def speeds(**ranges: list[float]) -> dict[str, dict[str, Any]]:
        speed = "decode_tokens_per_second"
        return {name: {speed: sum(ends) / 2, "ranges": {speed: ends}} for name, ends in ranges.items()}

    alike = pareto_fronts(speeds(a=[2, 3], b=[2.9, 9], c=[2, 9]), means)
    assert alike == {"decode_tokens_per_second": ["a", "b", "c"]}
    assert pareto_fronts(speeds(a=[2, 3], b=[2, 4], c=[8, 9]), means) == {"decode_tokens_per_second": ["c"]}
    fronts = pareto_fronts(speeds(a=[2, 3], b=[2, 4], c=[8, 9]), {**means, "a": 0.75})
    assert fronts == {"decode_tokens_per_second": ["a", "c"]}
    for environment in ({"device": "H100"}, {"threads": 2}):
        elsewhere = {name: {"device": "cpu", "threads": 1, **own} for name, own in speeds(a=[2, 3], b=[8, 9]).items()}
        elsewhere["b"] |= environment
        assert pareto_fronts(elsewhere, {"a": 0.5, "b": 0.5}) == {}


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    values = {n: {"t": (RNG.random(40) < p).astype(float).tolist()} for n, p in (("dense", 0.5), ("x|y", 0.9))}
    path = write_grid(tmp_path / "g", values, "dense")
    assert main(["grid", "compare", str(path), "--output", str(tmp_path / "o")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"x\\\|y +\| +40 \|", output) and "p Holm" in output  # the table
    names = {"table.csv", "comparison.json", "report.md", "page.html"}
    assert {file.name for file in (tmp_path / "o").iterdir()} == names
    assert {str(tmp_path / "o" / name) for name in names} <= set(output.splitlines())
    cells = [f"{name}={path / 'cells' / key_of(name, 't')}" for name in ("dense", "x|y")]  # as `compare` reads them
    assert main(["compare", *cells, "--output", str(tmp_path / "r")]) == 0
    first, second = (json.loads((tmp_path / name / "comparison.json").read_text())["rows"][-1] for name in "or")
    names = ("mean", "low", "difference", "difference_high", "p", "p_holm", "detectable")
    assert [first[name] for name in names] == [second[name] for name in names]
    page = (tmp_path / "o" / "page.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
