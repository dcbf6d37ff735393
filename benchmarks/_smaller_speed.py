"""Measure the speed of the recipes of smaller_model.py, each in turn with the dense model.

Tokens per second of prompts, of decoding, of whole answers by `generate` (the goal's) and by the decoding engine.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from _record import environment, median_and_range
from _smaller import DENSE, SPEEDS, Experiment, Goal
from _smaller_estimate import read_estimates
from _smaller_rows import device_name

from lmeval_prune import Plan, cut, load_pretrained
from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.decoding.speed import EngineSpeed
from lmeval_prune.errors import InputError
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.profiling.speed import Workload, generate_rate, measure_rounds

TOLERANCE = 0.01  # share of the parameters by which a model of the same plans may differ: biases of a compensation

ESTIMATE = "estimate"  # in place of a row's name: the shape is that of `estimate`


@dataclass(frozen=True)
class Gain:
    """How much faster a model is than the dense one: the median of the rounds' ratios minus 1, and their range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.median:+.1f}% ({100 * self.low:+.1f}% to {100 * self.high:+.1f}%)"


Gains = dict[str, dict[str, Gain]]  # by device and batch


def goal_work(goal: Goal) -> dict[str, Any]:
    """Return what is timed, as it is stored."""
    return {name: goal[name] for name in ("batches", "prompt", "new", "dtype", "threads", "rounds")}  # type: ignore[literal-required]


def measure_speeds(
    experiment: Experiment, recipes: Sequence[str], device: str, count: int, copy: Path | None = None
) -> None:
    """Measure shapes that were not measured on this device; write each to `speed.json`, and to that of `copy`.

    How long a model takes does not depend on its weights: models of the shapes of rows are timed: of the recipe's
    `count` rows with most parameters by the seeds of the choice, and as many by those of the verdict; without rows, of
    the shape that its `estimate` left.
    """
    experiment.check_names(recipes)
    goal = experiment.goal
    speeds, shapes = read_speeds(experiment.work), list(_shapes(experiment, recipes, count))
    if not shapes:
        raise InputError("no recipe has a row or an estimate to measure; make one by train or estimate")
    torch.set_num_threads(goal["threads"])
    work = Workload(prompt=goal["prompt"], new=goal["new"], batches=goal["batches"], rounds=goal["rounds"])
    for source, record in shapes:
        name = record["recipe"]
        key = f"{source} of {name} on {device_name(device)}"
        if key in speeds and speeds[key]["work"] == goal_work(goal) and speeds[key]["settings"] == record["settings"]:
            continue
        cut_model = shaped_like(record, _dense(experiment))
        kind = getattr(torch, goal["dtype"])
        models = {DENSE: _dense(experiment).to(device, kind), name: cut_model.to(device, kind)}
        rates = measure_rounds(models, work, answerers={"generate": generate_rate, "engine": EngineSpeed()})
        gains = {str(batch): compute_gain(rates[name], rates[DENSE], f"generate_{batch}") for batch in goal["batches"]}
        speeds[key] = {
            "recipe": name,
            "row": source,
            "settings": record["settings"],
            "device": device_name(device),
            "parameters": list(parameters(models[name])),
            "tokens_per_second": rates,
            "gains": {batch: asdict(gain) for batch, gain in gains.items()},
            "work": goal_work(goal),
            "measured": environment(),
        }
        _write_speeds(speeds, experiment.work, copy)
        print(f"{key}: {', '.join(f'{gain} at batch {batch}' for batch, gain in gains.items())}", flush=True)
    _write_speeds(speeds, copy)


def _write_speeds(speeds: dict[str, Any], *folders: Path | None) -> None:
    for folder in folders:
        if folder:
            write_text(folder / SPEEDS, json.dumps(speeds, indent=1) + "\n")


