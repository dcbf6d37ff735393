"""A small experiment of `benchmarks/smaller_model.py`, and records of rows that were never made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smaller_model
import yaml
from _smaller import DENSE, Experiment, Row
from _smaller_rows import PROBLEMS

from tests.athena_hosts import data_folder

PRUNED = {"ratio": 0.5, "unit": "balanced", "method": "magnitude", "feature": False, "hidden": True}


def tiny_experiment(tiny_folder: Path, tmp_path: Path) -> Experiment:
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
        "comparisons": [["other", "ours"]],
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
    sampled = [{"id": answer["id"], "answers": ["none", answer["answer"]]} for answer in answers["validation"]]
    content = {
        **{"recipe": row.recipe, "fold": row.fold, "seed": row.seed, "device": "here", "seconds": 1.0},
        **{"settings": experiment.digest(row), "weights": f"of {row.key}"},
        "parent": experiment.base if row.recipe == DENSE else f"of {row.dense.key}",
        **{"parameters": [parameters, parameters], "plans": [], "stages": [{"stage": 1}], **answers},
        "sampled": sampled,
    }
    path = experiment.path(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def row_maker(rows: list[Row]) -> Callable[[Experiment, Row, str, bool], dict[str, Any]]:
    """Return what stands for `make_row`: it notes a row, and records right answers alone."""

    def make_row(experiment: Experiment, row: Row, device: str, resumable: bool) -> dict[str, Any]:
        rows.append(row)
        record(experiment, row, {"validation": "1111", "test": "1111"}, 100 if row.recipe == DENSE else 80)
        return experiment.record(row)

    return make_row


def fill(experiment: Experiment, name: str, seeds: list[int], parameters: int = 80, **right: str) -> None:
    """Write the records of a recipe on both folds."""
    for fold in (0, 1):
        for seed in seeds:
            record(experiment, Row(name, fold, seed), right, parameters)
