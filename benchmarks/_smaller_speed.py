"""Measure the speed of the recipes of smaller_model.py, each in turn with the dense model.

Tokens per second of prompts, of decoding, of whole answers by `generate` (the goal's) and by the decoding engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from _record import environment
from _smaller import DENSE, Experiment, Row

from lmeval_prune import Plan, cut, load_pretrained
from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.decoding.speed import EngineSpeed
from lmeval_prune.errors import InputError
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.profiling.speed import Workload, generate_rate, measure

TOLERANCE = 0.01  # share of the parameters by which a model of the same plans may differ: biases of a compensation

ESTIMATE = "estimate"  # in place of a row's name: the shape is that of `estimate`


def measure_speeds(experiment: Experiment, recipes: Sequence[str], device: str) -> None:
    """Measure the recipes that were not measured on this device; write each to `speed.json`.

    How long a model takes does not depend on its weights: a model of the shapes of the recipe's first row is timed, or
    of the shapes that its `estimate` left. A recipe that was measured by its estimate is measured again by its row.
    """
    path = experiment.work / "speed.json"
    speeds: dict[str, Any] = read_json(path) if path.is_file() else {}
    shapes = _shapes(experiment, recipes)
    if not shapes:
        raise InputError("no recipe has a row or an estimate to measure; make one by train or estimate")
    batches = experiment.goal["batches"]
    work = Workload(prompt=96, new=32, batches=batches)  # about the tokens of the task's prompts and answers
    for name, (source, record) in shapes.items():
        key = f"{name} on {device}"
        if key in speeds and (speeds[key]["row"] == source or source == ESTIMATE):
            continue
        models = {DENSE: _dense(experiment).to(device), name: shaped_like(record, _dense(experiment)).to(device)}
        rates = measure(models, work, answerers={"generate": generate_rate, "engine": EngineSpeed()})
        speeds[key] = {
            "recipe": name,
            "row": source,
            "parameters": list(parameters(models[name])),
            "tokens_per_second": rates,
            "gains": {
                str(batch): rates[name][f"generate_{batch}"] / rates[DENSE][f"generate_{batch}"] - 1
                for batch in batches
            },
            "workload": asdict(work),
            "measured": environment(),
        }
        write_text(path, json.dumps(speeds, indent=1) + "\n")
        shown = ", ".join(f"{100 * gain:+.1f}% at batch {batch}" for batch, gain in speeds[key]["gains"].items())
        print(f"{key}: {shown}", flush=True)


def _shapes(experiment: Experiment, recipes: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return each recipe's first row, or else what its estimate removed: where it comes from, and the record."""
    shapes: dict[str, tuple[str, Any]] = {}
    for row, record in experiment.records().items():
        if row.recipe != DENSE:
            shapes.setdefault(row.recipe, (row.key, record))
    for path in sorted((experiment.work / "estimate").glob("*.json")):
        record = read_json(path)
        row = Row(record["recipe"], record["fold"], record["seed"])
        if row.recipe in experiment.settings["recipes"] and record["settings"] == experiment.digest(row):
            shapes.setdefault(row.recipe, (ESTIMATE, record))
    return {name: shape for name, shape in shapes.items() if name in (recipes or (name,))}


def shaped_like(record: Any, model: Any) -> Any:
    """Cut a model by the plans of a record, without their compensation."""
    names = {each.name for each in fields(Plan)} - {"tensors", "compensation", "scores", "provenance"}
    for plan in record["plans"]:
        model = cut(model, Plan(**{name: value for name, value in plan.items() if name in names})).model
    expected, found = record["parameters"][1], parameters(model)[1]
    if abs(found - expected) > TOLERANCE * expected:
        raise InputError(f"the plans of {record['recipe']} give {found} parameters, and its row has {expected}")
    return model.eval()


def _dense(experiment: Experiment) -> Any:
    return load_pretrained(embedded.resolve(experiment.pretrained)).float()


def read_speeds(work: Path) -> dict[str, Any]:
    """Read the measured speeds; empty if there are none."""
    path = work / "speed.json"
    speeds: dict[str, Any] = read_json(path) if path.is_file() else {}
    return speeds
