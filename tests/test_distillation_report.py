"""Tables of recursive distillation from rows of results: means, paired tests, the paper's figures and its arithmetic."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distillation_paper import TABLE_4, head_share
from distillation_report import Results, main, table_1, table_2, table_3a, table_3b, table_4, write

from lmeval_prune import InputError

HOST = "ATHENA over MiniLM"
RIGHT = {  # of three questions on each of two splits
    ("dense", 0.0): ("110111", "1101"),
    ("ours", 0.25): ("110011", "1101"),
    ("ours", 0.3): ("010010", "1100"),
    ("alpha 1.0", 0.25): ("000000", "0001"),
    ("alpha 0.0", 0.25): ("110111", "1101"),
    ("random", 0.25): ("100000", "0101"),
    ("distillation only", 0.0): ("111111", "1111"),
}


def row(kind: str, ratio: float, split: int, right: str, seed: int = 0) -> dict[str, Any]:
    return {
        "host": HOST,
        "task": "prune_asdiv_a_equation",
        "removed_by": "unit=head, 3 stages of 2 epochs",
        "kind": kind,
        "ratio": ratio,
        "split": f"fold{split}",
        "seed": seed,
        "right": right,
        "accuracy": right.count("1") / len(right),
        "parameters": int(1000 * (1 - 0.2 * ratio)),
        "flops": int(5000 * (1 - 0.1 * ratio)),
        "memory": 100,
        "removed": {"heads": round(72 * ratio), "kv_heads": 0, "channels": 3},
        "seconds": {"dense": 2.0, "own": 2.0 - ratio},
        "stages": [],
    }


@pytest.fixture
def content() -> dict[str, Any]:
    levels = [["low", "low", "low", "medium", "medium", "medium"], ["low", "low", "medium", "medium"]]
    return {
        "questions": {
            f"fold{number}": [{"id": f"{number}-{i}", "complexity": level} for i, level in enumerate(fold_levels)]
            for number, fold_levels in enumerate(levels)
        },
        "rows": {
            f"{kind} {ratio} {split}": row(kind, ratio, split, right)
            for (kind, ratio), pair in RIGHT.items()
            for split, right in enumerate(pair)
        },
    }


def cell(table: pd.DataFrame | None, first: str, column: str) -> str:
    assert table is not None
    return str(table.loc[table[table.columns[0]] == first, column].iloc[0])


def test_accuracies_differences_and_costs(content: dict[str, Any]) -> None:
    result = Results(content)
    table = table_1(result, HOST)
    dense, measured = 100 * np.mean([5 / 6, 3 / 4]), 100 * np.mean([4 / 6, 3 / 4])
    assert cell(table, "0", "accuracy") == f"{dense:.1f}"
    assert cell(table, "25", "accuracy") == f"{measured:.1f} (−{dense - measured:.1f})"
    assert cell(table, "25", "parameters↓") == "5.0"
    assert cell(table, "25", "FLOPs↓") == "2.5"
    assert cell(table, "25", "speed↑") == f"{100 * (2 / 1.75 - 1):.1f}"
    assert cell(table, "25", "memory↓") == "0.0"
    gone = 100 / 6, 0.0  # of fold0 and of fold1: the standard error of two is half of their distance
    assert cell(table, "25", "± splits") == f"{abs(gone[0] - gone[1]) / 2:.1f}" and cell(table, "0", "± splits") == ""
    assert cell(table, "30", table.columns[-1]) == "85.5, 19.5, 26.5, 17.2"  # type: ignore[union-attr]


def test_tests_are_paired_and_exact(content: dict[str, Any]) -> None:
    result = Results(content)
    variant = result.variant(HOST, "ours", 0.3)
    assert variant is not None
    # of ten questions three and one are lost, none is won: all of 2⁴ signs, two as extreme
    assert np.concatenate(variant.differences()).sum() == -4
    over_questions, over_splits = variant.test()
    assert over_questions == pytest.approx(2 / 16, abs=0.01)
    assert over_splits == pytest.approx(0.5)
    table = table_1(result, HOST)
    assert float(cell(table, "30", "Holm")) == pytest.approx(min(1, 2 * over_questions), abs=0.01)


def test_seeds_of_one_question_are_one_difference(content: dict[str, Any]) -> None:
    content["rows"]["dense again"] = row("dense", 0.0, 0, "111111", seed=1)
    content["rows"]["ours again"] = row("ours", 0.25, 0, "011111", seed=1)
    variant = Results(content).variant(HOST, "ours", 0.25)
    assert variant is not None
    first, second = variant.differences()
    assert first.tolist() == [-0.5, 0, 0, -0.5, 0, 0]
    assert second.tolist() == [0, 0, 0, 0]


def test_seeds_of_one_split_are_one_unit_of_the_test_over_splits(content: dict[str, Any]) -> None:
    """Three seeds of one split are no three independent differences: there is nothing to test."""
    content["rows"] = {}
    for seed in range(3):
        content["rows"][f"dense {seed}"] = row("dense", 0.0, 0, "111111", seed)
        content["rows"][f"ours {seed}"] = row("ours", 0.25, 0, "011111", seed)
    variant = Results(content).variant(HOST, "ours", 0.25)
    assert variant is not None
    assert np.isnan(variant.test()[1])


def test_a_table_compares_on_the_same_splits(content: dict[str, Any]) -> None:
    """Ours on a further, easier split does not count beside what was not measured there."""
    content["questions"]["fold2"] = [{"id": f"2-{i}", "complexity": "low"} for i in range(4)]
    content["rows"]["dense more"] = row("dense", 0.0, 2, "1111")
    content["rows"]["ours more"] = row("ours", 0.25, 2, "1111")
    result = Results(content)
    for table in (table_1(result, HOST), table_3a(result, HOST), table_4(result, HOST)):
        assert table is not None
        assert table.attrs["units"] == {("fold0", 0), ("fold1", 0)}
        measured = table.loc[table[table.columns[0]].isin(["25", "0.5", "ours"]), "accuracy"].iloc[0]
        assert measured == f"{100 * np.mean([4 / 6, 3 / 4]):.1f} (−8.3)"
    levels = table_3b(result, HOST)  # the same splits as Table 1
    assert levels is not None and levels.attrs["units"] == {("fold0", 0), ("fold1", 0)}


def test_what_was_removed_is_said(content: dict[str, Any]) -> None:
    assert cell(table_1(Results(content), HOST), "25", "removed") == "18 heads, 3 channels"


def test_small_p_is_no_zero() -> None:
    rows = {"a": row("dense", 0.0, 0, "1" * 60), "b": row("ours", 0.25, 0, "0" * 60)}
    result = Results({"rows": rows, "questions": {"fold0": [{"complexity": "low"}] * 60}})
    assert cell(table_1(result, HOST), "25", "p questions") == "<0.001"
    assert cell(table_3b(result, HOST), "low", "p questions") == "<0.001"
    assert cell(table_2(result), HOST, "p questions") == "<0.001"


@pytest.mark.parametrize("name", ["host", "kind", "split", "seed", "task", "removed_by", "right"])
def test_rows_that_lack_something_are_refused(content: dict[str, Any], tmp_path: Path, name: str) -> None:
    del content["rows"]["ours 0.25 0"][name]
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"\.{name}': Field required"):
        write(tmp_path / "results.json", tmp_path / "out")


def test_the_other_tables(content: dict[str, Any]) -> None:
    result = Results(content)
    alphas = table_3a(result, HOST)
    assert alphas is not None
    assert alphas["α"].tolist() == ["0.0", "0.5", "1.0"]
    assert cell(alphas, "1.0", "paper, Math23k") == "71.2"
    levels = table_3b(result, HOST)
    assert cell(levels, "low", "dense") == cell(levels, "low", "25% removed") == f"{100 * 4 / 5:.1f}"
    assert cell(levels, "medium", "difference") == "−20.0"
    assert cell(levels, "high", "problems") == "0" and cell(levels, "low", "p other than low") == ""
    ablations = table_4(result, HOST)
    assert ablations is not None
    assert cell(ablations, "without entropy", "accuracy").startswith("12.5")
    assert ablations["strategy"].tolist() == ["dense", "without entropy", "without norm", "random", "distillation only", "ours"]  # fmt: skip
    assert cell(ablations, "distillation only", "paper, Math23k") == str(TABLE_4["distillation only"])
    sizes = table_2(result)
    assert sizes is not None
    assert len(sizes) == 5


def test_ablations_are_tested_against_ours(content: dict[str, Any]) -> None:
    """By all sign flips, and Holm's correction by its definition."""
    table = table_4(Results(content), HOST)
    names = {"dense": ("dense", 0.0), "without entropy": ("alpha 1.0", 0.25), "without norm": ("alpha 0.0", 0.25)}
    names |= {"random": ("random", 0.25), "distillation only": ("distillation only", 0.0)}
    measured = np.array([int(mark) for mark in "".join(RIGHT["ours", 0.25])])
    points, chances = {}, {}
    for name, key in names.items():
        difference = np.array([int(mark) for mark in "".join(RIGHT[key])]) - measured
        flipped = [abs(np.dot(signs, difference)) for signs in product((1, -1), repeat=len(difference))]
        chances[name] = np.mean(np.array(flipped) >= abs(difference.sum()))
        points[name] = 50 * (difference[:6].mean() + difference[6:].mean())  # the mean over splits
    below = 0.0
    for name, chance in chances.items():
        assert float(cell(table, name, "p to ours")) == pytest.approx(chance, abs=6e-4)
        assert float(cell(table, name, "to ours").replace("−", "-")) == pytest.approx(points[name], abs=0.06)
    trained = [name for name in names if name not in ("dense", "distillation only")]  # and as much is pruned
    for rank, name in enumerate(sorted(trained, key=lambda item: chances[item])):
        below = min(1.0, max(below, (len(trained) - rank) * chances[name]))
        assert float(cell(table, name, "Holm to ours")) == pytest.approx(below, abs=6e-4)
    assert cell(table, "dense", "Holm to ours") == ""
    assert (
        cell(table, "ours", "to ours") == cell(table, "ours", "p to ours") == cell(table, "ours", "Holm to ours") == ""
    )
    content["rows"] = {key: item for key, item in content["rows"].items() if item["kind"] != "ours"}
    without = table_4(Results(content), HOST)
    assert without is not None and "to ours" not in without


