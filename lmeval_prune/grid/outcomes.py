"""Files of a cell: lm-eval's results and samples, and tables of the samples.

`outcomes.parquet` has a row for each question and a column for each metric; `answers.parquet` has the questions and
answers. Comparisons read these tables, because lm-eval's samples files contain whole prompts: gigabytes for a thousand
cells.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import pandas as pd
import pyarrow as pa
from typing_extensions import TypedDict

from lmeval_prune import artefacts
from lmeval_prune.artefacts import digest, read_json, write_artefact, write_text
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.grid.folder import CELL, VERSION, samples_file
from lmeval_prune.models.answer_store import write_table
from lmeval_prune.models.lengths import Lengths

OUTCOMES, ANSWERS = "outcomes.parquet", "answers.parquet"
PREFERRED_METRICS = ("exact_match", "acc")  # best first; the default for the compared metric


class Pruning(TypedDict):
    """The section `pruning` of lm-eval's results."""

    answers: NotRequired[dict[str, Lengths]]


class Config(TypedDict):
    """The section `config` of lm-eval's results."""

    pruning: NotRequired[Pruning]


class Results(TypedDict):
    """Fields of lm-eval's results that comparisons read."""

    config: NotRequired[Config]
    higher_is_better: NotRequired[dict[str, dict[str, bool | None] | None]]


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
    outcomes: dict[tuple[str, int], dict[str, Any]] = {}
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    for task, rows in sorted(samples.items()):
        for row in rows:
            key = task, int(row["doc_id"])
            outcome = outcomes.setdefault(key, {"task": task, "doc_id": key[1], "question": row["doc_hash"]})
            outcome |= _metrics(row)
            answers.setdefault(key, _answer(task, row, configs.get(task) or {}))
    for name, table in ((OUTCOMES, outcomes), (ANSWERS, answers)):
        frame = pd.DataFrame([table[key] for key in sorted(table)])
        write_table(folder / name, pa.Table.from_pandas(frame, preserve_index=False))


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a sample's numeric metrics, by `METRIC,FILTER`."""
    values = {f"{metric},{row['filter']}": row[metric] for metric in row["metrics"]}
    numbers = {name: value for name, value in values.items() if isinstance(value, bool | int | float | np.number)}
    return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}


