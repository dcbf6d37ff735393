"""What an exported adapter is called, and the manifest beside it, by which a served adapter is known again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.artefacts import digest, file_name, read_artefact, read_json
from lmeval_prune.errors import InputError

SCHEMA, VERSION = "lmeval-prune/adapter", 1
MANIFEST = "lmeval_prune.json"
_LONGEST = 120  # of a name: file systems end at 255


class Base(TypedDict):
    """The model that an adapter is for."""

    pretrained: str
    name: str
    revision: str
    checkpoint: str


class Adapter(TypedDict):
    """Fields of an adapter's manifest."""

    name: str
    heads: list[str]
    format: str
    dtype: str
    rank: int
    hash: str
    base: Base
    modules: dict[str, list[int]]
    files: dict[str, str]


def adapter_name(heads: Sequence[str]) -> str:
    """The name of the adapter of some heads: its folder's, and the one that a server knows it by.

    Args:
        heads: names of single heads, in the model's order: `("L5H3", "L15H0")` is `L5H3+L15H0`.
    """
    name = "+".join(heads)
    return file_name(name) if len(name) <= _LONGEST else f"heads-{len(heads)}-{digest(list(heads))[:8]}"


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of an adapter.

    Raises:
        InputError: there is none, or it is broken.
    """
    path = Path(folder) / MANIFEST
    try:
        return read_artefact(path, SCHEMA, VERSION, Adapter)[0]
    except InputError as error:
        raise InputError(f"{error}; export the adapter again") from None


def read_adapters(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The manifests of all adapters in a folder, by their names; fewest heads first.

    Raises:
        InputError: there is no such folder, it has no adapter, or a manifest is broken.
    """
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {folder}; make it with `lmeval-prune export adapter`")
    found = {one["name"]: one for one in map(read_adapter, _places(Path(folder)))}
    if not found:
        raise InputError(f"{folder} has no adapters; make some with `lmeval-prune export adapter`")
    order = {name: (len(one["heads"]), [len(x) for x in one["heads"]], one["heads"]) for name, one in found.items()}
    return {name: found[name] for name in sorted(found, key=order.__getitem__)}


def has_adapters(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has adapters; it need not be there."""
    return bool(_places(Path(folder)))


def _places(folder: Path) -> list[Path]:
    """Folders of adapters in a folder; those of checkpoints, whose manifests have the same name, are passed over."""
    found = [one.parent for one in folder.glob(f"*/{MANIFEST}") if not one.parent.name.startswith(".")]
    return [one for one in found if not _is_other(one / MANIFEST)]


def _is_other(path: Path) -> bool:
    try:
        return bool(read_json(path).get("schema", SCHEMA) != SCHEMA)
    except InputError:
        return False  # broken: to be refused
