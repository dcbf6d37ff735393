"""The outcome matrix Z of SPRINT §3.1: which questions each pruned head solves.

Rows are questions. Columns are the pool: the unpruned model (`dense`) and each pruned head. A cell is 1 (solved), 0
(not solved) or unknown (not run). The store on disk also has the model's identity and all settings that answers depend
on:

    store.json          model, tasks, settings and pool
    questions.parquet   task, split, doc_id, question, prompt (a digest), attributes (JSON)
    cells.parquet       task, split, doc_id, head, outcome, extracted answer, key in the answer store, length in tokens,
                        whether the answer was cut off (null if unknown)
    answers.*           the answer store, see `models/answer_store.py`
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from typing_extensions import TypedDict

from lmeval_prune.architectures import Head
from lmeval_prune.artefacts import parse_json, read_artefact, write_artefact
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.models.answer_store import FILES, read_answers, read_table, write_table
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.models.identity import describe_version_change
from lmeval_prune.models.lengths import Ending, cut_off_note, merge_lengths, summarize_lengths

SCHEMA = "lmeval-prune/outcomes"
SCHEMA_VERSION = 2  # version 1 had the texts of answers in cells.parquet

_KEY = {"task": pa.string(), "split": pa.string(), "doc_id": pa.int32()}
_QUESTIONS = pa.schema({**_KEY, "question": pa.string(), "prompt": pa.string(), "attributes": pa.string()})
_ANSWER = {"extracted": pa.string(), "answer": pa.string(), "length": pa.int32(), "cut_off": pa.bool_()}
_CELLS = pa.schema({**_KEY, "head": pa.string(), "outcome": pa.bool_(), **_ANSWER})


class StoreContents(TypedDict):
    """Fields of `store.json`."""

    pool: list[str]
    model: dict[str, Any]
    tasks: dict[str, dict[str, Any]]


class Question(NamedTuple):
    """Key of a question: task, split and the document's index in the split."""

    task: str
    split: str
    doc_id: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Question:
        """Return the key of a table row."""
        return cls(row["task"], row["split"], row["doc_id"])


def pool_order(columns: Iterable[str]) -> list[str]:
    """Sort the unique columns: dense first, then by layer and head."""
    return sorted(set(columns), key=lambda column: Head("", -1, -1) if column == DENSE else Head.named(column))


def question_field(tasks: dict[str, Any]) -> str | None:
    """Return the document field with the question, if all task settings have the same one."""
    names = {task["question_field"] for task in tasks.values() if "question_field" in task}
    return str(next(iter(names))) if len(names) == 1 else None


