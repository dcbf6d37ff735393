"""Rows of a comparison: means, paired differences, intervals and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lmeval_prune.comparison.samples import Answer
from lmeval_prune.comparison.tables import Table
from lmeval_prune.reporting.statistics import (
    detectable,
    difference_interval,
    holm,
    mcnemar_test,
    mean_interval,
    sign_flip_test,
)

LEVEL = 0.05  # significance level of all tests of a comparison together
DETECTABLE = (
    "the smallest difference that is significant after this correction with a power of 0.8, if the share of differing "
    "questions is that of this sample; if they are too few for this power, even with all in favour of one variant, the "
    "smallest sufficient number is assumed. It is a bound for planning: a single result below it can be significant"
)
# Shares are shown in percentage points, other values as they are. The difference of perplexities is relative: their
# ratio minus 1.
Unit = Literal["points", "value", "perplexity"]


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
    cut_off: float | None = None  # share of answers cut off by `max_gen_toks`; None for log-likelihoods
    mean_tokens: float | None = None  # mean length of an answer
    unit: Unit = "points"
    # distance from the model without interventions, see docs/distance.md; None if it is not measured
    mean_kld: float | None = None
    mean_kld_se: float | None = None
    same_top: float | None = None
    same_top_se: float | None = None
    same_answers: float | None = None  # in a comparison of runs: as the baseline's, or the same likeliest choice
    same_answers_se: float | None = None
    first_difference: float | None = None
    # KL divergence of the choices' probabilities from the baseline's, in nats, see `distances`; None without choices
    choice_kld: float | None = None
    choice_kld_se: float | None = None


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
        """Return the names of tasks, parts, groups and pooled tasks."""
        return list(self.tables)

    @property
    def evaluated(self) -> dict[str, Table]:
        """Return the tables of single tasks, which have questions and answers."""
        return {task: table for task, table in self.tables.items() if len(table.numbers)}


def rows_of(tables: Mapping[str, Table], baseline: str, seed: int) -> dict[tuple[str, str], Row]:
    """Return the rows of all tables, by variant and task.

    Holm's correction is for all tests of the tables that are no parts, and of those that are.
    """
    rows: dict[tuple[str, str], Row] = {}
    for is_part in (False, True):
        family = {task: table for task, table in tables.items() if table.is_part == is_part}
        tests = sum(len(table.variants) - 1 for table in family.values())
        family_rows = [
            row
            for task, table in family.items()
            for row in _rows_of(task, table, table.variants.index(baseline), seed, max(1, tests))
        ]
        tested = [row for row in family_rows if row.p is not None]
        for row, adjusted in zip(tested, holm([row.p for row in tested if row.p is not None]), strict=True):
            row.p_holm = adjusted
        rows |= {(row.variant, row.task): row for row in family_rows}
    return {(name, task): rows[name, task] for task, table in tables.items() for name in table.variants}


def _rows_of(task: str, table: Table, base: int, seed: int, tests: int) -> Iterator[Row]:
    """Yield the rows of one table; `tests` is the number of tests that are corrected together."""
    weights = np.ones(len(table.values)) if table.weights is None else table.weights / table.weights.mean()
    values = table.values if table.weights is None else table.values / table.weights.mean()
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
    name_of_unit: Unit = "perplexity" if table.is_perplexity else "points" if table.are_shares else "value"
    level, change = (np.exp, np.expm1) if table.is_perplexity else (np.asarray, np.asarray)
    with np.errstate(over="ignore"):
        means, lows, highs = level(values.mean(0)), level(lows), level(highs)
        changes, smallest = change(differences.mean(0)), change(smallest)
        change_lows, change_highs = map(change, difference_ends)
    for i, name in enumerate(table.variants):
        row = Row(name, task, len(values), float(means[i]), float(lows[i]), float(highs[i]))
        row.lower_is_better, row.unit = table.lower_is_better, name_of_unit
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
