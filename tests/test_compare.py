"""`lmeval-prune compare` on runs that lm-eval wrote."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from lmeval_prune import InputError
from lmeval_prune.cli import main
from lmeval_prune.comparison.compare import compare
from lmeval_prune.comparison.report import write
from lmeval_prune.comparison.samples import AGGREGATIONS, DEFAULT_AGGREGATIONS, Metric
from lmeval_prune.comparison.tables import POOLED, Table, _linearized, rows_of
from lmeval_prune.reporting.statistics import difference_interval, holm, noninferiority_test, sign_flip_test
from tests.conftest import ROOT
from tests.lm_eval_runs import evaluate, write_tasks

ALL = ["tiny_group", "tiny_colours", "tiny_texts", "tiny_last"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with two seeds of sampling, `a` and `b`, and another model, `c`, as three users have them."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("runs")
    other = folder / "tiny-other"
    shutil.copytree(tiny_folder, other)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(0)
    for weights in model.parameters():
        weights.data += 0.1 * torch.randn_like(weights)
    model.save_pretrained(other)
    for name, pretrained, seed in (("a", tiny_folder, 1), ("b", tiny_folder, 2), ("c", other, 1)):
        evaluate(tasks, ALL, folder / name, pretrained, seed)
    return {name: folder / name for name in "abc"}


def results_of(run: Path) -> dict[str, Any]:
    (path,) = run.rglob("results_*.json")
    return json.loads(path.read_text())


def samples_of(run: Path, task: str) -> list[dict[str, Any]]:
    (path,) = run.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def copy_of(run: Path, target: Path) -> Path:
    """A copy whose files can be changed."""
    shutil.copytree(run, target)
    return target


def change_samples(run: Path, task: str, change: Any) -> None:
    """Write the samples of a task that a function returns for its samples."""
    (path,) = run.rglob(f"samples_{task}_*.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in change(samples_of(run, task))))


def words(runs: dict[str, Path], names: str = "abc") -> list[str]:
    return [str(runs[name]) for name in names]


# ---------------------------------------------------------------------- figures and tests


@pytest.mark.parametrize(
    "metric",
    ["exact_match,whole", "exact_match,start", "length,whole", "acc,none", "acc_norm,none", "word_perplexity,none",
     "byte_perplexity,none", "bits_per_byte,none", "perplexity,none"],
)  # fmt: skip
def test_means_are_lm_evals_own(runs: dict[str, Path], metric: str) -> None:
    for name in "ac":
        figures = {task: own[metric] for task, own in results_of(runs[name])["results"].items() if metric in own}
        figures.pop("tiny_group", None)
        comparison = compare(words(runs), "a", metric=metric)
        assert figures and {task: comparison.rows[name, task].mean for task in figures} == pytest.approx(
            figures, rel=1e-9
        )
        assert all(comparison.tables[task].columns == [metric] for task in figures)


ABSENT = """
import sys
from lmeval_prune.cli import main
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "lm_eval", "datasets"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.exit(main(sys.argv[1:]))
"""


def test_runs_are_compared_where_torch_and_lm_eval_are_not_installed(runs: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", ABSENT, "compare", *words(runs), "--output", tmp_path]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "page.html").exists()


def test_the_table_of_aggregations_is_lm_evals() -> None:
    from lm_eval.api import metrics, registry

    for metric in registry.metric_registry:
        aggregation = registry.get_metric_aggregation(metric)
        names = [name for name in registry.aggregation_registry if registry.get_aggregation(name) is aggregation]
        if metric in DEFAULT_AGGREGATIONS or names[0] in AGGREGATIONS:
            assert DEFAULT_AGGREGATIONS.get(metric, "mean") in names, metric
    items = [(-3.0, 2), (-1.5, 4)]
    for name in ("weighted_perplexity", "bits_per_byte"):
        entry = AGGREGATIONS[name]
        mean = entry.factor * sum(value for value, _ in items) / sum(weight for _, weight in items)
        assert (math.exp(mean) if entry.is_exponential else mean) == pytest.approx(getattr(metrics, name)(items))
    assert math.exp(AGGREGATIONS["perplexity"].factor * -2.25) == pytest.approx(metrics.perplexity([-3.0, -1.5]))


def test_two_seeds_of_one_model_do_not_differ(runs: dict[str, Path]) -> None:
    comparison = compare(words(runs, "ab"), by=["level"])
    tested = [row for row in comparison.rows.values() if row.p is not None]
    assert len(tested) > 10 and all(row.p_holm >= 0.05 for row in tested)
    row = comparison.rows["b", "tiny_words"]
    assert row.better + row.worse > 0  # the answers do differ
    assert compare(words(runs, "ac")).rows["c", "tiny_texts"].p_holm < 0.05


def test_a_margin_is_tested_where_answers_are_right_or_wrong(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words(runs, "ab"), "--margin", "50", "--output", str(tmp_path)]) == 0
    assert "p margin" in capsys.readouterr().out
    rows = [row for row in json.loads((tmp_path / "comparison.json").read_text())["rows"] if row["p"] is not None]
    for row in rows:
        if row["test"] != "McNemar":
            assert row["p_margin"] is None
            continue
        better, worse = np.array(row["better"]), np.array(row["worse"])
        assert row["p_margin"] == pytest.approx(float(noninferiority_test(better, worse, row["questions"], 0.5)))
    assert {row["p_margin"] is None for row in rows} == {False, True}


def test_perplexities_against_a_literal_reading(runs: dict[str, Path]) -> None:
    """The ratio of perplexities, and all sign flips of the documents' log-likelihoods (of 12 documents)."""
    first, second = (
        {row["doc_id"]: row["word_perplexity"] for row in samples_of(runs[name], "tiny_texts")} for name in "ac"
    )
    logs = [
        -sum(value for value, _ in own.values()) / sum(weight for _, weight in own.values()) for own in (first, second)
    ]
    row = compare(words(runs, "ac")).rows["c", "tiny_texts"]
    assert row.mean == pytest.approx(math.exp(logs[1])) and row.unit == "perplexity" and row.lower_is_better
    assert row.difference == pytest.approx(math.exp(logs[1] - logs[0]) - 1)
    assert row.better == sum(second[number][0] > first[number][0] for number in first)
    rng = np.random.default_rng(3)
    values, weights = rng.normal(3, 1, (12, 2)), rng.integers(3, 40, 12).astype(float)
    table = weighted(values * weights[:, None], weights)
    differences = (values[:, 1] - values[:, 0]) * weights
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=12)]
    p = np.mean([value >= abs(differences.sum()) - 1e-9 for value in sums])
    assert rows_of({"t": table}, "x", 0)["y", "t"].p == pytest.approx(p)


