"""What a pruner has finished, in a folder beside the plan until it is complete, so that a killed run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lmeval_prune.artefacts import Work, read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.parts import Removal

INTERVAL = 5.0  # seconds between two writes of sums, at least


class Sums:
    """Sums over the tokens of a batch by batch and part; a file, if there is one, holds them as `{"0.layers.L5": 1.5}`.

    Args:
        path: the file; sums that it has are known, and a damaged file is as a missing one.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.written, self.values = path, time.monotonic(), dict[str, float]()
        if path is not None:
            with suppress(InputError):
                self.values = read_json(path, dict[str, float])

    def has(self, batch: int, part: str) -> bool:
        """Return whether the sum of a batch and a part is known."""
        return f"{batch}.{part}" in self.values

    def total(self, batches: int, part: str) -> float:
        """Return the sum of a part over all batches."""
        total = 0.0
        for batch in range(batches):  # one after the other: `sum` rounds in other ways from Python 3.12 on
            total += self.values[f"{batch}.{part}"]
        return total

    def add(self, batch: int, part: str, value: float) -> None:
        """Add the sum of a batch and a part, and write the file if the last time is `INTERVAL` seconds ago."""
        self.values[f"{batch}.{part}"] = value
        if self.path is not None and time.monotonic() - self.written >= INTERVAL:
            write_text(self.path, json.dumps(self.values))
            self.written = time.monotonic()


def sums(work: Work, name: str) -> Sums:
    """Return the sums of which the scores of this name are computed, as far as they are known."""
    work.begin()
    return Sums(work.path(name, "json"))


def load_scores(work: Work, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor] | None] | None:
    """Return scores and mean inputs by part, as in `Scores`; None if the file is missing or damaged."""
    tensors = work.tensors(name)
    if tensors is None:
        return None
    by_kind: dict[str, dict[str, Tensor]] = {"values": {}, "means": {}}
    for key, tensor in tensors.items():
        kind, _, part = key.partition(".")
        by_kind[kind][part] = tensor
    return by_kind["values"], by_kind["means"] or None


def save_scores(work: Work, name: str, values: Mapping[str, Tensor], means: Mapping[str, Tensor] | None) -> None:
    """Store scores and mean inputs by part, as in `Scores`; the name tells what they depend on beside the settings."""
    kinds = {"values": values, "means": means or {}}
    work.write_tensors(name, {f"{kind}.{part}": x for kind, parts in kinds.items() for part, x in parts.items()})


def load_layer(work: Work, label: str) -> Removal | None:
    """Return what a layer loses; None if its file is missing or damaged."""
    tensors = work.tensors(label)
    if tensors is None:
        return None
    notes = json.loads(bytes(tensors.pop("notes").tolist()))
    removed = {key: set(members) for key, members in notes["removed"].items()}
    return Removal(removed, tensors, dict(notes["damping"]))


def save_layer(work: Work, label: str, removal: Removal) -> None:
    """Store what a layer loses."""
    removed = {key: sorted(members) for key, members in removal.removed.items()}
    notes = json.dumps({"removed": removed, "damping": removal.damping}).encode()
    work.write_tensors(label, {**removal.compensation, "notes": torch.tensor(list(notes), dtype=torch.uint8)})
