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
from lmeval_prune.profiling.costs import SAME_BLOCKS, counted_flops, formula_flops, parameters
from lmeval_prune.profiling.speed import Answerers, Workload, measure, peak_memory
from lmeval_prune.profiling.table import draw_bars, table
from lmeval_prune.reporting.documents import printable


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
        rows[name] |= {"kind": kind_of(model)}
    speeds = measure(models, work, _show_progress, answerers)
    _show_progress("")
    return {name: {**row, **speeds[name], "peak_memory_mib": memory[name]} for name, row in rows.items()}


def kind_of(model: Any) -> dict[str, str]:
    """Return the facts of a model that do not change when heads, channels, blocks or layers are removed."""
    config = model.config.get_text_config()
    return {
        "model_type": SAME_BLOCKS.get(config.model_type, config.model_type),
        "hidden_size": str(getattr(config, "hidden_size", "")),
        "vocab_size": str(getattr(config, "vocab_size", "")),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def differences(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a note on each model of another kind than the first, whose costs differ by more than what is removed."""
    (base, first), *others = rows.items()
    notes = []
    for name, row in others:
        pairs = [(fact, value, first["kind"][fact]) for fact, value in row["kind"].items()]
        if differ := ", ".join(f"{fact} {value}, not {other}" for fact, value, other in pairs if value != other):
            notes.append(f"{name} is another kind of model than {base}: {differ}")
    return notes


def write(
    folder: Path,
    rows: dict[str, dict[str, Any]],
    settings: dict[str, Any],
    distances: Mapping[str, Mapping[str, str]],
) -> None:
    """Write and print the measured values; `distances` are further lines of the table, by model."""
    notes = differences(rows)
    text = "\n".join([table(rows, distances), *(f"note: {printable(note)}" for note in notes)])
    origin = {"created_by": CREATED_BY, **settings, "dtype": "as in each checkpoint", "notes": notes}
    write_text(folder / "profile.json", json.dumps({**origin, "models": rows}, indent=1) + "\n")
    write_text(folder / "profile.md", text)
    draw_bars(rows, folder / "profile")
    print(f"{text}\n{folder}/profile.json, .md, .png")


def _show_progress(line: str) -> None:
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)
