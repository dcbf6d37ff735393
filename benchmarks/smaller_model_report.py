"""Report whether the goal of smaller_model.py was reached, and what each part of its recipes gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _record import environment, write
from _smaller import DENSE, Experiment, Row
from _smaller_choice import change, points
from _smaller_plan import chosen_entries, chosen_recipes, note_tested, recipes_tested
from _smaller_power import power_text
from _smaller_results import COPIED
from _smaller_scores import Scored
from _smaller_speed import measured_gains, reached_by, read_speeds

TOLERANCE = 0.005  # share of the dense model's parameters, or time, by which models count as equal on a front


def write_report(experiment: Experiment, name: str) -> str:
    """Write the results file, and return the report; its first line says whether the goal was reached.

    The verdict is from rows of the seeds that did not choose; recipes are compared on validation problems by all seeds.
    """
    scored, chosen, settings = Scored(experiment), chosen_recipes(experiment), experiment.settings
    note_tested(experiment, [recipe for recipe in chosen if not missing(experiment, scored, recipe)])
    lines = [verdict(experiment, scored, chosen[0] if chosen else None), ""]
    lines += [
        f"Tested as number {n}: {verdict(experiment, scored, name)}" for n, name in enumerate(chosen[1:], start=2)
    ]
    fresh = [rows for recipe in chosen if (rows := scored.pairs(recipe, settings["seeds"]))]
    estimate = scored.power(fresh) if fresh else {}
    lines += [f"Of the rows by seeds of the verdict, {power_text(estimate)}.", ""] if estimate else []
    lines += _tested_table(experiment, scored, chosen)
    names = [recipe for recipe in settings["recipes"] if scored.pairs(recipe, all_seeds(experiment))]
    lines += [
        "",
        *_table(experiment, scored, names),
        "",
        *_comparisons(experiment, scored),
        "",
        *_fronts(experiment, scored, names),
    ]
    content = {
        "written": environment(),
        "goal": experiment.goal,
        "chosen": chosen_entries(experiment),
        "power": estimate,
        "verdict": lines[0],
        "rows": {row.key: _summary(scored, row) for row in scored.records},
        "settings": settings,
        "changes": experiment.changes,
        "recipe_changes": experiment.recipe_changes,
        "speed": read_speeds(experiment.work),
    }
    write(name, content, quiet=True)
    return "\n".join(lines)


# ---------------------------------------------------------------- the verdict


def missing(experiment: Experiment, scored: Scored, chosen: str) -> int:
    """Return the number of rows that a recipe lacks for the verdict, with their dense models' answers."""
    planned = experiment.rows_of(chosen, experiment.settings["seeds"])
    return len(planned) - len(scored.pairs(chosen, experiment.settings["seeds"]))


def conditions(experiment: Experiment, scored: Scored, chosen: str) -> dict[str, tuple[str, bool]]:
    """Return the parts of the goal but for speed, each with what was measured and whether it was reached."""
    goal, rows = experiment.goal, scored.pairs(chosen, experiment.settings["seeds"])
    difference = scored.difference(rows, "test")
    low, high = difference.interval
    smaller = scored.smaller(rows)
    return {
        f"parameters in blocks (at least −{goal['parameters']:.0%})": (
            f"−{smaller:.1%}",
            smaller >= goal["parameters"],
        ),
        f"mean loss (at most {goal['loss']} points)": (f"{-difference.mean:.2f}", -difference.mean <= goal["loss"]),
        f"95% interval (above {goal['lower_bound']:g})": (f"{low:+.2f} to {high:+.2f}", low > goal["lower_bound"]),
    }


def speed_conditions(experiment: Experiment, scored: Scored, chosen: str) -> dict[str, tuple[str, bool]]:
    """Return by device what was measured of the row with most parameters, and any others, and whether it is enough."""
    rows = scored.pairs(chosen, experiment.settings["seeds"])
    largest = max(scored.records[row]["parameters"][1] for row in rows)
    needed = {row.key for row in rows if scored.records[row]["parameters"][1] == largest}
    devices = measured_gains(experiment, chosen, needed)
    gains = measured_gains(experiment, chosen, {row.key for row in rows})
    return {
        device: (
            ", ".join(f"{gain} at batch {batch}" for batch, gain in gains[device].items()),
            reached_by(experiment.goal, gains[device]),
        )
        for device in devices
    }