@dataclass(frozen=True)
class Outcomes:
    """The matrix Z with its rows and columns.

    Attributes:
        z: shape (questions, pool): 1 solved, 0 not solved, NaN unknown.
        pool: names of the columns.
        questions: for each row its key, `question`, `prompt` (a digest) and `attributes`.
        model: identity of the model.
        tasks: settings of each task.
        lengths: lengths of all answers, as in `models/lengths.py`.
    """

    z: np.ndarray
    pool: list[str]
    questions: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)

    @property
    def cut_off(self) -> str:
        """A warning if many answers were cut off; else empty."""
        return cut_off_note(self.lengths) if self.lengths else ""

    @property
    def observed(self) -> np.ndarray:
        """Mask of the cells with an outcome, shape (questions, pool)."""
        return ~np.isnan(self.z)

    @property
    def texts(self) -> list[str]:
        """Texts of the questions."""
        return [row["question"] for row in self.questions]

    def rows(self, indices: Sequence[int] | np.ndarray) -> Outcomes:
        """Select questions."""
        questions = [self.questions[i] for i in indices] if self.questions else []
        return replace(self, z=self.z[np.asarray(indices)], questions=questions)

    def columns(self, names: Sequence[str]) -> Outcomes:
        """Select columns in the given order.

        Raises:
            InputError: a name is not in the pool.
        """
        missing = [name for name in names if name not in self.pool]
        if missing:
            raise InputError(f"the outcome store has no column {missing[0]}; it has {', '.join(self.pool)}")
        return replace(self, z=self.z[:, [self.pool.index(name) for name in names]], pool=list(names))

    def accuracy(self) -> np.ndarray:
        """Return the accuracy of each column over its observed cells, shape (pool,); NaN without any."""
        counts = self.observed.sum(0)
        return np.where(counts > 0, np.nansum(self.z, 0) / np.maximum(counts, 1), np.nan)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Row of each question text; `InputError` if two rows have the same text."""
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

    def read(self) -> Outcomes:
        """Read the outcomes of complete runs.

        Raises:
            InputError: the folder is not an outcome store, or the store is empty or damaged.
        """
        content = self.check()
        if not (self.folder / "cells.parquet").is_file():
            raise InputError(f"{self.folder} has no outcomes yet; run `lmeval-prune sweep` to its end first")
        questions = self._table("questions", _QUESTIONS).to_pylist()
        cells = self._table("cells", _CELLS, [*_KEY, "head", "outcome", "length", "cut_off"]).to_pylist()
        if not questions or not cells:
            raise InputError(f"the outcome store {self.folder} is empty; run `lmeval-prune sweep` into it first")
        try:
            pool = content["pool"]
            for row in questions:
                row["attributes"] = parse_json(row["attributes"], "questions.parquet")
            row_of = {Question.of(row): i for i, row in enumerate(questions)}
            column_of = {name: i for i, name in enumerate(pool)}
            rows = [row_of[Question.of(cell)] for cell in cells]
            columns = [column_of[cell["head"]] for cell in cells]
            z = np.full((len(questions), len(pool)), np.nan, np.float32)
            z[rows, columns] = np.array([cell["outcome"] for cell in cells], np.float32)  # None becomes NaN
            return Outcomes(z, pool, questions, content["model"], content["tasks"], _lengths(cells, content["tasks"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.folder} is damaged: its files are inconsistent ({first_line(error)}); give a new folder"
            ) from None

    def cells(self) -> list[dict[str, Any]]:
        """Read all cells, each with the `text` and `tokens` of its answer."""
        answers = {record["key"]: record for record in read_answers(self.folder)}
        cells: list[dict[str, Any]] = self._table("cells", _CELLS).to_pylist()
        for cell in cells:
            answer = answers.get(cell["answer"], {})
            cell |= {"text": answer.get("response"), "tokens": answer.get("tokens")}
        return cells

    def check(self) -> dict[str, Any]:
        """Read `store.json`.

        Raises:
            InputError: the folder is not an outcome store.
        """
        if self.folder.is_file():
            raise InputError(f"{self.folder} is a file; an outcome store is a folder")
        if not self.store_file.is_file():
            raise InputError(
                f"{self.folder} is not an outcome store (no store.json); write one with `lmeval-prune sweep`"
            )
        content, _ = read_artefact(self.store_file, SCHEMA, SCHEMA_VERSION, StoreContents)
        if content["schema_version"] < SCHEMA_VERSION:
            raise InputError(
                f"{self.folder} was written by an older lmeval-prune; rewrite it by `lmeval-prune migrate "
                f"{self.folder} --output FOLDER`, or sweep into a new folder"
            )
        return content

    def begin(
        self, model: dict[str, Any], tasks: dict[str, Any], questions: list[dict[str, Any]], pool: Sequence[str]
    ) -> None:
        """Create the store, or extend it after a check that model and settings are the same.

        Only one process of a run calls this.

        Raises:
            InputError: the store has another model or other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        foreign = [path.name for path in self.folder.iterdir() if not path.name.startswith((".", *FILES))]
        rows: dict[Question, dict[str, Any]] = {}
        if self.store_file.exists():
            content = self.check()
            model = _merge_models(self.folder, content["model"], model)
            for task in content["tasks"].keys() & tasks.keys():
                _refuse_difference(self.folder, f"task {task}", content["tasks"][task], tasks[task])
            tasks, pool = {**content["tasks"], **tasks}, [*content["pool"], *pool]
            rows = {Question.of(row): row for row in self._table("questions", _QUESTIONS).to_pylist()}
        elif foreign:
            raise InputError(f"{self.folder} holds {foreign[0]} and is not an outcome store; give a new folder")
        for row in questions:
            key = Question.of(row)
            if key in rows and rows[key]["prompt"] != row["prompt"]:
                raise InputError(
                    f"{self.folder}: the prompt of document {key.doc_id} of {key.task} ({key.split}) has changed; give "
                    f"a new folder"
                )
            attributes = json.dumps(row["attributes"], sort_keys=True, ensure_ascii=False)
            rows[key] = {**row, "attributes": attributes}
        content = {"model": model, "tasks": dict(sorted(tasks.items())), "pool": pool_order(pool)}
        write_artefact(self.store_file, SCHEMA, SCHEMA_VERSION, content)
        table = pa.Table.from_pylist([rows[key] for key in sorted(rows)], _QUESTIONS)
        write_table(self.folder / "questions.parquet", table)

    def add(self, cells: Iterable[dict[str, Any]]) -> None:
        """Write outcomes; they replace those of the same cells. Only one process of a run calls this."""
        rows = {(Question.of(row), row["head"]): row for row in [*self._table("cells", _CELLS).to_pylist(), *cells]}
        rank = {head: i for i, head in enumerate(pool_order(head for _, head in rows))}
        ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0], rank[key[1]]))]
        write_table(self.folder / "cells.parquet", pa.Table.from_pylist(ordered, _CELLS))

    def _table(self, name: str, schema: pa.Schema, columns: list[str] | None = None) -> pa.Table:
        return read_table(self.folder / f"{name}.parquet", schema, columns)


