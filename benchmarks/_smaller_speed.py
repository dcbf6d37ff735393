"""Measure the speed of the recipes of smaller_model.py through `generate`, each in turn with the dense model."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from _record import environment
from _smaller import DENSE, Experiment, Row

from lmeval_prune import Plan, cut, load_pretrained
from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError
from lmeval_prune.profiling.costs import parameters, random_inputs

PROMPT, NEW, ROUNDS = 96, 32, 5  # tokens of a prompt and of an answer, about those of the task; measurements
TOLERANCE = 0.01  # share of the parameters by which a model of the same plans may differ: biases of a compensation


def measure_speeds(experiment: Experiment, recipes: Sequence[str], device: str) -> None:
    """Measure the recipes that were not measured on this device; write each to `speed.json`.

    How long a model takes does not depend on its weights: a model of the shapes of the recipe's first row is timed.
    """
    path = experiment.work / "speed.json"
    speeds: dict[str, Any] = read_json(path) if path.is_file() else {}
    first: dict[str, tuple[Row, Any]] = {}
    for row, record in experiment.records().items():
        if row.recipe != DENSE and row.recipe in (recipes or (row.recipe,)):
            first.setdefault(row.recipe, (row, record))
    if not first:
        raise InputError("there are no rows of a recipe to measure; make one by train")
    batches = experiment.goal["batches"]
    for name, (row, record) in first.items():
        key = f"{name} on {device}"
        if key in speeds:
            continue
        models = {DENSE: _dense(experiment).to(device), name: shaped_like(record, _dense(experiment)).to(device)}
        rates = generation_rates(models, batches)
        speeds[key] = {
            "recipe": name,
            "row": row.key,
            "parameters": list(parameters(models[name])),
            "tokens_per_second": rates,
            "gains": {batch: rates[name][batch] / rates[DENSE][batch] - 1 for batch in rates[name]},
            "workload": {"prompt": PROMPT, "new": NEW, "rounds": ROUNDS},
            "measured": environment(),
        }
        write_text(path, json.dumps(speeds, indent=1) + "\n")
        shown = ", ".join(f"{100 * gain:+.1f}% at batch {batch}" for batch, gain in speeds[key]["gains"].items())
        print(f"{key}: {shown}", flush=True)


def generation_rates(models: Mapping[str, Any], batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the median tokens per second that models generate, in alternation, by model and batch size."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(ROUNDS + 1):  # the first one warms up
        for batch in batches:
            for name, model in models.items():
                seconds.setdefault((name, batch), []).append(_generate(model, batch, NEW if number else 2))
    return {
        name: {str(batch): batch * NEW / statistics.median(seconds[name, batch][1:]) for batch in batches}
        for name in models
    }


def _generate(model: Any, batch: int, new: int) -> float:
    """Return the seconds of greedy answers of a length to random prompts."""
    inputs = random_inputs(model, batch, PROMPT)
    begin = time.perf_counter()
    with torch.no_grad():
        model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
    if inputs["input_ids"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


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