def weighted(values: np.ndarray, weights: np.ndarray) -> Table:
    """A table of perplexities of two variants: sums of each document's nats, and its words."""
    metric = Metric("word_perplexity,none", AGGREGATIONS["weighted_perplexity"], True)
    return Table(["x", "y"], values, [""] * len(values), (metric,), weights=weights)


def test_intervals_of_perplexities_are_those_of_a_ratio() -> None:
    """Against the textbook variance of a ratio of sums, where nothing is skewed; and they hold the true value."""
    rng = np.random.default_rng(5)
    half = rng.integers(5, 60, 40).astype(float)
    noise = rng.normal(0, 20, 40)
    weights = np.concatenate([half, half])
    base = np.concatenate([3 * half + noise, 3 * half - noise])
    row = rows_of({"t": weighted(np.stack([base, base], 1), weights)}, "x", 0)["x", "t"]
    ratio, n = base.sum() / weights.sum(), len(base)
    error = (
        math.sqrt(sum((b - ratio * w) ** 2 for b, w in zip(base, weights, strict=True)) / (n - 1) / n)
        * n
        / weights.sum()
    )
    ends = stats.t.interval(0.95, n - 1, ratio, error)
    assert np.log([row.low, row.high]) == pytest.approx(ends, abs=1e-9)
    lengths = rng.integers(5, 200, 60).astype(float)
    differences = lengths[:, None] * rng.normal(0.1, 0.3, (60, 600)) / lengths.mean()
    ps = sign_flip_test(differences, draws=1999)
    low, high = difference_interval(_linearized(differences, lengths / lengths.mean()), np.inf, ps)
    inside = ((low <= 0.1) & (high >= 0.1)).mean()
    assert 0.95 - 3 * (0.95 * 0.05 / 600) ** 0.5 < inside < 0.98
    naive_low, naive_high = difference_interval(differences, np.inf, ps)  # the lengths' spread counts as an error
    assert (high - low).mean() < 0.99 * (naive_high - naive_low).mean()


