"""The outcome matrix Z: which question is solved with which head pruned (SPRINT §3.1).

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from typing_extensions import TypedDict

from lmeval_prune.architectures import Head
from lmeval_prune.artefacts import from_json, read_artefact, write_artefact
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.models.answer_store import FILES, read_answers, read_table, write_table
from lmeval_prune.models.identity import differing
from lmeval_prune.models.lengths import Ending, cut_off, lengths, merged
from lmeval_prune.models.tries import DENSE

SCHEMA = "lmeval-prune/outcomes"
SCHEMA_VERSION = 2  # 1: texts in the table of cells


class Contents(TypedDict):
    """Fields of `store.json`."""

    pool: list[str]
    model: dict[str, Any]
    tasks: dict[str, dict[str, Any]]


class Question(NamedTuple):
    """Where a question is: task, split, and its number in that split."""

    task: str
    split: str
    doc_id: int


def pool_order(columns: Iterable[str]) -> list[str]:
    """Columns in the order of the pool: dense first, then by layer and head; each once."""
    return sorted(set(columns), key=lambda column: Head("", -1, -1) if column == DENSE else Head.named(column))


@dataclass(frozen=True)
class Outcomes:
    """Z and what its rows and columns are.

    Attributes:
        z: shape (questions, pool), 1 solved, 0 not, NaN unknown.
        pool: names of the columns.
        questions: of each row, its place, and `question`, `prompt` (a digest) and `attributes`.
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
        """How many answers were cut off, if they are many; else empty."""
        return cut_off(self.lengths) if self.lengths else ""

    @property
    def known(self) -> np.ndarray:
        """Which cells are known; shape as `z`."""
        return ~np.isnan(self.z)

    @property
    def texts(self) -> list[str]:
        """The questions' texts."""
        return [row["question"] for row in self.questions]

    def rows(self, chosen: Sequence[int] | np.ndarray) -> Outcomes:
        """Only these questions."""
        questions = [self.questions[i] for i in chosen] if self.questions else []
        return replace(self, z=self.z[np.asarray(chosen)], questions=questions)

    def columns(self, chosen: Sequence[str]) -> Outcomes:
        """Only these columns, in this order.

        Raises:
            InputError: one is not in the pool.
        """
        missing = [name for name in chosen if name not in self.pool]
        if missing:
            raise InputError(f"the outcome store has no column {missing[0]}; it has {', '.join(self.pool)}")
        places = [self.pool.index(name) for name in chosen]
        return replace(self, z=self.z[:, places], pool=list(chosen))

    def accuracy(self) -> np.ndarray:
        """Share of solved questions among the known ones, for each column; NaN where none is known."""
        known = self.known.sum(0)
        return np.where(known > 0, np.nansum(self.z, 0) / np.maximum(known, 1), np.nan)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """Row of each question's text.

        Raises:
            InputError: several rows ask the same.
        """
        found = {text: i for i, text in enumerate(self.texts)}
        if len(found) < len(self.texts):
            raise InputError("several rows of the outcome store have the same question: which is meant is not clear")
        return found

    @property
    def question_field(self) -> str | None:
        """Field of the tasks' documents that holds the question, if it is one and the same in all of them."""
        return question_field(self.tasks)


def question_field(tasks: dict[str, Any]) -> str | None:
    """As `Outcomes.question_field`, of the settings of tasks."""
    names = {task["question_field"] for task in tasks.values() if "question_field" in task}
    return str(next(iter(names))) if len(names) == 1 else None


