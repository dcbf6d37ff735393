"""Distances of a grid's variants on the first documents of a task: what is measured from which model.

A table has a row for each text (`Distances.frame`); `grid compare` summarises it without a model.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from lmeval_prune.artefacts import digest
from lmeval_prune.distance.summary import COLUMNS
from lmeval_prune.grid.cells import Cell


def reference(cell: Cell, base: Cell) -> Cell | None:
    """Return the cell from whose model a cell's variant is measured; None for that model itself.

    It is the cell itself, whose model without interventions and preparation is loaded, if the variant has either of
    them. Another checkpoint is measured from the model of the baseline's cell.
    """
    if cell.identity["interventions"] or cell.prepared or "router" in cell.variant.model_args:
        return cell
    return base if cell.identity["model"] != base.identity["model"] else None


def why_unmeasured(cell: Cell, base: Cell) -> str:
    """Return the reason why a cell's distance cannot be measured; empty if it can."""
    if cell.variant.served:
        return "a server gives no probabilities of the whole vocabulary; measure the model by pruned-hf"
    if "router" in cell.variant.model_args:
        return "a router answers under several masks; `lmeval-prune distance --heads` measures each"
    if reference(cell, base) is base and base.variant.served:
        return f"the baseline {base.variant.name} is served; choose one that is not"
    return ""


def distance_key(cell: Cell, documents: int, origin: Cell) -> str:
    """Return the key of a cell's distances on a number of documents; `origin` is its `reference`."""
    loaded = cell.model_args(Path())["pretrained"]
    is_other = origin is not cell or loaded != cell.variant.model_args["pretrained"]
    return f"distance-{documents}-{cell.key}" + (f"-{digest(origin.identity['model'])[:12]}" if is_other else "")


def to_table(texts: pd.DataFrame) -> pa.Table:
    """Return the texts of a variant as stored: distances of tokens as lists of float32."""
    table = pa.Table.from_pandas(texts, preserve_index=False)
    for name in COLUMNS:
        position = table.schema.get_field_index(name)
        table = table.set_column(position, name, table[name].cast(pa.list_(pa.float32())))
    return table
