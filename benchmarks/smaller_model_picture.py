"""Draw how many points of accuracy recipes of smaller_model.py lose, from the results files.

    python benchmarks/smaller_model_picture.py

Writes docs/results/smaller_model/differences.png and .svg.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _record import RESULTS
from _smaller import Row
from _smaller_scores import Difference

from lmeval_prune.artefacts import read_json
from lmeval_prune.reporting.plot_style import COLOURS, figure, save

PICTURE = Path(__file__).parents[1] / "docs" / "results" / "smaller_model" / "differences"
SPLITS = {
    "validation": "validation, greedy",
    "sampled": "validation, any of 8",
    "test": "test, greedy",
}
MARKERS = {"validation": "o", "sampled": "s", "test": "D"}


@dataclass(frozen=True)
class Series:
    """Rows of a recipe in a results file."""

    label: str
    file: str
    recipe: str
    seeds: Collection[int]

    def records(self) -> dict[Row, Any]:
        """Return the records of the rows."""
        return {
            Row(self.recipe, record["fold"], record["seed"]): record
            for record in read_json(RESULTS / f"smaller_model_{self.file}.json")["rows"].values()
            if record["recipe"] == self.recipe and record["seed"] in self.seeds
        }

    def differences(self) -> dict[str, Difference]:
        """Return the differences to the dense models that were pruned, by split; of the test once it is scored."""
        records = self.records()
        answers = [record[name] for record in records.values() for name in ("right", "dense")]
        known = [split for split in SPLITS if all(split in digits for digits in answers)]
        return {split: _difference(records, split) for split in known}


SERIES = (
    Series("depth: nine layers at once\n14 epochs in large batches", "gpu", "depth", [0]),
    Series("width_short: a third of heads and channels\nfive epochs", "cpu", "width_short", [0]),
    Series(
        "depth_greedy_prompts: nine layers, one after the other\nthe seed of the choice",
        "greedy",
        "depth_greedy_prompts",
        [0],
    ),
    Series("the same by the seeds of the verdict\non a GPU, answers lost", "greedy", "depth_greedy_prompts", [1, 2, 3]),
    Series("the same by the seeds of the verdict\non a CPU", "verdict", "depth_greedy_prompts", [1, 2, 3]),
)


def _difference(records: dict[Row, Any], split: str) -> Difference:
    """Return the difference of rows on a split."""
    right = {
        row: [_bits(digits[split]) for digits in (record["right"], record["dense"])] for row, record in records.items()
    }
    by_row = {row: own - dense for row, (own, dense) in right.items()}
    return Difference(by_row, float(np.mean([own.mean() for own, _ in right.values()])))


def _bits(text: str) -> np.ndarray:
    """Return a results file's digits, 1 for a right answer, as numbers."""
    return np.array([int(digit) for digit in text], dtype=float)


def main() -> None:
    """Draw the figure."""
    goal = yaml.safe_load((Path(__file__).parent / "smaller_model.yaml").read_text())["goal"]
    canvas, axes = figure(8.2, 4.2, "Accuracy less that of the dense model")
    labels = dict(SPLITS)
    for number, series in enumerate(SERIES):
        differences = series.differences()
        for order, (split, difference) in enumerate(differences.items()):
            y, (low, high) = number + 0.24 * (order - (len(differences) - 1) / 2), difference.interval
            colour = COLOURS[[*SPLITS].index(split)]
            axes.plot([low, high], [y, y], color=colour, lw=1.5, solid_capstyle="butt")
            axes.plot(difference.mean, y, MARKERS[split], color=colour, ms=6, label=labels.pop(split, None))
        rows, folds = len(difference.by_row), len(difference.folds)
        axes.annotate(
            f"{rows} rows, {folds} folds", (1.0, number), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color="0.35", annotation_clip=False,
        )  # fmt: skip
    axes.axvline(0, color="0.5", lw=0.8)
    axes.axvline(-goal["loss"], color="0.5", lw=0.8, ls="--")
    axes.axvline(goal["lower_bound"], color="0.5", lw=0.8, ls=":")
    axes.set_yticks(range(len(SERIES)), [series.label for series in SERIES], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"points, with the 95% interval over folds; the goal: a mean right of the dashed line (−{goal['loss']}),\n"
        f"an interval right of the dotted one (−{-goal['lower_bound']:g}), on tests, by all rows of the verdict",
        fontsize=8,
    )
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    save(canvas, PICTURE)


if __name__ == "__main__":
    main()
