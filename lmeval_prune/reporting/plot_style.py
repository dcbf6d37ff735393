"""Figures in one style, drawn with matplotlib without a display and written as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    _disable_formulas(canvas)
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        options: dict[str, Any] = {"dpi": 150} if kind == "png" else {"metadata": {"Date": None}}
        with rc_context({"svg.hashsalt": stem.name}):
            canvas.savefig(buffer, format=kind, **options)
        write_bytes(stem.with_suffix(f".{kind}"), buffer.getvalue())


def _disable_formulas(canvas: Any) -> None:
    """Show `$` in names literally; only the ticks of a logarithmic axis are formulas."""
    scales = [axis for axes in canvas.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() != "linear"]
    formulas = {text for axis in scales for text in axis.findobj(Text)}
    for text in canvas.findobj(Text):
        text.set_parse_math(text in formulas)


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
