"""Compares a grid's variants with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from lmeval_prune.errors import InputError
from lmeval_prune.grid.configuration import check_name
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import ANSWERS, read_cell_json, read_lower_is_better, read_outcomes, read_table
from lmeval_prune.grid.seen import seen
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
# what a variant costs: its figure, how it is called, and whether less is better
COSTS = {
    "parameters": ("parameters", True),
    "flops_per_token": ("FLOPs a token", True),
    "decode_tokens_per_second": ("tokens a second, decoding alone", False),
    "prefill_tokens_per_second": ("tokens a second, reading", False),
    "cache_bytes_per_token": ("bytes of cache a token", True),
    "weights_bytes": ("bytes of weights", True),
}
TIMED = ("decode_tokens_per_second", "prefill_tokens_per_second")  # these vary from run to run


@dataclass
class Row:
    """One variant on one task, or pooled.

    Attributes:
        variant, task: their names.
        questions: how many.
        mean, low, high: of the metric, with a 95% interval.
        difference, difference_low, difference_high: to the baseline; None for the baseline itself.
        better, worse: questions on which the variant, or the baseline, alone is right (or has the better figure).
        test: `McNemar` or `sign flips`.
        p, p_holm: as it is, and corrected for all tests of the table.
        detectable: the smallest difference that would stand Holm's correction four times in five, whatever the other
            tests say; None if no difference would.
        chosen_on: so many of the questions are among those that the variant was chosen on.
        lower_is_better: of the metric.
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


@dataclass
class Comparison:
    """All rows of a grid.

    Attributes:
        title: of the grid.
        baseline: name of the variant that the others are compared with.
        variants, tasks: names, in the grid's order; `POOLED` is the last task if there are several.
        rows: by variant and task.
        costs: of each variant what was measured.
        fronts: by task and figure of `COSTS`, the variants that no other beats: as good in both, and better in one.
        missing: cells that are not there: variant, task, why.
        cells: the grid's entries, by variant and task.
        outcomes: of each task its questions, and of each variant their figures.
        metrics: of each task, the `METRIC,FILTER`s that are compared.
        notes: what a reader must know besides, a line each.
    """

    title: str
    baseline: str
    variants: list[str]
    tasks: list[str]
    rows: dict[tuple[str, str], Row]
    costs: dict[str, dict[str, Any]]
    fronts: dict[str, dict[str, list[str]]]
    missing: list[tuple[str, str, str]]
    cells: dict[tuple[str, str], dict[str, Any]] = field(repr=False)
    outcomes: dict[str, tuple[list[tuple[str, int, str]], dict[str, np.ndarray]]] = field(repr=False)
    metrics: dict[str, list[str]]
    notes: list[str]