def test_groups_parts_and_all_tasks(runs: dict[str, Path]) -> None:
    comparison = compare(words(runs), "a", by=["level"])
    evaluated = ["tiny_colours", "tiny_last", "tiny_more", "tiny_texts", "tiny_words"]
    levels = [f"{task}, level: {i}" for task in ("tiny_colours", "tiny_more", "tiny_words") for i in range(1, 5)]
    assert comparison.tasks == [*evaluated, *levels, "tiny_group", POOLED]
    counts = {task: comparison.rows["b", task].questions for task in comparison.tasks}
    assert counts["tiny_group"] == 40 and counts["tiny_words, level: 2"] == 10 and counts[POOLED] == 40
    parts = {task for task, table in comparison.tables.items() if table.is_part}
    assert parts == {"tiny_words", "tiny_more", *(task for task in counts if ", level: " in task)}
    for family in (parts, set(counts) - parts):
        tested = [row for row in comparison.rows.values() if row.p is not None and row.task in family]
        assert [row.p_holm for row in tested] == holm([row.p for row in tested])
    level = {row["doc_id"] for row in samples_of(runs["b"], "tiny_colours") if row["doc"]["level"] == 3}
    right = [row["acc"] for row in samples_of(runs["b"], "tiny_colours") if row["doc_id"] in level]
    assert comparison.rows["b", "tiny_colours, level: 3"].mean == pytest.approx(np.mean(right))
    only = compare(words(runs), tasks=["tiny_group"])
    assert sorted(only.tasks) == ["tiny_group", "tiny_more", "tiny_words"]


def test_distances_against_a_literal_reading(runs: dict[str, Path]) -> None:
    """KL divergence over the choices, the likeliest choice, and the texts, from the samples files."""
    comparison = compare(words(runs, "ac"))
    pairs = list(zip(samples_of(runs["a"], "tiny_colours"), samples_of(runs["c"], "tiny_colours"), strict=True))
    divergences, same = [], []
    for pair in pairs:
        likelihoods = [[float(response[0][0]) for response in row["resps"]] for row in pair]
        p, q = ([math.exp(value) / sum(map(math.exp, own)) for value in own] for own in likelihoods)
        divergences.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        same.append(p.index(max(p)) == q.index(max(q)))
    row = comparison.rows["c", "tiny_colours"]
    assert row.measured["choice_kld"] == pytest.approx(np.mean(divergences)) and row.measured["choice_kld"] > 0
    assert row.measured["choice_kld_se"] == pytest.approx(stats.sem(divergences))
    assert row.measured["same_answers"] == pytest.approx(np.mean(same))
    texts = zip(samples_of(runs["a"], "tiny_more"), samples_of(runs["c"], "tiny_more"), strict=True)
    same = [first["resps"] == second["resps"] for first, second in texts]
    row = comparison.rows["c", "tiny_more"]
    assert row.measured["same_answers"] == pytest.approx(np.mean(same)) and row.measured[
        "same_answers_se"
    ] == pytest.approx(stats.sem(same))
    assert "choice_kld" not in row.measured and "same_answers" not in comparison.rows["c", "tiny_texts"].measured
    assert (
        compare(words(runs, "ab")).rows["b", "tiny_colours"].measured["choice_kld"] == 0
    )  # greedy: seeds do not matter


# ---------------------------------------------------------------------- what has to agree


