"""Loss curves of all stages, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.reporting.plot_style import COLOURS, figure, save

LINES = {
    "loss": ("all (λ₁·distillation + λ₂·task)", COLOURS[7], "-"),
    "response": ("response", COLOURS[0], "-"),
    "feature": ("feature", COLOURS[2], "-"),
    "task": ("task", COLOURS[1], "-"),
    "eval_loss": ("all, validation", COLOURS[6], "--"),
}


def draw(stages: Sequence[dict[str, Any]], stem: Path) -> None:
    """Draw losses and validation accuracy by epoch, as `stem.png` and `stem.svg`.

    Args:
        stages: as `distillation.json` has them.
        stem: path without its ending.
    """
    made, axes = figure(7, 3.4, "Recursive distillation, stage by stage")
    right = axes.twinx() if any("eval_accuracy" in row for stage in stages for row in stage["log"]) else None
    begun, named = 0.0, set[str]()
    for stage in stages:
        for key, (name, colour, style) in LINES.items():
            rows = [row for row in stage["log"] if row.get(key, 0) > 0 and ("eval_loss" in row) == (key == "eval_loss")]
            if rows:
                places = [begun + row["epoch"] for row in rows]
                label = name if name not in named else None
                axes.plot(places, [row[key] for row in rows], color=colour, ls=style, marker=".", label=label)
                named.add(name)
        rows = [row for row in stage["log"] if "eval_accuracy" in row]
        if right is not None and rows:
            places = [begun + row["epoch"] for row in rows]
            right.plot(places, [100 * row["eval_accuracy"] for row in rows], color=COLOURS[3], ls=":", marker=".")
        end = begun + max((row["epoch"] for row in stage["log"]), default=0.0)
        axes.axvspan(begun, end, color="#f2f2f2" if stage["stage"] % 2 else "white", zorder=-1, lw=0)
        removed = stage["removed"]
        axes.annotate(
            f" −{removed['heads']} heads", (begun, 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top"
        )
        begun = end
    axes.set_xlabel("epoch, over all stages")
    if named:
        axes.set_yscale("log")
        made.legend(frameon=False, fontsize=7, ncols=len(named), loc="outside lower center")
    if right is not None:
        right.set_ylabel("validation problems solved, % (dotted)", color=COLOURS[3], fontsize=8)
        right.set_ylim(0, 100)
        right.spines[["top"]].set_visible(False)
    save(made, stem)
