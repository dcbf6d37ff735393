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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from typing_extensions import TypedDict

from lmeval_prune.artefacts import check_same, parse_json, read_artefact, write_artefact
from lmeval_prune.errors import InputError
from lmeval_prune.models.answer_store import read_answers, read_table, write_table
from lmeval_prune.models.attempts import attempt_order
from lmeval_prune.models.lengths import Ending, cut_off_note, merge_lengths, summarize_lengths

logger = logging.getLogger(__name__)
SCHEMA = "lmeval-prune/outcomes"
SCHEMA_VERSION = 3

ANSWER_SETTINGS = ("generation", "num_fewshot", "chat_template", "system_instruction")  # others are of their scoring

_KEY = {"task": pa.string(), "split": pa.string(), "doc_id": pa.int32()}
_QUESTIONS = pa.schema({**_KEY, "question": pa.string(), "prompt": pa.string(), "attributes": pa.string()})
_ANSWER = {"extracted": pa.string(), "answer": pa.string(), "length": pa.int32(), "cut_off": pa.bool_()}
_CELLS = pa.schema({**_KEY, "attempt": pa.string(), "outcome": pa.bool_(), **_ANSWER})
_READ = ("attempt", "outcome", "length", "cut_off")


class TaskSettings(TypedDict, total=False):
    """Settings of a task; the outcomes depend on all others, which are any JSON."""

    scored_splits: list[str]  # what the task scores, see `tasks/splits.py`
    code: str  # digest of the user's own code


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's settings without a user's own code: its folder may be moved, and not each change matters."""
    compared = {key: value for key, value in settings.items() if key != "code"}
    scoring = settings.get("scoring")
    return {**compared, "scoring": scoring.rpartition("/")[2]} if scoring else compared


def warn_of_other_code(task: str, settings: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Warn if outcomes of a task were scored by another state of a user's own code."""
    if settings.get("code") and others.get("code") and settings["code"] != others["code"]:
        logger.warning(
            "the code of %s has changed between sweeps: if scores depend on the change, they cannot be compared; "
            "sweep again into a new folder",
            task,
        )


class StoreContents(TypedDict):
    """Fields of `store.json`."""

    pool: list[str]
    model: dict[str, Any]
    tasks: dict[str, TaskSettings]


class Question(NamedTuple):
    """Key of a question: task, split and the document's index in the split."""

    task: str
    split: str
    doc_id: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Question:
        """Return the key of a table row."""
        return cls(row["task"], row["split"], row["doc_id"])


