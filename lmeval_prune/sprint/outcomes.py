"""The outcome matrix Z: questions solved by pruned head (SPRINT §3.1).

Rows are questions, columns the pool: the unpruned model (`dense`) and one column for each pruned head. A cell is
1 (solved), 0, or unknown until it was run. The store on disk also keeps the model's identity and every setting that
answers depend on; the answers themselves are in the answer store in the same folder:

    store.json          what model, tasks and settings; which columns
    questions.parquet   task, split, doc_id, question, prompt, attributes (JSON)
    cells.parquet       task, split, doc_id, head, outcome, extracted, answer (its key in the answer store), its length
                        in tokens and whether it was cut off (null: not known)
    answers.*           see `models/answer_store.py`
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
SCHEMA_VERSION = 2  # 1: texts in the table of cells


class Contents(TypedDict):
    """Fields of `store.json`."""

    pool: list[str]
    model: dict[str, Any]
    tasks: dict[str, dict[str, Any]]


class Question(NamedTuple):
    """Key of a question: task, split, and the document's number in that split."""

    task: str
    split: str
    doc_id: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Question:
        """Return the key of a row of the store's tables."""
        return cls(row["task"], row["split"], row["doc_id"])


def pool_order(columns: Iterable[str]) -> list[str]:
    """Sort columns in the order of the pool: dense first, then by layer and head; each once."""
    return sorted(set(columns), key=lambda column: Head("", -1, -1) if column == DENSE else Head.named(column))


@dataclass(frozen=True)
class Outcomes:
    """The matrix Z with its rows and columns.

    Attributes:
        z: shape (questions, pool), 1 solved, 0 not, NaN unknown.
        pool: names of the columns.
        questions: row by row the key, and `question`, `prompt` (a digest) and `attributes`.
        model: identity of the model.
        tasks: settings of each task.
        lengths: of all answers of the store; see `models/lengths.py`.
    """

    z: np.ndarray
    pool: list[str]
    questions: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)

    @property
    def cut_off(self) -> str:
        """Sentence on answers that were cut off, if they are many; else empty."""
        return cut_off_note(self.lengths) if self.lengths else ""

    @property
    def known(self) -> np.ndarray:
        """Mask of the known cells; shape as `z`."""
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
        """Select columns, in this order.

        Raises:
            InputError: one is not in the pool.
        """
        missing = [name for name in names if name not in self.pool]
        if missing:
            raise InputError(f"the outcome store has no column {missing[0]}; it has {', '.join(self.pool)}")
        return replace(self, z=self.z[:, [self.pool.index(name) for name in names]], pool=list(names))

    def accuracy(self) -> np.ndarray:
        """Return the share of solved questions among the known ones, by column; NaN where none is known."""
        known = self.known.sum(0)
        return np.where(known > 0, np.nansum(self.z, 0) / np.maximum(known, 1), np.nan)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Row of each question's text.

        Raises:
            InputError: several rows have the same text.
        """
        rows = {text: i for i, text in enumerate(self.texts)}
        if len(rows) < len(self.texts):
            raise InputError("several rows of the outcome store have the same question: which is meant is not clear")
        return rows

    @property
    def question_field(self) -> str | None:
        """Field of the tasks' documents that holds the question, if it is one and the same in all of them."""
        return question_field(self.tasks)


def question_field(tasks: dict[str, Any]) -> str | None:
    """Return the field that holds the question by the settings of tasks, if it is the same in all of them."""
    names = {task["question_field"] for task in tasks.values() if "question_field" in task}
    return str(next(iter(names))) if len(names) == 1 else None


_KEY = {"task": pa.string(), "split": pa.string(), "doc_id": pa.int32()}
_QUESTIONS = pa.schema({**_KEY, "question": pa.string(), "prompt": pa.string(), "attributes": pa.string()})
_ANSWER = {"extracted": pa.string(), "answer": pa.string(), "length": pa.int32(), "cut_off": pa.bool_()}
_CELLS = pa.schema({**_KEY, "head": pa.string(), "outcome": pa.bool_(), **_ANSWER})


