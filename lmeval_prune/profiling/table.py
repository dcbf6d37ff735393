"""Write a profile as a table and as a bar plot."""

from __future__ import annotations

from collections.abc import Mapping
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
    for key in _keys(first):
        cells = ["" if first.get(key) is None else _formatted(key, first[key])]
        for row in others:
            value = row.get(key)
            ratio = f" ({value / first[key]:.3f})" if value is not None and first[key] else ""
            cells.append("" if value is None else f"{_formatted(key, value)}{ratio}")
        lines.append([_label(key), *cells])
    for label in dict.fromkeys(label for values in further.values() for label in values):
        lines.append([label, *(further.get(name, {}).get(label, "") for name in rows)])
    return markdown(pd.DataFrame(lines, columns=["", *(Path(name).name for name in rows)]), [""]) + "\n"


def draw_bars(rows: Mapping[str, Mapping[str, Any]], stem: Path) -> None:
    """Draw each value relative to the first model's as bars."""
    names = list(rows)
    first, keys = rows[names[0]], _keys(rows[names[0]])
    canvas, axes = figure(7.5, 0.9 + 0.55 * len(keys), f"relative to {Path(names[0]).name}")
    height = 0.8 / max(1, len(names) - 1)
    for number, name in enumerate(names[1:] or names):
        ratios = [rows[name].get(key, 0) / first[key] if first[key] else 0 for key in keys]
        offset = (number - (len(names) - 2) / 2) * height
        positions = [position + offset for position in range(len(keys))]
        axes.barh(positions, ratios, height * 0.9, color=COLOURS[number % len(COLOURS)], label=Path(name).name)
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(keys)), [_label(key) for key in keys])
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(canvas, stem)


def _keys(row: Mapping[str, Any]) -> list[str]:
    speeds = [key for key in row if key.partition("_")[0] in _SPEEDS]
    return ["parameters", "without_embeddings", "flops_counted", *speeds, "peak_memory_mib"]


def _label(key: str) -> str:
    kind, _, batch = key.partition("_")
    return _LABELS.get(key, f"{_SPEEDS.get(kind, kind)}, batch {batch} (tokens/s)")


def _formatted(key: str, value: float) -> str:
    if key in ("parameters", "without_embeddings"):
        return f"{value / 1e6:.2f}" if value >= 1e5 else f"{value / 1e6:.5f}"
    return f"{value / 1e9:.3f}" if key == "flops_counted" else f"{value:.1f}"
