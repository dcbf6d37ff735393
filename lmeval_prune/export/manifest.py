"""Names and manifests of exported adapters, which identify served adapters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import content_digest, digest, file_name, read_artefact, read_json
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.lora import read_lora_config

SCHEMA, VERSION = "lmeval-prune/adapter", 1
MANIFEST = "lmeval_prune.json"


def adapter_name(heads: Sequence[str]) -> str:
    """Return an adapter's name, which is also its folder's name: `L5H3+L15H0` for `("L5H3", "L15H0")`."""
    name = "+".join(heads)
    return file_name(name) if len(name) <= 120 else f"heads-{len(heads)}-{digest(list(heads))[:8]}"


def read_adapter(folder: str | os.PathLike[str]) -> dict[str, Any]:
    return read_artefact(Path(folder) / MANIFEST, SCHEMA, VERSION)[0]


def read_lora(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the name, as on the server, and the digest of an ordinary LoRA adapter: a PEFT folder, or a GGUF file."""
    file = Path(path).expanduser().resolve()
    if file.is_file() and file.suffix == ".gguf":
        return {file.parent.name if file.stem == "adapter" else file.stem: content_digest(file)}
    read_lora_config(file)
    return {file.name: content_digest(file)}


def read_adapters(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Read the manifests of all adapters in a folder, by name, ordered by number of heads."""
    paths = [path for path in Path(folder).glob(f"*/{MANIFEST}") if not path.parent.name.startswith(".")]
    # exported checkpoints have a manifest of the same name
    adapters = [read_adapter(path.parent) for path in paths if read_json(path).get("schema") == SCHEMA]
    if not adapters:
        raise InputError(f"{folder} has no adapters; write some with `lmeval-prune export adapter`")
    # name lengths come before names, so that L5H3 comes before L15H0
    adapters.sort(key=lambda adapter: (len(adapter["heads"]), [len(x) for x in adapter["heads"]], adapter["heads"]))
    return {adapter["name"]: adapter for adapter in adapters}