def compare(path: str | Path, baseline: str | None = None, seed: int = 0) -> Comparison:
    """Compare the cells that are there.

    Args:
        path: folder of the grid.
        baseline: name of a variant; default the one that the grid names, else its first.
        seed: of tests.

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
    notes: dict[str, None] = {}
    outcomes: dict[str, tuple[list[tuple[str, int, str]], dict[str, np.ndarray]]] = {}
    asked = {task: _asked(folder, there[baseline, task]) for task in tasks}
    chosen: dict[str, set[str]] = {}
    for name in variants:
        chosen[name], said = _chosen_on(folder, [cell for place, cell in there.items() if place[0] == name], asked)
        notes |= dict.fromkeys(f"{name}: {one}" for one in said)
    tables: dict[str, tuple[list[str], np.ndarray, list[str]]] = {}  # variants, figures, texts of the questions
    for task, one in asked.items():
        present = [name for name in variants if (name, task) in there]
        values = _matrix(folder, there, baseline, present, task, one)
        outcomes[task] = one.questions, dict(zip(present, values.T, strict=True))
        tables[task] = present, values, one.texts
    together = [task for task in tasks if not asked[task].lower_is_better]
    if len(together) > 1:
        whole = [name for name in variants if all(name in outcomes[task][1] for task in together)]
        stacked = np.concatenate([np.stack([outcomes[task][1][name] for name in whole], 1) for task in together])
        texts, values = _once([place for task in together for place in asked[task].places()], stacked)
        tables[POOLED] = whole, values, texts
        if left := [task for task in tasks if task not in together]:
            notes[f"{POOLED}: without {', '.join(left)}, where lower is better"] = None
        if len(texts) < len(stacked):
            notes[
                f"{POOLED}: {len(stacked)} outcomes of {len(texts)} questions; one asked by several tasks counts once"
            ] = None
        tasks = [*tasks, POOLED]
    tests = max(1, sum(len(names) - 1 for names, _, _ in tables.values()))
    for task, (names, values, texts) in tables.items():
        lower = task != POOLED and asked[task].lower_is_better
        for row in _rows(names, task, values, names.index(baseline), lower, seed, tests):
            row.chosen_on = sum(key in chosen[row.variant] for key in texts)
            rows[row.variant, task] = row
            if task != POOLED and (lengths := _lengths(folder.cell(there[row.variant, task]["key"]))):
                row.cut_off, row.mean_tokens = lengths["cut_off"], lengths["mean_tokens"]
                if reason := cut_off(lengths):
                    notes[f"{row.variant} on {task}: {reason}"] = None
    tested = [row for row in rows.values() if row.p is not None]
    for row, adjusted in zip(tested, holm([row.p for row in tested if row.p is not None]), strict=True):
        row.p_holm = adjusted
    costs = {name: _costs(folder, cells, name) for name in variants}
    title, metrics = about["title"], {task: sorted({*one.columns.values()}) for task, one in asked.items()}
    fronts = {task: _fronts(rows, costs, task) for task in tasks}
    return Comparison(
        title, baseline, variants, tasks, rows, costs, fronts, missing, cells, outcomes, metrics, list(notes)
    )


@dataclass(frozen=True)
class _Asked:
    """What the baseline was asked in one column of the grid.

    Attributes:
        questions: task, number and hash of each.
        texts: digest of each one's text, by which it is known in another task.
        columns: by task, the `METRIC,FILTER` that is compared.
        lower_is_better: whether a smaller figure is the better one.
    """

    questions: list[tuple[str, int, str]]
    texts: list[str]
    columns: dict[str, str]
    lower_is_better: bool

    def places(self) -> Iterator[tuple[str, int]]:
        """Each question's text, and how often its task has asked the same before: questions may share a text."""
        count: dict[tuple[str, str], int] = {}
        for (own, _, _), text in zip(self.questions, self.texts, strict=True):
            yield text, count.setdefault((own, text), 0)
            count[own, text] += 1


def _asked(folder: GridFolder, cell: dict[str, Any]) -> _Asked:
    path = folder.cell(cell["key"])
    found = read_outcomes(path, cell["metric"])
    table = read_table(path / ANSWERS, ["task", "doc_id", "text_key"])
    tasks, numbers, keys = (table[name].to_pylist() for name in table.column_names)
    text_of = {(own, number): key for own, number, key in zip(tasks, numbers, keys, strict=True)}
    texts = [text_of[own, number] for own, number, _ in found.questions]
    return _Asked(found.questions, texts, found.columns, read_lower_is_better(path, found.columns))


class Pruning(TypedDict):
    """What is read of what a model says about itself."""

    answers: NotRequired[dict[str, Lengths]]


class Config(TypedDict):
    """What is read of lm-eval's configuration of a run."""

    pruning: NotRequired[Pruning]


class Results(TypedDict):
    """What is read of lm-eval's results."""

    config: NotRequired[Config]


def _lengths(cell: Path) -> dict[str, Any] | None:
    """Return how long a cell's answers are; None where nothing was generated, or an earlier version did not say.

    Raises:
        InputError: the results are damaged.
    """
    results = read_cell_json(cell / "results.json", Results)
    parts = list(results.get("config", {}).get("pruning", {}).get("answers", {}).values())
    return merged(parts) if parts else None


def _matrix(
    folder: GridFolder, there: dict[tuple[str, str], Any], baseline: str, names: Sequence[str], task: str, asked: _Asked
) -> np.ndarray:
    """A task's figures, (questions, variants).

    Raises:
        InputError: a variant was asked other questions than the baseline, or lacks the figure that is compared.
    """
    place_of = {question: place for place, question in enumerate(asked.questions)}
    values = np.empty((len(place_of), len(names)))
    for column, name in enumerate(names):
        cell = there[name, task]
        try:
            found = read_outcomes(folder.cell(cell["key"]), cell["metric"], asked.columns)
        except InputError as error:
            raise InputError(f"{name!r} on {task}: {error}") from None
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
    return values


