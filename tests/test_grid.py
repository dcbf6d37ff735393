"""The grid on tiny models: cells equal lm-eval alone, hashes, kills, two runners, failures, and what is refused."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import InputError
from lmeval_prune.cli import main
from lmeval_prune.grid import cells as cells_module
from lmeval_prune.grid.cells import cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.run import run
from lmeval_prune.grid.work import Loaded
from lmeval_prune.models.answer_store import AnswerStore, read_answers
from tests.conftest import task_manager

RANDOM = {"prepare": {"random_heads": {"share": 0.4, "seed": {"each": [0, 1]}}}}


@pytest.fixture(autouse=True, scope="module")
def _shared_manager() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells_module, "TaskManager", lambda metadata: task_manager())
        yield
    Loaded.release()


def described(folder: Path, **changes: Any) -> dict[str, Any]:
    """A grid as its YAML would have it."""
    return {
        "model": {"pretrained": str(folder), "dtype": "float64"},
        "variants": {
            "dense": {},
            "head {heads}": {"heads": {"each": ["L0H1", "L1H2"]}},
            "random {seed}": RANDOM,
            "filter": {"token_filter": {"ratio": 0.4, "warmup": 3}},
        },
        "tasks": [{"task": "prune_tiny_words", "gen_kwargs": {"max_gen_toks": 8}}, "prune_tiny_choice"],
        "limit": 4,
        "batch_size": 4,
        "device": "cpu",
        "measure": False,
        "baseline": "dense",
        **changes,
    }


def outcomes(folder: Path) -> dict[str, Any]:
    """Everything of a grid's cells that must not depend on how it was run."""
    found = {}
    for path in sorted((folder / "cells").iterdir()):
        if not path.name.startswith("."):
            files = {one.name: one.read_bytes() for one in path.glob("samples_*.jsonl")}
            tables = {one.name: one.read_bytes() for one in path.glob("*.parquet")}
            results = json.loads((path / "results.json").read_text())["results"]
            found[path.name] = {**files, **tables, "results": results}
    return found


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grids") / "whole"
    summary = run(Grid.of(described(tiny_folder)), str(folder))
    assert summary.failed == [] and summary.cells == summary.new == 12
    return folder


def test_a_cell_is_lm_eval_alone(tiny_folder: Path, whole: Path, tmp_path: Path) -> None:
    for entry in GridFolder(whole).read()["cells"]:
        about = json.loads((whole / "cells" / entry["key"] / "cell.json").read_text())
        arguments = {**entry["model_args"], "device": "cpu", "batch_size": 4}
        if entry["prepare"]:
            (key,) = {about["prepared"]}
            arguments["mask"] = str(whole / "prepared" / key / "mask.json")
        alone = simple_evaluate(
            model="pruned-hf", model_args=arguments, task_manager=task_manager(), **about["evaluation"]
        )
        (rows,) = alone["samples"].values()
        (path,) = (whole / "cells" / entry["key"]).glob("samples_*.jsonl")
        stored = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["resps"] for row in stored] == json.loads(json.dumps([row["resps"] for row in rows]))
        theirs = json.loads((whole / "cells" / entry["key"] / "results.json").read_text())["results"]
        assert theirs == json.loads(json.dumps(alone["results"]))


def test_variants_differ_and_masks_shared_a_pass(whole: Path) -> None:
    responses, passes = {}, {}
    for entry in GridFolder(whole).read()["cells"]:
        about = json.loads((whole / "cells" / entry["key"] / "cell.json").read_text())
        passes[entry["variant"], entry["task"]] = about["ran"]["variants_in_this_pass"]
        if entry["task"] == "prune_tiny_words":
            (path,) = (whole / "cells" / entry["key"]).glob("samples_*.jsonl")
            responses[entry["variant"]] = str([json.loads(line)["resps"] for line in path.read_text().splitlines()])
    assert len(set(responses.values())) == len(responses) == 6
    assert passes["dense", "prune_tiny_words"] == 5 and passes["filter", "prune_tiny_words"] == 1
    computed = [json.loads(p.read_text())["ran"]["answers_computed"] for p in whole.glob("cells/*/cell.json")]
    assert sum(computed) == 12 * 4 + 6 * 12  # 4 questions; 4 with 4 choices: nothing twice
