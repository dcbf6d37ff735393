"""`lmeval-prune compare` and `distance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lmeval_prune.comparison.options import DistanceOptions
from lmeval_prune.config import command
from lmeval_prune.errors import InputError, check_exists


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
    margin: float | None = None,
) -> int:
    """Compare runs of `lm_eval --log_samples` with a baseline, question by question, in tables and on a page.

    Args:
        runs: folders or results files, each as PATH or NAME=PATH; `--runs` may be left out
        baseline: name or path of a run (default: the only one of a folder without pruning, else the first)
        output: folder for the tables and the page
        tasks: tasks and groups to compare (default: all of the baseline)
        metric: METRIC or METRIC,FILTER to compare where a task has it (default: exact_match, acc or pass@N, else the
            first)
        by: columns of the documents; a part for each of their values is compared, too
        allow_different: questions, prompts or settings: compare though they differ
        without_texts: tasks whose questions and answers are left out of the page
        seed: seed of the tests
        margin: points; test, too, that a variant loses fewer of right and wrong answers
    """
    from lmeval_prune.comparison.compare import compare as compare_runs

    comparison = compare_runs(runs, baseline, tasks, metric, by, allow_different, seed, margin)
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


@command("pretrained", "MODEL", takes_tasks=True)
def distance(
    pretrained: str,
    output: str = "out/distance.json",
    heads: Sequence[str] = (),
    mask: Sequence[str] = (),
    checkpoint: Sequence[str] = (),
    **options: Any,
) -> int:
    """Measure how far variants are from a dense model: KL divergence, top token, greedy answers.

    Args:
        pretrained: the dense model, as for lm_eval; `--pretrained` may be left out
        output: JSON file; the table is written beside it (.md)
        heads: a variant without these heads, e.g. L5H3+L15H0, or a mask or plan of heads (FILE.json); can be repeated
        mask: a variant under the artefact in this file, e.g. a plan; can be repeated
        checkpoint: a variant that is another checkpoint with the same tokenizer; can be repeated
    """
    settings = DistanceOptions(**options)
    if not (heads or mask or checkpoint):
        raise InputError("name what is compared with the model: --heads, --mask or --checkpoint")
    if settings.text:
        check_exists(settings.text, file=True)
    files = (Path(value).stem if value.endswith(".json") else value for value in (*heads, *mask))
    names = [*files, *map(str, checkpoint)]
    if repeated := [name for name in names if ["dense", *names].count(name) > 1]:
        raise InputError(f"two variants are called {repeated[0]!r}; name each once, files by different names")
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.comparison.variants import distances_from, write
    from lmeval_prune.models.arguments import Arguments

    check_writable(output)
    arguments = [*({"heads": value} for value in heads), *({"mask": path} for path in mask)]
    pairs = zip(names, arguments, strict=False)  # the names of checkpoints come last
    variants = {name: Arguments.of(model_args).interventions for name, model_args in pairs}
    print(write(output, pretrained, settings, distances_from(pretrained, settings, variants, checkpoint)))
    return 0