def _once(places: list[tuple[str, int]], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Of questions that several tasks ask, one row each, with the mean of its figures; and the rows' texts.

    Outcomes of one question are no independent ones: counted as such, they would show differences that are not there.
    """
    rows: dict[tuple[str, int], int] = {}
    row = np.array([rows.setdefault(place, len(rows)) for place in places])
    sums = np.zeros((len(rows), values.shape[1]))
    np.add.at(sums, row, values)
    return [text for text, _ in rows], sums / np.bincount(row)[:, None]


def _rows(
    names: Sequence[str], task: str, values: np.ndarray, base: int, lower_is_better: bool, seed: int, tests: int
) -> Iterator[Row]:
    """Rows of one task, all tests at once; `tests` are those of the whole comparison."""
    is_binary = bool(np.isin(values, (0.0, 1.0)).all())
    are_shares = ((values >= 0) & (values <= 1)).all() and not lower_is_better  # what is to be low may have no largest
    unit = 1.0 if is_binary or are_shares else np.inf
    lows, highs = mean_interval(values, unit)
    differences = values - values[:, [base]]
    better, worse = (differences > 0).sum(0), (differences < 0).sum(0)
    better, worse = (worse, better) if lower_is_better else (better, worse)
    if is_binary:
        ps, test = mcnemar_test(better, worse), "McNemar"
    else:
        draws = max(10_000, 20 * tests)  # so that Holm's correction of the smallest p-value there can be is below 0.05
        ps, test = sign_flip_test(differences, seed, draws), "sign flips"
        ps = np.where(better + worse == 0, 1.0, ps)
    from_, to = difference_interval(differences, unit, ps)
    least = detectable(differences, unit, LEVEL / tests)
    for i, name in enumerate(names):
        row = Row(name, task, len(values), float(values[:, i].mean()), float(lows[i]), float(highs[i]))
        row.lower_is_better = lower_is_better
        if i != base:
            row.difference = float(differences[:, i].mean())
            row.difference_low, row.difference_high = float(from_[i]), float(to[i])
            row.better, row.worse, row.test = int(better[i]), int(worse[i]), test
            row.p = float(ps[i])
            row.detectable = None if np.isnan(least[i]) else float(least[i])
        yield row


# ---------------------------------------------------------------------- chosen on the questions they are tested on


def _chosen_on(folder: GridFolder, cells: list[dict[str, Any]], asked: dict[str, _Asked]) -> tuple[set[str], list[str]]:
    """Texts of questions that a variant was chosen on, as far as the grid or its artefacts say; and what is open."""
    found: set[str] = set()
    open_: list[str] = []
    for cell in cells:
        known, lost = seen(folder, cell)
        found |= known
        open_ += [f"{one} is not there as it was used; its questions are unknown" for one in lost]
        for named in cell["selected_on"]:
            matching = {
                text
                for task, one in asked.items()
                for (own, _, _), text in zip(one.questions, one.texts, strict=True)
                if named in (task, own)
            }
            found |= matching
            open_ += [] if matching else [f"selected on {named}, which is not compared here; its questions are unknown"]
    return found, open_


# ---------------------------------------------------------------------- costs


def _costs(folder: GridFolder, cells: dict[tuple[str, str], dict[str, Any]], variant: str) -> dict[str, Any]:
    keys = {cell["costs"] for (name, _), cell in cells.items() if name == variant}
    measured = [found for key in sorted(keys) if (found := folder.measure(key))]
    envelope = {"schema", "schema_version", "created_by"}
    return {name: value for name, value in measured[0].items() if name not in envelope} if measured else {}


def _fronts(rows: dict[tuple[str, str], Row], costs: dict[str, dict[str, Any]], task: str) -> dict[str, list[str]]:
    """Return, by figure in which variants differ, those that no other beats.

    Speeds that were measured once have no front: what they would be another time is not known.
    """
    names = [name for name, place in rows if place == task]
    gains = np.array([rows[name, task].mean * (-1 if rows[name, task].lower_is_better else 1) for name in names])
    found = {}
    for figure, (_, less) in COSTS.items():
        ends = np.array([measured_range(costs[name], figure) for name in names], dtype=float)
        known = ~np.isnan(ends).any(1)
        once = figure in TIMED and any(figure in costs[name] and not known[i] for i, name in enumerate(names))
        if not once and (ends[known] != ends[known][:1]).any():  # a cost that is the same for all has no front
            front = pareto(ends if less else -ends[:, ::-1], gains)
            found[figure] = [name for name, is_on in zip(names, front, strict=True) if is_on]
    return found


def measured_range(costs: dict[str, Any], figure: str) -> tuple[float, float]:
    """Return the ends of what was measured of a variant's figure; NaN where that is not known."""
    if figure in TIMED:
        low, high = costs.get("ranges", {}).get(figure, (np.nan, np.nan))
        return low, high
    value = costs.get(figure)
    return (np.nan if value is None else value,) * 2
