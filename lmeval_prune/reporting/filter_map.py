"""Which tokens of a text skip the attention of which layers: a picture, tokens × layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lmeval_prune.reporting.plot_style import COLOURS, save

ACROSS = 48  # tokens side by side; a longer text goes on below


def draw(pieces: Sequence[str], layers: Sequence[str], skipped: np.ndarray, title: str, stem: Path) -> None:
    """Write `stem.png` and `stem.svg`.

    Args:
        pieces: the tokens' texts.
        layers: names of the layers that filter, from the first on.
        skipped: (layers, tokens), true where a token skips.
        title: above the picture.
        stem: path without its ending.
    """
    across = min(ACROSS, len(pieces))
    strips = range(0, len(pieces), across)
    height = 0.16 * len(layers) + 0.85
    made = Figure(figsize=(11, 0.7 + height * len(strips)), layout="constrained")
    made.suptitle(
        f"{title}\nblue: the token skips this layer's attention; layers that are not shown do not filter",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    every = made.subplots(len(strips), 1, squeeze=False)[:, 0]
    for axes, start in zip(every, strips, strict=True):
        shown = skipped[:, start : start + across]
        filled = np.full((len(layers), across), np.nan)
        filled[:, : shown.shape[1]] = shown
        axes.pcolormesh(
            filled, cmap=ListedColormap(["#f2f2f2", COLOURS[0]]), vmin=0, vmax=1, edgecolors="white", lw=0.5
        )
        axes.set_yticks(np.arange(len(layers))[::-2] + 0.5, list(layers)[::-2], fontsize=6)
        names = [piece.replace("\n", "⏎").strip() or "␣" for piece in pieces[start : start + across]]
        axes.set_xticks(np.arange(len(names)) + 0.5, names, rotation=90, fontsize=6)
        axes.tick_params(length=0, pad=1)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("layer", fontsize=8)
    every[-1].set_xlabel("token", fontsize=8)
    save(made, stem)
