"""Which questions a variant's artefacts were made from: it was chosen on them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NotRequired

import pyarrow as pa
import pyarrow.parquet as parquet
from typing_extensions import TypedDict

from lmeval_prune.artefacts import content_digest, digest, read_json
from lmeval_prune.errors import InputError
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.preparations import preparation

ARGUMENTS = ("router", "router_store", "mask", "plan")  # model_args that may name such an artefact
_NAMES = {"random", "random_top", "best", "oracle"}  # routers that are no artefact


class Described(TypedDict):
    """What is read of a cell's identity."""

    router: NotRequired[dict[str, Any] | None]


class About(TypedDict):
    """What is read of `cell.json`."""

    prepared: NotRequired[str]
    identity: NotRequired[Described]


class Seen(TypedDict):
    """What is read of an artefact of ours."""

    schema: str
    seen: NotRequired[list[str]]


def seen(folder: GridFolder, cell: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Questions that a cell's artefacts were made from, its preparation's among them.

    Args:
        folder: of the grid.
        cell: its entry.

    Returns:
        Digests of their texts; and routers and stores that are not there any more, or have changed since.
    """
    given = {name: value for name, value in cell["model_args"].items() if name in ARGUMENTS and isinstance(value, str)}
    about = _about(folder.cell(cell["key"])) if given or cell["prepare"] else {}
    for name, settings in cell["prepare"].items():
        made = preparation(name, settings).model_args(folder.prepared / str(about.get("prepared") or ""))
        given |= {key: str(value) for key, value in made.items() if key in ARGUMENTS}
    found: set[str] = set()
    lost: list[str] = []
    for name, value in given.items():
        if name == "router" and value in _NAMES:
            continue
        recorded = ((about.get("identity") or {}).get("router") or {}).get(name)
        expected = recorded.get("content") if isinstance(recorded, dict) else None
        places = (path for path in _places(folder, value) if not expected or _content(path) == expected)
        path = next(places, None)
        if path:
            found |= _seen(path)
        elif name in ("router", "router_store"):  # a mask or a plan need not have seen any
            lost.append(f"{name}={value}")
    return found, lost


def _about(cell: Path) -> dict[str, Any]:
    """What a cell says of itself."""
    try:
        content: dict[str, Any] = read_json(cell / "cell.json", About)
    except InputError:
        return {}
    return content


def _places(folder: GridFolder, value: str) -> Iterator[Path]:
    """Where an artefact may be: a relative path begins where the grid was run, which is mostly above its folder."""
    path = Path(value).expanduser()
    for begin in dict.fromkeys((Path.cwd(), *folder.path.parents)):
        if (begin / path).exists():
            yield (begin / path).absolute()
        if path.is_absolute():
            return


@cache
def _content(path: Path) -> str:
    return content_digest(path)


@cache
def _seen(path: Path) -> frozenset[str]:
    """Questions that an artefact of ours names: a router those that it was fitted on, a store all that it holds."""
    questions = path / "questions.parquet"
    if questions.is_file():
        try:
            texts = parquet.read_table(questions, columns=["question"])["question"].to_pylist()
        except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException):
            return frozenset()
        return frozenset(digest(text) for text in texts)
    try:
        content = read_json(path / "router.json" if path.is_dir() else path, Seen)
    except InputError:
        return frozenset()
    return frozenset(content.get("seen", ())) if content["schema"].startswith("lmeval-prune/") else frozenset()
