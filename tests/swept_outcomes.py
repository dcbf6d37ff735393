"""Outcome stores of sweeps, written without sweeping."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lmeval_prune.architectures import ModelMap
from lmeval_prune.models.head_router import DENSE
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


def drawn_outcomes(
    model_map: ModelMap,
    folder: Path | None = None,
    questions: int = 24,
    seed: int = 0,
    texts: Sequence[str] = (),
) -> Path:
    """Write a store of a model with drawn outcomes of all heads, on so many questions or those with the given texts."""
    heads = [f"{layer.label}H{head}" for layer in model_map.attention for head in range(layer.heads)]
    draw = np.random.default_rng(seed)
    z = {name: draw.integers(0, 2, len(texts) or questions).astype(float).tolist() for name in [DENSE, *heads]}
    folder = folder or Path(tempfile.mkdtemp(prefix="outcomes"))
    return write_outcomes(folder, z, {"name": model_map.name, "weights": model_map.weights}, texts)