_QUESTIONS = pa.schema(
    [
        ("task", pa.string()),
        ("split", pa.string()),
        ("doc_id", pa.int32()),
        ("question", pa.string()),
        ("prompt", pa.string()),
        ("attributes", pa.string()),
    ]
)
_CELLS = pa.schema(
    [
        ("task", pa.string()),
        ("split", pa.string()),
        ("doc_id", pa.int32()),
        ("head", pa.string()),
        ("outcome", pa.bool_()),
        ("extracted", pa.string()),
        ("answer", pa.string()),
        ("length", pa.int32()),
        ("cut_off", pa.bool_()),
    ]
)
Cell = dict[str, Any]


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
        """The outcomes. Those of a run that has not ended are left out.

        Raises:
            InputError: the folder is not a store, or it is empty or broken.
        """
        about = self.check()
        if not (self.folder / "cells.parquet").is_file():
            raise InputError(f"{self.folder} has no outcomes yet; run `lmeval-prune sweep` to its end first")
        questions = self._table("questions", _QUESTIONS).to_pylist()
        cells = self._table("cells", _CELLS, [*Question._fields, "head", "outcome", "length", "cut_off"])
        if not questions or not cells.num_rows:
            raise InputError(f"the outcome store {self.folder} is empty; run `lmeval-prune sweep` into it first")
        try:
            return self._outcomes(about, questions, cells)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.folder} is damaged: its files do not fit together ({first_line(error)}); give a new folder"
            ) from None

    def _outcomes(self, about: dict[str, Any], questions: list[dict[str, Any]], cells: pa.Table) -> Outcomes:
        """The store's files as one matrix."""
        for row in questions:
            row["attributes"] = from_json(row["attributes"], "questions.parquet")
        pool = about["pool"]
        z = np.full((len(questions), len(pool)), np.nan, np.float32)
        row_of, column_of = (
            {_where(row): i for i, row in enumerate(questions)},
            {name: i for i, name in enumerate(pool)},
        )
        rows = [row_of[where] for where in _places(cells)]
        columns = [column_of[head] for head in cells["head"].to_pylist()]
        z[rows, columns] = np.array(cells["outcome"].to_pylist(), np.float32)  # None becomes NaN
        return Outcomes(z, pool, questions, about["model"], about["tasks"], _lengths(cells, about["tasks"]))

    def cells(self) -> list[Cell]:
        """All cells, each with the `text` and `tokens` of its answer."""
        answers = {record["key"]: record for record in read_answers(self.folder)}
        cells = self._table("cells", _CELLS).to_pylist()
        for cell in cells:
            found = answers.get(cell["answer"], {})
            cell |= {"text": found.get("response"), "tokens": found.get("tokens")}
        return cells

    def check(self) -> dict[str, Any]:
        """What `store.json` says.

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
        foreign = [p.name for p in self.folder.iterdir() if not p.name.startswith((".", *FILES))]
        known: list[dict[str, Any]] = []
        if self.about.exists():
            about = self.check()
            model = _same_model(self.folder, about["model"], model)
            for task in about["tasks"].keys() & tasks.keys():
                _refuse_difference(self.folder, f"task {task}", about["tasks"][task], tasks[task])
            tasks, pool = {**about["tasks"], **tasks}, [*about["pool"], *pool]
            known = self._table("questions", _QUESTIONS).to_pylist()
        elif foreign:
            raise InputError(f"{self.folder} holds {foreign[0]} and is not an outcome store; give a new folder")
        numbered = {_where(row): row for row in known}
        for row in questions:
            old = numbered.get(_where(row))
            if old and old["prompt"] != row["prompt"]:
                raise InputError(f"{self.folder}: the prompt of {_name(row)} is another one now; give a new folder")
            numbered[_where(row)] = {**row, "attributes": _json(row["attributes"])}
        content = {"model": model, "tasks": dict(sorted(tasks.items())), "pool": pool_order(pool)}
        write_artefact(self.about, SCHEMA, SCHEMA_VERSION, content)
        rows = [numbered[key] for key in sorted(numbered)]
        write_table(self.folder / "questions.parquet", pa.Table.from_pylist(rows, _QUESTIONS))

    def add(self, cells: Iterable[Cell]) -> None:
        """Write outcomes: new ones, or other ones in the place of old ones. Only one process of a run calls this."""
        known = {(_where(cell), cell["head"]): cell for cell in self._table("cells", _CELLS).to_pylist()}
        known |= {(_where(cell), cell["head"]): cell for cell in cells}
        order = {name: i for i, name in enumerate(pool_order(head for _, head in known))}
        rows = sorted(known.values(), key=lambda cell: (_where(cell), order[cell["head"]]))
        write_table(self.folder / "cells.parquet", pa.Table.from_pylist(rows, _CELLS))


def _lengths(cells: pa.Table, tasks: dict[str, Any]) -> dict[str, Any]:
    """How long the answers of cells are, and how many were cut off."""
    found: dict[str, list[Ending | None]] = {}
    for task, *ending in zip(*(cells[name].to_pylist() for name in ("task", "length", "cut_off")), strict=True):
        found.setdefault(task, []).append(None if None in ending else Ending(*ending))
    limits = {name: ((tasks.get(name) or {}).get("generation") or {}).get("max_gen_toks") for name in found}
    return merged([lengths(own, limits[name]) for name, own in found.items()])


def _places(cells: pa.Table) -> list[Question]:
    return [Question(*place) for place in zip(*(cells[name].to_pylist() for name in Question._fields), strict=True)]


def _where(row: dict[str, Any]) -> Question:
    return Question(row["task"], row["split"], row["doc_id"])


def _name(row: dict[str, Any]) -> str:
    return f"document {row['doc_id']} of {row['task']} ({row['split']})"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _same_model(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The identity of a model that a store has, with adapters that are new.

    Raises:
        InputError: the model is another one, or is computed elsewhere or in another type.
    """
    how = [f"{model.get('server', 'this machine')} in {model.get('dtype')}" for model in (before, now)]
    if how[0] != how[1] and "server" in {**before, **now}:
        raise InputError(f"{folder} has outcomes computed by {how[0]}, these are by {how[1]}: give a new folder")
    if before.get("versions") != now.get("versions"):
        reason = differing(before.get("versions"), now.get("versions") or {})
        raise InputError(f"{folder} has outcomes that {reason}: give a new folder")
    theirs, ours = before.get("adapters", {}), now.get("adapters", {})
    shared = theirs.keys() & ours.keys()
    _refuse_difference(folder, "adapter", *({name: each[name] for name in shared} for each in (theirs, ours)))
    # a folder may be renamed; the weights determine their roundings
    plain = {"name": "", "rounded": [], "adapters": {}}
    _refuse_difference(folder, "model", *({**each, **plain} for each in (before, now)))
    return {**now, **before, **({"adapters": dict(sorted({**theirs, **ours}.items()))} if ours else {})}


def _refuse_difference(folder: Path, what: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            old, new = (str(value.get(key))[:60] for value in (before, now))
            raise InputError(f"{folder} was made with another {what} ({key}: {old}, now {new}); give a new folder")
