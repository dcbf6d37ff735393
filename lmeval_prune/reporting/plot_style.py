"""Figures in one style, drawn with matplotlib without a display and written as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from lmeval_prune.artefacts import write_bytes

# Okabe and Ito's colours, which can be distinguished with any colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")


def figure(width: float, height: float, title: str) -> tuple[Any, Any]:
    """Create a figure of a size in inches with one pair of axes."""
    canvas = Figure(figsize=(width, height), layout="constrained")
    axes = canvas.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    return canvas, axes


def save(canvas: Any, stem: Path) -> None:
    """Write a figure as `stem.png` and `stem.svg`; equal figures give equal files."""
    # `$` in names is literal; only the ticks of a logarithmic axis are formulas
    scales = [axis for axes in canvas.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() != "linear"]
    formulas = {text for axis in scales for text in axis.findobj(Text)}
    for text in canvas.findobj(Text):
        text.set_parse_math(text in formulas)
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        options: dict[str, Any] = {"dpi": 150} if kind == "png" else {"metadata": {"Date": None}}
        with rc_context({"svg.hashsalt": stem.name}):
            canvas.savefig(buffer, format=kind, **options)
        write_bytes(stem.with_suffix(f".{kind}"), buffer.getvalue())


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, dict[str, Any]]], gap: float = 0.062) -> None:
    """Write names of lines at the right of the axes, beside their ends, without overlaps.

    Args:
        axes: axes with final limits.
        ends: x and y of each line's last point, its name and the style of its text.
        gap: minimum distance of two names, as a share of the axes' height.
    """
    (_, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.autoscale(False)
    ordered = sorted(ends, key=lambda end: -end[1])
    heights = [(y - bottom) / (top - bottom) for _, y, _, _ in ordered]
    for _ in range(200):  # neighbours that are too close push each other apart
        for above, below in pairwise(range(len(heights))):
            push = max(0.0, gap - heights[above] + heights[below]) / 2
            heights[above], heights[below] = min(heights[above] + push, 1.0), max(heights[below] - push, 0.0)
    for (x, y, name, style), height in zip(ordered, heights, strict=True):
        axes.plot([x, right], [y, bottom + height * (top - bottom)], color=style["color"], lw=0.8, ls=(0, (1, 3)))
        axes.annotate(name, (1.0, height), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=9, annotation_clip=False, **style)  # fmt: skip


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
    size = (max(3.5, 1.6 + 0.34 * widest) * len(stacks) + 0.8, 1.2 + 0.2 * tallest)
    canvas = Figure(figsize=size, layout="constrained")
    canvas.suptitle(title, fontsize=10, x=0.01, ha="left")
    flat = np.concatenate([np.asarray(values, dtype=float) for values in scores.values()])
    panels = canvas.subplots(1, len(stacks), squeeze=False)[0]
    for axes, (stack, layers) in zip(panels, stacks.items(), strict=True):
        grid = np.full((len(layers), widest), np.nan)
        for number, row in enumerate(layers.values()):
            grid[number, : len(row)] = np.asarray(row, dtype=float)
        axes.tick_params(length=0, pad=1)
        axes.spines[:].set_visible(False)
        limits = {"vmin": np.nanmin(flat), "vmax": np.nanmax(flat)}
        mesh = axes.pcolormesh(grid, edgecolors="white", lw=0.5, cmap="viridis", **limits)
        axes.set_yticks(np.arange(len(layers)) + 0.5, list(layers), fontsize=6)
        axes.set_xticks(np.arange(widest) + 0.5, columns or [str(head) for head in range(widest)], fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("" if columns else "head", fontsize=8)
        axes.set_title(stack, fontsize=8)
    bar = canvas.colorbar(mesh, ax=panels.tolist(), shrink=0.6)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("score", fontsize=8)
    save(canvas, stem)