@pytest.fixture(scope="module")
def others(tiny_folder: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs with fewer questions, with another prompt, and with another limit of tokens."""
    folder = tmp_path_factory.mktemp("others")
    evaluate(tasks, ["tiny_words"], folder / "fewer", tiny_folder, limit=15)
    evaluate(tasks, ["tiny_words"], folder / "prompts", tiny_folder, num_fewshot=1)
    evaluate(tasks, ["tiny_words"], folder / "settings", tiny_folder, gen_kwargs={"max_gen_toks": 3})
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(("name", "kind"), [("fewer", "questions"), ("prompts", "prompts"), ("settings", "settings")])
def test_runs_that_differ_are_refused_unless_told(
    runs: dict[str, Path], others: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    command = ["compare", f"first={runs['a']}", f"second={others[name]}", "--output", str(tmp_path / "o")]
    assert main(command) == 2
    assert main([*command, "--allow-different", kind]) == 0
    row = json.loads((tmp_path / "o" / "comparison.json").read_text())["rows"][-1]
    assert row["questions"] == (15 if kind == "questions" else 40)


# ---------------------------------------------------------------------- files


def test_several_seeds_in_a_folder_are_averaged(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["a"], tmp_path / "both")
    shutil.copytree(runs["b"], tmp_path / "both", dirs_exist_ok=True)
    comparison = compare([f"c={runs['c']}", f"both={tmp_path / 'both'}"])
    for task in ("tiny_words", "tiny_texts"):
        alone = compare(words(runs, "cab"))
        table, singles = comparison.tables[task], alone.tables[task]
        expected = singles.values_of([Path(name).name for name in ("a", "b")]).mean(1)
        assert table.values_of(["both"])[:, 0] == pytest.approx(expected)
    assert "seed 1; 2" in comparison.about["both"]


def test_distances_of_several_seeds_are_means_over_pairs(runs: dict[str, Path], tmp_path: Path) -> None:
    """Of a question: each answer of one run beside each of the other; in the baseline's row, of its own seeds."""
    copies = {name: copy_of(runs[name], tmp_path / name) for name in "abc"}
    for name, share in (("b", 2), ("c", 3)):  # sampled texts are never the same by themselves

        def with_answers_of_a(rows: list[dict[str, Any]], share: int = share) -> list[dict[str, Any]]:
            pairs = zip(rows, samples_of(runs["a"], "tiny_more"), strict=True)
            return [row | ({"resps": first["resps"]} if row["doc_id"] % share else {}) for row, first in pairs]

        change_samples(copies[name], "tiny_more", with_answers_of_a)
    for name in "ab":
        shutil.copytree(copies[name], tmp_path / "both", dirs_exist_ok=True)
    texts = {name: [row["resps"] for row in samples_of(copies[name], "tiny_more")] for name in "abc"}
    own = [first == second for first, second in zip(texts["a"], texts["b"], strict=True)]
    to_other = [
        ((first == other) + (second == other)) / 2
        for first, second, other in zip(texts["a"], texts["b"], texts["c"], strict=True)
    ]
    assert set(to_other) == {0, 0.5, 1} and set(own) == {False, True}
    both, single = f"both={tmp_path / 'both'}", f"c={copies['c']}"
    comparison = compare([both, single])
    for variant, expected in (("both", own), ("c", to_other)):
        row = comparison.rows[variant, "tiny_more"]
        assert row.measured["same_answers"] == pytest.approx(np.mean(expected))
        assert row.measured["same_answers_se"] == pytest.approx(stats.sem(expected))
    assert compare([single, both]).rows["both", "tiny_more"].measured["same_answers"] == pytest.approx(
        np.mean(to_other)
    )
    alone = compare([str(copies[name]) for name in "ac"])
    assert comparison.rows["c", "tiny_colours"].measured["choice_kld"] == pytest.approx(
        alone.rows["c", "tiny_colours"].measured["choice_kld"]
    )
    assert comparison.rows["both", "tiny_colours"].measured["choice_kld"] == 0  # log-likelihoods depend on no seed
    assert "same_answers" not in alone.rows["a", "tiny_more"].measured
    write(comparison, tmp_path / "report")
    assert "of its own seeds with each other" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        ({"pruning": {"weights_fingerprint": "6c"}}, {"pruning": {"weights_fingerprint": "13"}}, True),
        ({"pruning": {"heads": ["L0H1"]}}, {"pruning": {"heads": ["L1H1"]}}, True),  # a mask's file was written again
        ({"pruning": {"heads": ["L0H1"]}}, {"pruning": {"plan": {"channels": {"L0": "1"}}}}, True),
        ({}, {"model_num_parameters": 7}, True),
        ({"model_sha": "6c"}, {"model_sha": "13"}, True),
        ({"model_sha": "6c"}, {"model_sha": ""}, False),  # lm-eval could not ask for it
        (
            {"pruning": {"weights_fingerprint": "6c"}, "model_sha": "6c"},
            {"pruning": {"weights_fingerprint": "6c"}, "model_sha": "13"},
            False,
        ),
    ],
)
def test_other_weights_under_the_same_name_are_no_seeds(
    runs: dict[str, Path], tmp_path: Path, first: dict[str, Any], second: dict[str, Any], differ: bool
) -> None:
    """A checkpoint was written again, and evaluated into the folder of the earlier results."""
    for run, change in (("a", first), ("b", second)):
        folder = copy_of(runs[run], tmp_path / run)
        [path] = folder.rglob("results*.json")
        results = json.loads(path.read_text())
        results["config"] = {**results["config"], "model_sha": "", "pruning": None, **change}
        path.write_text(json.dumps(results))
        shutil.copytree(folder, tmp_path / "both", dirs_exist_ok=True)
    command = [str(runs["c"]), f"both={tmp_path / 'both'}"]
    with pytest.raises(InputError) if differ else nullcontext():
        assert compare(command).rows["both", "tiny_words"].questions == 40


