"""Compare a grid's variants with a baseline: a run of each variant, with its measured costs and distances."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import read_json
from lmeval_prune.comparison.columns import pareto_fronts
from lmeval_prune.comparison.compare import compare_runs
from lmeval_prune.comparison.distance import summarize
from lmeval_prune.comparison.runs import ResultsFile, Run
from lmeval_prune.comparison.tables import Comparison
from lmeval_prune.errors import InputError
from lmeval_prune.grid.folder import GridFolder, check_name, reason_missing

DISTANCES = ("mean_kld", "same_top", "same_answers", "first_difference")  # of the summary of a cell


def compare_grid(
    path: str | Path, baseline: str | None = None, seed: int = 0, margin: float | None = None
) -> Comparison:
    """Compare the cells that are done with a baseline, by default the grid's baseline, else its first variant."""
    folder = GridFolder(path)
    contents, failures = folder.read(), folder.failures()
    cells = {(entry["variant"], entry["task"]): entry for entry in contents["cells"]}
    variants = list(dict.fromkeys(variant for variant, _ in cells))
    base = baseline or contents["baseline"] or variants[0]
    check_name("baseline", base, variants)
    done = {names: entry for names, entry in cells.items() if folder.place("evaluate", entry["key"]).exists()}
    tasks = [task for variant, task in done if variant == base]
    if not tasks:
        raise InputError(f"no cell of the baseline {base!r} is done; finish `lmeval-prune grid run` first")
    runs = []
    for variant in dict.fromkeys((base, *variants)):
        own = {task: done[variant, task]["key"] for task in tasks if (variant, task) in done}
        if own:
            runs.append(Run(variant, [ResultsFile(folder.results(key), task) for task, key in own.items()]))
    measured, notes = {}, []
    for (variant, task), entry in done.items():
        key = entry.get("distance", "")  # of a variant whose distance is measured on this task
        if entry.get("distance_note"):
            notes.append(f"{variant}: its distance is {entry['distance_note']}")
        if key and folder.place("distance", key).exists():
            summary = summarize(folder.distances(key))
            measured[variant, task] = {k: v for k, v in summary.items() if k.removesuffix("_se") in DISTANCES}
        elif failure := failures.get(f"distance-{key}"):
            notes.append(f"{variant} on {task}: its distance is not measured: {failure}")
    comparison = compare_runs(
        runs,
        metric={task: entry["metric"] for (_, task), entry in cells.items() if entry["metric"]},
        allow_different=("prompts", "settings"),
        seed=seed,
        measured=measured,
        margin=margin,
    )
    costs = {run.name: dict[str, Any]() for run in runs}
    for (variant, _), entry in cells.items():
        if variant in costs:
            costs[variant] = costs[variant] or folder.costs(entry["costs"])  # of its first cell that has some
    gains: dict[str, dict[str, float]] = {task: {} for task in comparison.tables}
    for row in comparison.rows.values():
        gains[row.task][row.variant] = -row.mean if row.lower_is_better else row.mean
    notes = [*comparison.notes, *notes]
    unknown = []
    # a question's key is the digest of its text, behind a slash that of its choices
    texts = {task: [key.partition("/")[0] for key in table.texts] for task, table in comparison.tables.items()}
    selected: dict[str, set[str]] = {name: set() for name in comparison.variants}
    for (variant, _), entry in done.items():
        if variant not in selected:
            continue
        cell = read_json(folder.place("evaluate", entry["key"]) / "cell.json")
        selected[variant].update(cell.get("selected_questions", ()))
        for name in entry["selected_on"]:
            named = [task for task in texts if task == name or task.endswith(f"::{name}")]  # a file with several tasks
            selected[variant].update(text for task in named for text in texts[task])
            if not named:
                unknown.append(f"{variant}: selected on {name}, which is not compared here; its questions are unknown")
    for row in comparison.rows.values():  # how many of its questions the variant was selected on
        row.chosen_on = sum(text in selected[row.variant] for text in texts[row.task])
    hooked = [  # what hooks apply saves no cost
        variant
        for (variant, _), entry in cells.items()
        if {"heads", "mask", "plan"} & entry["model_args"].keys()
        or not all(settings.get("cut") for settings in entry["prepare"].values())
    ]
    return replace(
        comparison,
        title=contents["title"],
        costs=costs,
        fronts={task: pareto_fronts(costs, own) for task, own in gains.items()},
        missing=[(*names, reason_missing(entry, failures)) for names, entry in cells.items() if names not in done],
        commands={names: entry["command"] for names, entry in cells.items()},
        hooked=list(dict.fromkeys(hooked)),
        notes=list(dict.fromkeys([*unknown, *notes])),
    )
