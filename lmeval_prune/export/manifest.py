"""What an exported adapter is called, and the manifest beside it, by which a served adapter is known again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import digest, read_artefact
from lmeval_prune.errors import InputError

SCHEMA, VERSION = "lmeval-prune/adapter", 1
MANIFEST = "lmeval_prune.json"
_FIELDS = ("name", "heads", "format", "dtype", "rank", "hash", "base", "modules", "files")
_LONGEST = 120  # of a name: file systems end at 255


def adapter_name(heads: Sequence[str]) -> str:
    """The name of the adapter of some heads: its folder's, and the one that a server knows it by.

    Args:
        heads: names of single heads, in the model's order: `("L5H3", "L15H0")` is `L5H3+L15H0`.
    """
    name = "+".join(heads)
    return name if len(name) <= _LONGEST else f"heads-{len(heads)}-{digest(list(heads))[:8]}"


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of an adapter.

    Raises:
        InputError: there is none, or it is broken.
    """
    path = Path(folder) / MANIFEST
    found = read_artefact(path, SCHEMA, VERSION)[0]
    missing = [name for name in _FIELDS if name not in found]
    if missing:
        raise InputError(f"{path} is no whole manifest (it has no {missing[0]}); export the adapter again")
    return found


def read_adapters(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The manifests of all adapters in a folder, by their names; fewest heads first.

    Raises:
        InputError: there is no such folder, it has no adapter, or a manifest is broken.
    """
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {folder}; make it with `lmeval-prune export adapter`")
    places = [one.parent for one in Path(folder).glob(f"*/{MANIFEST}") if not one.parent.name.startswith(".")]
    found = {one["name"]: one for one in map(read_adapter, places)}
    if not found:
        raise InputError(f"{folder} has no adapters; make some with `lmeval-prune export adapter`")
    order = {name: (len(one["heads"]), [len(x) for x in one["heads"]], one["heads"]) for name, one in found.items()}
    return {name: found[name] for name in sorted(found, key=order.__getitem__)}
