"""`lmeval-prune migrate`: rewrite an artefact of an earlier format version in the current one.

The policy is in docs/artefacts.md. A migration loses nothing, invents nothing and loads no model. To add one, add a
line to `MIGRATIONS`: the schema, and a function that reads a path and writes another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmeval_prune.errors import InputError, check_exists, first_line
from lmeval_prune.options import first_argument

# The file of a folder that names its schema.
FOLDER_FILES = ("store.json", "router.json", "answers.json", "lmeval_prune.json", "athena.json", "grid.json")


@first_argument("path")
def migrate(path: str, output: str) -> int:
    """Rewrite an artefact of an earlier format version in the current one, in a new place.

    Args:
        path: file of a mask, or folder of an outcome store; `--path` may be left out
        output: file or folder for the new artefact; nothing may be there
    """
    schema, version = _kind(path)
    if schema not in MIGRATIONS:
        raise InputError(f"{path} is a {schema} artefact, whose format has not changed; use it as it is")
    versions, rewrite = MIGRATIONS[schema]
    if version not in versions:
        raise InputError(f"{path} has version {version} of its format, which is read as it is; use it so")
    if Path(output).exists():
        raise InputError(f"--output {output} exists; name a new path")
    print(f"{output}: {rewrite(Path(path), Path(output))}, from version {version} of its format")
    return 0


def _kind(path: str) -> tuple[str, int]:
    """Return an artefact's schema and its version."""
    from lmeval_prune.artefacts import read_json

    check_exists(path)
    file = Path(path)
    if file.is_dir():
        named = [file / name for name in FOLDER_FILES if (file / name).is_file()]
        if not named:
            raise InputError(f"{path} holds no artefact of lmeval-prune; name a file or an artefact's folder")
        file = named[0]
    content = read_json(file)
    schema, version = content.get("schema"), content.get("schema_version")
    if not str(schema).startswith("lmeval-prune/") or not isinstance(version, int):
        raise InputError(f"{file} is no artefact of lmeval-prune; name a file that it wrote")
    return str(schema), version


def _head_mask(path: Path, output: Path) -> str:
    """Rewrite a head mask. Of version 1 the weights stay unknown, so it is compared by the model's name as before."""
    from lmeval_prune.artefacts import read_artefact, write_artefact
    from lmeval_prune.interventions import HeadMask
    from lmeval_prune.interventions.base import SCHEMA_VERSION

    if output.suffix != ".json":
        raise InputError(f"--output {output} must end in .json, so that heads= and mask= tell it from names of heads")
    mask = HeadMask.load(path)
    model = read_artefact(path, HeadMask.schema(), SCHEMA_VERSION)[0]["model"]
    write_artefact(output, HeadMask.schema(), SCHEMA_VERSION, {"settings": mask.settings(), "model": model})
    return "a head mask"


def _outcomes(path: Path, output: Path) -> str:
    """Rewrite an outcome store: version 1 has the texts of answers in its table of cells, later ones an answer store.

    The new answers have no versions of the code, which were not recorded: they are read, but no run reuses them.
    """
    from lmeval_prune.artefacts import new_folder, read_artefact
    from lmeval_prune.models.answer_store import AnswerStore
    from lmeval_prune.sprint.outcomes import SCHEMA, SCHEMA_VERSION, OutcomeStore, StoreContents

    content = read_artefact(path / "store.json", SCHEMA, SCHEMA_VERSION, StoreContents)[0]
    questions, cells, answers = _first_tables(path)
    with new_folder(output) as folder:
        new_answers, store = AnswerStore(folder), OutcomeStore(folder)
        try:
            for answer in answers:
                new_answers.add(*answer)
            new_answers.compact()
        finally:
            new_answers.close()
        store.begin(content["model"], content["tasks"], questions, content["pool"])
        store.add(cells)
    return f"an outcome store of {len(questions)} questions and {len(cells)} answers"


Tables = tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[str, str, dict[str, Any]]]]


def _first_tables(path: Path) -> Tables:
    """Read the tables of an outcome store of version 1: its questions, its cells as they are now, and its answers."""
    import pyarrow as pa

    from lmeval_prune.artefacts import parse_json, read_table

    key = {"task": pa.string(), "split": pa.string(), "doc_id": pa.int32()}
    question_schema = pa.schema({**key, "question": pa.string(), "prompt": pa.string(), "attributes": pa.string()})
    text = {"extracted": pa.string(), "text": pa.string(), "tokens": pa.list_(pa.uint32())}
    cell_schema = pa.schema({**key, "head": pa.string(), "outcome": pa.bool_(), **text})
    remedy, file = "the store is damaged: sweep again into a new folder", path / "cells.parquet"
    answers = []
    try:
        questions = read_table(path / "questions.parquet", remedy, schema=question_schema).to_pylist()
        cells = read_table(file, remedy, schema=cell_schema).to_pylist() if file.is_file() else []
        cells = [*cells, *_unfinished(path, {_cell_key(cell) for cell in cells})]
        for row in questions:
            row["attributes"] = parse_json(row["attributes"], path / "questions.parquet")
        for cell in cells:
            cell |= {"answer": _answer_key(cell), "length": len(cell["tokens"]), "cut_off": None}
            answers.append((cell["answer"], cell.pop("text"), _about(cell)))
            cell["attempt"] = cell.pop("head")
    except (FileNotFoundError, TypeError) as error:  # a missing file, or a missing value
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None
    return questions, cells, answers


def _cell_key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("task", "split", "doc_id", "head"))


def _unfinished(path: Path, stored_keys: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the answers of a run that was interrupted: they are not scored, so their outcome is unknown."""
    from lmeval_prune.artefacts import parse_json

    for file in sorted(path.glob("rank-*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                record = parse_json(line, file)
                key = (*record["place"], record["head"])
                answer = {"text": record["text"], "tokens": record["tokens"]}
            except (InputError, KeyError, TypeError):  # truncated by a kill
                continue
            if key not in stored_keys:
                stored_keys.add(key)
                names = ("task", "split", "doc_id", "head")
                yield {**dict(zip(names, key, strict=True)), "outcome": None, "extracted": None, **answer}


def _answer_key(cell: dict[str, Any]) -> str:
    """Return the key of a migrated answer, which is that of no request."""
    from lmeval_prune.artefacts import digest

    return digest({"migrated": list(_cell_key(cell))})


def _about(cell: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored beside an answer. Whether it was cut off is unknown: version 1 did not record it."""
    about = {name: cell[name] for name in ("task", "head", "length")}
    return {"kind": "generate_until", "tokens": cell.pop("tokens"), **about}


# By schema: the versions that are rewritten, and the function that does it.
MIGRATIONS: dict[str, tuple[tuple[int, ...], Callable[[Path, Path], str]]] = {
    "lmeval-prune/head-mask": ((1, 2), _head_mask),
    "lmeval-prune/outcomes": ((1,), _outcomes),
}
