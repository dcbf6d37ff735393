"""The experiment of a smaller model: power, plan, a choice that sees no test, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smaller_model
import yaml
from _smaller import DENSE, Experiment, Row
from _smaller_choice import change, choice
from _smaller_plan import chosen_recipes, recipes_tested
from _smaller_power import Spread, probability, seeds_needed, spread_of
from _smaller_scores import Difference, Scored
from smaller_model_picture import SERIES, Series
from smaller_model_report import front, write_report
from smaller_model_table import HEADER, lines_of_tests, mean_lines, table_lines

from tests.smaller_experiments import command, fill, problems, record


def test_intervals_are_those_of_fold_means() -> None:
    rng = np.random.default_rng(0)
    rows = {Row("ours", fold, seed): rng.integers(-1, 2, 20).astype(float) for fold in range(5) for seed in range(3)}
    means = [np.mean([100 * rows[Row("ours", fold, seed)].mean() for seed in range(3)]) for fold in range(5)]
    difference = Difference(rows, 0.5)
    assert difference.mean == pytest.approx(sum(means) / 5)
    error = (sum((x - sum(means) / 5) ** 2 for x in means) / 4 / 5) ** 0.5
    assert difference.error == pytest.approx(error)
    assert difference.interval == pytest.approx(
        [difference.mean - 2.776445 * error, difference.mean + 2.776445 * error]
    )


def simulated_probability(goal: Any, deviation: float, folds: int, loss: float) -> float:
    """Draw means of folds again and again, and count how often they reach the goal."""
    rng, reached = np.random.default_rng(1), 0
    for _ in range(20_000):
        means = [rng.normal(-loss, deviation) for _ in range(folds)]
        mean = sum(means) / folds
        error = (sum((x - mean) ** 2 for x in means) / (folds - 1) / folds) ** 0.5
        reached += -mean <= goal["loss"] and mean - 2.776445 * error > goal["lower_bound"]
    return reached / 20_000


@pytest.mark.parametrize(("deviation", "loss"), [(0.5, 0.3), (1.0, 0.0), (3.0, 0.0)])
def test_the_probability_to_reach_the_goal_is_that_of_a_simulation(deviation: float, loss: float) -> None:
    goal: Any = {"loss": 0.7, "lower_bound": -2.0}
    expected = simulated_probability(goal, deviation, 5, loss)
    assert probability(goal, deviation, 5, loss) == pytest.approx(expected, abs=0.012)


def test_the_page_prints_the_probabilities_of_its_goal() -> None:
    goal = yaml.safe_load((smaller_model.HERE / "smaller_model.yaml").read_text())["goal"]
    lines = (smaller_model.HERE.parent / "docs" / "smaller-model.md").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| standard deviation, points |"))
    deviations, printed = ([float(cell) for cell in lines[n].split("|")[2:-1]] for n in (first, first + 2))
    assert printed == [round(probability(goal, deviation, 5), 2) for deviation in deviations]


def test_the_number_of_seeds_is_the_first_that_is_enough() -> None:
    goal: Any = {"loss": 0.7, "lower_bound": -2.0}
    spread = Spread(row=3.0, fold=0.5)
    needed = seeds_needed(goal, spread, 5)
    assert needed is not None
    chances = [probability(goal, (0.25 + 9 / n) ** 0.5, 5) for n in (needed - 1, needed)]
    assert chances[0] < 0.8 <= chances[1]
    assert seeds_needed(goal, Spread(row=0.0, fold=5.0), 5) is None


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_spread_of_tests_is_found_in_validation_differences(seeds: int) -> None:
    """Questions differ by what all trainings share (0.3) and by luck (0.4), trainings by 0.03; tests have 250 questions."""
    rng, recipes = np.random.default_rng(0), []
    for _ in range(150):
        difficulty, rows = rng.normal(0, 0.3, 600), {}
        for fold in range(5):
            for seed in range(seeds):
                drawn = rng.choice(600, 100, replace=False)
                values = difficulty[drawn] + rng.normal(0, 0.4, 100) + rng.normal(0, 0.03)
                rows[Row("ours", fold, seed)] = {str(n): float(x) for n, x in zip(drawn, values, strict=True)}
        recipes.append(rows)
    spread = spread_of(recipes, 250)
    assert spread is not None
    assert spread.row == pytest.approx(100 * (0.03**2 + 0.4**2 / 250) ** 0.5, rel=0.15)
    assert spread.fold == pytest.approx(100 * (0.3**2 / 250) ** 0.5, rel=0.15)
    assert spread_of([{row: values} for row, values in recipes[0].items()][:1], 250) is None


def test_the_choice_sees_validation_only_and_the_test_waits_for_all_rows(experiment: Experiment) -> None:
    """`ours` is better on validation of the seed of the choice; `other` by other seeds, and on the test."""
    fill(experiment, DENSE, [0, 1, 2], 100, validation="1110", test="1100")
    fill(experiment, "other", [0], validation="1100", test="1111")
    fill(experiment, "other", [1, 2], validation="1111", test="1111")
    fill(experiment, "ours", [0], validation="1110", test="1111")
    fill(experiment, "ours", [1, 2], validation="0000", test="1000")
    experiment.path(Row("ours", 1, 2)).unlink()
    table = choice(experiment)
    assert "validation problems of 2 folds and seeds" in table and "chosen: ours" in table and "power: test" in table
    scored: list[str] = []
    original = Scored._right

    def seen(self: Scored, row: Row, split: str, is_parent: bool = False) -> Any:
        scored.append(f"{row.recipe} {split}")
        return original(self, row, split, is_parent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scored, "_right", seen)
        first = write_report(experiment, str(experiment.work / "results")).splitlines()[0]
    assert first.startswith("The goal is not decided: ours lacks 1 rows") and "test" not in " ".join(scored)
    record(experiment, Row("ours", 1, 2), {"validation": "0000", "test": "1000"}, 80)
    report = write_report(experiment, str(experiment.work / "results")).splitlines()
    assert report[0].startswith(
        "The goal is not reached by ours: parameters in blocks (at least −10%): −20.0%, reached"
    )
    assert "mean loss (at most 0.7 points): 25.00, not reached" in report[0] and "not measured" in report[0]
    results = json.loads((experiment.work / "results.json").read_text())["rows"]
    assert results["ours_fold0_seed1"]["right"] == {"validation": "0000", "sampled": "0000", "test": "1000"}
    assert results["ours_fold0_seed1"]["dense"]["test"] == "1100"
    for key in ("ours_fold0_seed0", "other_fold0_seed1", "dense_fold0_seed0"):
        assert "test" not in results[key]["right"], key
    for _ in range(2):  # the last choice can be made again
        assert "as number 2: the test of ours is known already" in choice(experiment)
    assert chosen_recipes(experiment) == ["ours", "other"]
    report = write_report(experiment, str(experiment.work / "r")).splitlines()
    assert any(line.startswith("Tested as number 2: ") for line in report)
    experiment.path(Row("ours", 1, 2)).unlink()  # what was tested stays so
    write_report(experiment, str(experiment.work / "r"))
    assert recipes_tested(experiment) == ["ours", "other"]


def test_the_verdict_names_the_devices_whose_rows_were_measured(experiment: Experiment) -> None:
    """The slowest shape counts; without the row with most parameters, and by an estimate, nothing is decided."""
    fill(experiment, DENSE, [0, 1, 2], 100, validation="1110", test="1110")
    fill(experiment, "ours", [0, 1, 2], validation="1110", test="1110")
    record(experiment, Row("ours", 1, 2), {"validation": "1110", "test": "1110"}, 85)
    choice(experiment)
    goal = experiment.goal
    work = {name: goal[name] for name in ("batches", "prompt", "new", "dtype", "threads", "rounds")}  # type: ignore[literal-required]

    def verdict(*measured: tuple[str, str, float]) -> str:
        speeds = {
            f"{row} {device}": {
                **{"recipe": "ours", "row": row, "device": device, "work": work},
                "settings": experiment.digest(Row("ours", 0, 0)),
                "gains": {"1": {"median": gain, "low": 0.0, "high": 1.0}},
            }
            for row, device, gain in measured
        }
        (experiment.work / "speed.json").write_text(json.dumps(speeds))
        return write_report(experiment, str(experiment.work / "r")).splitlines()[0]

    slow, fast, largest = 0.1, 0.3, "ours_fold1_seed2"
    for other in ("estimate", "ours_fold0_seed1", "ours_fold0_seed0"):
        assert "not decided: the speed of ours's row with most parameters" in verdict((other, "a CPU", fast))
    reached = verdict((largest, "a CPU", fast), (largest, "a GPU", slow))
    assert reached.startswith("The goal is reached by ours on a CPU, not on a GPU: ")
    assert "not reached by ours" in verdict((largest, "a CPU", fast), ("ours_fold0_seed1", "a CPU", slow))


def test_only_recipes_that_may_be_chosen_must_have_all_folds(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(experiment, DENSE, [0], 100, validation="1111", test="1111")
    fill(experiment, "ours", [0], validation="1110", test="1111")
    record(experiment, Row("other", 0, 0), {"validation": "1111", "test": "1111"}, 95)
    assert "chosen: ours" in choice(experiment)
    record(experiment, Row("other", 0, 0), {"validation": "1111", "test": "1111"}, 80)
    assert command(experiment, "choose") == 2
    assert "compared on folds 0, 1 (other lacks fold 1)" in capsys.readouterr().err
    assert "chosen: ours" in choice(experiment, ["ours"])
    assert "chosen: other" in choice(experiment, folds=[0])


def test_the_report_compares_recipes_with_each_other(experiment: Experiment) -> None:
    fill(experiment, DENSE, [0], 100, validation="1111", test="1111")
    fill(experiment, "ours", [0], validation="1100", test="1111")
    record(experiment, Row("other", 0, 0), {"validation": "1110", "test": "1111"}, 80)
    change = "| other | ours | 1 | +25.00 points (1 of 4 problems won, 0 lost; no interval of 1 fold)"
    assert f"{change} |  |" in write_report(experiment, str(experiment.work / "r"))
    for name, divergence in (("other", 0.25), ("ours", 0.5)):
        path = experiment.path(Row(name, 0, 0))
        content = {**json.loads(path.read_text()), "stages": [{"stage": 1, "distance": {"mean_kld": divergence}}]}
        path.write_text(json.dumps(content))
    assert f"{change} | 0.250, 0.500; lower in 1 of 1 |" in write_report(experiment, str(experiment.work / "r"))


def test_rows_of_a_results_file_are_taken_back(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their tests sealed until all rows are there; the report is that of the answers."""
    fill(experiment, DENSE, [0, 1, 2], 100, validation="1110", test="1100")
    for name, validation, test in (("ours", "1110", "1011"), ("other", "1100", "1111")):
        fill(experiment, name, [0, 1, 2], validation=validation, test=test)
    last = Row("ours", 1, 2)
    experiment.path(last).unlink()
    choice(experiment)
    report, file = write_report(experiment, str(tmp_path / "unfinished")), tmp_path / "unfinished.json"
    rows = json.loads(file.read_text())["rows"]
    assert [key for key, row in rows.items() if "test" in row["right"]] == []
    assert {key for key, row in rows.items() if "sealed" in row["right"]} == {key for key in rows if key[-1] != "0"}

    def taken(*words: str) -> Experiment:
        copy = Experiment(experiment.file, tmp_path / f"copy{len([*tmp_path.iterdir()])}", experiment.pretrained)
        problems(copy)
        assert command(copy, "collect", "--results", *words) == 0
        return copy

    copy = taken(str(file))
    assert capsys.readouterr().out == f"17 new rows in {copy.work}\n"
    assert write_report(copy, str(tmp_path / "again")).splitlines()[0] == report.splitlines()[0]
    for target in (experiment, copy):
        record(target, last, {"validation": "1110", "test": "1011"}, 80)
    full = write_report(experiment, str(tmp_path / "finished"))
    tested = [line for line in full.splitlines() if line.startswith(("The goal is", "| ours | 4 |"))]
    assert len(tested) == 2 and set(tested) <= set(write_report(copy, str(tmp_path / "again")).splitlines())
    copy = taken(str(tmp_path / "finished.json"))
    assert recipes_tested(copy) == ["ours"] and set(tested) <= set(write_report(copy, str(tmp_path / "r")).splitlines())
    rows["ours_fold0_seed0"]["settings"] = "others"
    for changed, problem in (
        ({"rows": rows}, "ours_fold0_seed0 of the results file was made from another model or corpus"),
        ({"rows": {"ours_fold0_seed1": rows["ours_fold0_seed1"]}}, "has no dense rows, with which"),
        (
            {"rows": {**rows, "dense_fold0_seed0": {**rows["dense_fold0_seed0"], "parent": "other"}}},
            "were made from another model than",
        ),
        ({"changes": {"limit": 4}}, "were made with other options (--changes)"),
        ({"settings": {**json.loads(file.read_text())["settings"], "recipes": {}}}, "other options (other, ours)"),
    ):
        (tmp_path / "changed.json").write_text(json.dumps({**json.loads(file.read_text()), **changed}))
        empty = Experiment(experiment.file, tmp_path / "empty", experiment.pretrained)
        assert command(empty, "collect", "--results", str(tmp_path / "changed.json")) == 2
        assert problem in capsys.readouterr().err and not empty.records()


