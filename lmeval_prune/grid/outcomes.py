"""Files of a cell: lm-eval's results and samples, and tables of the samples.

`outcomes.parquet` has a row for each question and a column for each metric; `answers.parquet` has the questions and
answers. Comparisons read these tables, because lm-eval's samples files contain whole prompts: gigabytes for a thousand
cells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from lmeval_prune import artefacts
from lmeval_prune.artefacts import read_json, write_artefact, write_text
from lmeval_prune.comparison.metrics import Results
from lmeval_prune.comparison.samples import tables
from lmeval_prune.grid.folder import CELL, VERSION, samples_file
from lmeval_prune.models.answer_store import write_table
from lmeval_prune.models.lengths import Lengths

OUTCOMES, ANSWERS = "outcomes.parquet", "answers.parquet"


def write_cell(folder: Path, content: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the files of a cell: `cell.json` with its content, and lm-eval's results and samples."""
    from lm_eval.utils import handle_non_serializable

    def to_json(value: Any) -> str:
        return json.dumps(value, default=handle_non_serializable, ensure_ascii=False)

    samples = results["samples"]
    write_text(folder / "results.json", to_json({name: part for name, part in results.items() if name != "samples"}))
    for task, rows in samples.items():
        write_text(samples_file(folder, task), "".join(to_json(row) + "\n" for row in rows))
    write_tables(folder, samples, results["configs"])
    write_artefact(folder / "cell.json", CELL, VERSION, content)


def write_tables(folder: Path, samples: dict[str, list[dict[str, Any]]], configs: dict[str, Any]) -> None:
    """Write a cell's outcomes and answers from lm-eval's samples and task configurations, both by task."""
    for name, frame in zip((OUTCOMES, ANSWERS), tables(samples, configs), strict=True):
        write_table(folder / name, pa.Table.from_pandas(frame, preserve_index=False))


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a table of a cell, or some of its columns."""
    return artefacts.read_table(path, f"delete {path.parent} and run the grid", columns)


def read_outcomes(folder: Path) -> pd.DataFrame:
    """Read the values of all metrics of a cell, a row for each question."""
    return read_table(folder / OUTCOMES).to_pandas()


def read_text_keys(folder: Path) -> dict[tuple[str, int], str]:
    """Read the digests of a cell's questions, which identify a text across tasks, by task and number."""
    table = read_table(folder / ANSWERS, ["task", "doc_id", "text_key"])
    return {(row["task"], row["doc_id"]): row["text_key"] for row in table.to_pylist()}


def read_results(folder: Path) -> Any:
    """Read lm-eval's results of a cell."""
    return read_json(folder / "results.json", Results)


def read_lengths(folder: Path) -> list[Lengths]:
    """Read the lengths of a cell's answers, one entry per task; none for log-likelihood tasks."""
    return list(read_results(folder).get("config", {}).get("pruning", {}).get("answers", {}).values())


def read_answers(folder: Path) -> dict[tuple[str, int], dict[str, str]]:
    """Read a cell's questions, gold answers, answers and log-likelihoods, by task and number."""
    rows = read_table(folder / ANSWERS).to_pylist()
    return {(row["task"], row["doc_id"]): row for row in rows}
