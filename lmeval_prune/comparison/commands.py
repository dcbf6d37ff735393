"""`lmeval-prune compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lmeval_prune.config import command


@command("runs")
def compare(
    runs: tuple[str, ...],
    baseline: str | None = None,
    output: str = "compare",
    tasks: tuple[str, ...] = (),
    metric: str | None = None,
    by: tuple[str, ...] = (),
    allow_different: tuple[Literal["questions", "prompts", "settings"], ...] = (),
    without_texts: tuple[str, ...] = (),
    seed: int = 0,
) -> int:
    """Compare runs of `lm_eval --log_samples` with a baseline, question by question, in tables and on a page.

    Args:
        runs: folders or results files, each as PATH or NAME=PATH; `--runs` may be left out
        baseline: name or path of a run (default: the first)
        output: folder for the tables and the page
        tasks: tasks and groups to compare (default: all of the baseline)
        metric: METRIC or METRIC,FILTER to compare where a task has it (default: exact_match, acc or pass@N, else the
            first)
        by: columns of the documents; a part for each of their values is compared, too
        allow_different: questions, prompts or settings: compare though they differ
        without_texts: tasks whose questions and answers are left out of the page
        seed: seed of the tests
    """
    from lmeval_prune.comparison.compare import compare as compare_runs

    comparison = compare_runs(runs, baseline, tasks, metric, by, allow_different, seed)
    return write_report(comparison, Path(output), without_texts)


def write_report(comparison: Any, target: Path, without_texts: Sequence[str]) -> int:
    """Write the report of a comparison to a folder, and print its main table, the notes and the paths."""
    from lmeval_prune.comparison.report import summary_table, task_table, write
    from lmeval_prune.reporting.documents import printable

    notes, paths = write(comparison, target, without_texts)
    print(summary_table(comparison) if comparison.about else task_table(comparison, comparison.tasks[-1]))
    for note in notes:
        print(f"note: {printable(note)}")
    print(*paths, sep="\n")
    return 0
