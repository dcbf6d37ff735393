"""Compare a grid's variants with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.errors import InputError
from lmeval_prune.grid.costs import pareto_fronts, read_costs
from lmeval_prune.grid.folder import GridFolder, check_name
from lmeval_prune.grid.outcomes import read_lengths, read_lower_is_better, read_outcomes, read_text_keys
from lmeval_prune.grid.selection import selection_questions
from lmeval_prune.models.lengths import cut_off_note, merge_lengths
from lmeval_prune.reporting.statistics import (
    detectable,
    difference_interval,
    holm,
    mcnemar_test,
    mean_interval,
    sign_flip_test,
)

POOLED = "all tasks"
LEVEL = 0.05  # significance level of all tests of a comparison together
Question = tuple[str, int, str]  # task, number and hash


@dataclass
class Row:
    """Results of one variant on one task, or on all tasks pooled."""

    variant: str
    task: str
    questions: int  # number of questions
    mean: float
    low: float  # ends of the mean's 95% interval
    high: float
    difference: float | None = None  # to the baseline's mean; None for the baseline itself
    difference_low: float | None = None  # ends of the difference's 95% interval
    difference_high: float | None = None
    better: int | None = None  # number of questions on which the variant is better than the baseline
    worse: int | None = None
    test: str = ""  # `McNemar` or `sign flips`
    p: float | None = None
    p_holm: float | None = None  # corrected for all tests of the comparison
    detectable: float | None = None  # smallest difference with a power of 0.8 after Holm's correction; None if none has
    chosen_on: int = 0  # number of the questions that the variant was selected on
    lower_is_better: bool = False
    cut_off: float | None = None  # share of answers cut off by `max_gen_toks`; None for log-likelihoods
    mean_tokens: float | None = None  # mean length of an answer


@dataclass(frozen=True)
class Table:
    """Values of the compared metric on one task, or on all tasks pooled."""

    variants: list[str]  # that have values, including the baseline
    values: np.ndarray  # shape (questions, variants)
    texts: list[str]  # digest of each question's text, which is the same in all tasks
    questions: list[Question] = field(default_factory=list)  # empty for pooled tasks
    columns: dict[str, str] = field(default_factory=dict)  # the compared `METRIC,FILTER` by task
    lower_is_better: bool = False

    @property
    def metrics(self) -> list[str]:
        """Return the compared `METRIC,FILTER`s."""
        return sorted(set(self.columns.values()))

    def values_of(self, variants: Sequence[str]) -> np.ndarray:
        """Return the values of some variants, shape (questions, variants)."""
        return self.values[:, [self.variants.index(name) for name in variants]]

    def repeats(self) -> Iterator[tuple[str, int]]:
        """Yield each question's text, and how many earlier questions of its task have the same text."""
        count: dict[tuple[str, str], int] = {}
        for (task, _, _), text in zip(self.questions, self.texts, strict=True):
            yield text, count.setdefault((task, text), 0)
            count[task, text] += 1


@dataclass
class Comparison:
    """Result of comparing a grid's variants with a baseline."""

    title: str
    baseline: str
    variants: list[str]  # in the grid's order
    tables: dict[str, Table] = field(repr=False)  # by task, in the grid's order; last `POOLED` for several tasks
    rows: dict[tuple[str, str], Row]  # by variant and task
    costs: dict[str, dict[str, Any]]  # measured costs by variant
    fronts: dict[str, dict[str, list[str]]]  # variants on the Pareto front, by task and key of `COSTS`
    missing: list[tuple[str, str, str]]  # variant, task and reason of cells that are not done
    cells: dict[tuple[str, str], dict[str, Any]] = field(repr=False)  # entries of `grid.json` by variant and task
    notes: list[str]  # remarks for the reader, a line each

    @property
    def tasks(self) -> list[str]:
        """Return the names of tasks."""
        return list(self.tables)


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
    pooled, pooling_notes = _pooled(tables, variants)
    tables |= pooled
    rows = _rows(tables, baseline, seed)
    for row in rows.values():
        row.chosen_on = sum(text in selected[row.variant] for text in tables[row.task].texts)
    length_notes = _add_lengths(rows, {names: folder.cell(entry["key"]) for names, entry in done.items()})
    costs = _costs(folder, cells, variants)
    return Comparison(
        title=contents["title"],
        baseline=baseline,
        variants=variants,
        tables=tables,
        rows=rows,
        costs=costs,
        fronts={task: pareto_fronts(costs, _gains(rows, task)) for task in tables},
        missing=[
            (*names, folder.failure(cells[names]["key"]) or "not run yet") for names in cells if names not in done
        ],
        cells=cells,
        notes=list(dict.fromkeys([*selection_notes, *pooling_notes, *length_notes])),
    )


