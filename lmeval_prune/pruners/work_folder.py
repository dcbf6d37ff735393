"""A folder of finished work beside an output that is not complete, so that a killed run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from lmeval_prune.artefacts import digest, file_name, read_json, read_tensors, write_bytes, write_text
from lmeval_prune.errors import InputError


class WorkFolder:
    """Folder of finished work; that of a run with another `identity` (a JSON value) is deleted."""

    def __init__(self, folder: Path, identity: Any) -> None:
        self.folder, self.key = folder, digest(identity)
        try:
            same = read_json(folder / "about.json").get("key") == self.key
        except InputError:
            same = False
        if not same:
            self.remove()

    def begin(self) -> None:
        """Record the identity, before the first file is written."""
        if not (self.folder / "about.json").exists():
            write_text(self.folder / "about.json", json.dumps({"key": self.key}))

    def path(self, name: str) -> Path:
        """Return the path of a file with tensors."""
        return self.folder / f"{file_name(name)}.safetensors"

    def read(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors of a file; None if it is missing or damaged."""
        try:
            return read_tensors(self.path(name))
        except InputError:
            return None

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors, which may share memory, to a file."""
        self.begin()
        own = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        write_bytes(self.path(name), save(own))

    def remove(self) -> None:
        """Delete the files."""
        for pattern in ("*.safetensors", "*.json"):
            for path in self.folder.glob(pattern):
                path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
