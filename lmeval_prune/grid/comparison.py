"""Compare a grid's variants with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from lmeval_prune.errors import InputError
from lmeval_prune.grid.folder import GridFolder, check_name
from lmeval_prune.grid.outcomes import read_cell_json, read_lower_is_better, read_outcomes, read_text_keys
from lmeval_prune.grid.selection import selection_questions
from lmeval_prune.models.lengths import Lengths, cut_off, merged
from lmeval_prune.reporting.statistics import (
    detectable,
    difference_interval,
    holm,
    mcnemar_test,
    mean_interval,
    pareto,
    sign_flip_test,
)

POOLED = "all tasks"
LEVEL = 0.05  # of all tests of a comparison together
# costs of a variant: key, label, and whether less is better
COSTS = {
    "parameters": ("parameters", True),
    "flops_per_token": ("FLOPs a token", True),
    "decode_tokens_per_second": ("tokens a second, decoding alone", False),
    "prefill_tokens_per_second": ("tokens a second, reading", False),
    "cache_bytes_per_token": ("bytes of cache a token", True),
    "weights_bytes": ("bytes of weights", True),
}
TIMED = ("decode_tokens_per_second", "prefill_tokens_per_second")  # these vary from run to run
Question = tuple[str, int, str]  # task, number and hash


@dataclass
class Row:
    """One variant on one task, or on all tasks pooled.

    Attributes:
        variant, task: their names.
        questions: number of them.
        mean, low, high: of the metric, with a 95% interval.
        difference, difference_low, difference_high: to the baseline; None for the baseline itself.
        better, worse: questions on which only the variant, or only the baseline, is right (or has the better figure).
        test: `McNemar` or `sign flips`.
        p, p_holm: p-value, alone and corrected for all tests of the table.
        detectable: smallest difference with a power of 0.8 after Holm's correction, whatever the other tests say; None
            if no difference has it.
        chosen_on: number of the questions that the variant was chosen on.
        lower_is_better: for the metric.
        cut_off, mean_tokens: share of the answers that `max_gen_toks` cut off, and tokens an answer; None where nothing
            was generated, or a cell does not say.
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
    lower_is_better: bool = False
    cut_off: float | None = None
    mean_tokens: float | None = None


@dataclass(frozen=True)
class Table:
    """Figures of one task, or of all tasks pooled.

    Attributes:
        variants: names of those that have the figures, the baseline among them.
        values: the figures, shape (questions, variants).
        texts: digest of each question's text, which is the same in other tasks.
        questions: task, number and hash of each; empty where pooled.
        columns: by task, the `METRIC,FILTER` that is compared.
        lower_is_better: whether a smaller figure is the better one.
    """

    variants: list[str]
    values: np.ndarray
    texts: list[str]
    questions: list[Question] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    lower_is_better: bool = False

    @property
    def metrics(self) -> list[str]:
        """Return the compared `METRIC,FILTER`s."""
        return sorted(set(self.columns.values()))

    def columns_of(self, names: Sequence[str]) -> np.ndarray:
        """Return the figures of these variants."""
        return self.values[:, [self.variants.index(name) for name in names]]

    def repeats(self) -> Iterator[tuple[str, int]]:
        """Yield each question's text, and how often its task asked the same text before."""
        count: dict[tuple[str, str], int] = {}
        for (task, _, _), text in zip(self.questions, self.texts, strict=True):
            yield text, count.setdefault((task, text), 0)
            count[task, text] += 1


@dataclass
class Comparison:
    """All rows of a grid.

    Attributes:
        title: of the grid.
        baseline: name of the variant that the others are compared with.
        variants: their names, in the grid's order.
        tables: by task, in the grid's order; `POOLED` is the last if there are several.
        rows: by variant and task.
        costs: of each variant, its measured figures.
        fronts: by task and key of `COSTS`, the names of the variants on the Pareto front.
        missing: variant, task and reason of cells that are not done.
        cells: the grid's entries, by variant and task.
        notes: remarks for the reader, a line each.
    """

    title: str
    baseline: str
    variants: list[str]
    tables: dict[str, Table] = field(repr=False)
    rows: dict[tuple[str, str], Row]
    costs: dict[str, dict[str, Any]]
    fronts: dict[str, dict[str, list[str]]]
    missing: list[tuple[str, str, str]]
    cells: dict[tuple[str, str], dict[str, Any]] = field(repr=False)
    notes: list[str]

    @property
    def tasks(self) -> list[str]:
        """Return the names of tasks."""
        return list(self.tables)