def question_field(tasks: dict[str, Any]) -> str | None:
    """Return the document field with the question, if all task settings have the same one."""
    names = {task["question_field"] for task in tasks.values() if "question_field" in task}
    return str(next(iter(names))) if len(names) == 1 else None


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

    @cached_property
    def lengths(self) -> dict[str, Any]:
        """Return the lengths of all answers, as in `models/lengths.py`; empty if they are not known."""
        if self.tokens is None or self.cut is None:
            return {}
        endings: dict[str, list[Ending | None]] = defaultdict(list)
        for row, column in np.argwhere(self.observed):
            length, cut = self.tokens[row, column], self.cut[row, column]
            ending = None if np.isnan(length) or np.isnan(cut) else Ending(int(length), bool(cut))
            endings[self.questions[row]["task"]].append(ending)
        limits = {name: ((self.tasks.get(name) or {}).get("generation") or {}).get("max_gen_toks") for name in endings}
        return merge_lengths([summarize_lengths(of_task, limits[name]) for name, of_task in endings.items()])

    @property
    def cut_off(self) -> str:
        """Return a warning if many answers were cut off; else empty."""
        return cut_off_note(self.lengths) if self.lengths else ""

    @property
    def observed(self) -> np.ndarray:
        """Return the mask of the cells with an outcome, shape (questions, pool)."""
        return ~np.isnan(self.z)

    @property
    def uneven(self) -> str:
        """Return a warning if some columns lack outcomes that others have; else empty."""
        counts = self.observed.sum(0)
        column = int(counts.argmin())
        if counts[column] == counts.max():
            return ""
        return (
            f"{(counts < counts.max()).sum()} of {len(self.pool)} columns have outcomes of fewer questions, e.g. "
            f"{self.pool[column]} of {counts[column]} and not {counts.max()}: accuracies of different "
            f"questions are compared; `lmeval-prune sweep` at all questions gives the others"
        )

    @property
    def texts(self) -> list[str]:
        """Return the texts of the questions."""
        return [row["question"] for row in self.questions]

    def rows(self, indices: Sequence[int] | np.ndarray) -> Outcomes:
        """Select questions."""
        questions = [self.questions[i] for i in indices] if self.questions else []
        return replace(self, questions=questions, **self._select(np.asarray(indices, int)))

    def columns(self, names: Sequence[str]) -> Outcomes:
        """Select columns in the given order."""
        index = {name: i for i, name in enumerate(self.pool)}
        chosen = (slice(None), [index[name] for name in names])
        return replace(self, pool=list(names), **self._select(chosen))

    def _select(self, key: Any) -> dict[str, Any]:
        arrays = {name: getattr(self, name) for name in ("z", "tokens", "cut")}
        return {name: array[key] for name, array in arrays.items() if array is not None}

    def accuracy(self) -> np.ndarray:
        """Return the accuracy of each column over its observed cells, shape (pool,); NaN without any."""
        counts = self.observed.sum(0)
        return np.where(counts > 0, np.nansum(self.z, 0) / np.maximum(counts, 1), np.nan)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Return the row of each question text; `InputError` if two rows have the same text."""
        rows = {text: i for i, text in enumerate(self.texts)}
        if len(rows) < len(self.texts):
            raise InputError("the outcome store has the same question twice, so its outcome is ambiguous")
        return rows


class OutcomeStore:
    """A folder with outcomes; the module docstring lists its files.

    Args:
        folder: path of the store.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.store_file = self.folder / "store.json"
        self.questions_file = self.folder / "questions.parquet"
        self.cells_file = self.folder / "cells.parquet"

    def read(self) -> Outcomes:
        """Read the outcomes of complete runs."""
        content = self.check()
        questions = read_table(self.questions_file, _QUESTIONS).to_pylist()
        cells = self._cells([*_KEY, *_READ]).to_pylist()
        if not questions or not cells:
            raise InputError(f"the outcome store {self.folder} is empty; run `lmeval-prune sweep` into it first")
        for row in questions:
            row["attributes"] = parse_json(row["attributes"], "questions.parquet")
        content, questions = self._finished(content, questions, cells)
        return _outcomes(content, questions, cells)

    def _finished(
        self, content: dict[str, Any], questions: list[dict[str, Any]], cells: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Leave out tasks, questions and attempts without any cell; warn of them.

        A sweep announces them when it begins, and stores its cells when it is finished.
        """
        keys, attempts = {Question.of(cell) for cell in cells}, {cell["attempt"] for cell in cells}
        rows = [row for row in questions if Question.of(row) in keys]
        pool = [name for name in content["pool"] if name in attempts]
        without = len(questions) - len(rows), len(content["pool"]) - len(pool)
        if any(without):
            logger.warning(
                "%s: %d questions and %d attempts of a sweep that was not finished are left out", self.folder, *without
            )
        answered = {key.task for key in keys}
        tasks = {name: task for name, task in content["tasks"].items() if name in answered}
        return {**content, "pool": pool, "tasks": tasks}, rows

    def cells(self) -> list[dict[str, Any]]:
        """Read all cells, each with the `text` and `tokens` of its answer."""
        answers = {record["key"]: record for record in read_answers(self.folder)}
        cells: list[dict[str, Any]] = self._cells().to_pylist()
        for cell in cells:
            answer = answers.get(cell["answer"], {})
            cell |= {"text": answer.get("response"), "tokens": answer.get("tokens")}
        return cells

    def check(self) -> dict[str, Any]:
        """Read `store.json`."""
        content, _ = read_artefact(self.store_file, SCHEMA, SCHEMA_VERSION, StoreContents)
        return content

    def begin(
        self,
        model: dict[str, Any],
        tasks: dict[str, Any],
        questions: list[dict[str, Any]],
        pool: Sequence[str],
    ) -> None:
        """Create the store, or extend it after a check that model and settings are the same.

        Only one process of a run calls this.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        rows: dict[Question, dict[str, Any]] = {}
        if self.store_file.exists():
            content = self.check()
            model = _merge_models(self.folder, content["model"], model)
            tasks = _merge_tasks(self.folder, content["tasks"], tasks)
            pool = [*content["pool"], *pool]
            rows = {Question.of(row): row for row in read_table(self.questions_file, _QUESTIONS).to_pylist()}
        for row in questions:
            key = Question.of(row)
            if key in rows and rows[key]["prompt"] != row["prompt"]:
                raise InputError(
                    f"{self.folder}: the prompt of document {key.doc_id} of {key.task} ({key.split}) has changed; give "
                    f"a new folder"
                )
            attributes = json.dumps(row["attributes"], sort_keys=True, ensure_ascii=False)
            rows[key] = {**row, "attributes": attributes}
        content = {"model": model, "tasks": dict(sorted(tasks.items())), "pool": attempt_order(pool)}
        write_artefact(self.store_file, SCHEMA, SCHEMA_VERSION, content)
        table = pa.Table.from_pylist([rows[key] for key in sorted(rows)], _QUESTIONS)
        write_table(self.questions_file, table)

    def add(self, cells: Iterable[dict[str, Any]]) -> None:
        """Write outcomes; they replace those of the same cells. Only one process of a run calls this."""
        rows: dict[tuple[Question, str], dict[str, Any]] = {}
        for row in [*self._cells().to_pylist(), *cells]:
            rows[Question.of(row), row["attempt"]] = row
        rank = {attempt: i for i, attempt in enumerate(attempt_order(attempt for _, attempt in rows))}
        ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0], rank[key[1]]))]
        write_table(self.cells_file, pa.Table.from_pylist(ordered, _CELLS))

    def _cells(self, columns: list[str] | None = None) -> pa.Table:
        names = columns or _CELLS.names
        return read_table(self.cells_file, pa.schema([_CELLS.field(name) for name in names]), names)


