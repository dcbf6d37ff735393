"""Runs a grid: preparations, then cells, until all are there or have failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from lmeval_prune.artefacts import digest
from lmeval_prune.grid.cells import Cell, cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder, measuring
from lmeval_prune.grid.runners import Here, Runner
from lmeval_prune.grid.work import BUSY, FAILED, Job, Loaded

logger = logging.getLogger(__name__)
WAIT = 2.0  # seconds between looks at what another run is doing
SAY = 60.0  # seconds between words about it
_MASKS = {"heads", "mask"}
_UNPREPARED = "its preparation failed"


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
            for key in (cell.key, cell.prepared or cell.key, measuring(cell.costs)):
                folder.forget_failure(key)
    before = {cell.key for cell in cells if folder.done(cell.key)}
    if before:
        logger.info("%d of %d cells are there", len(before), len(cells))

    def left() -> list[Cell]:
        there = {cell.key for cell in cells if folder.done(cell.key)}
        rest = [cell for cell in cells if cell.key not in there and folder.failure(cell.key) is None]
        if grid.measure:  # what is done, but was not measured
            coming = {cell.costs for cell in rest}
            by_costs = {cell.costs: cell for cell in cells if cell.key in there and cell.costs not in coming}
            rest += [cell for costs, cell in by_costs.items() if folder.needs_measure(costs)]
        return rest

    names = {measuring(cell.costs): f"costs of {cell.variant}" for cell in cells}
    names |= {cell.key: f"{cell.variant} on {cell.task}" for cell in cells}
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
        return [cell for key, cell in needed.items() if not folder.is_prepared(key) and not folder.failure(key)]

    names = {key: f"preparation {next(iter(cell.prepare))} of {cell.variant}" for key, cell in needed.items()}
    _until_done(left, lambda rest: [Job(str(folder.path), (cell,), prepares=True) for cell in rest], runner, names)
    for key in needed:
        if folder.is_prepared(key):
            folder.forget_failure(key)
    for cell in cells:
        if cell.prepared in needed and not folder.done(cell.key):
            if reason := folder.failure(cell.prepared):
                folder.fail(cell.key, f"{_UNPREPARED}: {reason}", "")
            elif (folder.failure(cell.key) or "").startswith(_UNPREPARED):  # it has been made since
                folder.forget_failure(cell.key)


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
    total, ended, said = len(left()), 0, 0.0
    while rest := left():
        moved = False
        for one in runner.do(jobs(rest)):
            if one.state == BUSY:
                continue
            moved, ended = True, ended + 1
            what = f"failed: {one.reason}" if one.state == FAILED else "done"
            logger.info("[%d/%d] %s: %s", ended, total, names.get(one.key, one.key), what)
        if not moved and (rest := left()):
            if monotonic() >= said:
                first = names.get(rest[0].key) or rest[0].variant
                logger.info("waiting for another run that has %d of them, e.g. %s", len(rest), first)
                said = monotonic() + SAY
            sleep(WAIT)
