"""Plans as preparations of a grid: made as a part of a cell, tried out or cut, and measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune import Plan
from lmeval_prune.cli import main
from lmeval_prune.grid.cells import cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.preparations import make_preparation
from lmeval_prune.grid.run import run
from lmeval_prune.models.pruned_hf import PrunedHFLM
from tests.test_grid import described
from tests.test_own_answers import task_file


def grid_of(tiny_folder: Path, text: Path, **changes: Any) -> Grid:
    calibrated = {"text": str(text), "windows": 8, "tokens": 32, "ratio": 0.3}
    variants = {
        "dense": {},
        "{method}": {"prepare": {"prune": {"method": {"each": ["slimgpt"]}, **calibrated}}},
        "cut": {"prepare": {"prune": {"method": "slimgpt", "cut": True, **calibrated}}},
    }
    content = described(tiny_folder, variants=variants, tasks=["prune_tiny_choice"], measure=True, limit=3)
    return Grid.of({**content, **changes})


def test_methods_are_prepared_evaluated_and_compared(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A plan tried out and the checkpoint cut by it give the same answers; only the checkpoint measures as smaller."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))
    grid, folder = grid_of(tiny_folder, text), tmp_path / "grid"
    summary = run(grid, str(folder))
    assert summary.failed == [] and summary.cells == summary.new == 3
    plans = {path.parent.name: Plan.load(path) for path in folder.glob("prepared/*/plan.json")}
    assert sorted(plan.provenance["method"] for plan in plans.values()) == ["slimgpt", "slimgpt"]
    assert not [path for path in (folder / "prepared").iterdir() if path.name.startswith(".")]
    answers, parameters = {}, {}
    for entry in GridFolder(folder).read()["cells"]:
        (samples,) = (folder / "cells" / entry["key"]).glob("samples_*.jsonl")
        answers[entry["variant"]] = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
        costs = GridFolder(folder).costs(entry["costs"])
        assert costs is not None
        parameters[entry["variant"]] = costs["parameters"]
        for speed in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            slowest, fastest = costs["ranges"][speed]
            assert 0 < slowest <= costs[speed] <= fastest
    close = [
        abs(float(first[0]) - float(second[0]))  # lm-eval writes numbers as texts
        for rows in zip(answers["slimgpt"], answers["cut"], strict=True)
        for first, second in zip(*rows, strict=True)
    ]
    assert max(close) < 1e-6 and answers["slimgpt"] != answers["dense"]
    assert parameters["cut"] < parameters["dense"] == parameters["slimgpt"]
    capsys.readouterr()
    assert main(["grid", "compare", str(folder)]) == 0
    assert "slimgpt" in (folder / "compare" / "report.md").read_text()


def test_calibration_problems_are_read_as_the_grid_asks(tiny_folder: Path) -> None:
    """In the chat template, unless the preparation says otherwise; it is another preparation then."""
    read = {"method": "flap", "ratio": 0.3, "task": "prune_tiny_cloze"}
    settings = (read, {**read, "apply_chat_template": True}, {**read, "apply_chat_template": False})
    settings = (*settings, {"method": "random", "ratio": 0.3})
    chats, keys = [], []
    for prune in settings:
        for chat in (True, False):
            variants = {"v": {"prepare": {"prune": prune}}}
            content = described(tiny_folder, variants=variants, tasks=["prune_tiny_choice"], baseline=None)
            (cell,) = cells_of(Grid.of({**content, "apply_chat_template": chat}))
            chats.append(cell.preparation.apply_chat_template)
            keys.append(cell.prepared)
    assert chats == [True, False, True, True, False, False, False, False]
    assert keys[0] == keys[2] == keys[3] != keys[1] == keys[4] == keys[5] and keys[6] == keys[7]


def test_a_plan_of_own_answers(tiny_folder: Path, tmp_path: Path) -> None:
    """Their options are part of what the plan is; the store of answers goes when the plan is there."""
    lm = PrunedHFLM(str(tiny_folder))
    name = task_file(tmp_path / "task")
    plain = {"method": "flap", "ratio": 0.3, "task": name, "windows": 4}
    settings = [plain, {**plain, "calibrate_on": "own"}, {**plain, "calibrate_on": "own", "prompts_count": False}]
    preparations = [make_preparation("prune", options) for options in settings]
    assert len({str(prepared.identity()) for prepared in preparations}) == 3
    for number, preparation in enumerate(preparations[1:]):
        (tmp_path / str(number)).mkdir()
        preparation.make(lm, tmp_path / str(number))
        about = Plan.load(tmp_path / str(number) / "plan.json").provenance["calibration"]["own_answers"]
        assert about["questions"] == 4 and about["prompts_count"] is (number == 0)
    assert not list(tmp_path.glob(".*responses"))


def test_other_training_problems_of_the_same_name_are_another_plan(tiny_folder: Path, tmp_path: Path) -> None:
    """The same name of a task with other problems or prompts."""
    prune = {"method": "flap", "ratio": 0.3, "task": str(tmp_path / "sums.yaml")}
    keys = set()
    for changes in ({}, {"answers": {3: "7"}}, {"doc_to_text": "Say: {{question}}"}):
        task_file(tmp_path, **changes)
        shutil.rmtree(tmp_path / "json", ignore_errors=True)  # the cache of `datasets`
        variants = {"v": {"prepare": {"prune": prune}}}
        content = described(tiny_folder, variants=variants, tasks=["prune_tiny_choice"], baseline=None)
        (cell,) = cells_of(Grid.of(content))
        keys.add(cell.prepared)
    assert len(keys) == 3
