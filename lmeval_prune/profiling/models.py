"""Costs of several models: measured, and written as JSON, a table and a bar plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from lmeval_prune.architectures import map_model
from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.profiling.costs import counted_flops, formula_flops, parameters
from lmeval_prune.profiling.speed import Answerers, Workload, measure, peak_memory
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.tables import markdown

# label, digits and unit of a value; of speeds, which have the batch size in their names, the label
_VALUES = {
    "parameters": ("parameters (millions)", 2, 1e6),
    "without_embeddings": ("without embeddings (millions)", 2, 1e6),
    "flops_counted": ("GFLOPs of a prompt", 3, 1e9),
    "peak_memory_mib": ("peak memory (MiB)", 1, 1),
}
_SPEEDS = {
    "prefill": "prefill",
    "decode": "decode",
    "forward": "forward",
    "generate": "answers by generate",
    "engine": "answers by the engine",
}


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


def _show_progress(line: str) -> None:
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)


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
    _draw_bars(rows, folder / "profile")
    print(f"{text}\n{folder}/profile.json, .md, .png")


def table(rows: Mapping[str, Mapping[str, Any]], further: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table with a column for each model; values are followed by their ratio to the first model's.

    `further` are formatted values by model and line, which models may lack.
    """
    first, *_ = rows.values()
    lines = []
    for key, (label, digits, unit) in _lines(rows).items():
        cells = []
        for row in rows.values():
            value = row.get(key)
            ratio = f" ({value / first[key]:.3f})" if value is not None and row is not first and first.get(key) else ""
            places = 5 if unit == 1e6 and value is not None and value < 1e5 else digits
            cells.append("" if value is None else f"{value / unit:.{places}f}{ratio}")
        lines.append([label, *cells])
    for label in dict.fromkeys(label for values in further.values() for label in values):
        lines.append([label, *(further.get(name, {}).get(label, "") for name in rows)])
    return markdown(pd.DataFrame(lines, columns=["", *_short(rows)]), [""]) + "\n"


def _lines(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, int, float]]:
    """Return label, digits and unit of each value that is shown."""
    speeds = {}
    for key in dict.fromkeys(key for row in rows.values() for key in row):
        kind, _, batch = key.partition("_")
        if kind in _SPEEDS:
            speeds[key] = (f"{_SPEEDS[kind]}, batch {batch} (tokens/s)", 1, 1.0)
    memory = {"peak_memory_mib": _VALUES["peak_memory_mib"]}
    return {**{key: value for key, value in _VALUES.items() if key not in memory}, **speeds, **memory}


def _draw_bars(rows: Mapping[str, Mapping[str, Any]], stem: Path) -> None:
    """Draw each value relative to the first model's as bars."""
    names, labels, first = list(rows), _short(rows), next(iter(rows.values()))
    lines = {key: label for key, (label, *_) in _lines(rows).items() if first.get(key)}
    canvas, axes = figure(7.5, 0.9 + 0.55 * len(lines), f"relative to {labels[0]}")
    height = 0.8 / max(1, len(names) - 1)
    for number, (name, label) in enumerate([*zip(names, labels, strict=True)][len(names) > 1 :]):
        ratios = [rows[name].get(key, 0) / first[key] for key in lines]
        offset = (number - (len(names) - 2) / 2) * height
        positions = [position + offset for position in range(len(lines))]
        axes.barh(positions, ratios, height * 0.9, color=COLOURS[number % len(COLOURS)], label=label)
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(lines)), list(lines.values()))
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(canvas, stem)


def _short(names: Iterable[str]) -> list[str]:
    """Return the last part of each model's name, or as many as tell it from the others."""
    paths = [Path(name).parts for name in names]

    def is_alone(path: tuple[str, ...], count: int) -> bool:
        return sum(other[-count:] == path[-count:] for other in paths) == 1

    counts = [next((n for n in range(1, len(path)) if is_alone(path, n)), len(path)) for path in paths]
    return [str(Path(*path[-count:])) for path, count in zip(paths, counts, strict=True)]
