"""Figures, drawn with matplotlib without a display and written as PNG and SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.architectures import Head
from lmeval_prune.artefacts import write_bytes
from lmeval_prune.sprint.curves import Curve
from lmeval_prune.sprint.head_table import HeadTable

# Okabe and Ito's colours, told apart with any colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _write(figure: Any, stem: Path) -> None:
    from matplotlib import rc_context

    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        options: dict[str, Any] = {"dpi": 150} if kind == "png" else {"metadata": {"Date": None}}
        with rc_context({"svg.hashsalt": stem.name}):  # the same picture is the same file
            figure.savefig(buffer, format=kind, **options)
        write_bytes(stem.with_suffix(f".{kind}"), buffer.getvalue())


def pass_at_n(
    curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]], dense: float | None, stem: Path
) -> None:
    """Figure 4: pass@N of every policy with 95% bootstrap bands over questions."""
    figure, axes = _figure(7.5, 4.6)
    for number, (curve, (low, high)) in enumerate(zip(curves, bands, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        ks = np.arange(1, curve.values.shape[1] + 1)
        there = ~np.isnan(curve.mean)
        dashed = curve.kind != "ordered"
        # the first curve is what the report is about: it lies above the others
        style = {"color": colour, "marker": "o", "ms": 4, "zorder": len(curves) - number + 2, "label": curve.name}
        axes.plot(ks[there], curve.mean[there], "--" if dashed else "-", **style)
        axes.fill_between(ks[there], low[there], high[there], color=colour, alpha=0.08, lw=0)
    if dense is not None:
        axes.axhline(dense, color="0.4", lw=1, ls=":", label="unpruned, greedy (one try)")
    axes.set(xlabel="tries N", ylabel="pass@N", ylim=(0, None))
    axes.set_xticks(np.arange(1, max(curve.values.shape[1] for curve in curves) + 1))
    axes.set_title(f"pass@N on {len(curves[0].values)} questions; bands: 95% bootstrap over questions", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    _write(figure, stem)


def violins(measured: dict[str, list[float]], lucky: dict[str, list[float]], stem: Path) -> None:
    """Figure 2: what the best head of a layer gains, by layer, beside what it gains when heads do not matter."""
    layers = list(measured)
    figure, axes = _figure(max(5.5, 1.1 * len(layers) + 2), 4.4)
    from matplotlib.patches import Patch

    for offset, values, colour in ((-0.2, measured, COLOURS[0]), (0.2, lucky, COLOURS[7])):
        for i, layer in enumerate(layers):
            points = np.asarray(values[layer])
            if len(points) > 4 and np.ptp(points) > 0:
                (body,) = axes.violinplot([points], [i + offset], widths=0.36, showmedians=False, showextrema=False)[
                    "bodies"
                ]
                body.set(facecolor=colour, alpha=0.5)
            axes.plot([i + offset - 0.12, i + offset + 0.12], [np.median(points)] * 2, color=colour, lw=2)
            if len(points) <= 20:
                axes.plot(np.full(len(points), i + offset), points, ".", color=colour, ms=5)
    axes.axhline(0, color="0.4", lw=1, ls=":")
    axes.set_xticks(range(len(layers)), layers)
    axes.set(xlabel="layer", ylabel="accuracy of the best head − unpruned")
    axes.set_title("Best head of a layer, by group of questions (line: median)", fontsize=10)
    names = ("measured", "outcomes shuffled among heads: luck alone")
    axes.legend(
        handles=[Patch(color=c, alpha=0.5, label=n) for c, n in zip((COLOURS[0], COLOURS[7]), names, strict=True)],
        frameon=False,
        fontsize=9,
    )
    _write(figure, stem)


def head_changes(changes: dict[str, tuple[float, float]], stem: Path) -> None:
    """Figure 5: each head's change in accuracy, sorted, with two standard errors."""
    ordered = sorted(changes.items(), key=lambda item: item[1][0])
    figure, axes = _figure(max(6.0, 0.19 * len(ordered) + 1.5), 4.2)
    values = np.array([change for _, (change, _) in ordered])
    errors = np.array([2 * error for _, (_, error) in ordered])
    colours = [COLOURS[0] if value >= 0 else COLOURS[1] for value in values]
    axes.bar(range(len(ordered)), values, color=colours, yerr=errors, ecolor="0.5", error_kw={"lw": 0.8})
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_xticks(range(len(ordered)), [name for name, _ in ordered], rotation=90, fontsize=7)
    axes.margins(x=0.01)
    axes.set(ylabel="change in accuracy")
    axes.set_title("Accuracy with one head pruned − unpruned (lines: two standard errors)", fontsize=10)
    _write(figure, stem)


def head_map(changes: dict[str, tuple[float, float]], table: HeadTable, stem: Path) -> None:
    """Layer × head: the change in accuracy."""
    layers = list(table.layers)
    count = 1 + max(head for numbers in table.layers.values() for head in numbers)
    grid = np.full((len(layers), count), np.nan)
    for column, (change, _) in changes.items():
        head = Head.named(column)
        grid[layers.index(head.layer_label), head.head] = change
    figure, axes = _figure(max(5.0, 0.5 * count + 2.2), max(2.4, 0.42 * len(layers) + 1.4))
    limit = max(float(np.nanmax(np.abs(grid))), 1e-9)
    image = axes.imshow(grid, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axes.spines[:].set_visible(False)
    axes.set_xticks(range(count))
    axes.set_yticks(range(len(layers)), layers)
    axes.set(xlabel="pruned head", ylabel="layer")
    if grid.size <= 160:
        for (i, j), value in np.ndenumerate(grid):
            if not np.isnan(value):
                shade = "white" if abs(value) > 0.6 * limit else "0.15"
                axes.text(j, i, f"{100 * value:+.1f}", ha="center", va="center", fontsize=7, color=shade)
    figure.colorbar(image, ax=axes, label="change in accuracy")
    axes.set_title("Change in accuracy with one head pruned (points)", fontsize=10)
    _write(figure, stem)