def _costs(folder: GridFolder, cells: Mapping[tuple[str, str], Any], variants: Sequence[str]) -> dict[str, Any]:
    """Return the measured costs of each variant; empty if there are none."""
    keys: dict[str, set[str]] = {name: set() for name in variants}
    for (variant, _), entry in cells.items():
        keys[variant].add(entry["costs"])
    return {name: read_costs(folder, keys[name]) for name in variants}


def _gains(rows: Mapping[tuple[str, str], Row], task: str) -> dict[str, float]:
    """Return the means of a task by variant, negative where lower is better."""
    return {row.variant: -row.mean if row.lower_is_better else row.mean for row in rows.values() if row.task == task}


# ---------------------------------------------------------------------- values


def _tables(
    folder: GridFolder, done: Mapping[tuple[str, str], Any], variants: list[str], tasks: list[str], baseline: str
) -> dict[str, Table]:
    """Read the tasks for which the baseline's cell is done."""
    tables = {}
    for task in tasks:
        if (baseline, task) in done:
            entries = {name: done[name, task] for name in variants if (name, task) in done}
            tables[task] = _table(folder, task, baseline, entries)
    if not tables:
        raise InputError(f"no cell of the baseline {baseline!r} is done; finish `lmeval-prune grid run` first")
    return tables


def _table(folder: GridFolder, task: str, baseline: str, entries: Mapping[str, dict[str, Any]]) -> Table:
    """Read the values of a task, given its cells' entries in `grid.json` by variant."""
    path = folder.cell(entries[baseline]["key"])
    base = read_outcomes(path, entries[baseline]["metric"])
    keys = read_text_keys(path)
    texts = [keys[name, number] for name, number, _ in base.questions]
    position = {question: row for row, question in enumerate(base.questions)}
    values = np.empty((len(position), len(entries)))
    for column, (variant, entry) in enumerate(entries.items()):
        try:
            outcomes = read_outcomes(folder.cell(entry["key"]), entry["metric"], base.columns)
        except InputError as error:
            raise InputError(f"{variant!r} on {task}: {error}") from None
        rows = [position[question] for question in outcomes.questions if question in position]
        if not len(rows) == len(outcomes.questions) == len(position):
            raise InputError(
                f"{variant!r} and the baseline {baseline!r} have different questions of {task}: "
                f"{len(outcomes.questions)} and {len(position)}, {len(rows)} of them the same; compare runs of the "
                f"same questions"
            )
        values[rows, column] = outcomes.values
    lower = read_lower_is_better(path, base.columns)
    return Table(list(entries), values, texts, base.questions, base.columns, lower)


def _pooled(tables: Mapping[str, Table], variants: Sequence[str]) -> tuple[dict[str, Table], list[str]]:
    """Pool the tasks where higher is better, if there are several; return notes on omitted tasks and merged rows."""
    higher = [table for table in tables.values() if not table.lower_is_better]
    if len(higher) < 2:
        return {}, []
    names = [name for name in variants if all(name in table.variants for table in higher)]
    stacked = np.concatenate([table.values_of(names) for table in higher])
    texts, values = _mean_by_text([repeat for table in higher for repeat in table.repeats()], stacked)
    notes = []
    if lower := [task for task, table in tables.items() if table.lower_is_better]:
        notes.append(f"{POOLED}: without {', '.join(lower)}, where lower is better")
    if len(texts) < len(stacked):
        notes.append(
            f"{POOLED}: {len(stacked)} outcomes of {len(texts)} questions; a question of several tasks counts once"
        )
    return {POOLED: Table(names, values, texts)}, notes