def verdict(experiment: Experiment, scored: Scored, chosen: str | None) -> str:
    """Return the first line: whether the goal was reached, by what and on which device."""
    if chosen is None:
        return "The goal is not decided: no recipe is chosen yet."
    if count := missing(experiment, scored, chosen):
        return f"The goal is not decided: {chosen} lacks {count} rows, and no test is looked at before all are there."
    parts, speeds = conditions(experiment, scored, chosen), speed_conditions(experiment, scored, chosen)
    on = [device for device, (_, met) in speeds.items() if met]
    if not all(met for _, met in parts.values()) or (speeds and not on):
        head = f"The goal is not reached by {chosen}"
    elif not speeds:
        head = f"The goal is not decided: the speed of {chosen}'s row with most parameters is not measured"
    else:
        others = [device for device in speeds if device not in on]
        head = f"The goal is reached by {chosen} on {', '.join(on)}" + (
            f", not on {', '.join(others)}" if others else ""
        )
    speed = f"speed (at least {100 * experiment.goal['speed']:+.1f}%)"
    parts |= {f"{speed} on {device}": condition for device, condition in speeds.items()}
    texts = [f"{name}: {value}, {'reached' if met else 'not reached'}" for name, (value, met) in parts.items()]
    texts += [] if speeds else [f"{speed}: not measured"]
    return f"{head}: {'; '.join(texts)}."


