"""Draw the SPRINT paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.patches import Patch

from lmeval_prune.architectures import Head
from lmeval_prune.reporting.plot_style import COLOURS, figure, label_ends, save
from lmeval_prune.sprint.curves import Curve


def pass_at_n(
    curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]], dense: float, stem: Path
) -> None:
    """Draw pass@N of all policies; the first one and the best of the others have 95% intervals (Figure 4)."""
    known = [np.flatnonzero(~np.isnan(curve.mean)) for curve in curves]
    last = [float(curve.mean[columns[-1]]) for curve, columns in zip(curves, known, strict=True)]
    rivals = [i for i, curve in enumerate(curves) if i and not curve.is_bound]
    strongest = max(rivals, key=last.__getitem__, default=0)
    main = {strongest: COLOURS[1], 0: COLOURS[0]}
    drawing, axes = figure(8.2, 4.6, f"pass@N on {len(curves[0].values)} questions; bands: 95%")
    ends, colours = [], iter(COLOURS[2:] * len(curves))
    for i, (curve, columns, (low, high)) in enumerate(zip(curves, known, bands, strict=True)):
        colour = "0.35" if curve.is_bound else main[i] if i in main else next(colours)
        ks, is_main = columns + 1, i in main
        style = {"color": colour, "ls": "-" if curve.kind == "ordered" else "--", "lw": 2.4 if is_main else 1.3}
        marker = {"marker": "o", "ms": 5, "zorder": 4 if i else 5} if is_main else {}
        axes.plot(ks, curve.mean[columns], **style, **marker)
        if is_main:
            axes.fill_between(ks, low[columns], high[columns], color=colour, alpha=0.13, lw=0)
        ends.append((ks[-1], last[i], curve.name, {"color": colour, "weight": "bold" if is_main else "normal"}))
    tries = curves[0].values.shape[1]
    axes.axhline(dense, color="0.35", lw=1, ls=":")
    ends.append((tries, dense, "unpruned, greedy (one try)", {"color": "0.35", "weight": "normal"}))
    axes.set(xlabel="tries N  (dashed: an expectation over draws)", ylabel="pass@N", xlim=(0.8, tries + 0.6))
    axes.set_xticks(np.arange(1, tries + 1))
    axes.grid(axis="y", color="0.92")
    label_ends(axes, ends)
    save(drawing, stem)


def violins(measured: dict[str, list[float]], by_chance: dict[str, list[float]], stem: Path) -> None:
    """Draw the best head's gain in each layer, next to the gain expected by chance (Figure 2)."""
    layers = list(measured)
    title = "Best head of a layer, by group of questions (line: median)"
    drawing, axes = figure(max(5.5, 1.1 * len(layers) + 2), 4.4, title)
    for offset, values, colour in ((-0.2, measured, COLOURS[0]), (0.2, by_chance, COLOURS[6])):
        for i, layer in enumerate(layers):
            points = np.asarray(values[layer])
            if len(points) > 4 and np.ptp(points) > 0:
                parts = axes.violinplot([points], [i + offset], widths=0.36, showmedians=False, showextrema=False)
                parts["bodies"][0].set(facecolor=colour, alpha=0.5)
            axes.plot([i + offset - 0.12, i + offset + 0.12], [np.median(points)] * 2, color=colour, lw=2)
            if len(points) <= 20:
                axes.plot(np.full(len(points), i + offset), points, ".", color=colour, ms=5)
    axes.axhline(0, color="0.4", lw=1, ls=":")
    axes.set_xticks(range(len(layers)), layers)
    axes.set(xlabel="layer", ylabel="accuracy of the best head − unpruned")
    names = ("measured", "outcomes shuffled among heads: chance alone")
    drawing.legend(  # beside the axes: on them it could hide a violin
        handles=[Patch(color=c, alpha=0.5, label=n) for c, n in zip((COLOURS[0], COLOURS[6]), names, strict=True)],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    save(drawing, stem)


def head_changes(changes: dict[str, tuple[float, float]], stem: Path) -> None:
    """Draw each head's change in accuracy, sorted, with two standard errors (Figure 5)."""
    ordered = sorted(changes.items(), key=lambda item: item[1][0])
    title = "Accuracy with one head pruned − unpruned (lines: two standard errors)"
    drawing, axes = figure(max(6.0, 0.19 * len(ordered) + 1.5), 4.2, title)
    values = np.array([change for _, (change, _) in ordered])
    errors = np.array([2 * error for _, (_, error) in ordered])
    colours = [COLOURS[0] if value >= 0 else COLOURS[1] for value in values]
    axes.bar(range(len(ordered)), values, color=colours, yerr=errors, ecolor="0.5", error_kw={"lw": 0.8})
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_xticks(range(len(ordered)), [name for name, _ in ordered], rotation=90, fontsize=7)
    axes.margins(x=0.01)
    axes.set(ylabel="change in accuracy")
    save(drawing, stem)


def head_map(changes: dict[str, tuple[float, float]], stem: Path) -> None:
    """Draw the change in accuracy by layer and head."""
    heads = {name: Head.named(name) for name in changes}
    layers = list(dict.fromkeys(head.layer_label for head in heads.values()))
    count = 1 + max(head.head for head in heads.values())
    grid = np.full((len(layers), count), np.nan)  # in percentage points
    for name, head in heads.items():
        grid[layers.index(head.layer_label), head.head] = 100 * changes[name][0]
    title = "Change in accuracy with one head pruned"
    drawing, axes = figure(max(5.0, 0.5 * count + 2.2), max(2.4, 0.42 * len(layers) + 1.4), title)
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
                axes.text(j, i, f"{value:+.1f}", ha="center", va="center", fontsize=7, color=shade)
    drawing.colorbar(image, ax=axes, label="change in accuracy, points")
    save(drawing, stem)
