"""Compare a grid's variants with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_prune.comparison.costs import pareto_fronts
from lmeval_prune.comparison.metrics import known_metrics
from lmeval_prune.comparison.report import DISTANCE
from lmeval_prune.comparison.rows import Comparison, Row, rows_of
from lmeval_prune.comparison.tables import Table, pooled, read_table
from lmeval_prune.distance.summary import summarize
from lmeval_prune.errors import InputError
from lmeval_prune.grid.folder import GridFolder, check_name
from lmeval_prune.grid.outcomes import read_answers, read_lengths, read_outcomes, read_results, read_text_keys
from lmeval_prune.grid.selection import selection_questions
from lmeval_prune.models.lengths import cut_off_note, merge_lengths

ADVICE = "run the grid with `metric: NAME` for the task"


def compare(path: str | Path, baseline: str | None = None, seed: int = 0) -> Comparison:
    """Compare the cells that are done with a baseline, by default the grid's baseline, else its first variant."""
    folder = GridFolder(path)
    contents = folder.read()
    cells = {(entry["variant"], entry["task"]): entry for entry in contents["cells"]}
    variants, tasks = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    baseline = baseline or contents["baseline"] or variants[0]
    check_name("baseline", baseline, variants)
    done = {names: entry for names, entry in cells.items() if folder.has_cell(entry["key"])}
    tables = _tables(folder, done, variants, tasks, baseline)
    selected, selection_notes = _selected_on(folder, done, variants, tables)
    all_tasks, pooling_notes = pooled(tables, variants)
    tables |= all_tasks
    rows = rows_of(tables, baseline, seed)
    for row in rows.values():
        row.chosen_on = sum(text in selected[row.variant] for text in _texts(tables[row.task]))
    length_notes = _add_lengths(folder, rows, done)
    distance_notes = _add_distances(folder, rows, done)
    costs = _costs(folder, cells, variants)
    gains: dict[str, dict[str, float]] = {task: {} for task in tables}
    for row in rows.values():
        gains[row.task][row.variant] = -row.mean if row.lower_is_better else row.mean
    hooked = [
        variant
        for (variant, _), entry in cells.items()
        if {"heads", "mask", "plan"} & entry["model_args"].keys() or entry["prepare"]
    ]
    return Comparison(
        title=contents["title"],
        baseline=baseline,
        variants=variants,
        tables=tables,
        rows=rows,
        answers=lambda variant, task: read_answers(folder.cell(done[variant, task]["key"])),
        costs=costs,
        fronts={task: pareto_fronts(costs, gains[task]) for task in tables},
        missing=[
            (*names, folder.failure(cells[names]["key"]) or "not run yet") for names in cells if names not in done
        ],
        commands={names: entry["command"] for names, entry in cells.items()},
        hooked=list(dict.fromkeys(hooked)),
        notes=list(dict.fromkeys([*selection_notes, *pooling_notes, *length_notes, *distance_notes])),
    )


def _costs(folder: GridFolder, cells: Mapping[tuple[str, str], Any], variants: Sequence[str]) -> dict[str, Any]:
    costs: dict[str, dict[str, Any]] = {name: {} for name in variants}
    for (variant, _), entry in cells.items():
        costs[variant] = costs[variant] or folder.costs(entry["costs"]) or {}
    return costs


# ---------------------------------------------------------------------- values


def _tables(
    folder: GridFolder, done: Mapping[tuple[str, str], Any], variants: list[str], tasks: list[str], baseline: str
) -> dict[str, Table]:
    """Read the tasks for which the baseline's cell is done."""
    tables = {}
    for task in tasks:
        if (baseline, task) in done:
            entries = {name: done[name, task] for name in variants if (name, task) in done}
            paths = {name: folder.cell(entry["key"]) for name, entry in entries.items()}
            base = read_outcomes(paths[baseline])
            outcomes = {name: partial(read_outcomes, path) for name, path in paths.items()}
            outcomes[baseline] = partial(pd.DataFrame, base)
            tables[task] = read_table(
                task,
                baseline,
                outcomes,
                known_metrics(base, read_results(paths[baseline]), paths[baseline]),
                read_text_keys(paths[baseline]),
                entries[baseline]["metric"],
                ADVICE,
            )
    if not tables:
        raise InputError(f"no cell of the baseline {baseline!r} is done; finish `lmeval-prune grid run` first")
    return tables


# ---------------------------------------------------------------------- selection and lengths


def _selected_on(
    folder: GridFolder, done: Mapping[tuple[str, str], Any], variants: Sequence[str], tables: Mapping[str, Table]
) -> tuple[dict[str, set[str]], list[str]]:
    """Return the texts of questions that each variant was selected on, and notes on unknown ones."""
    texts_of: dict[str, set[str]] = {}  # by names of tasks, and of the parts of groups
    for name, table in tables.items():
        texts_of.setdefault(name, set()).update(_texts(table))
        for (task, _, _), text in zip(table.questions, _texts(table), strict=True):
            texts_of.setdefault(task, set()).add(text)
    selected: dict[str, set[str]] = {name: set() for name in variants}
    notes = []
    for (variant, _), entry in done.items():
        texts, unavailable = selection_questions(folder, entry)
        selected[variant] |= texts.union(*(texts_of.get(task, set()) for task in entry["selected_on"]))
        notes += [f"{variant}: {name} is missing or has changed; its questions are unknown" for name in unavailable]
        notes += [
            f"{variant}: selected on {task}, which is not compared here; its questions are unknown"
            for task in entry["selected_on"]
            if task not in texts_of
        ]
    return selected, notes


def _texts(table: Table) -> list[str]:
    return [key.partition("/")[0] for key in table.texts]


def _add_lengths(
    folder: GridFolder, rows: Mapping[tuple[str, str], Row], done: Mapping[tuple[str, str], Any]
) -> list[str]:
    """Add the lengths of answers to the rows of single tasks, and return notes on many cut-off answers."""
    notes = []
    for names, row in rows.items():
        if names in done and (parts := read_lengths(folder.cell(done[names]["key"]))):
            lengths = merge_lengths(parts)
            row.cut_off, row.mean_tokens = lengths["cut_off"], lengths["mean_tokens"]
            if reason := cut_off_note(lengths):
                notes.append(f"{row.variant} on {row.task}: {reason}")
    return notes


def _add_distances(
    folder: GridFolder, rows: Mapping[tuple[str, str], Row], done: Mapping[tuple[str, str], Any]
) -> list[str]:
    """Add the measured distances to the rows of single tasks; return notes on what is not or otherwise measured."""
    notes = []
    for names, row in rows.items():
        entry = done.get(names, {})
        key = entry.get("distance")
        if reason := entry.get("no_distance"):
            notes.append(f"{row.variant}: its distance is not measured: {reason}")
        if origin := entry.get("distance_from"):
            notes.append(f"{row.variant}: its distance is that of its checkpoint from the model of {origin}")
        if key and folder.has_distances(key):
            summary = summarize(folder.distances(key))
            for name in DISTANCE:
                setattr(row, name, summary.get(name))
        elif key and (reason := folder.failure(key)):
            notes.append(f"{row.variant} on {row.task}: its distance is not measured: {reason}")
    return notes
