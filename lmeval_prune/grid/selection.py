"""Questions that a variant was selected on: those that its router or outcome store was made from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from lmeval_prune.artefacts import content_digest, digest, read_json
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.models.head_router import POLICIES

ARTEFACT_ARGUMENTS = ("router", "router_store")  # model_args that may name an artefact


def selection_questions(folder: GridFolder, entry: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Return digests of the questions that a cell's artefacts were made from, and `NAME=VALUE` of unknown artefacts.

    Artefacts are unknown if they are missing or have changed since the evaluation.
    """
    named = {
        name: value
        for name, value in entry["model_args"].items()
        if name in ARTEFACT_ARGUMENTS and isinstance(value, str)
    }
    if named.get("router") in POLICIES:
        del named["router"]
    contents = read_json(folder.cell(entry["key"]) / "cell.json") if named else {}
    recorded = (contents.get("identity") or {}).get("router") or {}
    questions: set[str] = set()
    unavailable: list[str] = []
    for name, value in named.items():
        content = recorded[name].get("content") if isinstance(recorded.get(name), dict) else None
        path = Path(value).expanduser().absolute()
        if path.exists() and content in (None, _content_digest(path)):
            questions |= _questions(path)
        else:
            unavailable.append(f"{name}={value}")
    return questions, unavailable


_content_digest = cache(content_digest)


@cache
def _questions(path: Path) -> frozenset[str]:
    """Return the digests of an artefact's questions: a router's training questions, all questions of a store."""
    questions = path / "questions.parquet"
    if questions.is_file():
        texts = parquet.read_table(questions, columns=["question"])["question"].to_pylist()
        return frozenset(digest(text) for text in texts)
    return frozenset(map(str, read_json(path / "router.json").get("seen", ())))
