"""`lmeval-prune grid run` and `grid compare`."""

from __future__ import annotations

import logging
from typing import Literal

from lmeval_prune.config import command


@command("grid", resumes=True, takes_tasks=True)
def run(
    grid: str,
    output: str,
    runner: Literal["here", "ray"] = "here",
    retry_failed: bool = False,
    ray_address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    memory: float | None = None,
) -> int:
    """Evaluate every variant of a grid on every task; the same command resumes an interrupted grid.

    Args:
        grid: YAML file of the grid; `--grid` may be left out
        output: folder of the grid
        runner: here (this process) or ray (a Ray cluster)
        retry_failed: try failed cells again
        ray_address: address of a Ray cluster (default: RAY_ADDRESS, else a local one is started)
        cpus: processors of a job on Ray
        gpus: GPUs of a job on Ray
        memory: bytes of memory of a job on Ray
    """
    from lmeval_prune.grid.configuration import Grid

    parsed = Grid.read(grid)
    from functools import partial

    from lmeval_prune.grid.ray_runner import run_on_ray
    from lmeval_prune.grid.run import run as run_grid

    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmeval_prune.grid").setLevel(logging.INFO)
    on_ray = partial(run_on_ray, address=ray_address, cpus=cpus, gpus=gpus, memory=memory or 0)
    summary = run_grid(parsed, output, on_ray if runner == "ray" else None, retry_failed)
    for variant, task, reason in summary.failed:
        print(f"failed: {variant} on {task}: {reason}")
    done = summary.cells - len(summary.failed)
    print(f"{output}: {done} of {summary.cells} cells are done, {summary.new} of them new")
    if summary.failed:
        print("add --retry-failed to try them again")
        return 1
    print(f"compare them: lmeval-prune grid compare {output}")
    return 0


@command("folder")
def compare(
    folder: str,
    baseline: str | None = None,
    output: str | None = None,
    without_texts: tuple[str, ...] = (),
    seed: int = 0,
    margin: float | None = None,
) -> int:
    """Compare a grid's variants with a baseline, question by question, in tables and on a page.

    Args:
        folder: folder of the grid; `--folder` may be left out
        baseline: name of a variant (default: the grid's baseline, else its first variant)
        output: folder for the tables and the page (default: `compare` in the grid's folder)
        without_texts: tasks whose questions and answers are left out of the page, for licences that forbid publishing
        seed: seed of the tests
        margin: points; test, too, that a variant loses fewer of right and wrong answers
    """
    from pathlib import Path

    from lmeval_prune.artefacts import output_lock
    from lmeval_prune.comparison.commands import write_report
    from lmeval_prune.grid.comparison import compare_grid

    target = Path(output or Path(folder) / "compare")
    with output_lock(target):
        return write_report(compare_grid(folder, baseline, seed, margin), target, without_texts)
