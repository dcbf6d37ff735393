"""Plot the loss curves of a training, or of consecutive stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.architectures.names import compact_names
from lmeval_prune.reporting.plot_style import COLOURS, figure, save

ACCURACY = "eval_accuracy"
# label, colour and line style of each loss in the log
Lines = Mapping[str, tuple[str, str, str]]


def draw(stages: Sequence[dict[str, Any]], lines: Lines, title: str, stem: Path) -> None:
    """Draw losses and validation accuracy by epoch as `stem.png` and `stem.svg`.

    Each stage has its `log`; a stage that removes heads also has `stage` and `removed`.
    """
    picture, axes = figure(7, 3.4, title)
    right = axes.twinx() if any(ACCURACY in row for stage in stages for row in stage["log"]) else None
    start, labels = 0.0, set[str]()
    for stage in stages:
        for name in lines:
            _draw_loss(axes, stage["log"], start, name, lines[name], labels)
        if right is not None and (points := _points(stage["log"], start, ACCURACY)):
            right.plot(*points, color=COLOURS[3], ls=":", marker=".")
        end = start + max((row["epoch"] for row in stage["log"]), default=0.0)
        if "removed" in stage:
            axes.axvspan(start, end, color="#f2f2f2" if stage["stage"] % 2 else "white", zorder=-1, lw=0)
            text, position = f" {_removal(stage)}", (start, 0.98)
            axes.annotate(text, position, xycoords=("data", "axes fraction"), fontsize=7, va="top")
        start = end
    axes.set_xlabel("epoch, over all stages" if len(stages) > 1 else "epoch")
    if labels:
        axes.set_yscale("log")
        picture.legend(frameon=False, fontsize=7, ncols=len(labels), loc="outside lower center")
    if right is not None:
        right.set_ylabel("validation accuracy, % (dotted)", color=COLOURS[3], fontsize=8)
        right.set_ylim(0, 100)
        right.spines[["top"]].set_visible(False)
    save(picture, stem)


def _removal(stage: Mapping[str, Any]) -> str:
    """Return what a stage removed: whole layers and blocks by name, or else numbers of heads and channels."""
    if names := compact_names(stage.get("removed_blocks", ())):
        return f"−{names}"
    removed = stage["removed"]
    counts = [f"−{removed[name]} {name}" for name in ("heads", "channels") if removed.get(name)]
    return ", ".join(counts) or "nothing removed"


def _draw_loss(
    axes: Any, log: Sequence[dict[str, Any]], start: float, name: str, line: tuple[str, str, str], labels: set[str]
) -> None:
    """Draw a loss of a stage; only its first line has a label in the legend."""
    label, colour, style = line
    is_validation = name.startswith("eval_")
    rows = [row for row in log if row.get(name, 0) > 0 and ("eval_loss" in row) == is_validation]
    if points := _points(rows, start, name):
        axes.plot(*points, color=colour, ls=style, marker=".", label=None if label in labels else label)
        labels.add(label)


def _points(rows: Sequence[dict[str, Any]], start: float, name: str) -> tuple[list[float], list[float]] | None:
    """Return epochs and values of a metric, accuracies in %; None if no row has it."""
    scale = 100 if name == ACCURACY else 1
    points = [(start + row["epoch"], scale * row[name]) for row in rows if name in row]
    return ([x for x, _ in points], [y for _, y in points]) if points else None
