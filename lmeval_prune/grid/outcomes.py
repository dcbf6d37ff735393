"""Outcomes of a cell in columns: a row a question, a column a metric; and, beside them, questions and answers.

lm-eval's samples files hold whole prompts; comparing a thousand cells by them would read gigabytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import pandas as pd
import pyarrow as pa
from typing_extensions import TypedDict

from lmeval_prune import artefacts
from lmeval_prune.artefacts import digest, read_json
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.models.answer_store import write_table

OUTCOMES, ANSWERS = "outcomes.parquet", "answers.parquet"
FIRST = ("exact_match", "acc")  # metrics that are compared unless the grid names one


class Results(TypedDict):
    """What is read of lm-eval's results."""

    higher_is_better: NotRequired[dict[str, dict[str, bool | None] | None]]


def write_tables(folder: Path, samples: dict[str, list[dict[str, Any]]], configs: dict[str, Any]) -> None:
    """Write a cell's outcomes and answers.

    Args:
        folder: of the cell.
        samples: lm-eval's, by task.
        configs: lm-eval's, by task.
    """
    outcomes: dict[tuple[str, int], dict[str, Any]] = {}
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    for task, rows in sorted(samples.items()):
        config = configs.get(task) or {}
        for row in rows:
            place = (task, int(row["doc_id"]))
            own = outcomes.setdefault(place, {"task": task, "doc_id": place[1], "question": row["doc_hash"]})
            for metric in row["metrics"]:
                value = row[metric]
                if isinstance(value, bool | int | float | np.number) and not math.isnan(value):
                    own[f"{metric},{row['filter']}"] = float(value)
            answers.setdefault(place, _answer(task, row, config))
    for name, table in ((OUTCOMES, outcomes), (ANSWERS, answers)):
        frame = pd.DataFrame([table[place] for place in sorted(table)])
        write_table(folder / name, pa.Table.from_pandas(frame, preserve_index=False))


def _answer(task: str, row: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What was asked and answered, as people read it; and by which text the question is known."""
    doc, arguments = row["doc"], row["arguments"][0]
    field = (config.get("metadata") or {}).get("question_field") or "question"
    text = doc.get(field) if isinstance(doc, dict) else None
    question = text if isinstance(text, str) and text else str(arguments[0])
    responses = row["resps"]
    if len(arguments) > 1 and isinstance(arguments[1], str):  # likelihoods of given texts
        scores = [one[0][0] if isinstance(one[0], list | tuple) else one[0] for one in responses]
        best = max(range(len(scores)), key=lambda i: scores[i])
        shown = [row["arguments"][best][1]] if len(scores) > 1 else []  # of one text nothing was chosen
        likelihood = f"log-likelihood {scores[best]:.2f}"
    else:
        shown, likelihood = [text for one in responses for text in one], ""
    return {
        "task": task,
        "doc_id": int(row["doc_id"]),
        "question": question,
        "text_key": digest(question),
        "target": str(row["target"]),
        "answer": "\n\n— next try —\n\n".join(map(str, shown)),
        "likelihood": likelihood,
        "extracted": str(row.get("extracted", "")),
    }


@dataclass(frozen=True)
class Outcomes:
    """One metric of one cell.

    Attributes:
        questions: by what each question is known: task, number and hash.
        values: of the metric.
        columns: by task, the `METRIC,FILTER` that it is.
    """

    questions: list[tuple[str, int, str]]
    values: np.ndarray
    columns: dict[str, str]


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read one of a cell's tables, or these columns of it.

    Raises:
        InputError: it is damaged.
    """
    remedy = f"delete {path.parent} and run the grid"
    try:
        table = artefacts.read_table(path, remedy, columns)
        table.select(columns or ["task", "doc_id", "question"])
    except (FileNotFoundError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None
    return table


def read_outcomes(folder: Path, metric: str | None, columns: dict[str, str] | None = None) -> Outcomes:
    """Read the metric that is compared.

    Args:
        folder: of the cell.
        metric: `METRIC` or `METRIC,FILTER`; None for the task's own.
        columns: of the cell that it is compared with: the same are read, whatever `metric` says.

    Raises:
        InputError: the cell is damaged, or has no such metric, or not for all of its questions.
    """
    table = read_table(folder / OUTCOMES)
    tasks, numbers, keys = (table[name].to_pylist() for name in ("task", "doc_id", "question"))
    found = [name for name in table.column_names if "," in name]
    values = np.full(len(tasks), np.nan)
    places = np.array(tasks)
    read: dict[str, str] = {}
    for task in dict.fromkeys(tasks):
        rows = places == task
        whole = [name for name in found if np.isfinite(table[name].to_numpy(zero_copy_only=False)[rows]).all()]
        wanted = columns.get(task) if columns else metric
        chosen = _chosen(whole, wanted)
        if chosen is None:
            known = ", ".join(whole) or "no figure a question"
            of_all = (
                " for all questions"
                if wanted in {name for column in found for name in (column, _metric(column))}
                else ""
            )
            advice = "run the grid with `metric: NAME` for the task"
            raise InputError(f"{task} has {known}, and not {wanted or 'one to compare'}{of_all}; {advice}")
        read[task] = chosen
        values[rows] = table[chosen].to_numpy(zero_copy_only=False)[rows]
    return Outcomes(list(zip(tasks, numbers, keys, strict=True)), values, read)


def _metric(column: str) -> str:
    return column.partition(",")[0]


def _chosen(whole: list[str], wanted: str | None) -> str | None:
    """The column that is compared, of those that have a value for each of a task's questions."""
    if wanted:
        return next((name for name in whole if wanted in (name, _metric(name))), None)
    for first in FIRST:
        for name in whole:
            if _metric(name) == first:
                return name
    passes = [name for name in whole if name.startswith("pass@") and _metric(name)[5:].isdigit()]
    return max(passes, key=lambda name: int(_metric(name)[5:])) if passes else next(iter(whole), None)


def read_cell_json(path: Path, fields: Any) -> Any:
    """Read a JSON file of a cell, as of `read_json`.

    Raises:
        InputError: it is missing or damaged; the message says what to do.
    """
    try:
        return read_json(path, fields)
    except InputError as error:
        raise InputError(f"{error}; delete {path.parent} and run the grid") from None


def read_lower_is_better(folder: Path, columns: dict[str, str]) -> bool:
    """Whether a smaller figure is the better one, as lm-eval's results say.

    Args:
        folder: of the cell.
        columns: by task, what is compared.

    Raises:
        InputError: the results are damaged, or it is so for one task of a group and not for another.
    """
    said = read_cell_json(folder / "results.json", Results).get("higher_is_better", {})
    lower = {(said.get(task) or {}).get(_metric(column), True) is False for task, column in columns.items()}
    if len(lower) > 1:
        shown = ", ".join(f"{column} of {task}" for task, column in columns.items())
        raise InputError(f"of {shown} some are better when they are higher, some when lower; give `metric: NAME`")
    return lower == {True}


def read_answers(folder: Path) -> dict[tuple[str, int], dict[str, str]]:
    """Questions, gold answers, answers and their likelihoods of a cell, by task and number."""
    rows = read_table(folder / ANSWERS).to_pylist()
    return {(row["task"], row["doc_id"]): {"likelihood": "", **row} for row in rows}
