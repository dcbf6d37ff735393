"""Choose a recipe of smaller_model.py by its answers to validation problems."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from _smaller import Experiment, Row
from _smaller_plan import CHOSEN, chosen_entries, recipes_tested
from _smaller_power import power_text
from _smaller_scores import Difference, Scored
from _smaller_speed import measured_gains, reached_by

from lmeval_prune.artefacts import write_text
from lmeval_prune.errors import InputError

FEWEST_FOLDS = 3  # that have an interval: of two, its width is that of a single difference times 12.7


def choice(experiment: Experiment, recipes: Sequence[str] = (), folds: Sequence[int] = ()) -> str:
    """Choose the recipe of the best pooled validation difference, write `chosen.json` and return a table.

    Only rows by the seeds of the choice count. Only recipes that remove enough parameters, and are fast enough where
    that was measured, may be chosen. They are compared on the folds and seeds that all of these have: at least all
    folds (default: of the experiment) by one seed each, else an `InputError`.
    """
    experiment.check_names(recipes, folds)
    scored, seeds = Scored(experiment), experiment.settings["choice_seeds"]
    tested = recipes_tested(experiment)
    earlier = [entry for entry in chosen_entries(experiment) if entry["recipe"] in tested]  # others can be chosen again
    own = {name: scored.pairs(name, seeds) for name in recipes or experiment.settings["recipes"]}
    own = {name: [row for row in rows if row.fold in (folds or [row.fold])] for name, rows in own.items()}
    failures = {name: _failures(experiment, scored, name, rows) for name, rows in own.items() if rows}
    if not failures:
        raise InputError("there are no rows by the seeds of the choice to compare; make them by train")
    eligible = [name for name in own if not failures.get(name, not recipes)]  # of those without rows, the named ones
    rows = {
        name: [row for row in common if row in own[name]] for name, common in scored.common(eligible, seeds).items()
    }
    _check_complete({name: own[name] for name in eligible}, rows, folds or experiment.settings["folds"])
    differences = {name: scored.difference(rows[name], "validation") for name in rows}
    others = {name: scored.difference(own[name], "validation") for name in failures if failures[name]}
    count = len(next(iter(rows.values()), []))
    lines = [f"validation problems of {count} folds and seeds:" if count else "validation problems:"]
    for name in sorted(differences, key=lambda name: -differences[name].mean):
        lines.append(f"  {name}: {points(differences[name])}{', tested already' if name in tested else ''}")
    for name, difference in others.items():
        lines.append(f"  {name} ({len(own[name])} rows): {points(difference)}, {', '.join(failures[name])}")
    candidates = [name for name in eligible if name not in tested]
    if not candidates:
        return "\n".join([*lines, "no other recipe removes enough and is fast enough"])
    chosen = max(candidates, key=lambda name: differences[name].mean)
    estimate = scored.power(list(rows.values()))
    entry = {
        "recipe": chosen,
        "rows": [(row.fold, row.seed) for row in rows[chosen]],
        "differences": {name: difference.mean for name, difference in differences.items()},
        "power": estimate,
    }
    write_text(experiment.work / CHOSEN, json.dumps({"recipes": [*earlier, entry]}, indent=1) + "\n")
    order = f", as number {len(tested) + 1}: the test of {', '.join(tested)} is known already" if tested else ""
    return "\n".join([*lines, power_text(estimate), f"chosen: {chosen}{order}"])


def _check_complete(
    own: Mapping[str, Sequence[Row]], common: Mapping[str, Sequence[Row]], folds: Sequence[int]
) -> None:
    """Raise an `InputError` if recipes lack a fold, or have it by other seeds."""
    shared = {row.fold for rows in common.values() for row in rows}
    if not own or set(folds) <= shared:
        return
    lacking = [
        f"{name} lacks {_folds(missing)}"
        for name, rows in own.items()
        if (missing := [fold for fold in folds if fold not in {row.fold for row in rows}])
    ]
    raise InputError(
        f"recipes are compared on {_folds(folds)} ({'; '.join(lacking) or 'they have them by different seeds'}); make "
        f"the rows by train, or say by --recipes and --folds what is compared"
    )


def _folds(numbers: Collection[int]) -> str:
    return f"fold{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _failures(experiment: Experiment, scored: Scored, name: str, rows: Sequence[Row]) -> list[str]:
    """Return why a recipe cannot reach the goal, whatever its accuracy: parameters, or its speed on all devices."""
    goal, failures = experiment.goal, []
    if scored.smaller(rows) < goal["parameters"]:
        failures.append(f"removes {scored.smaller(rows):.1%} of the parameters")
    gains = measured_gains(experiment, name)
    if gains and not any(reached_by(goal, on_device) for on_device in gains.values()):
        failures += [
            f"{gain} speed at batch {batch} on {device}"
            for device, on_device in gains.items()
            for batch, gain in on_device.items()
            if gain.median < goal["speed"]
        ]
    return failures


def points(difference: Difference) -> str:
    """Return accuracy and difference with its error and interval."""
    return f"{100 * difference.accuracy:.1f}%, {change(difference)}"


def change(difference: Difference) -> str:
    """Return a difference with its error and interval; of few folds, with the numbers of problems that differ."""
    folds = len(difference.folds)
    if folds < FEWEST_FOLDS:
        differences = np.concatenate(list(difference.by_row.values()))
        won, lost = (differences > 0).sum(), (differences < 0).sum()
        return (
            f"{difference.mean:+.2f} points ({won} of {len(differences)} problems won, {lost} lost; no interval of "
            f"{folds} fold{'s' if folds > 1 else ''})"
        )
    low, high = difference.interval
    return f"{difference.mean:+.2f} ± {difference.error:.2f} points ({low:+.2f} to {high:+.2f})"
