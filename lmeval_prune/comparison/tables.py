"""Values of the compared metric: of a task, of its parts, of groups of tasks, and of all tasks pooled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from lmeval_prune.comparison.metrics import KnownMetrics, Metric, choose_metrics, values_of
from lmeval_prune.comparison.samples import QUESTION, question_keys
from lmeval_prune.errors import InputError

POOLED = "all tasks"
Question = tuple[str, int, str]  # task, number in the task (lm-eval's doc_id), and hash


@dataclass(frozen=True)
class Table:
    """Values of the compared metric on one task, on a part of it, or on several tasks."""

    variants: list[str]  # that have values, including the baseline
    values: np.ndarray  # shape (questions, variants); of perplexities, negative log-likelihoods in nats
    texts: list[str]  # key of each question's text, the same in all tasks; see `samples.question_keys`
    questions: list[Question] = field(default_factory=list)  # empty for parts of a task, groups and pooled tasks
    metrics: dict[str, Metric] = field(default_factory=dict)  # the compared metric by task
    is_part: bool = False  # of a task or of a group: its tests are corrected together with those of other parts
    weights: np.ndarray | None = None  # shape (questions,): words or bytes; None: each question has the same weight

    @property
    def columns(self) -> list[str]:
        """Return the compared `METRIC,FILTER`s."""
        return sorted({metric.column for metric in self.metrics.values()})

    @property
    def lower_is_better(self) -> bool:
        """Return whether a smaller mean is better; the metrics of a table agree in this."""
        return any(metric.lower_is_better for metric in self.metrics.values())

    @property
    def is_perplexity(self) -> bool:
        """Return whether the metric is the exponential of the mean."""
        return any(metric.aggregation.is_exponential for metric in self.metrics.values())

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
        """Return the table of some questions, given their numbers."""
        weights = None if self.weights is None else self.weights[rows]
        texts = [self.texts[row] for row in rows]
        return replace(self, values=self.values[rows], texts=texts, questions=[], weights=weights, is_part=True)


def read_table(
    task: str,
    baseline: str,
    outcomes: Mapping[str, Callable[[], pd.DataFrame]],
    metrics_by_task: KnownMetrics,
    texts: Mapping[tuple[str, int], str],
    metric: str | None,
    advice: str,
) -> Table:
    """Read the values of a task.

    Args:
        task: name for messages.
        baseline: name of the variant that determines questions and metrics.
        outcomes: functions that read a variant's outcomes, by variant; see `samples.tables`.
        metrics_by_task: metrics of the baseline; see `known_metrics`.
        texts: digests of the questions' texts, by task and number.
        metric: `METRIC` or `METRIC,FILTER`; None for the default.
        advice: end of a message: how to name another metric.
    """
    base = outcomes[baseline]()
    metrics = choose_metrics(metrics_by_task, metric, advice)
    questions = questions_of(base)
    position = {question: row for row, question in enumerate(questions)}
    values = np.empty((len(position), len(outcomes)))
    weights = np.ones(len(position))
    for column, (variant, read) in enumerate(outcomes.items()):
        frame = base if variant == baseline else read()
        own_questions = questions_of(frame)
        rows = [position[question] for question in own_questions if question in position]
        if not len(rows) == len(own_questions) == len(position):
            raise InputError(
                f"{variant!r} and the baseline {baseline!r} have different questions of {task}: {len(own_questions)} "
                f"and {len(position)}, {len(rows)} of them the same; compare runs of the same questions"
            )
        values[rows, column], weights[rows] = values_of(frame, metrics, advice)
    keys = [texts[name, number] for name, number, _ in questions]
    return Table(list(outcomes), values, keys, questions, metrics, weights=_unless_equal(weights))


def questions_of(outcomes: pd.DataFrame) -> list[Question]:
    """Return the question of each row."""
    return list(outcomes[QUESTION].itertuples(index=False, name=None))


def _unless_equal(weights: np.ndarray) -> np.ndarray | None:
    return None if (weights == 1).all() else weights


def can_be_averaged(tables: Sequence[Table]) -> bool:
    """Return whether tasks have one mean: shares with each other, other metrics only with the same of another task."""
    aggregations = {metric.aggregation for table in tables for metric in table.metrics.values()}
    columns = {column for table in tables for column in table.columns}
    return all(table.are_shares for table in tables) or max(len(columns), len(aggregations)) == 1


def merged(name: str, tables: Sequence[Table], variants: Sequence[str]) -> tuple[Table, list[str]]:
    """Return the table of the questions of several tasks, and a note on questions that several tasks contain.

    Outcomes of one question are not independent, so they are averaged.
    """
    names = [variant for variant in variants if all(variant in table.variants for table in tables)]
    weights = [np.ones(len(table.values)) if table.weights is None else table.weights for table in tables]
    outcomes = np.concatenate([table.values_of(names) for table in tables])
    texts, means = _mean_by_text(_repeats(tables), np.column_stack([outcomes, np.concatenate(weights)]))
    metrics = {task: metric for table in tables for task, metric in table.metrics.items()}
    note = f"{name}: {len(outcomes)} outcomes of {len(texts)} questions; a question of several tasks counts once"
    table = Table(names, means[:, :-1], texts, metrics=metrics, weights=_unless_equal(means[:, -1]))
    return table, [note] if len(texts) < len(outcomes) else []


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
    return {POOLED: replace(table, metrics={})}, notes + merged_notes


def _repeats(tables: Sequence[Table]) -> Iterator[tuple[str, int]]:
    """Yield what identifies each question, and how many earlier questions of its task are the same."""
    count: dict[tuple[str, str], int] = {}
    questions = [question for table in tables for question in table.questions]
    keys = question_keys([text for table in tables for text in table.texts])
    for (task, _, _), key in zip(questions, keys, strict=True):
        yield key, count.setdefault((task, key), 0)
        count[task, key] += 1


def _mean_by_text(repeats: Iterable[tuple[str, int]], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Average the rows of a question that several tasks contain: its outcomes are not independent."""
    rows: dict[tuple[str, int], int] = {}
    row = np.array([rows.setdefault(repeat, len(rows)) for repeat in repeats])
    sums = np.zeros((len(rows), values.shape[1]))
    np.add.at(sums, row, values)
    return [text for text, _ in rows], sums / np.bincount(row)[:, None]
