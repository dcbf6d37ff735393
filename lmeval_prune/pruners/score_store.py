"""Store scores, and sums of which they are computed, until a plan is complete, so that a killed run resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.work_folder import WorkFolder

INTERVAL = 5.0  # seconds between two writes of sums, at least
_VALUES, _MEANS = "values", "means"


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


class ScoreStore(WorkFolder):
    """Folder with the scores of each finished step, and the sums of the one that is computed.

    A name tells all that scores depend on beside the identity of the folder.
    """

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor] | None] | None:
        """Return scores and mean inputs by part, as in `Scores`; None if the file is missing or damaged."""
        tensors = self.read(name)
        if tensors is None:
            return None
        by_kind: dict[str, dict[str, Tensor]] = {_VALUES: {}, _MEANS: {}}
        for key, tensor in tensors.items():
            kind, _, part = key.partition(".")
            by_kind[kind][part] = tensor
        return by_kind[_VALUES], by_kind[_MEANS] or None

    def save(self, name: str, values: Mapping[str, Tensor], means: Mapping[str, Tensor] | None) -> None:
        """Store scores and mean inputs by part, as in `Scores`."""
        kinds = {_VALUES: values, _MEANS: means or {}}
        self.write(name, {f"{kind}.{part}": x for kind, parts in kinds.items() for part, x in parts.items()})

    def sums(self, name: str) -> Sums:
        """Return the sums of which scores are computed, as far as they are known."""
        self.begin()
        return Sums(self.path(name).with_suffix(".json"))
