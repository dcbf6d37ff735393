"""Distances of a grid's variants from their model without interventions, on the first documents of a task.

A table has a row for each text (`Distances.frame`); `grid compare` summarises it without a model.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa

from lmeval_prune.distance.summary import COLUMNS
from lmeval_prune.grid.cells import Cell


def is_comparable(cell: Cell) -> bool:
    """Return whether a cell's variant has interventions that can be removed from its loaded model."""
    variant = cell.variant
    has_interventions = bool(cell.identity["interventions"] or cell.prepared)
    return has_interventions and not variant.served and "router" not in variant.model_args


def distance_key(cell: Cell, documents: int) -> str:
    """Return the key of a cell's distances on a number of documents."""
    return f"distance-{documents}-{cell.key}"


def first_documents(evaluation: dict[str, Any], documents: int) -> dict[str, Any]:
    """Return the arguments of `simple_evaluate` for at most this number of documents of a task."""
    limit = evaluation["limit"]
    limit = min(limit, documents) if isinstance(limit, int) else documents
    return {**evaluation, "gen_kwargs": evaluation["gen_kwargs"] or None, "limit": limit}


def to_table(texts: pd.DataFrame) -> pa.Table:
    """Return the texts of a variant as stored: distances of tokens as lists of float32."""
    table = pa.Table.from_pandas(texts, preserve_index=False)
    for name in COLUMNS:
        position = table.schema.get_field_index(name)
        table = table.set_column(position, name, table[name].cast(pa.list_(pa.float32())))
    return table