def test_complexity_is_by_problem_and_compared_with_low(content: dict[str, Any]) -> None:
    """The mean over seeds first; whether complex problems lose more by all ways to divide them."""
    content["rows"]["dense again"] = row("dense", 0.0, 0, "111111", seed=1)
    content["rows"]["ours again"] = row("ours", 0.25, 0, "111000", seed=1)
    content["rows"]["more again"] = row("ours", 0.3, 0, "111000", seed=1)
    table = table_3b(Results(content), HOST)
    differences = np.array([0, 0, -0.0, -1, -0.5, -0.5, 0, 0, 0, 0])  # by hand; two seeds on fold0, one on fold1
    seeds = np.array(
        [[int(a) - int(b) for a, b in zip(*pair, strict=True)] for pair in (("110011", "110111"), ("111000", "111111"))]
    )
    assert differences[:6] == pytest.approx(seeds.mean(0))
    low = np.array([True, True, True, False, False, False, True, True, False, False])
    assert (cell(table, "low", "problems"), cell(table, "medium", "problems")) == ("5", "5")
    assert cell(table, "medium", "difference") == "−40.0" and cell(table, "low", "difference") == "+0.0"
    observed = abs(differences[~low].mean() - differences[low].mean())
    ways = [np.isin(range(10), chosen) for chosen in combinations(range(10), 5)]
    others = [abs(differences[~way].mean() - differences[way].mean()) for way in ways]
    assert float(cell(table, "medium", "p other than low")) == pytest.approx(
        np.mean(np.array(others) >= observed - 1e-12), abs=6e-4
    )


