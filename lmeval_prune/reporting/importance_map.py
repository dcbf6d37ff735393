"""Scores of heads: a picture, layers × heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lmeval_prune.reporting.plot_style import save


def draw(scores: Mapping[str, Sequence[float]], title: str, stem: Path) -> None:
    """Write `stem.png` and `stem.svg`.

    Args:
        scores: of each layer's heads, layers in order; each stack of a model with several gets a panel.
        title: above the picture.
        stem: path without its ending.
    """
    stacks: dict[str, dict[str, Sequence[float]]] = {}
    for label, values in scores.items():
        stacks.setdefault(label.rpartition(".")[0], {})[label] = values
    widest = max(len(values) for values in scores.values())
    tallest = max(map(len, stacks.values()))
    made = Figure(
        figsize=(max(3.5, 1.6 + 0.34 * widest) * len(stacks) + 0.8, 1.2 + 0.2 * tallest), layout="constrained"
    )
    made.suptitle(title, fontsize=10, x=0.01, ha="left")
    every = np.concatenate([np.asarray(values, dtype=float) for values in scores.values()])
    panels = made.subplots(1, len(stacks), squeeze=False)[0]
    for axes, (stack, layers) in zip(panels, stacks.items(), strict=True):
        filled = np.full((len(layers), widest), np.nan)
        for place, values in enumerate(layers.values()):
            filled[place, : len(values)] = np.asarray(values, dtype=float)
        shown = axes.pcolormesh(filled, cmap="viridis", vmin=every.min(), vmax=every.max(), edgecolors="white", lw=0.5)
        axes.set_yticks(np.arange(len(layers)) + 0.5, list(layers), fontsize=6)
        axes.set_xticks(np.arange(widest) + 0.5, [str(head) for head in range(widest)], fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("head", fontsize=8)
        axes.set_title(stack, fontsize=8)
        axes.tick_params(length=0, pad=1)
        axes.spines[:].set_visible(False)
    bar = made.colorbar(shown, ax=panels.tolist(), shrink=0.6)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("score", fontsize=8)
    save(made, stem)