def _outcomes(content: dict[str, Any], questions: list[dict[str, Any]], cells: list[dict[str, Any]]) -> Outcomes:
    pool = content["pool"]
    row_of = {Question.of(row): i for i, row in enumerate(questions)}
    column_of = {name: i for i, name in enumerate(pool)}
    positions = ([row_of[Question.of(cell)] for cell in cells], [column_of[cell["attempt"]] for cell in cells])

    def matrix(name: str, empty: Any, kind: Any) -> np.ndarray:
        values = np.full((len(questions), len(pool)), empty, kind)
        values[positions] = np.array([empty if cell[name] is None else cell[name] for cell in cells], kind)
        return values

    return Outcomes(
        matrix("outcome", np.nan, np.float32),
        pool,
        questions,
        content["model"],
        content["tasks"],
        matrix("length", np.nan, np.float64),
        matrix("cut_off", np.nan, np.float32),
    )


def _merge_models(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return a store's model identity with new adapters added; `InputError` if it is another model or backend."""
    old, new = before.get("adapters", {}), now.get("adapters", {})
    shared = old.keys() & new.keys()
    # a folder may be renamed, and `rounded` follows from the weights
    first, second = (
        {**model, "name": "", "rounded": [], "adapters": {name: adapters[name] for name in shared}}
        for model, adapters in ((before, old), (now, new))
    )
    check_same({"model": first}, {"model": second}, folder)
    return {**now, **before, **({"adapters": dict(sorted({**old, **new}.items()))} if new else {})}


def _merge_tasks(folder: Path, stored: dict[str, Any], tasks: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a store's tasks with those of a sweep; `InputError` if a task has other ones."""
    merged = {**stored, **tasks}
    for task in stored.keys() & tasks.keys():
        before = stored[task]
        check_same({task: comparable(before)}, {task: comparable(tasks[task])}, folder)
        warn_of_other_code(task, before, tasks[task])
        if "code" in before:  # of the first outcomes, so that each later sweep warns
            merged[task] = {**tasks[task], "code": before["code"]}
    return merged
