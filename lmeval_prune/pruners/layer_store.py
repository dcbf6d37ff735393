"""Store the removed units of each finished layer until the plan is complete, so that a killed run resumes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from lmeval_prune.artefacts import file_name, parse_json, read_tensors, write_bytes
from lmeval_prune.pruners.parts import Removed
from lmeval_prune.pruners.work_folder import WorkFolder


@dataclass
class Removal:
    """Removed parts of some layers, and the compensation for them."""

    removed: Removed = field(default_factory=dict)
    compensation: dict[str, Tensor] = field(default_factory=dict)  # named as in a plan
    damping: dict[str, float] = field(default_factory=dict)  # by projection, where it was raised

    def add(self, other: Removal) -> None:
        """Add the removed units of other layers."""
        self.removed |= other.removed
        self.compensation |= other.compensation
        self.damping |= other.damping


class LayerStore(WorkFolder):
    """Folder with one file per finished layer."""

    def load(self, label: str) -> Removal | None:
        """Return what a layer loses, or None if its file is missing or damaged."""
        try:
            tensors = read_tensors(self._path(label))
            notes = parse_json(bytes(tensors.pop("notes").tolist()), label)
            removed = {key: set(members) for key, members in notes["removed"].items()}
            return Removal(removed, tensors, dict(notes["damping"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def save(self, label: str, removal: Removal) -> None:
        """Store what a layer loses."""
        self.begin()
        removed = {key: sorted(members) for key, members in removal.removed.items()}
        notes = json.dumps({"removed": removed, "damping": removal.damping}).encode()
        tensors = {name: tensor.contiguous() for name, tensor in removal.compensation.items()}
        tensors["notes"] = torch.tensor(list(notes), dtype=torch.uint8)
        write_bytes(self._path(label), save(tensors))

    def _path(self, label: str) -> Path:
        return self.folder / f"{file_name(label)}.safetensors"
