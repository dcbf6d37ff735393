"""Write a profile as a table and as a bar plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.tables import markdown

_LABELS = {
    "parameters": "parameters (millions)",
    "without_embeddings": "without embeddings (millions)",
    "flops_counted": "GFLOPs of a prompt",
    "peak_memory_mib": "peak memory (MiB)",
}
_SPEEDS = {
    "prefill": "prefill",
    "decode": "decode",
    "forward": "forward",
    "generate": "answers by generate",
    "engine": "answers by the engine",
}


def table(rows: Mapping[str, Mapping[str, Any]], further: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table with a column for each model; values are followed by their ratio to the first model's.

    `further` are formatted values by model and line, which models may lack.
    """
    first, *others = rows.values()
    lines = []
    for key in _keys(rows):
        cells = ["" if first.get(key) is None else _formatted(key, first[key])]
        for row in others:
            value = row.get(key)
            ratio = f" ({value / first[key]:.3f})" if value is not None and first.get(key) else ""
            cells.append("" if value is None else f"{_formatted(key, value)}{ratio}")
        lines.append([_label(key), *cells])
    for label in dict.fromkeys(label for values in further.values() for label in values):
        lines.append([label, *(further.get(name, {}).get(label, "") for name in rows)])
    return markdown(pd.DataFrame(lines, columns=["", *_short(rows)]), [""]) + "\n"


def draw_bars(rows: Mapping[str, Mapping[str, Any]], stem: Path) -> None:
    """Draw each value relative to the first model's as bars."""
    names, labels, first = list(rows), _short(rows), next(iter(rows.values()))
    keys = [key for key in _keys(rows) if first.get(key)]
    canvas, axes = figure(7.5, 0.9 + 0.55 * len(keys), f"relative to {labels[0]}")
    height = 0.8 / max(1, len(names) - 1)
    for number, (name, label) in enumerate([*zip(names, labels, strict=True)][len(names) > 1 :]):
        ratios = [rows[name].get(key, 0) / first[key] for key in keys]
        offset = (number - (len(names) - 2) / 2) * height
        positions = [position + offset for position in range(len(keys))]
        axes.barh(positions, ratios, height * 0.9, color=COLOURS[number % len(COLOURS)], label=label)
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(keys)), [_label(key) for key in keys])
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


def _keys(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for row in rows.values() for key in row)
    speeds = [key for key in keys if key.partition("_")[0] in _SPEEDS]
    return ["parameters", "without_embeddings", "flops_counted", *speeds, "peak_memory_mib"]


def _label(key: str) -> str:
    kind, _, batch = key.partition("_")
    return _LABELS.get(key, f"{_SPEEDS.get(kind, kind)}, batch {batch} (tokens/s)")


def _formatted(key: str, value: float) -> str:
    if key in ("parameters", "without_embeddings"):
        return f"{value / 1e6:.2f}" if value >= 1e5 else f"{value / 1e6:.5f}"
    return f"{value / 1e9:.3f}" if key == "flops_counted" else f"{value:.1f}"
