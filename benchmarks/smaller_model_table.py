"""Print the rows of the verdict of smaller_model.py, as docs/smaller-model.md has them, their tests and means.

    python benchmarks/smaller_model_table.py

Reads benchmarks/results/smaller_model_verdict.json, which `smaller_model.py report` writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from _smaller import Row
from smaller_model_picture import SERIES, SPLITS, Series

HEADER = (
    *("fold, seed", "dense solves", "`depth_greedy_prompts`", "won, lost", "dense, best of 8 samples"),
    *("`depth_greedy_prompts`, best of 8", "KL divergence from dense", "response term, training texts"),
    "validation problems",
)
TEST_HEADER = ("fold, seed", "dense solves, test", "`depth_greedy_prompts`, test", "won, lost")


def table_lines(series: Series) -> list[str]:
    """Return the table of a series' rows as Markdown, by seed and fold."""
    records = sorted(series.records().items(), key=lambda item: (item[0].seed, item[0].fold))
    rows = (HEADER, ["---"] * len(HEADER), *itertools.starmap(_cells, records))
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _cells(row: Row, record: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row: counts of solved validation problems, distance, and the response term at the end."""
    pruned, dense = record["right"], record["dense"]
    stage = record["stages"][-1]
    terms = [[entry[name] for entry in stage["log"] if name in entry][-1] for name in ("response", "eval_response")]
    return [
        f"{row.fold}, {row.seed}",
        *_counts(record, "validation"),
        str(dense["sampled"].count("1")),
        str(pruned["sampled"].count("1")),
        *(f"{value:.3f}" for value in (stage["distance"]["mean_kld"], *terms)),
    ]


def lines_of_tests(series: Series) -> list[str]:
    """Return the table of a series' tests as Markdown, by seed and fold; nothing before they are scored."""
    records = sorted(series.records().items(), key=lambda item: (item[0].seed, item[0].fold))
    if "test" not in series.differences():
        return []
    rows = [TEST_HEADER, ["---"] * len(TEST_HEADER)]
    for row, record in records:
        counts = _counts(record, "test")
        rows.append([f"{row.fold}, {row.seed}", *counts])
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _counts(record: Mapping[str, Any], split: str) -> tuple[str, str, str]:
    """Return how many problems the dense and the pruned model solve, and how many the pruned one wins and loses."""
    dense, pruned = record["dense"][split], record["right"][split]
    pairs = list(zip(dense, pruned, strict=True))
    return (
        f"{dense.count('1')} of {len(pairs)}",
        str(pruned.count("1")),
        f"{pairs.count(('0', '1'))}, {pairs.count(('1', '0'))}",
    )


def mean_lines(series: Series) -> list[str]:
    """Return the mean difference of a series to the dense models on each split, with its 95% interval over folds."""
    lines = []
    for split, difference in series.differences().items():
        digits, (low, high) = 2 if split == "test" else 1, difference.interval
        lines.append(f"{SPLITS[split]}: {difference.mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})")
    return lines


def main() -> None:
    """Print the table and the means."""
    print("\n".join([*table_lines(SERIES[-1]), "", *lines_of_tests(SERIES[-1]), "", *mean_lines(SERIES[-1])]))


if __name__ == "__main__":
    main()
