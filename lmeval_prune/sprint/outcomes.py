"""The outcome matrix Z of SPRINT §3.1: which questions each attempt solves.

Rows are questions. Columns are the pool: the unpruned model (`dense`) and pruned heads. A cell is 1 (solved), 0 (not
solved) or unknown (not run). The store on disk also has the model's identity and all settings that answers depend on:

    store.json          model, tasks, settings, pool
    questions.parquet   task, split, doc_id, question, prompt (a digest), attributes (JSON)
    cells.parquet       task, split, doc_id, attempt, outcome, extracted answer, key in the answer store, length in
                        tokens, whether the answer was cut off (null if unknown)
    answers.*           the answer store, see `models/answer_store.py`
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lmeval_prune.artefacts import check_same, parse_json, read_artefact, read_table, write_artefact, write_table
from lmeval_prune.errors import InputError
from lmeval_prune.models.answer_store import cut_off_note, read_answers
from lmeval_prune.models.head_router import attempt_order

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/outcomes"
SCHEMA_VERSION = 3

_KEY = {"task": pa.string(), "split": pa.string(), "doc_id": pa.int32()}
_QUESTIONS = pa.schema({**_KEY, "question": pa.string(), "prompt": pa.string(), "attributes": pa.string()})
_ANSWER = {"extracted": pa.string(), "answer": pa.string(), "length": pa.int32(), "cut_off": pa.bool_()}
_CELLS = pa.schema({**_KEY, "attempt": pa.string(), "outcome": pa.bool_(), **_ANSWER})
_READ = [*_KEY, "attempt", "outcome", "length", "cut_off"]


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["task"], row["split"], row["doc_id"]


def question_field(tasks: dict[str, Any]) -> str | None:
    """Return the document field with the question, if all task settings have the same one."""
    names = {task["question_field"] for task in tasks.values() if "question_field" in task}
    return str(next(iter(names))) if len(names) == 1 else None


def check_tasks(
    subject: object, before: Mapping[str, Any], now: Mapping[str, Any], ignored: Iterable[str] = (), **remedy: str
) -> None:
    """Raise `InputError` if the settings of a task in both differ; warn if only the user's own code does.

    Not each change of a user's code matters to scores, and a sweep is dear.
    """
    for task in sorted(before.keys() & now.keys()):
        names = [name for name in {**before[task], **now[task]} if name not in ("code", *ignored)]
        old, new = ({task: {name: tasks[task].get(name) for name in names}} for tasks in (before, now))
        check_same(old, new, subject, **remedy)
        if len({tasks[task].get("code") or None for tasks in (before, now)} - {None}) > 1:
            logger.warning(
                "the code of %s has changed between sweeps: if scores depend on the change, they cannot be compared; "
                "sweep again into a new folder",
                task,
            )


@dataclass(frozen=True)
class Outcomes:
    """The matrix Z with its rows and columns.

    Attributes:
        z: shape (questions, pool): 1 solved, 0 not solved, NaN unknown.
        pool: names of the columns, attempts.
        questions: for each row its key, `question`, `prompt` (a digest) and `attributes`.
        model: identity of the model.
        tasks: settings of each task.
        tokens: lengths of the answers in tokens, (questions, pool); NaN unknown.
        cut: 1 where an answer was cut off, (questions, pool); NaN unknown.
    """

    z: np.ndarray
    pool: list[str]
    questions: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    tokens: np.ndarray | None = None
    cut: np.ndarray | None = None

    @property
    def warnings(self) -> list[str]:
        """Return why accuracies may mislead: columns of fewer questions, and answers that were cut off."""
        counts, warnings = self.observed.sum(0), []
        column = int(counts.argmin())
        if counts[column] < counts.max():
            warnings.append(
                f"columns have outcomes of different questions, e.g. {self.pool[column]} of {counts[column]} and not "
                f"{counts.max()}; `lmeval-prune sweep` at all questions gives the others"
            )
        limits = [(task.get("generation") or {}).get("max_gen_toks") or 0 for task in self.tasks.values()]
        share = 0.0 if self.cut is None or np.isnan(self.cut).all() else float(np.nanmean(self.cut))
        if note := cut_off_note({"cut_off": share, "max_gen_toks": max(limits, default=0)}):
            warnings.append(f"{note}; their accuracy reflects the limit, not the model")
        return warnings

    @property
    def observed(self) -> np.ndarray:
        """Return the mask of the cells with an outcome, shape (questions, pool)."""
        return ~np.isnan(self.z)

    @property
    def texts(self) -> list[str]:
        return [row["question"] for row in self.questions]

    def rows(self, indices: Sequence[int] | np.ndarray) -> Outcomes:
        questions = [self.questions[i] for i in indices] if self.questions else []
        return replace(self, questions=questions, **self._select(np.asarray(indices, int)))

    def columns(self, names: Sequence[str]) -> Outcomes:
        index = {name: i for i, name in enumerate(self.pool)}
        return replace(self, pool=list(names), **self._select((slice(None), [index[name] for name in names])))

    def _select(self, key: Any) -> dict[str, Any]:
        arrays = {"z": self.z, "tokens": self.tokens, "cut": self.cut}
        return {name: array[key] for name, array in arrays.items() if array is not None}

    def accuracy(self) -> np.ndarray:
        """Return the accuracy of each column over its observed cells, shape (pool,); NaN without any."""
        counts = self.observed.sum(0)
        return np.where(counts > 0, np.nansum(self.z, 0) / np.maximum(counts, 1), np.nan)


class OutcomeStore:
    """A folder with outcomes; the module docstring lists its files. Only one process of a run writes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.store_file = self.folder / "store.json"
        self.questions_file = self.folder / "questions.parquet"
        self.cells_file = self.folder / "cells.parquet"

    def read(self) -> Outcomes:
        """Read the outcomes of complete runs.

        A sweep announces tasks, questions and attempts when it begins, and stores its cells when it is finished: those
        without any cell are left out, with a warning.
        """
        content = self._content()
        questions = read_table(self.questions_file, _QUESTIONS).to_pylist()
        cells = self._cells(*_READ).to_pylist()
        if not questions or not cells:
            raise InputError(f"the outcome store {self.folder} is empty; run `lmeval-prune sweep` into it first")
        keys, attempts = {key_of(cell) for cell in cells}, {cell["attempt"] for cell in cells}
        rows = [row for row in questions if key_of(row) in keys]
        for row in rows:
            row["attributes"] = parse_json(row["attributes"], self.questions_file)
        pool = [name for name in content["pool"] if name in attempts]
        if any(without := (len(questions) - len(rows), len(content["pool"]) - len(pool))):
            unfinished = "%s: %d questions and %d attempts of a sweep that was not finished are left out"
            logger.warning(unfinished, self.folder, *without)
        row_of = {key_of(row): i for i, row in enumerate(rows)}
        column_of = {name: i for i, name in enumerate(pool)}
        positions = ([row_of[key_of(cell)] for cell in cells], [column_of[cell["attempt"]] for cell in cells])

        def matrix(name: str, kind: Any) -> np.ndarray:
            values = np.full((len(rows), len(pool)), np.nan, kind)
            values[positions] = np.array([np.nan if cell[name] is None else cell[name] for cell in cells], kind)
            return values

        tasks = {name: task for name, task in content["tasks"].items() if any(name == key[0] for key in keys)}
        z, tokens, cut = matrix("outcome", np.float32), matrix("length", np.float64), matrix("cut_off", np.float32)
        return Outcomes(z, pool, rows, content["model"], tasks, tokens, cut)

    def cells(self) -> list[dict[str, Any]]:
        """Read all cells, each with the `text` and `tokens` of its answer."""
        answers = {record["key"]: record for record in read_answers(self.folder)}
        cells: list[dict[str, Any]] = self._cells(*_CELLS.names).to_pylist()
        for cell in cells:
            answer = answers.get(cell["answer"], {})
            cell |= {"text": answer.get("response"), "tokens": answer.get("tokens")}
        return cells

    def begin(
        self, model: dict[str, Any], tasks: dict[str, Any], questions: list[dict[str, Any]], pool: Sequence[str]
    ) -> None:
        """Create the store, or extend it; `InputError` if its model, settings or prompts are other ones."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows: dict[tuple[str, str, int], dict[str, Any]] = {}
        if self.store_file.exists():
            content = self._content()
            first, before = content["model"], content["tasks"]
            known, new = first.get("adapters", {}), model.get("adapters", {})
            shared = known.keys() & new.keys()
            # a folder may be renamed, and `rounded` follows from the weights; a sweep may bring further adapters
            old, now = (
                {**each, "name": "", "rounded": [], "adapters": {name: adapters[name] for name in shared}}
                for each, adapters in ((first, known), (model, new))
            )
            check_same({"model": old}, {"model": now}, self.folder)
            model = {**model, **first, **({"adapters": dict(sorted({**known, **new}.items()))} if new else {})}
            check_tasks(self.folder, before, tasks)
            # the code stays that of the first outcomes, so that each later sweep warns
            tasks = tasks | {name: {**tasks.get(name, {}), **own} for name, own in before.items()}
            pool = [*content["pool"], *pool]
            rows = {key_of(row): row for row in read_table(self.questions_file, _QUESTIONS).to_pylist()}
        for row in questions:
            key = task, split, doc_id = key_of(row)
            if key in rows and rows[key]["prompt"] != row["prompt"]:
                raise InputError(
                    f"{self.folder}: the prompt of document {doc_id} of {task} ({split}) has changed; give a new folder"
                )
            rows[key] = {**row, "attributes": json.dumps(row["attributes"], sort_keys=True, ensure_ascii=False)}
        content = {"model": model, "tasks": dict(sorted(tasks.items())), "pool": attempt_order(pool)}
        write_artefact(self.store_file, SCHEMA, SCHEMA_VERSION, content)
        write_table(self.questions_file, pa.Table.from_pylist([rows[key] for key in sorted(rows)], _QUESTIONS))

    def add(self, cells: Iterable[dict[str, Any]]) -> None:
        rows = {(key_of(row), row["attempt"]): row for row in [*self._cells(*_CELLS.names).to_pylist(), *cells]}
        rank = {attempt: i for i, attempt in enumerate(attempt_order(attempt for _, attempt in rows))}
        ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0], rank[key[1]]))]
        write_table(self.cells_file, pa.Table.from_pylist(ordered, _CELLS))

    def _content(self) -> dict[str, Any]:
        return read_artefact(self.store_file, SCHEMA, SCHEMA_VERSION)[0]

    def _cells(self, *columns: str) -> pa.Table:
        return read_table(self.cells_file, pa.schema([_CELLS.field(name) for name in columns]))
