"""Keeps what a plan removes of each layer until the plan is whole, so that a killed calibration goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lmeval_prune.artefacts import digest, file_name, parse_json, read_json, read_tensors, write_bytes, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.parts import Removed


@dataclass
class Removal:
    """Removed heads and channels of layers, and their compensation.

    Attributes:
        removed: by part.
        compensation: tensors, as of a plan.
        damping: of projections where it was raised.
    """

    removed: Removed = field(default_factory=dict)
    compensation: dict[str, Tensor] = field(default_factory=dict)
    damping: dict[str, float] = field(default_factory=dict)

    def add(self, other: Removal) -> None:
        """Take in other layers'."""
        self.removed |= other.removed
        self.compensation |= other.compensation
        self.damping |= other.damping


class LayerStore:
    """A folder with a file for each layer that is done.

    Args:
        folder: it is made when a layer is done. What is there of another plan is removed.
        about: what the plan depends on, a JSON value.
    """

    def __init__(self, folder: Path, about: Any) -> None:
        self.folder, self.key = folder, digest(about)
        try:
            same = read_json(folder / "about.json").get("key") == self.key
        except InputError:
            same = False
        if not same:
            self.remove()

    def load(self, label: str) -> Removal | None:
        """Return what a layer loses; None if it is not known."""
        try:
            tensors = read_tensors(self._path(label))
            notes = parse_json(bytes(tensors.pop("notes").tolist()), label)
            removed = {key: set(members) for key, members in notes["removed"].items()}
            return Removal(removed, tensors, dict(notes["damping"]))
        except (AttributeError, KeyError, TypeError, ValueError):  # it is damaged, or not there, and is made again
            return None

    def save(self, label: str, removal: Removal) -> None:
        """Keep what a layer loses."""
        if not (self.folder / "about.json").exists():
            write_text(self.folder / "about.json", json.dumps({"key": self.key}))
        removed = {key: sorted(members) for key, members in removal.removed.items()}
        notes = json.dumps({"removed": removed, "damping": removal.damping})
        tensors = {name: tensor.contiguous() for name, tensor in removal.compensation.items()}
        write_bytes(
            self._path(label), save({**tensors, "notes": torch.tensor(list(notes.encode()), dtype=torch.uint8)})
        )

    def remove(self) -> None:
        """Remove what is kept of layers."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        (self.folder / "about.json").unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            shutil.rmtree(self.folder)

    def _path(self, label: str) -> Path:
        return self.folder / f"{file_name(label)}.safetensors"