def compute_gain(own: dict[str, list[float]], dense: dict[str, list[float]], kind: str) -> Gain:
    """Return the gain of a model over the dense one: median and range of the ratios of each round."""
    ratios = [a / b - 1 for a, b in zip(own[kind], dense[kind], strict=True)]
    return Gain(**median_and_range(ratios))


def _shapes(experiment: Experiment, recipes: Sequence[str], count: int) -> Iterator[tuple[str, Any]]:
    """Yield where a shape comes from (row or estimate) and its record."""
    records = {row: record for row, record in experiment.records().items() if row.recipe != DENSE and "plans" in record}
    with_rows = {row.recipe for row in records}
    for name in recipes or experiment.settings["recipes"]:
        for seeds in (experiment.settings["choice_seeds"], experiment.settings["seeds"]):
            rows = [row for row in records if row.recipe == name and row.seed in seeds]
            rows.sort(key=lambda row: (-records[row]["parameters"][1], row.seed, row.fold))
            yield from ((row.key, records[row]) for row in rows[:count])
        if name not in with_rows:
            estimated = [record for row, record in read_estimates(experiment).items() if row.recipe == name]
            yield from ((ESTIMATE, record) for record in estimated[:1])


def shaped_like(record: Any, model: Any) -> Any:
    """Cut a model by the plans of a record, without their compensation."""
    names = {field.name for field in fields(Plan)} - {"tensors", "compensation", "scores", "provenance"}
    for plan in record["plans"]:
        model = cut(model, Plan(**{name: value for name, value in plan.items() if name in names})).model
    expected, actual = record["parameters"][1], parameters(model)[1]
    if abs(actual - expected) > TOLERANCE * expected:
        raise InputError(f"the plans of {record['recipe']} give {actual} parameters, and its row has {expected}")
    return model.eval()


def _dense(experiment: Experiment) -> Any:
    return load_pretrained(embedded.resolve(experiment.pretrained)).float()


def read_speeds(work: Path) -> dict[str, Any]:
    """Read the measured speeds; empty if there are none."""
    path = work / SPEEDS
    speeds: dict[str, Any] = read_json(path) if path.is_file() else {}
    return speeds


def _is_valid(experiment: Experiment, entry: dict[str, Any]) -> bool:
    """Return whether a speed is of its recipe's present settings, and of the goal's work."""
    name, settings = entry["recipe"], experiment.settings
    if name not in settings["recipes"] or entry["work"] != goal_work(experiment.goal):
        return False
    rows = experiment.rows([name], [*settings["choice_seeds"], *settings["seeds"]])
    return any(entry["settings"] == experiment.digest(row) for row in rows)


def take_speeds(experiment: Experiment, others: dict[str, Any]) -> int:
    """Add the valid speeds of another folder or file that were not measured here; return their number."""
    speeds, new = read_speeds(experiment.work), dict[str, Any]()
    for key, entry in others.items():
        if _is_valid(experiment, entry) and not (key in speeds and _is_valid(experiment, speeds[key])):
            new[key] = entry
    if new:
        _write_speeds({**speeds, **new}, experiment.work)
    return len(new)


def measured_gains(experiment: Experiment, name: str, rows: Collection[str] | None = None) -> Gains:
    """Return the gains of a recipe by device and batch, those of its slowest shape.

    Args:
        rows: names of the rows whose shapes count; None: all, and estimates.
    """
    gains: Gains = {}
    for entry in read_speeds(experiment.work).values():
        counts = rows is None or entry["row"] in rows
        if entry["recipe"] != name or not counts or not _is_valid(experiment, entry):
            continue
        on_device = gains.setdefault(entry["device"], {})
        for batch, values in entry["gains"].items():
            gain = Gain(**values)
            on_device[batch] = min(on_device.get(batch, gain), gain, key=operator.attrgetter("median"))
    return gains


def reached_by(goal: Goal, gains: dict[str, Gain]) -> bool:
    """Return whether gains by batch reach the goal at all its batches."""
    return all(gains[str(batch)].median >= goal["speed"] for batch in goal["batches"])
