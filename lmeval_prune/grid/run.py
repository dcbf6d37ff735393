"""Runs a grid: preparations, then cells, until all are there or have failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmeval_prune.artefacts import digest
from lmeval_prune.grid.cells import Cell, cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.runners import Here, Runner
from lmeval_prune.grid.work import BUSY, FAILED, Job, Loaded

logger = logging.getLogger(__name__)
WAIT = 2.0  # seconds between looks at what another run is doing
_MASKS = {"heads", "mask"}


@dataclass(frozen=True)
class Summary:
    """What a run leaves.

    Attributes:
        cells: of the grid.
        new: cells that this run evaluated.
        failed: (variant, task, reason) of the cells that have failed.
    """

    cells: int
    new: int
    failed: list[tuple[str, str, str]]


def run(grid: Grid, output: str, runner: Runner | None = None, retry_failed: bool = False) -> Summary:
    """Evaluate the cells of a grid that are not there yet.

    Args:
        grid: the grid.
        output: its folder.
        runner: default `Here`.
        retry_failed: try those again that have failed.

    Raises:
        InputError: something in the grid does not fit; nothing has been run then.
    """
    runner = runner or Here()
    folder, cells = GridFolder(output), cells_of(grid)
    folder.begin(grid.title, grid.baseline, [_entry(cell, folder) for cell in cells])
    if retry_failed:
        for cell in cells:
            folder.forget_failure(cell.key)
            folder.forget_failure(cell.prepared or cell.key)
    before = {cell.key for cell in cells if folder.done(cell.key)}
    if before:
        logger.info("%d of %d cells are there", len(before), len(cells))

    def left() -> list[Cell]:
        return [cell for cell in cells if not folder.done(cell.key) and folder.failure(cell.key) is None]

    names = {cell.key: f"{cell.variant} on {cell.task}" for cell in cells}
    try:
        _prepare(cells, folder, runner)
        _until_done(left, lambda rest: jobs_of(grid, rest, folder), runner, names)
    finally:
        Loaded.release()
    reasons = [(cell, folder.failure(cell.key)) for cell in cells if not folder.done(cell.key)]
    failed = [(cell.variant, cell.task, reason or "not run") for cell, reason in reasons]
    new = sum(folder.done(cell.key) and cell.key not in before for cell in cells)
    return Summary(len(cells), new, failed)


def _entry(cell: Cell, folder: GridFolder) -> dict[str, Any]:
    """A cell in `grid.json`: what comparing needs to know without opening the cell."""
    names = ("variant", "task", "metric", "selected_on", "model_args", "prepare")
    found = {name: getattr(cell, name) for name in names}
    return {"key": cell.key, **found, "costs": cell.costs, "command": cell.command(folder.prepared)}


def _prepare(cells: Sequence[Cell], folder: GridFolder, runner: Runner) -> None:
    """Make what cells need; those whose preparation fails fail with it."""
    needed = {cell.prepared: cell for cell in cells if cell.prepared and not folder.done(cell.key)}

    def left() -> list[Cell]:
        return [
            cell for key, cell in needed.items() if not (folder.prepared / key).is_dir() and not folder.failure(key)
        ]

    names = {key: f"preparation {next(iter(cell.prepare))} of {cell.variant}" for key, cell in needed.items()}
    _until_done(left, lambda rest: [Job(str(folder.path), (cell,), prepares=True) for cell in rest], runner, names)
    for cell in cells:
        reason = folder.failure(cell.prepared) if cell.prepared in needed else None
        if reason and not folder.done(cell.key):
            folder.fail(cell.key, f"its preparation failed: {reason}", "")


def jobs_of(grid: Grid, cells: Sequence[Cell], folder: GridFolder) -> list[Job]:
    """Cells in jobs: variants of one model on one task that are only masks together, others alone.

    Jobs of one model stand side by side, in the order of the grid.
    """
    models: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        base = {name: value for name, value in cell.model_args.items() if name not in _MASKS}
        prepared = {**base, **cell.arguments(folder.prepared)}
        loads = digest([str(prepared.get(name)) for name in ("pretrained", "peft", "dtype", "revision")])
        only_masks = {name: value for name, value in prepared.items() if name not in _MASKS}
        group = digest([str(sorted(only_masks.items())), cell.task, cell.seed])
        models.setdefault(loads, {}).setdefault(group, []).append(cell)
    found = []
    for groups in models.values():
        for group_cells in groups.values():
            for begin in range(0, len(group_cells), grid.together):
                chosen = tuple(group_cells[begin : begin + grid.together])
                found.append(Job(str(folder.path), chosen, measures=grid.measure))
    return found


def _until_done(
    left: Callable[[], list[Cell]],
    jobs: Callable[[Sequence[Cell]], Sequence[Job]],
    runner: Runner,
    names: dict[str, str],
) -> None:
    """Run jobs until nothing is left; what another run has is looked at again."""
    total, ended = len(left()), 0
    while rest := left():
        moved = False
        for one in runner.do(jobs(rest)):
            if one.state == BUSY:
                continue
            moved, ended = True, ended + 1
            what = f"failed: {one.reason}" if one.state == FAILED else "done"
            logger.info("[%d/%d] %s: %s", ended, total, names.get(one.key, one.key), what)
        if not moved and left():
            time.sleep(WAIT)
