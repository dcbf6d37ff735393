"""Values of the compared metric: of a task, of its parts, of groups of tasks, and of all tasks pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmeval_prune.comparison.metrics import Metric
from lmeval_prune.comparison.samples import question_keys

POOLED = "all tasks"


@dataclass(frozen=True)
class Table:
    """Values of the compared metric on one task, on a part of it, or on several tasks."""

    variants: list[str]  # that have values, the baseline first
    values: np.ndarray  # shape (questions, variants); of perplexities, negative log-likelihoods in nats
    texts: list[str]  # key of each question's text, the same in all tasks; see `samples.question_keys`
    metrics: tuple[Metric, ...] = ()  # the compared metrics, of each task one
    numbers: Sequence[
        int
    ] = ()  # of the questions in the task (lm-eval's doc_id); empty for parts, groups, pooled tasks
    is_part: bool = False  # of a task or of a group: its tests are corrected together with those of other parts
    weights: np.ndarray | None = None  # shape (questions,): words or bytes; None: each question has the same weight

    @property
    def columns(self) -> list[str]:
        """Return the compared `METRIC,FILTER`s."""
        return sorted({metric.column for metric in self.metrics})

    @property
    def lower_is_better(self) -> bool:
        """Return whether a smaller mean is better; the metrics of a table agree in this."""
        return any(metric.lower_is_better for metric in self.metrics)

    @property
    def is_perplexity(self) -> bool:
        """Return whether the metric is the exponential of the mean."""
        return any(metric.aggregation.is_exponential for metric in self.metrics)

    @property
    def are_shares(self) -> bool:
        """Return whether all values are shares between 0 and 1 (right and wrong answers are 1 and 0)."""
        values = self.values
        is_plain = self.weights is None and not self.lower_is_better and not self.is_perplexity
        return is_plain and bool(((values >= 0) & (values <= 1)).all())

    @property
    def figures(self) -> np.ndarray:
        """Return the metric of each question alone, shape (questions, variants)."""
        figures = self.values if self.weights is None else self.values / np.maximum(self.weights, 1e-12)[:, None]
        with np.errstate(over="ignore"):
            return np.exp(figures) if self.is_perplexity else figures

    def values_of(self, variants: Sequence[str]) -> np.ndarray:
        """Return the values of some variants, shape (questions, variants)."""
        return self.values[:, [self.variants.index(name) for name in variants]]

    def part(self, rows: np.ndarray) -> Table:
        """Return the table of some questions, given their rows."""
        weights = None if self.weights is None else self.weights[rows]
        texts = [self.texts[row] for row in rows]
        return replace(self, values=self.values[rows], texts=texts, numbers=(), weights=weights, is_part=True)


def unless_equal(weights: np.ndarray) -> np.ndarray | None:
    """Return weights; None if all are 1."""
    return None if (weights == 1).all() else weights


def can_be_averaged(tables: Sequence[Table]) -> bool:
    """Return whether tasks have one mean: shares with each other, other metrics only with the same of another task."""
    metrics = {
        (metric.column, metric.aggregation, metric.lower_is_better) for table in tables for metric in table.metrics
    }
    return all(table.are_shares for table in tables) or len(metrics) == 1


def merged(name: str, tables: Sequence[Table], variants: Sequence[str]) -> tuple[Table, list[str]]:
    """Return the table of the questions of several tasks, and a note on questions that several tasks contain.

    Outcomes of one question are not independent, so they are averaged.
    """
    names = [variant for variant in variants if all(variant in table.variants for table in tables)]
    weights = [np.ones(len(table.values)) if table.weights is None else table.weights for table in tables]
    outcomes = np.concatenate([table.values_of(names) for table in tables])
    keys = iter(question_keys([text for table in tables for text in table.texts]))
    rows: dict[tuple[str, int], int] = {}  # by text, and the number of earlier questions of its task that are the same
    row = []
    for table in tables:
        count: dict[str, int] = {}
        for _ in table.texts:
            key = next(keys)
            row.append(rows.setdefault((key, count.get(key, 0)), len(rows)))
            count[key] = count.get(key, 0) + 1
    sums = np.zeros((len(rows), len(names) + 1))
    np.add.at(sums, row, np.column_stack([outcomes, np.concatenate(weights)]))
    means = sums / np.bincount(row)[:, None]
    note = f"{name}: {len(outcomes)} outcomes of {len(rows)} questions; a question of several tasks counts once"
    metrics = tuple(metric for table in tables for metric in table.metrics)
    table = Table(names, means[:, :-1], [text for text, _ in rows], metrics, weights=unless_equal(means[:, -1]))
    return table, [note] if len(rows) < len(outcomes) else []


def pooled(tables: Mapping[str, Table], variants: Sequence[str]) -> tuple[dict[str, Table], list[str]]:
    """Pool the tasks whose metrics are shares, if there are several; return notes on omitted tasks and merged rows."""
    shares = [table for table in tables.values() if table.are_shares]
    if len(shares) < 2:
        return {}, []
    table, merged_notes = merged(POOLED, shares, variants)
    lower = [task for task, table in tables.items() if table.lower_is_better]
    other = [task for task, table in tables.items() if not table.are_shares and task not in lower]
    notes = [f"{POOLED}: without {', '.join(lower)}, where lower is better"] if lower else []
    notes += [f"{POOLED}: without {', '.join(other)}, whose metric is not a share between 0 and 1"] if other else []
    return {POOLED: replace(table, metrics=())}, notes + merged_notes