def test_two_models_in_a_folder_are_two_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    for name in "ac":
        shutil.copytree(runs[name], tmp_path / "all", dirs_exist_ok=True)
    comparison = compare([str(tmp_path / "all")])
    assert len(comparison.variants) == 2 and all(name.startswith(str(tmp_path / "all")) for name in comparison.variants)
    (path,) = (tmp_path / "all").rglob("*tiny-llama/results_*.json")
    results = json.loads(path.read_text())
    results["config"]["pruning"] = {"heads": ["L0H1"], "weights_fingerprint": "x"}
    path.write_text(json.dumps(results))
    assert "other" in compare([str(tmp_path / "all")]).baseline  # the one that is not pruned
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (tmp_path / "all").rglob("*.json*"):
        shutil.copy(path, flat)
    names = compare([str(flat)]).variants
    assert all(re.search(r"flat pretrained=.*tiny-(llama|other)$", name) for name in names)


def copy_as(mark: str, source: str, target: str) -> str:
    """Copy a file under another date, as a second command would have written it."""
    path = Path(target)
    return str(shutil.copy(source, path.with_name(re.sub(r"\d(\.jsonl?)$", rf"{mark}\1", path.name))))


OLD_RUNS = ROOT / "tests" / "old_runs"


def test_runs_that_old_versions_wrote() -> None:
    """Each has the figures of its results file, and both are compared with each other."""
    versions = sorted(path.name for path in OLD_RUNS.iterdir() if path.is_dir())
    for metric in ("exact_match,start", "acc_norm", "bits_per_byte", None):
        comparison = compare([f"{name}={OLD_RUNS / name}" for name in versions], "0.4.7", metric=metric)
        assert {"old_words", "old_choice", "old_texts"} <= set(comparison.tasks)
        for name in versions:
            (path,) = (OLD_RUNS / name).glob("results*.json")
            figures = json.loads(path.read_text())["results"]
            for task in ("old_words", "old_choice", "old_texts"):
                (column,) = comparison.tables[task].columns
                assert comparison.rows[name, task].mean == pytest.approx(figures[task][column], rel=1e-9), (name, task)


def old_run(target: Path, *at: Any, value: Any = None, task: str = "") -> Path:
    """A copy of the run of 0.4.12 with a value at this place of its results, or of the first sample of a task."""
    copy_of(OLD_RUNS / "0.4.12", target)
    (path,) = target.glob(f"samples_{task}_*" if task else "results_*")
    first, *others = path.read_text().splitlines() if task else [path.read_text()]
    content = inner = json.loads(first)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    path.write_text("\n".join([json.dumps(content), *others]))
    return target


@pytest.mark.parametrize("figure", [None, math.nan])
def test_a_question_without_a_value_does_not_change_the_metric(tmp_path: Path, figure: float | None) -> None:
    """Of lm-eval's own NaN, too: `acc_norm` is not tested instead."""
    copy = old_run(tmp_path / "copy", "acc", value=math.nan, task="old_choice")
    if figure is not None:
        (path,) = copy.glob("results_*")
        results = json.loads(path.read_text())
        results["results"]["old_choice"]["acc,none"] = figure
        path.write_text(json.dumps(results))
    runs = [str(OLD_RUNS / "0.4.12"), str(copy)]
    for order in (runs, runs[::-1]):
        with pytest.raises(InputError):
            compare(order)
    if figure is not None:
        assert compare(runs, metric="acc_norm").tables["old_choice"].columns == ["acc_norm,none"]


