"""Tabulate the accuracy with each head pruned, by group and layer: the paper's Tables 1–4 and Figures 2 and 5."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.architectures import Head
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE
from lmeval_prune.reporting.documents import bold, markdown
from lmeval_prune.sprint.outcomes import Outcomes

GROUPINGS = ("subject", "complexity", "grade", "solution_type", "level", "type", "task")


def groups(outcomes: Outcomes, by: str | None = None) -> dict[str, list[int]]:
    """Group the rows of questions by an attribute.

    Default: the first of `GROUPINGS` with several values that all questions have; else a single group.
    """
    attributes = pd.DataFrame([{**row["attributes"], "task": row["task"]} for row in outcomes.questions], dtype=object)
    for name in [by] if by else GROUPINGS:
        if name in attributes and attributes[name].notna().all() and (by or attributes[name].nunique() > 1):
            rows = attributes.groupby(attributes[name].map(str)).indices
            return {group: indices.tolist() for group, indices in sorted(rows.items())}
    if by:
        names = sorted({name for row in outcomes.questions for name in row["attributes"]})
        raise InputError(f"not all questions have {by!r}; they have {', '.join(names) or 'no attributes'}")
    return {"all": list(range(len(outcomes.questions)))}


@dataclass(frozen=True)
class HeadTable:
    """Accuracy by group, layer and head."""

    accuracy: dict[tuple[str, str], float]  # by group and column
    groups: dict[str, list[int]]  # rows of each group
    layers: dict[str, dict[int, str]]  # by layer label, the column of each head

    @classmethod
    def of(cls, outcomes: Outcomes, by: str | None = None) -> HeadTable:
        """Tabulate outcomes of the unpruned model and of single heads."""
        layers: dict[str, dict[int, str]] = defaultdict(dict)
        for column in outcomes.pool:
            if column != DENSE:
                head = Head.named(column)
                layers[head.layer_label][head.head] = column
        rows_of = groups(outcomes, by)
        accuracy = {
            (group, column): float(value)
            for group, rows in rows_of.items()
            for column, value in zip(outcomes.pool, outcomes.rows(rows).accuracy(), strict=True)
        }
        return cls(accuracy, rows_of, dict(layers))

    def markdown(self) -> dict[str, str]:
        """Return a Markdown table for each group: heads by layers, then the unpruned model; a better best is bold."""
        heads = sorted({head for numbers in self.layers.values() for head in numbers})
        tables: dict[str, str] = {}
        for group in self.groups:
            columns: dict[str, list[Any]] = {"pruned head": [*map(str, heads), "none"]}
            for layer, numbers in self.layers.items():
                values = {head: self.accuracy[group, column] for head, column in numbers.items()}
                best = max(values.values())
                is_gain = best > self.accuracy[group, DENSE]
                cells = [bold(f"{values[h]:.3f}", is_gain and values[h] == best) if h in values else "" for h in heads]
                columns[layer] = [*cells, f"{self.accuracy[group, DENSE]:.3f}"]
            tables[group] = markdown(pd.DataFrame(columns), ["pruned head"])
        return tables

    def long(self) -> pd.DataFrame:
        """Return the table in long format: a row for each group, layer and head."""
        rows = [
            (group, len(rows), layer, head, self.accuracy[group, column], self.accuracy[group, DENSE])
            for group, rows in self.groups.items()
            for layer, numbers in self.layers.items()
            for head, column in sorted(numbers.items())
        ]
        return pd.DataFrame(rows, columns=["group", "questions", "layer", "head", "accuracy", "dense_accuracy"])


def gains(table: HeadTable) -> dict[str, list[float]]:
    """Return for each layer and group the best head's accuracy minus the unpruned model's (Figure 2)."""

    def gain(group: str, columns: Iterable[str]) -> float:
        best = np.nanmax([table.accuracy[group, column] for column in columns])
        return float(best - table.accuracy[group, DENSE])

    return {layer: [gain(group, numbers.values()) for group in table.groups] for layer, numbers in table.layers.items()}


def gains_by_chance(outcomes: Outcomes, table: HeadTable, draws: int = 200, seed: int = 0) -> dict[str, list[float]]:
    """Return the gains after each question's outcomes are shuffled among the unpruned model and a layer's heads.

    After the shuffle no head is better than another, so the best head's gain is chance.
    """
    generator = np.random.default_rng(seed)
    gains_of = {}
    for layer, numbers in table.layers.items():
        part = outcomes.columns([DENSE, *numbers.values()])
        values = []
        for rows in table.groups.values():
            z = part.z[rows]
            for _ in range(draws):
                shuffled = np.nanmean(generator.permuted(z, axis=1), axis=0)
                values.append(float(shuffled[1:].max() - shuffled[0]))
        gains_of[layer] = values
    return gains_of


def changes(outcomes: Outcomes) -> dict[str, tuple[float, float]]:
    """Return each head's change in accuracy and the standard error of this paired difference (Figure 5)."""
    dense = outcomes.z[:, outcomes.pool.index(DENSE)]
    change_of = {}
    for i, column in enumerate(outcomes.pool):
        if column != DENSE:
            difference = outcomes.z[:, i] - dense
            difference = difference[~np.isnan(difference)]
            count = len(difference)
            error = float(difference.std(ddof=1) / count**0.5) if count > 1 else 0.0
            change_of[column] = (float(difference.mean()), error)
    return change_of