def compare(path: str | Path, baseline: str | None = None, seed: int = 0) -> Comparison:
    """Compare the cells that are done.

    Args:
        path: folder of the grid.
        baseline: name of a variant; default the one that the grid names, else its first.
        seed: of tests.

    Raises:
        InputError: there is no such grid or baseline, or variants were not asked the same questions.
    """
    folder = GridFolder(path)
    contents = folder.read()
    cells = {(entry["variant"], entry["task"]): entry for entry in contents["cells"]}
    variants, tasks = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    baseline = baseline or contents["baseline"] or variants[0]
    check_name("baseline", baseline, variants)
    done = {names: entry for names, entry in cells.items() if folder.has_cell(entry["key"])}
    missing = [(*names, folder.failure(cells[names]["key"]) or "not run yet") for names in cells if names not in done]
    tables = _tables(folder, done, variants, tasks, baseline)
    chosen, notes = _chosen_on(folder, done, variants, tables)
    pooled, remarks = _pooled(tables, variants)
    tables |= pooled
    rows = _rows(tables, baseline, seed)
    for row in rows.values():
        row.chosen_on = sum(text in chosen[row.variant] for text in tables[row.task].texts)
        if (row.variant, row.task) in done:
            remarks += _add_lengths(row, folder.cell(done[row.variant, row.task]["key"]))
    costs = {name: _costs(folder, cells, name) for name in variants}
    return Comparison(
        contents["title"],
        baseline,
        variants,
        tables,
        rows,
        costs,
        {task: _fronts(rows, costs, task) for task in tables},
        missing,
        cells,
        list(dict.fromkeys([*notes, *remarks])),
    )


# ---------------------------------------------------------------------- figures


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
        raise InputError(f"no cell of the baseline {baseline!r} is there; finish `lmeval-prune grid run` first")
    return tables


def _table(folder: GridFolder, task: str, baseline: str, entries: Mapping[str, dict[str, Any]]) -> Table:
    """Read a task's figures.

    Args:
        entries: cells of the task in `grid.json`, by variant.

    Raises:
        InputError: a variant was asked other questions than the baseline, or lacks the figure that is compared.
    """
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
                f"{variant!r} and the baseline {baseline!r} were asked different questions of {task}: "
                f"{len(outcomes.questions)} and {len(position)}, {len(rows)} of them the same; compare runs of the "
                f"same questions"
            )
        values[rows, column] = outcomes.values
    lower = read_lower_is_better(path, base.columns)
    return Table(list(entries), values, texts, base.questions, base.columns, lower)


def _pooled(tables: Mapping[str, Table], variants: Sequence[str]) -> tuple[dict[str, Table], list[str]]:
    """Pool the tasks where higher is better, if there are several; and return notes on what is left out or merged."""
    together = [table for table in tables.values() if not table.lower_is_better]
    if len(together) < 2:
        return {}, []
    names = [name for name in variants if all(name in table.variants for table in together)]
    stacked = np.concatenate([table.columns_of(names) for table in together])
    texts, values = _merged([repeat for table in together for repeat in table.repeats()], stacked)
    notes = []
    if left := [task for task, table in tables.items() if table.lower_is_better]:
        notes.append(f"{POOLED}: without {', '.join(left)}, where lower is better")
    if len(texts) < len(stacked):
        notes.append(
            f"{POOLED}: {len(stacked)} outcomes of {len(texts)} questions; one asked by several tasks counts once"
        )
    return {POOLED: Table(names, values, texts)}, notes


