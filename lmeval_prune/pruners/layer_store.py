"""Store the removed units of each finished layer until the plan is complete, so that a killed run resumes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        tensors = self.read(label)
        if tensors is None:
            return None
        notes = json.loads(bytes(tensors.pop("notes").tolist()))
        removed = {key: set(members) for key, members in notes["removed"].items()}
        return Removal(removed, tensors, dict(notes["damping"]))

    def save(self, label: str, removal: Removal) -> None:
        """Store what a layer loses."""
        removed = {key: sorted(members) for key, members in removal.removed.items()}
        notes = json.dumps({"removed": removed, "damping": removal.damping}).encode()
        self.write(label, {**removal.compensation, "notes": torch.tensor(list(notes), dtype=torch.uint8)})