def test_rows_without_a_dense_host_do_not_count(content: dict[str, Any]) -> None:
    del content["rows"]["dense 0.0 1"]
    variant = Results(content).variant(HOST, "ours", 0.25)
    assert variant is not None
    assert [item["split"] for item in variant.rows] == ["fold0"]
    assert np.isnan(variant.test()[1])


def test_what_heads_are_worth() -> None:
    """A quarter of 144 heads: 36 · (4 · 768 · 64 + 3 · 64) parameters of about 181 million."""
    gone, parameters, share = head_share("base", 0.25)
    assert (gone, parameters) == (36, 36 * (4 * 768 * 64 + 3 * 64))
    assert share == pytest.approx(3.9, abs=0.05)
    assert head_share("large", 0.25)[0] == 96


def test_names_are_shown_in_markdown_not_read(content: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(content).replace(HOST, "<script>").replace("prune_asdiv_a_equation", "[t](javascript:x)")
    (tmp_path / "results.json").write_text(text.replace('"ours"', '"ours <b>"').replace("fold0", "=fold `0`"))
    write(tmp_path / "results.json", tmp_path)
    tables = (tmp_path / "tables.md").read_text()
    assert "## &lt;script&gt;" in tables and "<script>" not in tables and "<b>" not in tables
    assert "`" not in tables.replace("\\`", "") and "[t](" not in tables
    assert ",'=fold `0`," in (tmp_path / "rows.csv").read_text()


def test_the_command_writes_it_all(content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = [{"epoch": 1.0, "loss": 1.0, "task": 1.5, "response": 0.5}, {"epoch": 1.0, "eval_loss": 0.9}]
    content["rows"]["ours 0.25 0"]["stages"] = [{"stage": 1, "removed": {"heads": 6}, "log": log}]
    results = tmp_path / "results.json"
    results.write_text(json.dumps(content))
    assert main(["--results", str(results), "--output", str(tmp_path / "out")]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"tables.md", "rows.csv", "ratios.png", "ratios.svg"} | {
        f"athena_over_minilm_25.{kind}" for kind in ("png", "svg")
    }
    assert set(capsys.readouterr().out.split()) == {str(tmp_path / "out" / name) for name in written}
    text = (tmp_path / "out" / "tables.md").read_text(encoding="utf-8")
    for piece in (
        "Table 1",
        "Table 2",
        "Table 3 (a)",
        "Table 3 (b)",
        "Table 4",
        "3.9% of the model",
        "prints 15.8%",
        "On fold0 seed 0, fold1 seed 0.",
    ):
        assert piece in text


@pytest.mark.parametrize("broken", ["{}", '{"rows": {"a": {"host": "x"}}, "questions": {}}', "rows"])
def test_other_files_are_refused(tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    path.write_text(broken)
    with pytest.raises(InputError, match=r"field|not valid JSON"):
        write(path, tmp_path / "out")
    assert main(["--results", str(tmp_path / "none.json"), "--output", str(tmp_path / "out")]) == 2
    assert "no such file" in capsys.readouterr().err