def _merged(repeats: list[tuple[str, int]], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Merge the rows of a question that several tasks ask into their mean: its outcomes are not independent."""
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
    """Make the rows of one task, with `tests` the number of tests in the whole comparison."""
    values, lower_is_better = table.values, table.lower_is_better
    is_binary = bool(np.isin(values, (0.0, 1.0)).all())
    are_shares = ((values >= 0) & (values <= 1)).all() and not lower_is_better  # else there may be no largest value
    unit = 1.0 if is_binary or are_shares else np.inf
    lows, highs = mean_interval(values, unit)
    differences = values - values[:, [base]]
    better, worse = (differences > 0).sum(0), (differences < 0).sum(0)
    better, worse = (worse, better) if lower_is_better else (better, worse)
    if is_binary:
        ps, test = mcnemar_test(better, worse), "McNemar"
    else:
        draws = max(10_000, 20 * tests)  # so that the smallest possible p-value can pass Holm's correction
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


# ---------------------------------------------------------------------- questions that a variant was chosen on


def _chosen_on(
    folder: GridFolder, done: Mapping[tuple[str, str], Any], variants: Sequence[str], tables: Mapping[str, Table]
) -> tuple[dict[str, set[str]], list[str]]:
    """Collect the texts of questions that each variant was chosen on, and notes on what is unknown."""
    texts_of: dict[str, set[str]] = {}  # texts, by names of tasks, columns of the grid or parts of them
    for name, table in tables.items():
        texts_of.setdefault(name, set()).update(table.texts)
        for (task, _, _), text in zip(table.questions, table.texts, strict=True):
            texts_of.setdefault(task, set()).add(text)
    chosen: dict[str, set[str]] = {name: set() for name in variants}
    notes = []
    for (variant, _), entry in done.items():
        texts, lost = selection_questions(folder, entry)
        selected = [texts_of.get(task, set()) for task in entry["selected_on"]]
        chosen[variant] |= texts.union(*selected)
        notes += [f"{variant}: {name} is not there as it was used; its questions are unknown" for name in lost]
        notes += [
            f"{variant}: selected on {task}, which is not compared here; its questions are unknown"
            for task in entry["selected_on"]
            if task not in texts_of
        ]
    return chosen, notes


# ---------------------------------------------------------------------- lengths and costs


class Pruning(TypedDict):
    """Fields of `pruning` in lm-eval's results that are read here."""

    answers: NotRequired[dict[str, Lengths]]


class Config(TypedDict):
    """Fields of `config` in lm-eval's results that are read here."""

    pruning: NotRequired[Pruning]


class Results(TypedDict):
    """Fields of lm-eval's results that are read here."""

    config: NotRequired[Config]


def _add_lengths(row: Row, cell: Path) -> list[str]:
    """Add the lengths of a cell's answers to a row, and return a note where many were cut off."""
    results = read_cell_json(cell / "results.json", Results)
    parts = list(results.get("config", {}).get("pruning", {}).get("answers", {}).values())
    if not parts:  # nothing was generated, or an earlier version did not say
        return []
    lengths = merged(parts)
    row.cut_off, row.mean_tokens = lengths["cut_off"], lengths["mean_tokens"]
    reason = cut_off(lengths)
    return [f"{row.variant} on {row.task}: {reason}"] if reason else []


def _costs(folder: GridFolder, cells: Mapping[tuple[str, str], dict[str, Any]], variant: str) -> dict[str, Any]:
    keys = {entry["costs"] for (name, _), entry in cells.items() if name == variant}
    measured = next(filter(None, map(folder.costs, sorted(keys))), {})
    envelope = {"schema", "schema_version", "created_by"}
    return {name: value for name, value in measured.items() if name not in envelope}


def _fronts(
    rows: Mapping[tuple[str, str], Row], costs: Mapping[str, dict[str, Any]], task: str
) -> dict[str, list[str]]:
    """Return the Pareto front of each figure in which variants differ.

    Speeds that were measured once have no front: their spread is unknown.
    """
    names = [name for name, other in rows if other == task]
    gains = np.array([rows[name, task].mean * (-1 if rows[name, task].lower_is_better else 1) for name in names])
    fronts = {}
    for key, (_, less) in COSTS.items():
        ranges = np.array([measured_range(costs[name], key) for name in names], dtype=float)
        known = ~np.isnan(ranges).any(1)
        lacks_range = key in TIMED and any(key in costs[names[i]] for i in np.flatnonzero(~known))
        if not lacks_range and (ranges[known] != ranges[known][:1]).any():
            front = pareto(ranges if less else -ranges[:, ::-1], gains)
            fronts[key] = [name for name, is_on in zip(names, front, strict=True) if is_on]
    return fronts


def measured_range(costs: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return the ends of what was measured of a variant's figure; NaN where that is not known."""
    if key in TIMED:
        low, high = costs.get("ranges", {}).get(key, (np.nan, np.nan))
        return low, high
    value = costs.get(key)
    return (np.nan if value is None else value,) * 2
