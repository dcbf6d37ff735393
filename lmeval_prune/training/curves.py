"""Loss curves of one training, or of several stages one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.reporting.plot_style import COLOURS, figure, save

ACCURACY = "eval_accuracy"
# of each figure in the log its label, colour and line
Lines = Mapping[str, tuple[str, str, str]]


def draw(stages: Sequence[dict[str, Any]], lines: Lines, title: str, stem: Path) -> None:
    """Draw losses and validation accuracy by epoch, as `stem.png` and `stem.svg`.

    Args:
        stages: each with its `log`; where stages remove heads, with `stage` and `removed`.
        lines: of the losses.
        title: of the picture.
        stem: path without its ending.
    """
    picture, axes = figure(7, 3.4, title)
    right = axes.twinx() if any(ACCURACY in row for stage in stages for row in stage["log"]) else None
    begun, labels = 0.0, set[str]()
    for stage in stages:
        for name in lines:
            _draw_loss(axes, stage["log"], begun, name, lines[name], labels)
        if right is not None and (points := _points(stage["log"], begun, ACCURACY)):
            right.plot(*points, color=COLOURS[3], ls=":", marker=".")
        end = begun + max((row["epoch"] for row in stage["log"]), default=0.0)
        if "removed" in stage:
            axes.axvspan(begun, end, color="#f2f2f2" if stage["stage"] % 2 else "white", zorder=-1, lw=0)
            text, position = f" −{stage['removed']['heads']} heads", (begun, 0.98)
            axes.annotate(text, position, xycoords=("data", "axes fraction"), fontsize=7, va="top")
        begun = end
    axes.set_xlabel("epoch, over all stages" if len(stages) > 1 else "epoch")
    if labels:
        axes.set_yscale("log")
        picture.legend(frameon=False, fontsize=7, ncols=len(labels), loc="outside lower center")
    if right is not None:
        right.set_ylabel("validation problems solved, % (dotted)", color=COLOURS[3], fontsize=8)
        right.set_ylim(0, 100)
        right.spines[["top"]].set_visible(False)
    save(picture, stem)


def _draw_loss(
    axes: Any, log: Sequence[dict[str, Any]], begun: float, name: str, line: tuple[str, str, str], labels: set[str]
) -> None:
    """Draw a loss of a stage; the first stage that has it gives it a label."""
    label, colour, style = line
    of_validation = name.startswith("eval_")
    rows = [row for row in log if row.get(name, 0) > 0 and ("eval_loss" in row) == of_validation]
    if points := _points(rows, begun, name):
        new = None if label in labels else label
        axes.plot(*points, color=colour, ls=style, marker=".", label=new)
        labels.add(label)


def _points(rows: Sequence[dict[str, Any]], begun: float, name: str) -> tuple[list[float], list[float]] | None:
    """Return epochs and values of a figure, accuracies in %; None where no row has it."""
    scale = 100 if name == ACCURACY else 1
    known = [(begun + row["epoch"], scale * row[name]) for row in rows if name in row]
    return ([x for x, _ in known], [y for _, y in known]) if known else None
