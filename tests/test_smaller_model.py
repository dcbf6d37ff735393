"""The experiment of a smaller model: rows that are resumed, a choice that sees no test, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import smaller_model
import yaml
from _smaller import DENSE, Experiment, Row
from _smaller_choice import choice
from _smaller_estimate import removed_share
from _smaller_plan import chosen_recipes, recipes_tested
from _smaller_power import Spread, probability, seeds_needed, spread_of
from _smaller_rows import PROBLEMS
from _smaller_scores import Difference, Scored
from smaller_model_report import front, write_report
from transformers import LlamaConfig

from lmeval_prune import InputError, load_pretrained
from lmeval_prune.artefacts import output_lock
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.distillation.trainer import DistillTrainer
from lmeval_prune.profiling import costs
from tests.athena_hosts import data_folder, quick_training
from tests.test_distillation import Killed, killed_at

PRUNED = {"ratio": 0.5, "unit": "balanced", "method": "magnitude", "feature": False, "hidden": True}


@pytest.fixture(autouse=True, scope="module")
def no_pictures() -> Iterator[None]:
    """Skip drawing the figures."""
    with quick_training():
        yield


@pytest.fixture
def experiment(tiny_folder: Path, tmp_path: Path) -> Experiment:
    """Two folds, two seeds, the dense model and two recipes of a tiny model."""
    common = {
        "chat": True,
        "answer": "\\boxed{{}}",
        "data_dir": str(data_folder(tmp_path / "data")),
        "stages": 1,
        "epochs": 1,
        "batch": 8,
        "validation": 0.25,
        "max_length": 400,
    }
    settings = {
        "goal": {
            **{"parameters": 0.1, "speed": 0.2, "batches": [1], "loss": 0.7, "lower_bound": -2.0},
            **{"prompt": 8, "new": 4, "dtype": "float32", "threads": 1, "rounds": 2},
        },
        "task": "prune_asdiv_a_equation",
        "new_tokens": 4,
        "samples": 2,
        "sample_temperature": 1.0,
        "folds": [0, 1],
        "choice_seeds": [0],
        "seeds": [1, 2],
        "comparisons": {"other": "ours"},
        "dense": {**common, "ratio": 0, "distill_weight": 0, "task_weight": 1},
        "recipes": {"ours": {**common, **PRUNED}, "other": {**common, **PRUNED, "hidden": False}},
    }
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(settings))
    return Experiment(file, tmp_path / "work", str(tiny_folder))


def command(experiment: Experiment, *words: str) -> int:
    """Run a command of the script for an experiment."""
    where = ["--experiment", str(experiment.file), "--work", str(experiment.work), "--pretrained"]
    return smaller_model.main([words[0], *where, experiment.pretrained, *words[1:]])


def problems(experiment: Experiment, count: int = 4) -> dict[str, list[dict[str, Any]]]:
    """Write problems of two folds whose answers are 1+1, and return them."""
    folds = {
        f"fold{fold}": [
            {
                "id": f"{fold}-{n}",
                "question": f"{fold} and {n}?",
                "formula": "1+1=2",
                "target": "2",
                "complexity": "low",
                "grade": "1",
            }
            for n in range(count)
        ]
        for fold in (0, 1)
    }
    experiment.work.mkdir(parents=True, exist_ok=True)
    (experiment.work / PROBLEMS).write_text(json.dumps(folds))
    return folds


def record(experiment: Experiment, row: Row, right: dict[str, str], parameters: int = 100) -> None:
    """Write a record whose answers are right as `right` says for each split."""
    folds = problems(experiment)
    documents = {"validation": folds[f"fold{1 - row.fold}"], "test": folds[f"fold{row.fold}"]}
    answers = {
        split: [
            {"id": doc["id"], "answer": "\\boxed{1+1}" if x == "1" else "\\boxed{3+1}"}
            for doc, x in zip(documents[split], right[split], strict=True)
        ]
        for split in documents
    }
    sampled = [{"id": each["id"], "answers": ["none", each["answer"]]} for each in answers["validation"]]
    content = {
        **{"recipe": row.recipe, "fold": row.fold, "seed": row.seed, "device": "here", "seconds": 1.0},
        **{"settings": experiment.digest(row), "weights": f"of {row.key}", "parent": f"of {row.dense.key}"},
        **{"parameters": [parameters, parameters], "plans": [], "stages": [{"stage": 1}], **answers},
        "sampled": sampled,
    }
    path = experiment.path(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


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


def fill(experiment: Experiment, name: str, seeds: list[int], parameters: int = 80, **right: str) -> None:
    """Write the records of a recipe on both folds."""
    for fold in (0, 1):
        for seed in seeds:
            record(experiment, Row(name, fold, seed), right, parameters)


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
    report = write_report(experiment, str(experiment.work / "r"))
    assert "| other | ours | 1 | +25.00" in report


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


def test_a_row_of_a_recipe_that_is_gone_is_one_line(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    record(experiment, Row("other", 0, 0), {"validation": "1000", "test": "1000"})
    content = yaml.safe_load(experiment.file.read_text())
    del content["recipes"]["other"]
    experiment.file.write_text(yaml.safe_dump({**content, "comparisons": {}}))
    assert command(experiment, "choose") == 2
    assert "is a row of the recipe other, which experiment.yaml has no more" in capsys.readouterr().err


def test_rows_of_a_machine_without_the_dense_model_have_its_answers(experiment: Experiment, tmp_path: Path) -> None:
    """The dense row comes from elsewhere, by other weights; each row here is paired with the model that it was cut from."""
    assert command(experiment, "train", "--recipes", DENSE, "--rows", "1") == 0
    there = json.loads(experiment.path(Row(DENSE, 0, 0)).read_text())
    here = Experiment(experiment.file, tmp_path / "here", experiment.pretrained)
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "dense_fold0_seed0.json").write_text(json.dumps({**there, "weights": "those of another machine"}))
    assert command(here, "collect", "--copy", str(copies)) == 0
    given = ["--folds", "0", "--copy", str(tmp_path / "given")]
    assert command(here, "train", "--recipes", "ours", *given) == 0
    assert command(here, "train", "--recipes", "other", *given) == 0  # the dense model is there by now
    rows = [Row(name, 0, 0) for name in ("ours", "other")]
    for row in rows:
        made = here.record(row)
        assert made["parent"] == made["dense"]["weights"] == there["weights"]  # trained anew, alike
        assert made["made"][0]["versions"] and made["made"][0]["commit"] and made["made"][0]["device"]
    assert Scored(here).difference(rows[1:], "validation").by_row.keys() == {rows[1]}
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    without = {name: value for name, value in here.record(rows[0]).items() if name != "dense"}
    (lonely / "ours_fold0_seed0.json").write_text(json.dumps(without))
    third = Experiment(experiment.file, tmp_path / "third", experiment.pretrained)
    assert command(third, "collect", "--copy", str(lonely)) == 2
    assert command(third, "collect", "--copy", str(tmp_path / "copies")) == 0
    assert command(third, "collect", "--copy", str(lonely)) == 2 and len(third.records()) == 1
    (lonely / "dense_fold0_seed0.json").write_text(json.dumps(there))
    assert command(third, "collect", "--copy", str(lonely)) == 0
    assert third.record(rows[0])["dense"]["weights"] == there["weights"]
    (third.work / PROBLEMS).write_text((here.work / PROBLEMS).read_text())
    assert Scored(third).difference(rows[:1], "validation").by_row.keys() == {rows[0]}


def test_rows_of_other_settings_are_refused(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal = Experiment(experiment.file, tmp_path / "rehearsal", experiment.pretrained, {"limit": 8})
    record(rehearsal, Row(DENSE, 0, 0), {"validation": "1000", "test": "1000"})
    assert command(experiment, "collect", "--copy", str(rehearsal.work / "rows")) == 2
    assert "is a row of other settings or of another model" in capsys.readouterr().err
    assert not experiment.path(Row(DENSE, 0, 0)).exists()


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
            "work": {name: goal[name] for name in ("batches", "prompt", "new", "dtype", "threads", "rounds")},  # type: ignore[literal-required]
            "gains": {"1": {"median": 0.1, "low": 0.0, "high": 0.2}},
        }
    }
    (experiment.work / "speed.json").write_text(json.dumps(speed))
    assert "no other recipe removes enough and is fast enough" in choice(experiment, folds=[0])


@pytest.fixture
def shape_of_smollm2(tmp_path: Path) -> str:
    """The configuration of SmolLM2-135M, without weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "shape")
    return str(tmp_path / "shape")


