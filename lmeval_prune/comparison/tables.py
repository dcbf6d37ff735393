"""Values of the compared metric and their tests: of a task, of its parts, of groups of tasks, of all tasks pooled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from lmeval_prune.comparison.samples import Answer, Metric, question_keys
from lmeval_prune.reporting.statistics import (
    detectable,
    difference_interval,
    holm,
    mcnemar_test,
    mean_interval,
    noninferiority_test,
    sign_flip_test,
)

POOLED = "all tasks"
LEVEL = 0.05  # significance level of all tests of a comparison together


@dataclass(frozen=True)
class Table:
    """Values of the compared metric on one task, on a part of it, or on several tasks."""

    variants: list[str]  # that have values, the baseline first
    values: np.ndarray  # shape (questions, variants); of perplexities, negative log-likelihoods in nats
    texts: list[str]  # key of each question's text, the same in all tasks; see `samples.question_keys`
    metrics: tuple[Metric, ...] = ()  # the compared metrics, of each task one
    numbers: Sequence[int] = ()  # lm-eval's doc_ids; empty for parts, groups, pooled tasks
    is_part: bool = False  # of a task or of a group: its tests are corrected together with those of other parts
    weights: Any = 1.0  # words or bytes of each question, shape (questions,); 1: each has the same weight

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", np.broadcast_to(self.weights, len(self.values)))

    @property
    def columns(self) -> list[str]:
        return sorted({metric.column for metric in self.metrics})

    @property
    def lower_is_better(self) -> bool:
        """Return whether a smaller mean is better; the metrics of a table agree in this."""
        return any(metric.lower_is_better for metric in self.metrics)

    @property
    def is_perplexity(self) -> bool:
        return any(metric.aggregation.is_exponential for metric in self.metrics)

    @property
    def are_shares(self) -> bool:
        """Return whether all values are shares between 0 and 1 (right and wrong answers are 1 and 0)."""
        is_plain = bool((self.weights == 1).all()) and not self.lower_is_better and not self.is_perplexity
        return is_plain and bool(((self.values >= 0) & (self.values <= 1)).all())

    @property
    def figures(self) -> np.ndarray:
        """Return the metric of each question alone, shape (questions, variants)."""
        figures = self.values / np.maximum(self.weights, 1e-12)[:, None]
        with np.errstate(over="ignore"):
            return np.exp(figures) if self.is_perplexity else figures

    def values_of(self, variants: Sequence[str]) -> np.ndarray:
        return self.values[:, [self.variants.index(name) for name in variants]]


def merged(name: str, tables: Sequence[Table], variants: Sequence[str], notes: list[str]) -> Table:
    """Return the table of the questions of several tasks; add a note on questions that several tasks contain.

    Outcomes of one question are not independent, so they are averaged.
    """
    names = [variant for variant in variants if all(variant in table.variants for table in tables)]
    outcomes = np.concatenate([table.values_of(names) for table in tables])
    questions = pd.DataFrame({"text": question_keys([text for table in tables for text in table.texts])})
    questions["task"] = np.repeat(np.arange(len(tables)), [len(table.texts) for table in tables])
    questions["repeat"] = questions.groupby(["task", "text"]).cumcount()  # earlier ones of the task that are the same
    row = questions.groupby(["text", "repeat"], sort=False).ngroup().to_numpy()
    texts = questions["text"][~questions.duplicated(["text", "repeat"])].to_list()
    sums = np.zeros((len(texts), len(names) + 1))
    np.add.at(sums, row, np.column_stack([outcomes, np.concatenate([table.weights for table in tables])]))
    means = sums / np.bincount(row)[:, None]
    if len(texts) < len(outcomes):
        counts = f"{len(outcomes)} outcomes of {len(texts)} questions"
        notes.append(f"{name}: {counts}; a question of several tasks counts once")
    metrics = tuple(metric for table in tables for metric in table.metrics)
    return Table(names, means[:, :-1], texts, metrics, weights=means[:, -1])


# ---------------------------------------------------------------------- rows


@dataclass
class Row:
    """Results of one variant on one task, on a part of it, or on several tasks."""

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
    p_holm: float | None = None  # corrected for all tests of the comparison, or of its parts
    detectable: float | None = None  # smallest difference with a power of 0.8 after Holm's correction; None if none has
    chosen_on: int = 0  # number of the questions that the variant was selected on
    lower_is_better: bool = False
    # Shares are shown in percentage points, other values as they are. The difference of perplexities is relative: their
    # ratio minus 1.
    unit: Literal["points", "value", "perplexity"] = "points"
    measured: dict[str, float | None] = field(default_factory=dict)  # see `columns.MEASURED`

    @property
    def is_significant(self) -> bool:
        return self.p_holm is not None and self.p_holm < LEVEL


@dataclass
class Comparison:
    """Result of comparing variants with a baseline."""

    title: str
    baseline: str
    variants: list[str]  # in their order
    tables: dict[str, Table] = field(repr=False)  # by task, in their order; groups after their tasks, `POOLED` last
    rows: dict[tuple[str, str], Row]  # by variant and task
    answers: Callable[[str, str], Sequence[Answer]] = field(repr=False)
    """The answers of a variant to a task's questions, in the order of its table."""
    about: dict[str, str] = field(default_factory=dict)  # a line on each variant
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)  # measured costs by variant; empty without any
    fronts: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Variants on the Pareto front, by task and key of `COSTS`."""
    missing: list[tuple[str, str, str]] = field(default_factory=list)  # variant, task and reason
    commands: dict[tuple[str, str], str] = field(default_factory=dict)  # how to evaluate, by variant and task
    hooked: list[str] = field(default_factory=list)  # variants whose hooks save no cost
    notes: list[str] = field(default_factory=list)  # remarks for the reader, a line each

    @property
    def tasks(self) -> list[str]:
        return list(self.tables)

    @property
    def evaluated(self) -> dict[str, Table]:
        """Return the tables of single tasks, which have questions and answers."""
        return {task: table for task, table in self.tables.items() if len(table.numbers)}


def rows_of(
    tables: Mapping[str, Table], baseline: str, seed: int, margin: float | None = None
) -> dict[tuple[str, str], Row]:
    """Return the rows of all tables, by variant and task; `margin` is a loss in points to test against.

    Holm's correction is for all tests of the tables that are no parts, and of those that are.
    """
    rows: dict[tuple[str, str], Row] = {}
    for is_part in (False, True):
        family = {task: table for task, table in tables.items() if table.is_part == is_part}
        tests = sum(len(table.variants) - 1 for table in family.values())
        own = [row for task, table in family.items() for row in _rows_of(task, table, baseline, seed, max(1, tests))]
        tested = [(row, row.p) for row in own if row.p is not None]
        for (row, _), adjusted in zip(tested, holm([p for _, p in tested]), strict=True):
            row.p_holm = adjusted
        rows |= {(row.variant, row.task): row for row in own}
    for row in rows.values():
        if margin and row.test == "McNemar":
            better, worse = np.array(row.better), np.array(row.worse)
            row.measured["p_margin"] = float(noninferiority_test(better, worse, row.questions, margin / 100))
    return {(name, task): rows[name, task] for task, table in tables.items() for name in table.variants}


def _rows_of(task: str, table: Table, baseline: str, seed: int, tests: int) -> Iterator[Row]:
    """Yield the rows of one table; `tests` is the number of tests that are corrected together."""
    base = table.variants.index(baseline)
    weights, values = table.weights / table.weights.mean(), table.values / table.weights.mean()
    is_binary = table.are_shares and bool(np.isin(values, (0.0, 1.0)).all())
    unit = 1.0 if table.are_shares else np.inf
    lows, highs = mean_interval(_linearized(values, weights), unit)
    differences = values - values[:, [base]]
    better, worse = (differences > 0).sum(0), (differences < 0).sum(0)
    better, worse = (worse, better) if table.lower_is_better else (better, worse)
    if is_binary:
        ps, test = mcnemar_test(better, worse), "McNemar"
    else:
        draws = max(10_000, 20 * tests)  # the smallest possible p-value must pass Holm's correction
        ps, test = sign_flip_test(differences, seed, draws), "sign flips"
        ps = np.where(better + worse == 0, 1.0, ps)
    difference_ends = difference_interval(_linearized(differences, weights), unit, ps)
    smallest = detectable(differences, unit, LEVEL / tests)
    shown: Literal["points", "value", "perplexity"] = "points" if table.are_shares else "value"
    level, change = (np.exp, np.expm1) if table.is_perplexity else (np.asarray, np.asarray)
    with np.errstate(over="ignore"):
        means, lows, highs = level(values.mean(0)), level(lows), level(highs)
        changes, smallest = change(differences.mean(0)), change(smallest)
        change_lows, change_highs = map(change, difference_ends)
    for i, name in enumerate(table.variants):
        row = Row(name, task, len(values), float(means[i]), float(lows[i]), float(highs[i]))
        row.lower_is_better, row.unit = table.lower_is_better, "perplexity" if table.is_perplexity else shown
        if i != base:
            row.difference = float(changes[i])
            row.difference_low, row.difference_high = float(change_lows[i]), float(change_highs[i])
            row.better, row.worse, row.test = int(better[i]), int(worse[i]), test
            row.p = float(ps[i])
            row.detectable = None if np.isnan(smallest[i]) else float(smallest[i])
        yield row


def _linearized(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return values whose plain mean and variance are those of the weighted mean Σ values / Σ weights.

    It is a ratio of two means over documents, whose variance is that of the residuals (Taylor linearisation).

    Args:
        values: value times weight, shape (questions, columns).
        weights: shape (questions,), of mean 1.
    """
    return values if (weights == 1).all() else values.mean(0) * (1 - weights[:, None]) + values
