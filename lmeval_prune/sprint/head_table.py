"""Changes in accuracy by pruning each head, by group and layer: the paper's Tables 1–4 and Figures 2 and 5."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.architectures import Head
from lmeval_prune.errors import InputError
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.reporting.tables import bold, markdown
from lmeval_prune.sprint.outcomes import Outcomes

GROUPINGS = ("subject", "complexity", "grade", "solution_type", "level", "type", "task")


def groups(outcomes: Outcomes, by: str | None = None) -> dict[str, list[int]]:
    """Return the rows of each group of questions by an attribute; all in one group where there is none.

    Args:
        outcomes: whose questions.
        by: an attribute; default the first of `GROUPINGS` that all questions have, with several values.

    Raises:
        InputError: the questions do not have it.
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
    """Accuracy by group, layer and head.

    Attributes:
        accuracy: (group, column) → accuracy.
        groups: rows of each group.
        layers: names of the layers, with the heads of each.
    """

    accuracy: dict[tuple[str, str], float]
    groups: dict[str, list[int]]
    layers: dict[str, dict[int, str]]

    @classmethod
    def of(cls, outcomes: Outcomes, by: str | None = None) -> HeadTable:
        """Tabulate outcomes.

        Raises:
            InputError: the unpruned model was not run, or no head was.
        """
        if DENSE not in outcomes.pool:
            raise InputError("the store lacks the unpruned model, which heads are compared with; sweep it too")
        layers: dict[str, dict[int, str]] = defaultdict(dict)
        for column in outcomes.pool:
            if column != DENSE:
                head = Head.named(column)
                layers[head.layer_label][head.head] = column
        if not layers:
            raise InputError("the store holds the unpruned model only; sweep some heads")
        rows_of = groups(outcomes, by)
        accuracy = {
            (group, column): float(value)
            for group, rows in rows_of.items()
            for column, value in zip(outcomes.pool, outcomes.rows(rows).accuracy(), strict=True)
        }
        return cls(accuracy, rows_of, dict(layers))

    def markdown(self) -> dict[str, str]:
        """Write a table for each group: heads by layers, last the unpruned model; the best of a column bold."""
        heads = sorted({head for numbers in self.layers.values() for head in numbers})
        tables: dict[str, str] = {}
        for group in self.groups:
            columns: dict[str, list[Any]] = {"pruned head": [*map(str, heads), "none"]}
            for layer, numbers in self.layers.items():
                values = {head: self.accuracy[group, column] for head, column in numbers.items()}
                best = max(values.values())
                cells = [bold(f"{values[h]:.3f}", values[h] == best) if h in values else "" for h in heads]
                columns[layer] = [*cells, f"{self.accuracy[group, DENSE]:.3f}"]
            tables[group] = markdown(pd.DataFrame(columns), ["pruned head"])
        return tables

    def long(self) -> pd.DataFrame:
        """Return a row for each group, layer and head."""
        rows = [
            (group, len(rows), layer, head, self.accuracy[group, column], self.accuracy[group, DENSE])
            for group, rows in self.groups.items()
            for layer, numbers in self.layers.items()
            for head, column in sorted(numbers.items())
        ]
        return pd.DataFrame(rows, columns=["group", "questions", "layer", "head", "accuracy", "dense_accuracy"])


def gains(table: HeadTable) -> dict[str, list[float]]:
    """Return by layer, for every group, the best head's accuracy minus the unpruned model's (Figure 2)."""

    def gain(group: str, columns: Iterable[str]) -> float:
        best = np.nanmax([table.accuracy[group, column] for column in columns])
        return float(best - table.accuracy[group, DENSE])

    return {layer: [gain(group, numbers.values()) for group in table.groups] for layer, numbers in table.layers.items()}


def gains_by_luck(outcomes: Outcomes, table: HeadTable, draws: int = 200, seed: int = 0) -> dict[str, list[float]]:
    """Return the gains with each question's outcomes shuffled among the unpruned model and a layer's heads.

    Then no head is better than another, and what 'the best head' gains is the luck of a maximum.
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
    """Return by head its change in accuracy and the standard error of that paired difference (Figure 5)."""
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
