"""The table and the picture of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.tables import markdown

_WORDS = {
    "parameters": "parameters (millions)",
    "without_embeddings": "without embeddings (millions)",
    "flops_counted": "GFLOPs of a prompt",
    "peak_memory_mib": "peak memory (MiB)",
}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table: a column a model, and its share of the first one's figure."""
    names = list(rows)
    first = rows[names[0]]
    lines = []
    for key in _figures(first):
        cells = []
        for place, name in enumerate(names):
            value = rows[name].get(key)
            share = f" ({value / first[key]:.3f})" if place and value is not None and first[key] else ""
            cells.append("" if value is None else f"{_shown(key, value)}{share}")
        lines.append([_named(key), *cells])
    return markdown(pd.DataFrame(lines, columns=["", *(Path(name).name for name in names)]), [""]) + "\n"


def draw(rows: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Bars of each figure relative to the first model's."""
    names = list(rows)
    first, keys = rows[names[0]], _figures(rows[names[0]])
    made, axes = figure(7.5, 0.9 + 0.55 * len(keys), f"relative to {Path(names[0]).name}")
    height = 0.8 / max(1, len(names) - 1)
    for number, name in enumerate(names[1:] or names):
        shares = [rows[name].get(key, 0) / first[key] if first[key] else 0 for key in keys]
        places = [place + (number - (len(names) - 2) / 2) * height for place in range(len(keys))]
        axes.barh(places, shares, height * 0.9, color=COLOURS[number % len(COLOURS)], label=Path(name).name)
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(keys)), [_named(key) for key in keys])
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)


def _figures(row: Mapping[str, Any]) -> list[str]:
    speeds = [key for key in row if key.partition("_")[0] in ("prefill", "decode", "forward")]
    return ["parameters", "without_embeddings", "flops_counted", *speeds, "peak_memory_mib"]


def _named(key: str) -> str:
    if key in _WORDS:
        return _WORDS[key]
    kind, _, batch = key.partition("_")
    return f"{kind}, batch {batch} (tokens/s)"


def _shown(key: str, value: float) -> str:
    if key in ("parameters", "without_embeddings"):
        return f"{value / 1e6:.2f}" if value >= 1e5 else f"{value / 1e6:.5f}"
    return f"{value / 1e9:.3f}" if key == "flops_counted" else f"{value:.1f}"
