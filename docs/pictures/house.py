"""Draw the folders of the package and their imports: `python docs/pictures/house.py` writes house.png beside it."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FLOORS = [
    [("cli · demo", "the commands"), ("plugin", "how lm-eval finds us")],
    [
        ("sprint", "outcomes, router, report"),
        ("distillation", "stages, losses, hosts"),
        ("grid", "cells of variants and tasks"),
    ],
    [
        ("models", "pruned-hf, store of answers"),
        ("planning", "importance, prune, cut"),
        ("comparison", "tests, page, distances"),
    ],
    [("export", "adapters, GGUF, servers"), ("surgery", "executes a plan"), ("pruners", "scores, budgets, plans")],
    [
        ("decoding", "the engine"),
        ("profiling", "parameters, FLOPs, speed"),
        ("athena · training", "the model of Yu et al."),
    ],
    [("interventions", "head masks, plans, token filter, probe pruning, the attention call")],
    [("checkpoints", "embedded models, models without weights, cut ones")],
    [("architectures", "the model map, names of heads, fingerprints"), ("kernels", "Triton, with references")],
]
BESIDE = [
    ("tasks", "lm-eval's YAML and\nits Python", 2.0),
    ("scoring", "reads and compares\nanswers", 3.4),
    ("reporting", "statistics, tables,\nplot style", 5.3),
    ("config · artefacts · errors", "used by all", 6.6),
]


def box(axes: Any, x: float, y: float, width: float, height: float, name: str, description: str, colour: str) -> None:
    """Draw a box with a name and a line about it; a text that does not fit ends the program."""
    patch = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=colour, ec="0.35")
    axes.add_patch(patch)
    texts = [
        axes.text(x + 0.16, y + height - 0.3, name, fontsize=10, weight="bold", va="center"),
        axes.text(x + 0.16, y + (height - 0.3) / 2 - 0.02, description, fontsize=8.5, va="center", color="0.25"),
    ]
    axes.figure.draw_without_rendering()
    for text in texts:
        if text.get_window_extent().x1 > patch.get_window_extent().x1:
            raise SystemExit(f"{text.get_text()!r} is wider than its box")


def widths(rooms: list[tuple[str, str]]) -> list[float]:
    """Return the widths of a floor's boxes, in proportion to their texts."""
    lengths = [max(1.3 * len(name), len(description)) + 4 for name, description in rooms]
    return [(8.0 - 0.15 * (len(rooms) - 1)) * length / sum(lengths) for length in lengths]


def main() -> None:
    figure = Figure(figsize=(9, 6.1), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.1, 12.2), ylim=(-1.0, 7.75))
    for number, rooms in enumerate(FLOORS):
        x, y = 0.0, 6.75 - 1.08 * number
        for (name, description), width in zip(rooms, widths(rooms), strict=True):
            box(axes, x, y, width, 0.86, name, description, "#dcebf7" if number < 2 else "#eef4e6")
            x += width + 0.15
        if number:
            arrow = {"arrowstyle": "-|>", "color": "0.35", "lw": 1.2}
            axes.annotate("", (4, y + 0.88), (4, y + 1.07), arrowprops=arrow)
    for name, description, depth in BESIDE:
        box(axes, 8.9, 7.6 - depth - 0.9, 3.2, 1.15, name, description, "#f6efdc")
    axes.annotate("", (10.5, 4.5), (10.5, 4.68), arrowprops={"arrowstyle": "-|>", "color": "0.35", "lw": 1.2})
    axes.text(
        8.9, 7.05, "Imports point down, never up\nand never in a circle.", fontsize=9, style="italic", va="center"
    )
    figure.savefig(Path(__file__).with_name("house.png"), dpi=140)


if __name__ == "__main__":
    main()