def _mean_by_text(repeats: list[tuple[str, int]], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Average the rows of a question that several tasks contain: its outcomes are not independent."""
    rows: dict[tuple[str, int], int] = {}
    row = np.array([rows.setdefault(repeat, len(rows)) for repeat in repeats])
    sums = np.zeros((len(rows), values.shape[1]))
    np.add.at(sums, row, values)
    return [text for text, _ in rows], sums / np.bincount(row)[:, None]


def _rows(tables: Mapping[str, Table], baseline: str, seed: int) -> dict[tuple[str, str], Row]:
    tests = max(1, sum(len(table.variants) - 1 for table in tables.values()))
    rows = {
        (row.variant, task): row
        for task, table in tables.items()
        for row in _rows_of(task, table, table.variants.index(baseline), seed, tests)
    }
    tested = [row for row in rows.values() if row.p is not None]
    for row, adjusted in zip(tested, holm([row.p for row in tested if row.p is not None]), strict=True):
        row.p_holm = adjusted
    return rows


def _rows_of(task: str, table: Table, base: int, seed: int, tests: int) -> Iterator[Row]:
    """Yield the rows of one task; `tests` is the number of tests of the whole comparison."""
    values, lower_is_better = table.values, table.lower_is_better
    is_binary = bool(np.isin(values, (0.0, 1.0)).all())
    are_shares = ((values >= 0) & (values <= 1)).all() and not lower_is_better  # other metrics may be unbounded
    unit = 1.0 if is_binary or are_shares else np.inf
    lows, highs = mean_interval(values, unit)
    differences = values - values[:, [base]]
    better, worse = (differences > 0).sum(0), (differences < 0).sum(0)
    better, worse = (worse, better) if lower_is_better else (better, worse)
    if is_binary:
        ps, test = mcnemar_test(better, worse), "McNemar"
    else:
        draws = max(10_000, 20 * tests)  # the smallest possible p-value must pass Holm's correction
        ps, test = sign_flip_test(differences, seed, draws), "sign flips"
        ps = np.where(better + worse == 0, 1.0, ps)
    difference_lows, difference_highs = difference_interval(differences, unit, ps)
    smallest = detectable(differences, unit, LEVEL / tests)
    for i, name in enumerate(table.variants):
        row = Row(name, task, len(values), float(values[:, i].mean()), float(lows[i]), float(highs[i]))
        row.lower_is_better = lower_is_better
        if i != base:
            row.difference = float(differences[:, i].mean())
            row.difference_low, row.difference_high = float(difference_lows[i]), float(difference_highs[i])
            row.better, row.worse, row.test = int(better[i]), int(worse[i]), test
            row.p = float(ps[i])
            row.detectable = None if np.isnan(smallest[i]) else float(smallest[i])
        yield row


# ---------------------------------------------------------------------- selection and lengths


def _selected_on(
    folder: GridFolder, done: Mapping[tuple[str, str], Any], variants: Sequence[str], tables: Mapping[str, Table]
) -> tuple[dict[str, set[str]], list[str]]:
    """Return the texts of questions that each variant was selected on, and notes on unknown ones."""
    texts_of: dict[str, set[str]] = {}  # by names of tasks, and of the parts of groups
    for name, table in tables.items():
        texts_of.setdefault(name, set()).update(table.texts)
        for (task, _, _), text in zip(table.questions, table.texts, strict=True):
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


def _add_lengths(rows: Mapping[tuple[str, str], Row], folders: Mapping[tuple[str, str], Path]) -> list[str]:
    """Add the lengths of answers to the rows of single tasks, and return notes on many cut-off answers."""
    notes = []
    for names, row in rows.items():
        if names in folders and (parts := read_lengths(folders[names])):
            lengths = merge_lengths(parts)
            row.cut_off, row.mean_tokens = lengths["cut_off"], lengths["mean_tokens"]
            if reason := cut_off_note(lengths):
                notes.append(f"{row.variant} on {row.task}: {reason}")
    return notes