def _tested_table(experiment: Experiment, scored: Scored, chosen: Sequence[str]) -> list[str]:
    """Return the tested recipes: their tests, and by rows of the same seeds their answers to validation problems."""
    tested = [recipe for recipe in chosen if not missing(experiment, scored, recipe)]
    lines = [
        "| tested | rows | test, difference ± error (95%), p | validation | devices |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in tested:
        rows = scored.pairs(name, experiment.settings["seeds"])
        test, validation = (scored.difference(rows, split) for split in ("test", "validation"))
        cells = [name, len(rows), f"{points(test)}, {test.p_value:.3f}", points(validation), _devices(scored, rows)]
        lines.append(_cells(cells))
    return lines if tested else []


# ---------------------------------------------------------------- recipes


def all_seeds(experiment: Experiment) -> list[int]:
    """Return the seeds of the choice and of the verdict."""
    return [*experiment.settings["choice_seeds"], *experiment.settings["seeds"]]


def _table(experiment: Experiment, scored: Scored, names: Sequence[str]) -> list[str]:
    """Return the table of recipes, by validation problems of all rows."""
    samples = experiment.settings["samples"]
    lines = [
        "| recipe | rows | parameters in blocks | speed | validation, difference ± error (95%) | "
        f"pass@{samples} | KLD | device |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        rows = scored.pairs(name, all_seeds(experiment))
        divergences = [value for value in map(scored.divergence, rows) if value is not None]
        speeds = [
            f"{device}: {', '.join(f'{100 * gain.median:+.1f}% at {batch}' for batch, gain in gains.items())}"
            for device, gains in measured_gains(experiment, name).items()
        ]
        cells = [name, len(rows), f"−{scored.smaller(rows):.1%}", "; ".join(speeds)]
        cells += [points(scored.difference(rows, split)) for split in ("validation", "sampled")]
        lines.append(_cells([*cells, f"{np.mean(divergences):.3f}" if divergences else "", _devices(scored, rows)]))
    return lines


def _cells(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _devices(scored: Scored, rows: Sequence[Row]) -> str:
    """Return the devices that trained or answered, and the number type of products where it is noted."""
    records = [scored.records[row] for row in rows]
    names = sorted({run["device"] for record in records for run in (record, *record.get("made", []))})
    return ", ".join([*names, *sorted({record["products"] for record in records if "products" in record})])


def _comparisons(experiment: Experiment, scored: Scored) -> list[str]:
    """Return what each part gave: declared pairs of recipes on validation problems of their common folds and seeds.

    Beside the problems that are solved: the mean divergences of both from their dense models, over the rows that have
    them, and in how many of these that of the first is the lower one.
    """
    lines = [
        "| recipe | compared with | folds and seeds | validation, difference ± error (95%) | KLD of both |",
        "| --- | --- | --- | --- | --- |",
    ]
    seeds = all_seeds(experiment)
    for first, second in experiment.settings["comparisons"]:
        if difference := scored.between(first, second, seeds):
            count = len(difference.by_row)
            pairs = zip(*scored.common([first, second], seeds).values(), strict=True)
            both = [(scored.divergence(own), scored.divergence(other)) for own, other in pairs]
            known = np.array([pair for pair in both if None not in pair], dtype=float).reshape(-1, 2)
            distances = ""
            if len(known):
                (own_mean, other_mean), lower = known.mean(0), (known[:, 0] < known[:, 1]).sum()
                distances = f"{own_mean:.3f}, {other_mean:.3f}; lower in {lower} of {len(known)}"
            lines.append(_cells([first, second, count, change(difference), distances]))
    return lines if len(lines) > 2 else []


def front(costs: dict[str, float], gains: dict[str, float], tolerance: float = TOLERANCE) -> list[str]:
    """Return the names that no other beats: one with a larger gain that costs no more, within the tolerance."""
    return [
        name
        for name in costs
        if not any(costs[other] <= costs[name] + tolerance and gains[other] > gains[name] for other in costs)
    ]


def _fronts(experiment: Experiment, scored: Scored, names: Sequence[str]) -> list[str]:
    """Return the Pareto fronts of validation difference and parameters, and by device, measured speed.

    Speed is that of the batch at which a recipe gains least. Recipes are compared on common rows.
    """
    seeds = all_seeds(experiment)
    parameters = {name: 1 - scored.smaller(scored.pairs(name, seeds)) for name in names}
    costs = {"parameters": parameters}
    for name in names:
        for device, gains in measured_gains(experiment, name).items():
            slowest = min(gain.median for gain in gains.values())
            costs.setdefault(f"speed on {device}", {})[name] = 1 / (1 + slowest)
    lines = []
    for kind, by_recipe in costs.items():
        rows = scored.common(list(by_recipe), seeds)
        if any(rows.values()):
            differences = {name: scored.difference(rows[name], "validation").mean for name in by_recipe}
            best, count = front(by_recipe, differences), len(next(iter(rows.values())))
            lines.append(
                f"Pareto front of {kind} and validation difference, {count} common folds and seeds: {', '.join(best)}."
            )
    return lines


def _summary(scored: Scored, row: Row) -> dict[str, Any]:
    """Return a row of the results file, with its dense model's answers; its test if that is known, else sealed."""
    record, tested = scored.records[row], recipes_tested(scored.experiment)
    counts = row.seed in scored.experiment.settings["seeds"]
    is_tested = counts and bool(tested) and row.recipe in (DENSE, *tested)
    splits = ("validation", "sampled", *(["test"] if is_tested else []))
    right = {"right": {split: _bits(scored.right(row, split)) for split in splits}}
    is_pruned = row.recipe != DENSE and row in scored.pairs(row.recipe, [row.seed])
    if is_pruned:
        right["dense"] = {split: _bits(scored.right(row, split, True)) for split in splits}
    if counts and not is_tested:
        right["right"]["sealed"] = scored.sealed_test(row)
        if is_pruned:
            right["dense"]["sealed"] = scored.sealed_test(row, True)
    ids = {split: [answer["id"] for answer in record[split]] for split in ("validation", "sampled", "test")}
    return {**{name: record[name] for name in ("settings", *COPIED) if name in record}, **right, "ids": ids}


def _bits(right: np.ndarray) -> str:
    return "".join(str(int(bit)) for bit in right)
