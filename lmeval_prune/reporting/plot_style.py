"""The look of figures, drawn with matplotlib without a display and written as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from lmeval_prune.artefacts import write_bytes

# Okabe and Ito's colours, told apart with any colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")


def figure(width: float, height: float, title: str) -> tuple[Any, Any]:
    """Make a figure in inches with one pair of axes."""
    made = Figure(figsize=(width, height), layout="constrained")
    axes = made.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    return made, axes


def save(made: Any, stem: Path) -> None:
    """Write a figure as `stem.png` and `stem.svg`; the same picture is the same file."""
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        options: dict[str, Any] = {"dpi": 150} if kind == "png" else {"metadata": {"Date": None}}
        with rc_context({"svg.hashsalt": stem.name}):
            made.savefig(buffer, format=kind, **options)
        write_bytes(stem.with_suffix(f".{kind}"), buffer.getvalue())


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, dict[str, Any]]], gap: float = 0.062) -> None:
    """Write names of lines at the right of the axes, beside their ends, apart from one another.

    Args:
        axes: whose limits are set.
        ends: of each line its last point, its name and the text's style.
        gap: between two names, as a share of the axes' height.
    """
    (_, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.autoscale(False)
    ordered = sorted(ends, key=lambda end: -end[1])
    heights = [(y - bottom) / (top - bottom) for _, y, _, _ in ordered]
    for _ in range(200):  # neighbours that are too near push each other away
        for above, below in pairwise(range(len(heights))):
            push = max(0.0, gap - heights[above] + heights[below]) / 2
            heights[above], heights[below] = min(heights[above] + push, 1.0), max(heights[below] - push, 0.0)
    for (x, y, name, style), height in zip(ordered, heights, strict=True):
        axes.plot([x, right], [y, bottom + height * (top - bottom)], color=style["color"], lw=0.5, alpha=0.6)
        axes.annotate(name, (1.0, height), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=9, annotation_clip=False, **style)  # fmt: skip
