"""Outcome stores of sweeps, written without sweeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lmeval_prune.sprint.outcomes import OutcomeStore


def write_outcomes(
    folder: Path,
    z: dict[str, list[float]],
    model: dict[str, Any],
    texts: Sequence[str] = (),
    split: str = "train",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a store with the outcomes of each column, 0, 1 or NaN (not run), of questions with the given texts.

    `settings` are those of their task.
    """
    rows = max(map(len, z.values()))
    texts = texts or [f"q{n}" for n in range(rows)]
    questions = [
        {"task": "toy", "split": split, "doc_id": n, "question": texts[n], "prompt": "p", "attributes": {}}
        for n in range(rows)
    ]
    store = OutcomeStore(folder)
    store.begin(model, {"toy": dict(settings)}, questions, list(z))
    blank = {"extracted": "", "answer": "", "length": None, "cut_off": None}
    store.add(
        {"task": "toy", "split": split, "doc_id": n, "attempt": head, "outcome": bool(value), **blank}
        for head, column in z.items()
        for n, value in enumerate(column)
        if not np.isnan(value)
    )
    return folder
