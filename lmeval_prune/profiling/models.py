"""Costs of several models: measured, and written as JSON, a table and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lmeval_prune.architectures import map_model
from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.profiling.costs import counted_flops, formula_flops, parameters
from lmeval_prune.profiling.speed import Answerers, Workload, measure, peak_memory
from lmeval_prune.profiling.table import draw_bars, table


def measure_models(
    names: Sequence[str], work: Workload, answerers: Answerers = MappingProxyType({}), device: Any = "cpu"
) -> dict[str, dict[str, Any]]:
    """Return the measured values by model; `answerers` as for `measure`."""
    memory = {}
    for name in names:  # first, because the measured process starts from this one, which is still small
        _show_progress(f"memory: {name}")
        memory[name] = round(peak_memory(name, work, device), 1)
    models = {name: load_pretrained(name).to(device) for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        total, without_embeddings = parameters(model)
        flops, counted = formula_flops(map_model(model), work.prompt), counted_flops(model, work.prompt)
        rows[name] = {"parameters": total, "without_embeddings": without_embeddings, "tokens": work.prompt}
        rows[name] |= {"flops": flops, "flops_counted": counted}
    speeds = measure(models, work, _show_progress, answerers)
    _show_progress("")
    return {name: {**row, **speeds[name], "peak_memory_mib": memory[name]} for name, row in rows.items()}


def write(
    folder: Path,
    rows: dict[str, dict[str, Any]],
    settings: dict[str, Any],
    distances: Mapping[str, Mapping[str, str]],
) -> None:
    """Write and print the measured values; `distances` are further lines of the table, by model."""
    text = table(rows, distances)
    origin = {"created_by": CREATED_BY, **settings, "dtype": "as in each checkpoint"}
    write_text(folder / "profile.json", json.dumps({**origin, "models": rows}, indent=1) + "\n")
    write_text(folder / "profile.md", text)
    draw_bars(rows, folder / "profile")
    print(f"{text}\n{folder}/profile.json, .md, .png")


def _show_progress(line: str) -> None:
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)