def _answer(task: str, row: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the question and answer for the grid's pages, and a digest of the question's text."""
    doc, arguments = row["doc"], row["arguments"][0]
    likelihood = ""
    field = (config.get("metadata") or {}).get("question_field") or "question"
    text = doc.get(field) if isinstance(doc, dict) else None
    question = text if isinstance(text, str) and text else str(arguments[0])
    if len(arguments) > 1 and isinstance(arguments[1], str):  # a log-likelihood task: arguments[1] is a choice
        answers, likelihood = _likeliest(row)
    else:
        answers = [text for responses in row["resps"] for text in responses]
    return {
        "task": task,
        "doc_id": int(row["doc_id"]),
        "question": question,
        "text_key": digest(question),
        "target": str(row["target"]),
        "answer": "\n\n— next try —\n\n".join(map(str, answers)),
        "likelihood": likelihood,
        "extracted": str(row.get("extracted", "")),
    }


def _likeliest(row: dict[str, Any]) -> tuple[list[str], str]:
    """Return the choice with the highest log-likelihood, and that log-likelihood as text.

    The list of choices is empty if the task has a single text, so that nothing is chosen.
    """
    responses = [repeats[0] for repeats in row["resps"]]
    scores = [response[0] if isinstance(response, list | tuple) else response for response in responses]
    best = max(range(len(scores)), key=lambda i: scores[i])
    return [row["arguments"][best][1]] if len(scores) > 1 else [], f"log-likelihood {scores[best]:.2f}"


@dataclass(frozen=True)
class CellOutcomes:
    """The compared metric of one cell."""

    questions: list[tuple[str, int, str]]  # task, number in the task (lm-eval's doc_id), and hash
    values: np.ndarray  # shape (questions,)
    columns: dict[str, str]  # `METRIC,FILTER` by task


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a table of a cell, or some of its columns."""
    remedy = f"delete {path.parent} and run the grid"
    try:
        table = artefacts.read_table(path, remedy, columns)
        table.select(columns or ["task", "doc_id", "question"])  # raises KeyError if one is missing
    except (FileNotFoundError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None
    return table


def read_outcomes(folder: Path, metric: str | None, columns: dict[str, str] | None = None) -> CellOutcomes:
    """Read the compared metric of a cell.

    Args:
        folder: folder of the cell.
        metric: `METRIC` or `METRIC,FILTER`; None for the default (see `_preference`).
        columns: the columns compared in the baseline's cell, by task; they take precedence over `metric`.
    """
    table = read_table(folder / OUTCOMES)
    tasks, numbers, hashes = (table[name].to_pylist() for name in ("task", "doc_id", "question"))
    metrics = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names if "," in name}
    values = np.full(len(tasks), np.nan)
    task_column = np.array(tasks)
    chosen: dict[str, str] = {}
    for task in dict.fromkeys(tasks):
        rows = task_column == task
        chosen[task] = _column(task, columns.get(task) if columns else metric, metrics, rows)
        values[rows] = metrics[chosen[task]][rows]
    return CellOutcomes(list(zip(tasks, numbers, hashes, strict=True)), values, chosen)


def _column(task: str, name: str | None, metrics: dict[str, np.ndarray], rows: np.ndarray) -> str:
    """Choose a metric that has a value for each question of a task: `name` (a metric or column), or the preferred one.

    `rows` is a mask of the task's questions.
    """
    named = [column for column in metrics if name is None or name in (column, _metric(column))]
    complete = [column for column in metrics if np.isfinite(metrics[column][rows]).all()]
    if candidates := [column for column in complete if column in named]:
        return max(candidates, key=_preference)
    advice = "run the grid with `metric: NAME` for the task"
    if not complete:
        raise InputError(f"{task} has no metric with a value for each question, so it cannot be compared; {advice}")
    missing = f"{name} is not known for all questions of {task}" if named else f"{task} has no metric {name}"
    raise InputError(f"{missing}; it has {', '.join(complete)}; {advice}")


def _metric(column: str) -> str:
    """Return METRIC of `METRIC,FILTER`."""
    return column.partition(",")[0]


def _preference(column: str) -> tuple[int, int]:
    """Return a sort key that ranks `PREFERRED_METRICS` highest, then pass@N by its N, then all others.

    Of equal keys, `max` takes the first column.
    """
    metric = _metric(column)
    if metric in PREFERRED_METRICS:
        return 2, -PREFERRED_METRICS.index(metric)
    count = metric.removeprefix("pass@")
    return (1, int(count)) if metric.startswith("pass@") and count.isdigit() else (0, 0)


def read_text_keys(folder: Path) -> dict[tuple[str, int], str]:
    """Read the digests of a cell's questions, which identify a text across tasks, by task and number."""
    table = read_table(folder / ANSWERS, ["task", "doc_id", "text_key"])
    return {(row["task"], row["doc_id"]): row["text_key"] for row in table.to_pylist()}


def _read_results(folder: Path) -> Any:
    """Read lm-eval's results of a cell."""
    try:
        return read_json(folder / "results.json", Results)
    except InputError as error:
        raise InputError(f"{error}; delete {folder} and run the grid") from None


def read_lengths(folder: Path) -> list[Lengths]:
    """Read the lengths of a cell's answers, one entry per task.

    The list is empty for log-likelihood tasks, and for cells written by earlier versions.
    """
    return list(_read_results(folder).get("config", {}).get("pruning", {}).get("answers", {}).values())


def read_lower_is_better(folder: Path, columns: dict[str, str]) -> bool:
    """Read from lm-eval's results whether smaller values of the compared `METRIC,FILTER`s are better."""
    higher = _read_results(folder).get("higher_is_better", {})
    lower = [(higher.get(task) or {}).get(_metric(column), True) is False for task, column in columns.items()]
    if any(lower) and not all(lower):
        names = ", ".join(f"{column} of {task}" for task, column in columns.items())
        raise InputError(f"higher is better for some of {names}, lower for others; give `metric: NAME`")
    return any(lower)


def read_answers(folder: Path) -> dict[tuple[str, int], dict[str, str]]:
    """Read a cell's questions, gold answers, answers and log-likelihoods, by task and number."""
    rows = read_table(folder / ANSWERS).to_pylist()
    # tables of earlier versions have no likelihood
    return {(row["task"], row["doc_id"]): {"likelihood": "", **row} for row in rows}
