"""Questions that a variant was selected on: those that its router, outcome store, mask, plan or cuts were made from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

import pyarrow as pa
import pyarrow.parquet as parquet
from typing_extensions import TypedDict

from lmeval_prune.artefacts import content_digest, digest, read_json
from lmeval_prune.checkpoints.pruned import MANIFEST
from lmeval_prune.errors import InputError
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.preparations import make_preparation
from lmeval_prune.models.head_router import POLICIES

ARTEFACT_ARGUMENTS = ("router", "router_store", "mask", "plan")  # model_args that may name an artefact
FILES = ("router.json", MANIFEST)  # of a router's and of a checkpoint's folder
CHECKPOINT = "pretrained"  # model_arg that names a checkpoint, whose manifest has the plans of its cuts


class CellIdentity(TypedDict):
    """The router in a cell's identity."""

    router: NotRequired[dict[str, Any] | None]


class CellContents(TypedDict):
    """Fields of `cell.json` that locate artefacts."""

    prepared: NotRequired[str]
    identity: NotRequired[CellIdentity]


def selection_questions(folder: GridFolder, entry: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Return digests of the questions that a cell's artefacts were made from, and `NAME=VALUE` of unknown artefacts.

    Artefacts are unknown if they are routers or stores that are missing or have changed since the evaluation.
    """
    has_artefacts = entry["prepare"] or not entry["model_args"].keys().isdisjoint(ARTEFACT_ARGUMENTS)
    contents = _cell_contents(folder.cell(entry["key"])) if has_artefacts else {}
    recorded = (contents.get("identity") or {}).get("router") or {}
    questions: set[str] = set()
    unavailable: list[str] = []
    for name, value in _artefacts(folder, entry, contents, unavailable):
        content = recorded[name].get("content") if isinstance(recorded.get(name), dict) else None
        path = next((path for path in _candidates(folder, value) if content in (None, _content_digest(path))), None)
        if path:
            questions |= _questions(path)
        elif name in ("router", "router_store"):  # masks and plans may be made without questions
            unavailable.append(f"{name}={value}")
    return questions, unavailable


def _artefacts(
    folder: GridFolder, entry: dict[str, Any], contents: dict[str, Any], unavailable: list[str]
) -> list[tuple[str, str]]:
    """Return the arguments that name artefacts, with the preparation's; an unknown one goes to `unavailable`."""
    arguments = dict(entry["model_args"])
    if arguments.get("router") in POLICIES:
        del arguments["router"]
    for name, settings in entry["prepare"].items():
        try:
            preparation = make_preparation(name, settings)
        except InputError:  # its package, or its pruner's, is not installed here
            unavailable.append(f"prepare={name}")
        else:
            arguments |= preparation.model_args(folder.prepared / str(contents.get("prepared") or ""))
    named = [(name, value) for name, value in arguments.items() if name in (*ARTEFACT_ARGUMENTS, CHECKPOINT)]
    return [(name, value) for name, value in named if isinstance(value, str)]


def _cell_contents(cell: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(cell / "cell.json", CellContents)
    except InputError:
        return {}
    return content


def _candidates(folder: GridFolder, value: str) -> Iterator[Path]:
    """Yield existing paths of an artefact; a relative path may start at this folder or at a parent of the grid's."""
    path = Path(value).expanduser()
    for start in dict.fromkeys((Path.cwd(), *folder.path.parents)):
        if (start / path).exists():
            yield (start / path).absolute()
        if path.is_absolute():
            return


_content_digest = cache(content_digest)


@cache
def _questions(path: Path) -> frozenset[str]:
    """Return the digests of an artefact's questions: a router's training questions, all questions of a store.

    Of plans and of checkpoints that plans cut, those whose outcomes scored what was removed.
    """
    questions = path / "questions.parquet"
    if questions.is_file():
        try:
            texts = parquet.read_table(questions, columns=["question"])["question"].to_pylist()
        except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException):
            return frozenset()
        return frozenset(digest(text) for text in texts)
    try:
        files = [path] if path.is_file() else [file for name in FILES if (file := path / name).is_file()]
        contents = [read_json(file) for file in files]
    except InputError:
        return frozenset()
    artefacts = [content for content in contents if str(content.get("schema")).startswith("lmeval-prune/")]
    return frozenset(_question_digests(artefacts))


def _question_digests(content: Any) -> Iterator[str]:
    """Yield the entries of all lists `seen` in an artefact: of a router, of a mask's or plan's provenance, of cuts."""
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for value in values:
        yield from _question_digests(value)
    if isinstance(content, dict) and isinstance(digests := content.get("seen"), list):
        yield from (key for key in digests if isinstance(key, str))
