"""Heatmaps of the scores of a model's heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lmeval_prune.reporting.plot_style import save


def draw_scores(
    scores: Mapping[str, Sequence[float]], title: str, stem: Path, columns: Sequence[str] | None = None
) -> None:
    """Draw layers × heads, or layers × columns, as `stem.png` and `stem.svg`; encoder and decoder get a panel each.

    Args:
        scores: scores by layer, in order; NaN where a layer has none.
        title: title of the figure.
        stem: path without its suffix.
        columns: what each column is; None: heads.
    """
    stacks: dict[str, dict[str, Sequence[float]]] = {}
    for label, values in scores.items():
        stacks.setdefault(label.rpartition(".")[0], {})[label] = values
    widest = max(len(values) for values in scores.values())
    tallest = max(map(len, stacks.values()))
    figure = _figure(max(3.5, 1.6 + 0.34 * widest) * len(stacks) + 0.8, 1.2 + 0.2 * tallest, title)
    flat = np.concatenate([np.asarray(values, dtype=float) for values in scores.values()])
    panels = figure.subplots(1, len(stacks), squeeze=False)[0]
    for axes, (stack, layers) in zip(panels, stacks.items(), strict=True):
        mesh = _heatmap(axes, list(layers.values()), widest, cmap="viridis", vmin=np.nanmin(flat), vmax=np.nanmax(flat))
        axes.set_yticks(np.arange(len(layers)) + 0.5, list(layers), fontsize=6)
        axes.set_xticks(np.arange(widest) + 0.5, columns or [str(head) for head in range(widest)], fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("" if columns else "head", fontsize=8)
        axes.set_title(stack, fontsize=8)
    bar = figure.colorbar(mesh, ax=panels.tolist(), shrink=0.6)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("score", fontsize=8)
    save(figure, stem)


def _figure(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _heatmap(axes: Any, rows: Sequence[Any], width: int, **colours: Any) -> Any:
    values = np.full((len(rows), width), np.nan)
    for number, row in enumerate(rows):
        values[number, : len(row)] = np.asarray(row, dtype=float)
    axes.tick_params(length=0, pad=1)
    axes.spines[:].set_visible(False)
    return axes.pcolormesh(values, edgecolors="white", lw=0.5, **colours)