def test_every_recipe_removes_what_the_goal_asks_for(shape_of_smollm2: str, tmp_path: Path) -> None:
    """`choose` would leave out others after hours of training; its options can be read, too."""
    own = Experiment(Path(smaller_model.HERE / "smaller_model.yaml"), tmp_path, shape_of_smollm2)
    shares = {name: removed_share(own, name) for name in own.settings["recipes"]}
    assert shares.pop("continued") == 0  # trained as long, with nothing removed: for comparison
    assert shares["depth"] == pytest.approx(own.settings["recipes"]["depth"]["ratio"], abs=1 / 60)
    for name, share in shares.items():
        assert share is not None
        assert own.goal["parameters"] <= share < 0.4, name


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.5, "unit": "balanced", "method": "magnitude"},
        {"ratio": 0.5, "unit": "group", "ffn_ratio": 0.25, "method": "magnitude"},
        {"ratio": 0.4, "budget": "parameters", "method": "slimgpt"},
        {"ratio": 0.5, "budget": "parameters", "method": "block_influence", "parts": "layers"},
        {"ratio": 0.4, "budget": "parameters", "method": "magnitude", "allocation": "composition"},
    ],
)
def test_the_share_that_is_removed_is_known_before(experiment: Experiment, changes: dict[str, Any]) -> None:
    """It is that of the cut model but for norms; a composition may remove more than its budget."""
    content = yaml.safe_load(experiment.file.read_text())
    content["recipes"]["ours"] |= {"unit": None, "epochs": 0, **changes}
    experiment.file.write_text(yaml.safe_dump(content))
    row = Row("ours", 0, 0)
    whole = replace(experiment.options(row), pretrained=experiment.pretrained, limit=8)
    distill(whole)
    before, after = (costs.parameters(load_pretrained(each))[1] for each in (experiment.pretrained, whole.output))
    known, removed = removed_share(experiment, "ours"), 1 - after / before
    assert known is not None
    assert removed >= known - 0.01
    assert removed <= known + (0.15 if "allocation" in changes else 0.02)