class OutcomeStore:
    """A folder with outcomes; see the module's description.

    Args:
        folder: of the store.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.about = self.folder / "store.json"

    # ------------------------------------------------------------------ reading

    def read(self) -> Outcomes:
        """Read the outcomes. Those of a run that has not ended are left out.

        Raises:
            InputError: the folder is not a store, or it is empty or broken.
        """
        about = self.check()
        if not (self.folder / "cells.parquet").is_file():
            raise InputError(f"{self.folder} has no outcomes yet; run `lmeval-prune sweep` to its end first")
        questions = self._table("questions", _QUESTIONS).to_pylist()
        cells = self._table("cells", _CELLS, [*_KEY, "head", "outcome", "length", "cut_off"]).to_pylist()
        if not questions or not cells:
            raise InputError(f"the outcome store {self.folder} is empty; run `lmeval-prune sweep` into it first")
        try:
            pool = about["pool"]
            for row in questions:
                row["attributes"] = parse_json(row["attributes"], "questions.parquet")
            z = np.full((len(questions), len(pool)), np.nan, np.float32)
            row_of = {Question.of(row): i for i, row in enumerate(questions)}
            column_of = {name: i for i, name in enumerate(pool)}
            rows = [row_of[Question.of(cell)] for cell in cells]
            columns = [column_of[cell["head"]] for cell in cells]
            z[rows, columns] = np.array([cell["outcome"] for cell in cells], np.float32)  # None becomes NaN
            return Outcomes(z, pool, questions, about["model"], about["tasks"], _lengths(cells, about["tasks"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.folder} is damaged: its files do not fit together ({first_line(error)}); give a new folder"
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
            InputError: the folder is not a store.
        """
        if self.folder.is_file():
            raise InputError(f"{self.folder} is a file; an outcome store is a folder")
        if not self.about.is_file():
            raise InputError(
                f"{self.folder} is not an outcome store (no store.json); write one with `lmeval-prune sweep`"
            )
        content, _ = read_artefact(self.about, SCHEMA, SCHEMA_VERSION, Contents)
        if content["schema_version"] < SCHEMA_VERSION:
            raise InputError(f"{self.folder} was written by an older lmeval-prune; sweep into a new folder")
        return content

    def _table(self, name: str, schema: pa.Schema, columns: list[str] | None = None) -> pa.Table:
        return read_table(self.folder / f"{name}.parquet", schema, columns)

    # ------------------------------------------------------------------ writing

    def begin(
        self, model: dict[str, Any], tasks: dict[str, Any], questions: list[dict[str, Any]], pool: Sequence[str]
    ) -> None:
        """Prepare a run: make the store or check that it is of this model and these settings, and extend it.

        Only one process of a run calls this.

        Raises:
            InputError: the store is of another model or was made with other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        foreign = [path.name for path in self.folder.iterdir() if not path.name.startswith((".", *FILES))]
        rows: dict[Question, dict[str, Any]] = {}
        if self.about.exists():
            about = self.check()
            model = _merge_models(self.folder, about["model"], model)
            for task in about["tasks"].keys() & tasks.keys():
                _refuse_difference(self.folder, f"task {task}", about["tasks"][task], tasks[task])
            tasks, pool = {**about["tasks"], **tasks}, [*about["pool"], *pool]
            rows = {Question.of(row): row for row in self._table("questions", _QUESTIONS).to_pylist()}
        elif foreign:
            raise InputError(f"{self.folder} holds {foreign[0]} and is not an outcome store; give a new folder")
        for row in questions:
            key = Question.of(row)
            if key in rows and rows[key]["prompt"] != row["prompt"]:
                raise InputError(
                    f"{self.folder}: the prompt of document {key.doc_id} of {key.task} ({key.split}) is another one "
                    f"now; give a new folder"
                )
            attributes = json.dumps(row["attributes"], sort_keys=True, ensure_ascii=False)
            rows[key] = {**row, "attributes": attributes}
        content = {"model": model, "tasks": dict(sorted(tasks.items())), "pool": pool_order(pool)}
        write_artefact(self.about, SCHEMA, SCHEMA_VERSION, content)
        table = pa.Table.from_pylist([rows[key] for key in sorted(rows)], _QUESTIONS)
        write_table(self.folder / "questions.parquet", table)

    def add(self, cells: Iterable[dict[str, Any]]) -> None:
        """Write outcomes; new ones replace old ones of the same cell. Only one process of a run calls this."""
        rows = {(Question.of(row), row["head"]): row for row in [*self._table("cells", _CELLS).to_pylist(), *cells]}
        rank = {head: i for i, head in enumerate(pool_order(head for _, head in rows))}
        ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[0], rank[key[1]]))]
        write_table(self.folder / "cells.parquet", pa.Table.from_pylist(ordered, _CELLS))


def _lengths(cells: list[dict[str, Any]], tasks: dict[str, Any]) -> dict[str, Any]:
    """Summarise how long the answers of cells are, and how many were cut off."""
    endings: dict[str, list[Ending | None]] = defaultdict(list)
    for cell in cells:
        known = None not in (cell["length"], cell["cut_off"])
        endings[cell["task"]].append(Ending(cell["length"], cell["cut_off"]) if known else None)
    limits = {name: ((tasks.get(name) or {}).get("generation") or {}).get("max_gen_toks") for name in endings}
    return merge_lengths(
        [summarize_lengths(endings_of_task, limits[name]) for name, endings_of_task in endings.items()]
    )


def _merge_models(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a store's model, with adapters that are new.

    Raises:
        InputError: the model is another one, or is computed elsewhere or in another type.
    """
    how = [f"{model.get('server', 'this machine')} in {model.get('dtype')}" for model in (before, now)]
    if how[0] != how[1] and "server" in {**before, **now}:
        raise InputError(f"{folder} has outcomes computed by {how[0]}, these are by {how[1]}: give a new folder")
    if before.get("versions") != now.get("versions"):
        reason = describe_version_change(before.get("versions"), now.get("versions") or {})
        raise InputError(f"{folder} has outcomes that {reason}: give a new folder")
    old, new = before.get("adapters", {}), now.get("adapters", {})
    shared = old.keys() & new.keys()
    _refuse_difference(folder, "adapter", *({name: adapters[name] for name in shared} for adapters in (old, new)))
    # a folder may be renamed; the weights determine their roundings
    plain = {"name": "", "rounded": [], "adapters": {}}
    _refuse_difference(folder, "model", {**before, **plain}, {**now, **plain})
    return {**now, **before, **({"adapters": dict(sorted({**old, **new}.items()))} if new else {})}


def _refuse_difference(folder: Path, what: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            old, new = (str(value.get(key))[:60] for value in (before, now))
            raise InputError(f"{folder} was made with another {what} ({key}: {old}, now {new}); give a new folder")
