"""What of smaller_model.py's plan is fixed, and which recipes were chosen and tested."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from _smaller import Experiment, Goal, Row
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError

PLAN, CHOSEN, TESTED = "plan.json", "chosen.json", "tested.json"


class Plan(TypedDict):
    """The part of the settings that no row has in its digest."""

    goal: Goal
    folds: list[int]
    choice_seeds: list[int]
    seeds: list[int]


class Chosen(TypedDict):
    """Recipes that were chosen, in order."""

    recipes: list[dict[str, Any]]


def check_plan(experiment: Experiment) -> None:
    """Write the plan beside the rows; `InputError` if it was changed.

    Goal and folds are fixed by the first row. Seeds may be added until a test is known.
    """
    path, tested = experiment.work / PLAN, recipes_tested(experiment)
    current = {name: experiment.settings[name] for name in Plan.__annotations__}
    before: dict[str, Any] = read_json(path, Plan) if path.is_file() else current
    if any((experiment.work / "rows").glob("*.json")):
        changed = [name for name in ("goal", "folds") if current[name] != before[name]]
        for name in ("choice_seeds", "seeds"):
            added = set(before[name]) <= set(current[name]) and not tested
            changed += [] if added or before[name] == current[name] else [name]
        if changed:
            values = ", ".join(f"{name}={json.dumps(before[name])}" for name in changed)
            why = f"the test of {', '.join(tested)} is known" if tested else "only seeds may be added"
            raise InputError(f"the experiment in {experiment.work} has {values} ({why}); restore that in the YAML file")
    if before != current or not path.is_file():
        write_text(path, json.dumps(current, indent=1) + "\n")


def chosen_entries(experiment: Experiment) -> list[dict[str, Any]]:
    """Return what `choose` has written of each choice, in order."""
    path = experiment.work / CHOSEN
    entries: list[dict[str, Any]] = read_json(path, Chosen)["recipes"] if path.is_file() else []
    return entries


def chosen_recipes(experiment: Experiment) -> list[str]:
    """Return the recipes that were chosen, in order: only the first before any test was known."""
    return [entry["recipe"] for entry in chosen_entries(experiment)]


def recipes_tested(experiment: Experiment) -> list[str]:
    """Return the recipes whose test was ever scored, in order."""
    path = experiment.work / TESTED
    names: list[str] = read_json(path, list[str]) if path.is_file() else []
    return names


def note_tested(experiment: Experiment, recipes: Sequence[str]) -> None:
    """Add recipes to those whose test is known; called before it is scored."""
    names = list(dict.fromkeys([*recipes_tested(experiment), *recipes]))
    if names != recipes_tested(experiment):
        write_text(experiment.work / TESTED, json.dumps(names) + "\n")


def planned_rows(
    experiment: Experiment, recipes: Sequence[str], folds: Sequence[int], seeds: Sequence[int]
) -> Iterator[Row]:
    """Yield the rows to make: of the recipes by the seeds of the choice, then of those chosen by the other seeds.

    Seeds that are given replace both.
    """
    yield from experiment.rows(recipes, seeds or experiment.settings["choice_seeds"], folds)
    chosen = [name for name in chosen_recipes(experiment) if name in (recipes or [name])]
    if chosen and not seeds:
        yield from experiment.rows(chosen, experiment.settings["seeds"], folds)