def test_a_row_is_made_once_and_goes_on_after_a_kill(
    experiment: Experiment, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, DistillTrainer, "training_step", 2)
        with pytest.raises(Killed):
            command(experiment, "train", "--recipes", "ours", "--rows", "2")
    assert not list((experiment.work).glob("rows/*.json"))
    copies = tmp_path / "copies"
    assert command(experiment, "train", "--recipes", "ours", "--rows", "2", "--copy", str(copies)) == 0
    assert {path.stem for path in copies.iterdir()} == {"dense_fold0_seed0", "ours_fold0_seed0"}
    dense, ours = (experiment.record(Row(name, 0, 0)) for name in (DENSE, "ours"))
    assert len(dense["test"]) == 6 and len(dense["validation"]) == 6
    assert [answer["id"] for answer in dense["validation"]] == [answer["id"] for answer in ours["validation"]]
    assert [(entry["id"], len(entry["answers"])) for entry in ours["sampled"]] == [
        (answer["id"], 2) for answer in ours["validation"]
    ]
    assert ours["parameters"][1] < dense["parameters"][1] and ours["plans"][-1]["heads"]
    capsys.readouterr()
    assert command(experiment, "train", "--recipes", "ours", "--folds", "0", "--seeds", "0") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all rows are made"
    other = Experiment(experiment.file, tmp_path / "elsewhere", experiment.pretrained)
    assert command(other, "collect", "--copy", str(copies)) == 0 and len(other.records()) == 2
    assert command(experiment, "choose", "--recipes", "ours", "--folds", "0") == 0
    assert command(experiment, "speed") == 0
    speed = json.loads((experiment.work / "speed.json").read_text())
    (speed,) = speed.values()
    assert speed["row"] == "ours_fold0_seed0" and len(speed["tokens_per_second"]["ours"]["generate_1"]) == 2
    assert speed["gains"].keys() == {"1"} and {"generate_1", "engine_1"} <= speed["tokens_per_second"]["ours"].keys()
    changed = yaml.safe_load(experiment.file.read_text())
    changed["recipes"]["ours"]["epochs"] = 2
    experiment.file.write_text(yaml.safe_dump(changed))
    assert command(experiment, "train") == 2
    assert "ours_fold0_seed0.json is a row of other settings" in capsys.readouterr().err