def test_documents_in_another_order_are_paired(tmp_path: Path) -> None:
    """lm-eval's `--samples` gives sorted documents the numbers in the order of the list."""
    first, second = (copy_of(OLD_RUNS / "0.4.12", tmp_path / name) for name in "ab")

    def with_numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {"doc_id": {1: 4, 4: 9, 9: 1}.get(row["doc_id"], row["doc_id"])} for row in rows]

    change_samples(second, "old_choice", with_numbers)
    row = compare([f"a={first}", f"b={second}"]).rows["b", "old_choice"]
    assert (row.questions, row.difference, row.measured["same_answers"]) == (12, 0, 1)
    shutil.copytree(second, tmp_path / "both")
    shutil.copytree(first, tmp_path / "both", dirs_exist_ok=True, copy_function=partial(copy_as, "7"))
    assert compare([str(first), f"both={tmp_path / 'both'}"]).rows["both", "old_choice"].measured["choice_kld"] == 0


def test_samples_that_do_not_give_the_results_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    changes: list[tuple[str, Any]] = [
        ("tiny_words", lambda rows: rows[:-50]),
        ("tiny_words", lambda rows: rows + rows[:1]),
        ("tiny_last", lambda rows: [row | {"perplexity": row["perplexity"] - 1} for row in rows]),
    ]
    for number, (task, change) in enumerate(changes):
        changed = copy_of(runs["a"], tmp_path / str(number))
        change_samples(changed, task, change)
        with pytest.raises(InputError):
            compare([str(runs["a"]), str(changed)])


def test_a_task_that_cannot_be_compared_is_left_out(runs: dict[str, Path], tmp_path: Path) -> None:
    """As of BLEU: its configuration names another aggregation."""
    copies = [copy_of(runs[name], tmp_path / name) for name in "ab"]
    for copy in copies:
        (path,) = copy.rglob("results_*.json")
        results = json.loads(path.read_text())
        results["configs"]["tiny_last"]["metric_list"] = [{"metric": "perplexity", "aggregation": "bleu"}]
        results["results"]["tiny_last"]["perplexity,none"] = 12.5
        path.write_text(json.dumps(results))
    comparison = compare(list(map(str, copies)))
    assert "tiny_last" not in comparison.tasks and "tiny_texts" in comparison.tasks
    with pytest.raises(InputError):
        compare(list(map(str, copies)), tasks=["tiny_last"])


def test_a_results_file_with_a_name_of_its_own(
    tiny_folder: Path, tasks: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    """`--output_path x.json` writes `x_DATE.json`, and samples beside it."""
    evaluate(tasks, ["tiny_colours"], tmp_path / "x.json", tiny_folder)
    (path,) = tmp_path.glob("x_*.json")
    assert compare([str(runs["c"]), f"x={path}"]).tasks == ["tiny_colours"]


def test_the_page_of_runs_in_a_browser(browser: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    """An overview of the tasks, perplexities as they are with relative differences, and no section of costs."""
    arguments = [f"first={runs['a']}", f"second={runs['c']}", "--by", "level", "--output", str(tmp_path)]
    assert main(["compare", *arguments]) == 0
    rows = {row["task"]: row for row in json.loads((tmp_path / "comparison.json").read_text())["rows"][1::2]}
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("body[data-ready=true]")
    assert not page.is_visible("#costs")

    def tasks() -> list[str]:
        return [line.get_attribute("data-task") for line in page.query_selector_all("#tasks tbody tr")]

    assert tasks() == list(rows)
    page.click("tr[data-task=tiny_texts]")
    page.wait_for_selector("#questions-part[aria-busy=false]")
    assert page.input_value("#question_task") == "tiny_texts"
    difference = f"{100 * rows['tiny_texts']['difference']:+.1f}%".replace("-", "−")
    assert difference in page.inner_text("tr[data-task=tiny_texts]")
    assert difference in page.inner_text("tr[data-variant=second]")
    assert errors == []
    page.close()