def _lengths(cells: list[dict[str, Any]], tasks: dict[str, Any]) -> dict[str, Any]:
    """Summarise the lengths of the cells' answers, and how many were cut off."""
    endings: dict[str, list[Ending | None]] = defaultdict(list)
    for cell in cells:
        is_complete = None not in (cell["length"], cell["cut_off"])
        endings[cell["task"]].append(Ending(cell["length"], cell["cut_off"]) if is_complete else None)
    limits = {name: ((tasks.get(name) or {}).get("generation") or {}).get("max_gen_toks") for name in endings}
    return merge_lengths([summarize_lengths(task_endings, limits[name]) for name, task_endings in endings.items()])


def _merge_models(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return a store's model identity with new adapters added; `InputError` if it is another model or backend."""
    backends = [f"{model.get('server', 'this machine')} in {model.get('dtype')}" for model in (before, now)]
    if backends[0] != backends[1] and "server" in {**before, **now}:
        raise InputError(
            f"{folder} has outcomes computed by {backends[0]}, these are by {backends[1]}: give a new folder"
        )
    if before.get("versions") != now.get("versions"):
        reason = describe_version_change(before.get("versions"), now.get("versions") or {})
        raise InputError(f"{folder} has outcomes that {reason}: give a new folder")
    old, new = before.get("adapters", {}), now.get("adapters", {})
    shared = old.keys() & new.keys()
    _refuse_difference(folder, "adapter", *({name: adapters[name] for name in shared} for adapters in (old, new)))
    # a folder may be renamed, and `rounded` follows from the weights
    ignored = {"name": "", "rounded": [], "adapters": {}}
    _refuse_difference(folder, "model", {**before, **ignored}, {**now, **ignored})
    return {**now, **before, **({"adapters": dict(sorted({**old, **new}.items()))} if new else {})}


def _refuse_difference(folder: Path, subject: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            old, new = (str(value.get(key))[:60] for value in (before, now))
            raise InputError(f"{folder} was made with another {subject} ({key}: {old}, now {new}); give a new folder")
