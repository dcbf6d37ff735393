"""Compares a grid's variants with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.errors import InputError
from lmeval_prune.grid.configuration import check_name
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import ANSWERS, Outcomes, read_outcomes, read_table
from lmeval_prune.grid.seen import seen
from lmeval_prune.reporting.statistics import bootstrap_band, detectable, holm, mcnemar_test, pareto, sign_flip_test

POOLED = "all tasks"
# what a variant costs: its figure, how it is called, and whether less is better
COSTS = {
    "parameters": ("parameters", True),
    "flops_per_token": ("FLOPs a token", True),
    "decode_tokens_per_second": ("tokens a second, decoding alone", False),
    "prefill_tokens_per_second": ("tokens a second, reading", False),
    "cache_bytes_per_token": ("bytes of cache a token", True),
    "weights_bytes": ("bytes of weights", True),
}


@dataclass
class Row:
    """One variant on one task, or pooled.

    Attributes:
        variant, task: their names.
        questions: how many.
        mean, low, high: of the metric, with a 95% bootstrap interval.
        difference, difference_low, difference_high: to the baseline; None for the baseline itself.
        better, worse: questions on which the variant, or the baseline, alone is right (or has the larger figure).
        test: `McNemar` or `sign flips`.
        p, p_holm: as it is, and corrected for all tests of the table.
        detectable: the smallest difference that would have been seen four times in five.
        chosen_on: so many of the questions are among those that the variant was chosen on.
    """

    variant: str
    task: str
    questions: int
    mean: float
    low: float
    high: float
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    better: int | None = None
    worse: int | None = None
    test: str = ""
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None
    chosen_on: int = 0


@dataclass
class Comparison:
    """All rows of a grid.

    Attributes:
        title: of the grid.
        baseline: name of the variant that the others are compared with.
        variants, tasks: names, in the grid's order; `POOLED` is the last task if there are several.
        rows: by variant and task.
        costs: of each variant what was measured.
        fronts: by figure of `COSTS`, the variants that no other beats in it and in pooled accuracy.
        missing: cells that are not there: variant, task, why.
        cells: the grid's entries, by variant and task.
        outcomes: of each task its questions, and of each variant their figures.
        notes: what a reader must know besides, a line each.
    """

    title: str
    baseline: str
    variants: list[str]
    tasks: list[str]
    rows: dict[tuple[str, str], Row]
    costs: dict[str, dict[str, Any]]
    fronts: dict[str, list[str]]
    missing: list[tuple[str, str, str]]
    cells: dict[tuple[str, str], dict[str, Any]] = field(repr=False)
    outcomes: dict[str, tuple[list[tuple[str, int, str]], dict[str, np.ndarray]]] = field(repr=False)
    notes: list[str] = field(default_factory=list)


def compare(path: str | Path, baseline: str | None = None, seed: int = 0) -> Comparison:
    """Compare the cells that are there.

    Args:
        path: folder of the grid.
        baseline: name of a variant; default the one that the grid names, else its first.
        seed: of bootstrap and tests.

    Raises:
        InputError: there is no such grid or baseline, or a variant was asked other questions than the baseline.
    """
    folder = GridFolder(path)
    about = folder.read()
    cells = {(cell["variant"], cell["task"]): cell for cell in about["cells"]}
    variants, every = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    baseline = baseline or about["baseline"] or variants[0]
    check_name("baseline", baseline, variants)
    missing = [
        (*place, folder.failure(cell["key"]) or "not run yet")
        for place, cell in cells.items()
        if not folder.done(cell["key"])
    ]
    there = {place: cell for place, cell in cells.items() if folder.done(cell["key"])}
    tasks = [task for task in every if (baseline, task) in there]
    if not tasks:
        raise InputError(f"no cell of the baseline {baseline!r} is there; finish `lmeval-prune grid run` first")
    rows: dict[tuple[str, str], Row] = {}
    pooled: dict[str, list[np.ndarray]] = {}
    chosen: dict[str, int] = {}
    binary: list[bool] = []
    notes: dict[str, None] = {}
    outcomes: dict[str, tuple[list[tuple[str, int, str]], dict[str, np.ndarray]]] = {}
    for task in tasks:
        present = [name for name in variants if (name, task) in there]
        questions, values = _matrix(folder, there, baseline, present, task)
        is_binary = bool(np.isin(values, (0.0, 1.0)).all())
        binary.append(is_binary)
        outcomes[task] = questions, dict(zip(present, values.T, strict=True))
        base = present.index(baseline)
        for row in _rows(present, task, values, base, is_binary, seed):
            known, lost = seen(folder, there[row.variant, task])
            notes |= dict.fromkeys(
                f"{row.variant}: {one} is not there as it was used; its questions are unknown" for one in lost
            )
            row.chosen_on = _chosen_on(folder, there[row.variant, task], task, known)
            chosen[row.variant] = chosen.get(row.variant, 0) + row.chosen_on
            rows[row.variant, task] = row
        for name, column in zip(present, values.T, strict=True):
            pooled.setdefault(name, []).append(column)
    if len(tasks) > 1:
        whole = [name for name in variants if len(pooled.get(name, ())) == len(tasks)]
        values = np.stack([np.concatenate(pooled[name]) for name in whole], 1)
        for row in _rows(whole, POOLED, values, whole.index(baseline), all(binary), seed):
            row.chosen_on = chosen.get(row.variant, 0)
            rows[row.variant, POOLED] = row
        tasks = [*tasks, POOLED]
    tested = [row for row in rows.values() if row.p is not None]
    for row, adjusted in zip(tested, holm([row.p for row in tested if row.p is not None]), strict=True):
        row.p_holm = adjusted
    costs = {name: _costs(folder, cells, name) for name in variants}
    title = about["title"]
    return Comparison(
        title,
        baseline,
        variants,
        tasks,
        rows,
        costs,
        _fronts(rows, costs, tasks[-1]),
        missing,
        cells,
        outcomes,
        list(notes),
    )


def _matrix(
    folder: GridFolder, there: dict[tuple[str, str], Any], baseline: str, names: Sequence[str], task: str
) -> tuple[list[tuple[str, int, str]], np.ndarray]:
    """A task's questions, and their figures, (questions, variants).

    Raises:
        InputError: a variant was asked other questions than the baseline.
    """

    def read(name: str) -> Outcomes:
        cell = there[name, task]
        return read_outcomes(folder.cell(cell["key"]), cell["metric"])

    asked = read(baseline)
    place_of = {question: place for place, question in enumerate(asked.questions)}
    values = np.empty((len(place_of), len(names)))
    for column, name in enumerate(names):
        found = asked if name == baseline else read(name)
        if found.questions == asked.questions:
            values[:, column] = found.values
            continue
        places = [place_of[question] for question in found.questions if question in place_of]
        if len(places) != len(found.questions) or len(places) != len(place_of):
            raise InputError(
                f"{name!r} and the baseline {baseline!r} were asked different questions of {task}: "
                f"{len(found.questions)} and {len(place_of)}, {len(places)} of them the same; compare runs of the same "
                f"questions"
            )
        values[places, column] = found.values
    return asked.questions, values


def _rows(names: Sequence[str], task: str, values: np.ndarray, base: int, is_binary: bool, seed: int) -> Iterator[Row]:
    """Rows of one task, all tests at once."""
    count = len(values)
    lows, highs = bootstrap_band(values, seed)
    differences = values - values[:, [base]]
    from_, to = bootstrap_band(differences, seed)
    better, worse = (differences > 0).sum(0), (differences < 0).sum(0)
    if is_binary:
        ps, test = mcnemar_test(better, worse), "McNemar"
    else:
        ps, test = sign_flip_test(differences, seed), "sign flips"
        ps = np.where(better + worse == 0, 1.0, ps)
    least = detectable(differences.std(0, ddof=1) if count > 1 else np.full(len(names), np.nan), count, is_binary)
    for i, name in enumerate(names):
        row = Row(name, task, count, float(values[:, i].mean()), float(lows[i]), float(highs[i]))
        if i != base:
            row.difference = float(differences[:, i].mean())
            row.difference_low, row.difference_high = float(from_[i]), float(to[i])
            row.better, row.worse, row.test = int(better[i]), int(worse[i]), test
            row.p, row.detectable = float(ps[i]), float(least[i])
        yield row


# ---------------------------------------------------------------------- chosen on the questions they are tested on


def _chosen_on(folder: GridFolder, cell: dict[str, Any], task: str, known: set[str]) -> int:
    """How many of a cell's questions its variant was chosen on: `known` are digests of their texts."""
    if cell["selected_on"] or known:
        table = read_table(folder.cell(cell["key"]) / ANSWERS, ["task", "text_key"])
        places = zip(table["task"].to_pylist(), table["text_key"].to_pylist(), strict=True)
        named = {*cell["selected_on"]}
        return sum(task in named or own in named or key in known for own, key in places)
    return 0


# ---------------------------------------------------------------------- costs


def _costs(folder: GridFolder, cells: dict[tuple[str, str], dict[str, Any]], variant: str) -> dict[str, Any]:
    keys = {cell["costs"] for (name, _), cell in cells.items() if name == variant}
    measured = [found for key in sorted(keys) if (found := folder.measure(key))]
    envelope = {"schema", "schema_version", "created_by"}
    return {name: value for name, value in measured[0].items() if name not in envelope} if measured else {}


def _fronts(rows: dict[tuple[str, str], Row], costs: dict[str, dict[str, Any]], task: str) -> dict[str, list[str]]:
    """By figure, the variants that no other beats."""
    names = [name for name, place in rows if place == task]
    gains = np.array([rows[name, task].mean for name in names])
    found = {}
    for figure, (_, less) in COSTS.items():
        values = np.array([costs[name].get(figure, np.nan) for name in names], dtype=float)
        if not np.isnan(values).all():
            front = pareto(values if less else -values, gains)
            found[figure] = [name for name, is_on in zip(names, front, strict=True) if is_on]
    return found
