"""The experiment of a smaller model: rows that are resumed, a choice that sees no test, and the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smaller_model
import yaml
from _smaller import DENSE, Experiment, Row
from _smaller_rows import PROBLEMS
from smaller_model_report import Difference, Scored, choice, chosen_recipes, write_report
from transformers import LlamaConfig

from lmeval_prune import InputError, load_pretrained
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
        "goal": {"parameters": 0.1, "speed": 0.2, "batches": [1], "loss": 0.7, "lower_bound": -2.0},
        "task": "prune_asdiv_a_equation",
        "new_tokens": 4,
        "samples": 2,
        "sample_temperature": 1.0,
        "folds": [0, 1],
        "seeds": [0, 1],
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


def test_the_choice_sees_validation_only_and_the_test_waits_for_all_rows(experiment: Experiment) -> None:
    """`ours` is better on validation, `other` on the test; a test is scored when all rows are there."""
    for fold in (0, 1):
        for seed in (0, 1):
            record(experiment, Row(DENSE, fold, seed), {"validation": "1110", "test": "1100"})
            record(experiment, Row("other", fold, seed), {"validation": "1100", "test": "1111"}, 80)
            if (fold, seed) != (1, 1):
                record(experiment, Row("ours", fold, seed), {"validation": "1110", "test": "1000"}, 80)
    table = choice(experiment)
    assert "validation problems of 3 folds and seeds" in table and "chosen: ours" in table
    scored: list[str] = []
    original = Scored._right

    def seen(self: Scored, row: Row, split: str, is_parent: bool = False) -> Any:
        scored.append(f"{row.recipe} {split}")
        return original(self, row, split, is_parent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scored, "_right", seen)
        first = write_report(experiment, str(experiment.work / "results")).splitlines()[0]
    assert first.startswith("The goal is not decided: ours lacks 1 rows") and "test" not in " ".join(scored)
    record(experiment, Row("ours", 1, 1), {"validation": "1110", "test": "1000"}, 80)
    report = write_report(experiment, str(experiment.work / "results")).splitlines()
    assert report[0].startswith(
        "The goal is not reached by ours: parameters in blocks (at least −10%): −20.0%, reached"
    )
    assert (
        "mean loss (at most 0.7 points): 25.00, not reached" in report[0] and "not measured, not reached" in report[0]
    )
    results = json.loads((experiment.work / "results.json").read_text())
    assert results["rows"]["ours_fold0_seed0"]["right"] == {
        "validation": "1110",
        "sampled": "1110",
        "test": "1000",
    }
    assert "test" not in results["rows"]["other_fold0_seed0"]["right"]
    for _ in range(2):  # the last choice can be made again
        assert "as number 2: the test of ours is known already" in choice(experiment)
    assert chosen_recipes(experiment) == ["ours", "other"]
    assert any(
        line.startswith("Tested as number 2: ")
        for line in write_report(experiment, str(experiment.work / "r")).splitlines()
    )


def test_rows_of_further_seeds_do_not_count(experiment: Experiment) -> None:
    for seed, right in ((0, "1000"), (1, "1000"), (2, "1111")):
        for fold in (0, 1):
            record(experiment, Row(DENSE, fold, seed), {"validation": "1100", "test": "1100"})
            record(experiment, Row("ours", fold, seed), {"validation": right, "test": right}, 80)
    assert len(Scored(experiment).pairs("ours")) == 4
    assert "4 folds and seeds" in choice(experiment) and "-25.00" in choice(experiment)


def test_a_row_is_paired_with_the_model_that_was_pruned(experiment: Experiment) -> None:
    row = Row("ours", 0, 0)
    record(experiment, row.dense, {"validation": "1111", "test": "1111"})
    record(experiment, row, {"validation": "1000", "test": "1000"}, 80)
    content = json.loads(experiment.path(row).read_text())
    dense = json.loads(experiment.path(row.dense).read_text())
    experiment.path(row).write_text(json.dumps({**content, "parent": "trained elsewhere"}))
    with pytest.raises(InputError, match="was pruned from another model than the one that answered"):
        choice(experiment)
    record(experiment, Row("other", 0, 0), {"validation": "1000", "test": "1000"})
    again = {**json.loads(experiment.path(Row("other", 0, 0)).read_text()), "weights": "trained elsewhere"}
    experiment.path(Row("other", 0, 0)).unlink()
    experiment.path(row).write_text(json.dumps({**content, "parent": "trained elsewhere", "dense": again}))
    assert Scored(experiment).difference([row], "validation").mean == 0
    assert dense["weights"] != "trained elsewhere"


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
    assert "chosen: other" in choice(experiment)
    speed = {"other on cpu": {"gains": {"1": 0.1}}}
    (experiment.work / "speed.json").write_text(json.dumps(speed))
    assert "no other recipe removes enough and is fast enough" in choice(experiment)


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
    shares = {name: own.removed_share(name) for name in own.settings["recipes"]}
    assert shares["depth"] == pytest.approx(own.settings["recipes"]["depth"]["ratio"], abs=1 / 60)
    for name, share in shares.items():
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
    known, removed = experiment.removed_share("ours"), 1 - after / before
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
    assert command(experiment, "choose", "--recipes", "ours") == 0
    assert command(experiment, "speed") == 0
    speed = json.loads((experiment.work / "speed.json").read_text())["ours on cpu"]
    assert speed["row"] == "ours_fold0_seed0"
    assert speed["gains"].keys() == {"1"} and {"generate_1", "engine_1"} <= speed["tokens_per_second"]["ours"].keys()
    changed = yaml.safe_load(experiment.file.read_text())
    changed["recipes"]["ours"]["epochs"] = 2
    experiment.file.write_text(yaml.safe_dump(changed))
    assert command(experiment, "train") == 2
    assert "has rows by other settings (ours)" in capsys.readouterr().err


def test_an_estimate_is_enough_to_measure_the_speed(experiment: Experiment) -> None:
    """The shape that the estimate left is timed, unless the recipe was changed since."""
    assert command(experiment, "estimate", "--recipes", "ours") == 0
    (path,) = (path for path in (experiment.work / "estimate").glob("*.json") if "ours" in path.name)
    estimate = json.loads(path.read_text())
    path.write_text(json.dumps({**estimate, "settings": "another"}))
    assert command(experiment, "speed") == 2
    path.write_text(json.dumps(estimate))
    assert command(experiment, "speed") == 0
    speed = json.loads((experiment.work / "speed.json").read_text())["ours on cpu"]
    assert speed["row"] == "estimate" and speed["parameters"] == estimate["parameters"]


def test_mistakes_are_one_line(experiment: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("train", "--recipes", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("estimate", "--recipes", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("choose", "--recipes", "ours", "our"), "there is no recipe our; did you mean 'ours'?"),
        (("train", "--folds", "9"), "there is no fold 9"),
        (("train", "--changes", "3"), "--changes 3 must be a mapping"),
        (("train", "--changes", "{epoch: 1}"), "has no setting 'epoch'; did you mean 'epochs'?"),
        (("collect",), "name the folder of the records"),
        (("speed",), "no recipe has a row or an estimate to measure"),
    ):
        assert command(experiment, *words) == 2
        assert message in capsys.readouterr().err
        (experiment.work / "experiment.json").unlink(missing_ok=True)
    problems(experiment)
    with pytest.raises(InputError, match="there are no folds and seeds that all recipes have"):
        choice(experiment)
