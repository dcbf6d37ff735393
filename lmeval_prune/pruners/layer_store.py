"""What became of each layer, kept until the plan is whole: a calibration that was killed goes on where it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lmeval_prune.artefacts import digest, file_name, from_json, read_json, read_tensors, write_bytes, write_text
from lmeval_prune.errors import InputError


@dataclass
class Done:
    """What became of a layer.

    Attributes:
        heads, channels: that go.
        tensors: what makes up for them, as of a plan.
        damping: of projections where it was raised.
    """

    heads: set[int] = field(default_factory=set)
    channels: set[int] = field(default_factory=set)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    damping: dict[str, float] = field(default_factory=dict)


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

    def load(self, label: str) -> Done | None:
        """What became of a layer; None if it is not known."""
        try:
            tensors = read_tensors(self._path(label))
            damping = tensors.pop("damping")
            heads, channels = (set(tensors.pop(name).tolist()) for name in ("heads", "channels"))
            names = sorted(from_json(bytes(tensors.pop("names").tolist()), label))
            return Done(heads, channels, tensors, dict(zip(names, damping.tolist(), strict=True)))
        except (KeyError, TypeError, ValueError):  # it is damaged, or not there, and is made again
            return None

    def save(self, label: str, done: Done) -> None:
        """Keep what became of a layer."""
        if not (self.folder / "about.json").exists():
            write_text(self.folder / "about.json", json.dumps({"key": self.key}))
        names = sorted(done.damping)
        whole = {
            **{name: tensor.contiguous() for name, tensor in done.tensors.items()},
            "heads": torch.tensor(sorted(done.heads), dtype=torch.long),
            "channels": torch.tensor(sorted(done.channels), dtype=torch.long),
            "names": torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8),
            "damping": torch.tensor([done.damping[name] for name in names], dtype=torch.float64),
        }
        write_bytes(self._path(label), save(whole))

    def remove(self) -> None:
        """Remove what is kept of layers."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        (self.folder / "about.json").unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            shutil.rmtree(self.folder)

    def _path(self, label: str) -> Path:
        return self.folder / f"{file_name(label)}.safetensors"