def test_fewer_than_three_folds_have_no_interval() -> None:
    rows = {Row("ours", fold, 0): np.array([1.0, -1.0, -1.0, 0.0]) for fold in (0, 1, 2)}
    assert change(Difference(rows, 0.5)) == "-25.00 ± 0.00 points (-25.00 to -25.00)"
    two = {row: differences for row, differences in rows.items() if row.fold < 2}
    assert change(Difference(two, 0.5)) == "-25.00 points (2 of 8 problems won, 4 lost; no interval of 2 folds)"


def test_what_costs_nearly_the_same_is_beaten_by_what_gains_more() -> None:
    costs = {"small": 0.60, "near": 0.602, "large": 0.65, "worse": 0.66}
    gains = {"small": -2.0, "near": -1.0, "large": 0.0, "worse": -0.5}
    assert front(costs, gains) == ["near", "large"]
    assert front(costs, gains, 0.0) == ["small", "near", "large"]


def test_the_plan_is_fixed_by_the_first_row(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    settings = yaml.safe_load(experiment.file.read_text())

    def changed(**values: Any) -> int:
        experiment.file.write_text(yaml.safe_dump({**settings, **values}))
        return command(experiment, "choose", "--folds", "0")

    problems(experiment)
    assert changed(folds=[0]) == 2 and "there are no rows by the seeds of the choice" in capsys.readouterr().err
    assert changed() == 2  # until there is a row, all can be changed
    fill(experiment, DENSE, [0, 1, 2, 3], 100, validation="1111", test="1111")
    fill(experiment, "ours", [0, 1, 2, 3], validation="1110", test="1111")
    assert changed() == 0
    goal = {**settings["goal"], "loss": 3.0}
    for values in ({"goal": goal}, {"folds": [1, 0]}, {"seeds": [1]}, {"choice_seeds": [4]}):
        assert changed(**values) == 2
        assert f"{next(iter(values))}=" in capsys.readouterr().err
    assert changed(seeds=[1, 2, 3]) == 0
    assert command(experiment, "report", "--out", str(experiment.work / "r")) == 0
    assert changed(seeds=[1, 2, 3, 4]) == 2
    assert "(the test of ours is known)" in capsys.readouterr().err
    assert changed(seeds=[0, 1]) == 2
    assert "seeds of the verdict chose the recipe ([0])" in capsys.readouterr().err


def test_rows_of_further_seeds_do_not_count(experiment: Experiment) -> None:
    fill(experiment, DENSE, [0, 5], 100, validation="1100", test="1100")
    fill(experiment, "ours", [0], validation="1000", test="1000")
    fill(experiment, "ours", [5], validation="1111", test="1111")
    assert "2 folds and seeds" in choice(experiment) and "-25.00" in choice(experiment)


def test_a_recipe_that_removes_too_little_or_is_too_slow_is_not_chosen(experiment: Experiment) -> None:
    for name, parameters in ((DENSE, 100), ("ours", 95), ("other", 80)):
        record(
            experiment,
            Row(name, 0, 0),
            {"validation": "1111" if name == "ours" else "1000", "test": "0000"},
            parameters,
        )
    assert "chosen: other" in choice(experiment, folds=[0])
    goal = experiment.goal
    speed = {
        "other": {
            **{"recipe": "other", "row": "estimate", "device": "a CPU"},
            "settings": experiment.digest(Row("other", 0, 0)),
            "work": {name: goal[name] for name in ("batches", "prompt", "new", "dtype", "threads", "rounds")},  # type: ignore[literal-required]
            "gains": {"1": {"median": 0.1, "low": 0.0, "high": 0.2}},
        }
    }
    (experiment.work / "speed.json").write_text(json.dumps(speed))
    assert "no other recipe removes enough and is fast enough" in choice(experiment, folds=[0])


def test_the_table_of_tests_is_of_scored_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = {"validation": "10", "sampled": "11"}
    records = {
        Row("a", fold, 1): {"right": {**digits, "test": "110"}, "dense": {**digits, "test": "011"}} for fold in (1, 0)
    }
    series = Series("a", "a", "a", [1])
    monkeypatch.setattr(Series, "records", lambda _: records)
    _, _, *rows = lines_of_tests(series)
    assert rows == ["| 0, 1 | 2 of 3 | 2 | 1, 1 |", "| 1, 1 | 2 of 3 | 2 | 1, 1 |"]
    assert mean_lines(series)[-1] == "test, greedy: +0.00 (+0.00 to +0.00)"
    del records[Row("a", 1, 1)]["right"]["test"]
    assert lines_of_tests(series) == [] and len(mean_lines(series)) == 2


def test_the_page_has_the_rows_of_the_results_file() -> None:
    """All rows of the page, and the means below them to a decimal place."""
    page = Path(__file__).parents[1].joinpath("docs", "smaller-model.md").read_text(encoding="utf-8")
    header, rule, *rows = table_lines(SERIES[-1])
    assert header == f"| {' | '.join(HEADER)} |"
    below = page.split(f"{header}\n{rule}\n")[1]
    table, text = below.split("\n\n", 1)
    assert table.splitlines() == rows
    assert "\n".join(lines_of_tests(SERIES[-1])) in page
    (greedy, (low, high)), (sampled, (lowest, highest)), *test = (
        (difference.mean, difference.interval) for difference in SERIES[-1].differences().values()
    )
    for mean, (least, most) in test:
        assert f"{mean:+.2f} points, 95% {least:+.2f} to {most:+.2f}".replace("-", "−") in " ".join(page.split())
    for sentence in (
        f"{greedy:+.1f} points, 95% {low:+.1f} to {high:+.1f}",
        f"solves {sampled:+.1f} ({lowest:+.1f} to {highest:+.1f})",
    ):
        assert sentence.replace("-", "−") in " ".join(text.split())