def test_an_estimate_is_enough_to_measure_the_speed(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape that the estimate left is timed, unless the recipe was changed since."""
    assert command(experiment, "estimate", "--recipes", "ours") == 0
    assert ", scoring " in capsys.readouterr().out
    (path,) = (path for path in (experiment.work / "estimate").glob("*.json") if "ours" in path.name)
    estimate = json.loads(path.read_text())
    path.write_text(json.dumps({**estimate, "settings": "another"}))
    assert command(experiment, "speed") == 2
    path.write_text(json.dumps(estimate))
    assert command(experiment, "speed") == 0
    (speed,) = json.loads((experiment.work / "speed.json").read_text()).values()
    assert speed["row"] == "estimate" and speed["parameters"] == estimate["parameters"]
    capsys.readouterr()
    assert command(experiment, "train", "--recipes", "ours", "--budget", str(estimate["seconds"] / 1e6)) == 0
    assert "0 rows made in 0 s; the next is dense_fold0_seed0" in capsys.readouterr().out


def test_training_goes_on_if_another_process_makes_a_row(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    for fold in (0, 1):
        record(experiment, Row(DENSE, fold, 0), {"validation": "1111", "test": "1111"}, 100)
    made: list[Row] = []

    def make(experiment: Experiment, row: Row, device: str) -> Any:
        made.append(row)
        record(experiment, row, {"validation": "1111", "test": "1111"}, 80)
        return experiment.record(row)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as elsewhere:
        patch.setattr("_smaller_rows.make_row", make)
        lock = output_lock(experiment.path(Row("ours", 0, 0)))
        elsewhere.submit(lock.__enter__).result()
        assert command(experiment, "train") == 0
        elsewhere.submit(lock.__exit__, None, None, None).result()
    assert set(made) == {Row("other", 0, 0), Row("ours", 1, 0), Row("other", 1, 0)}
    output = capsys.readouterr().out
    assert "ours_fold0_seed0 is left: another run is writing" in output and "1 rows wait for other processes" in output


def test_an_estimate_counts_what_the_row_reads(experiment: Experiment) -> None:
    """More calibration texts, and sampled answers to validation problems, take longer."""
    from _smaller_estimate import _answering_seconds, _ratio

    assert _ratio([43, 256]) == 256 / 43 and _ratio([0, 256]) == 1.0
    asked: list[tuple[int, int]] = []

    def answers(host: Any, model: Any, documents: Any, params: Any, samples: int = 1) -> list[Any]:
        asked.append((len(documents), samples))
        return []

    moments = iter([0.0, 2.0, 10.0, 14.0])  # two seconds for the greedy answers, four for the sampled ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("_smaller_estimate.answers", answers)
        patch.setattr("_smaller_estimate.time.monotonic", lambda: next(moments))
        host: Any = SimpleNamespace(rows=lambda: SimpleNamespace(test=list(range(20))))
        seconds = _answering_seconds(experiment, host, None, 5)
    assert asked == [(16, 1), (8, 2)]
    assert seconds == 2 / 16 * 25 + 4 / 8 * 5


def test_mistakes_are_one_line(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("train", "--recipes", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("estimate", "--recipes", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("choose", "--recipes", "ours", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("train", "--folds", "9"), "there is no fold 9"),
        (("train", "--seeds", "9"), "there is no seed 9"),
        (("train", "--changes", "3"), "--changes 3 must be a mapping"),
        (("train", "--changes", "{epoch: 1}"), "has no setting 'epoch'; did you mean 'epochs'?"),
        (("collect",), "name the folder of the records"),
        (("speed",), "no recipe has a row or an estimate to measure"),
    ):
        assert command(experiment, *words) == 2
        assert message in capsys.readouterr().err
    problems(experiment)
    with pytest.raises(InputError, match="there are no rows by the seeds of the choice"):
        choice(experiment)
