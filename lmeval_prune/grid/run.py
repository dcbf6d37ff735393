"""Run a grid: first the preparations, then cells, costs and distances, until everything is done or has failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

from lmeval_prune.artefacts import digest
from lmeval_prune.grid.cells import Cell, Item, Job, Made, cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder, Kind, reason_missing
from lmeval_prune.grid.worker import Worker

logger = logging.getLogger(__name__)
POLL_SECONDS = 2.0  # between two checks for items that another run makes
LOADING_ARGUMENTS = ("pretrained", "peft", "dtype", "revision")
MASK_ARGUMENTS = {"heads", "mask"}
# Runs jobs on a grid's folder in any order. A job whose machine is lost yields a failure for each of its items.
Runner = Callable[[Path, Sequence[Job], Grid], Iterator[Made]]
ORDER: tuple[Kind, ...] = ("prepare", "evaluate", "measure", "distance")  # with one loaded model


class Summary(NamedTuple):
    """Result of a run."""

    cells: int  # number of cells of the grid
    new: int  # number of cells that this run evaluated
    failed: list[tuple[str, str, str]]  # variant, task and reason of each failed cell


def run(grid: Grid, output: str, runner: Runner | None = None, retry_failed: bool = False) -> Summary:
    """Evaluate the cells of a grid that are not done; `output` is its folder; default runner: in this process."""
    folder, cells = GridFolder(output), cells_of(grid)
    fields, distances = _plan_distances(grid, cells) if grid.distance else ({}, [])
    entries = [cell.entry(cell.model_args(folder.prepared)) | fields.get(cell.key, {}) for cell in cells]
    folder.create(grid.title, grid.baseline, entries)
    items = [Item("evaluate", cell.key, cell) for cell in cells]
    preparations = [Item("prepare", cell.prepared, cell) for cell in cells if cell.prepared]
    if grid.measure:
        items += {cell.costs: Item("measure", cell.costs, cell) for cell in cells if cell.measurable}.values()
    items += distances
    if retry_failed:
        for item in (*items, *preparations):
            folder.clear_failure(item.name)
    done_before = folder.done("evaluate") & {cell.key for cell in cells}
    if done_before:
        logger.info("%d of %d cells are done", len(done_before), len(cells))
    needed = {item.key: item for item in preparations if item.cell.key not in done_before}

    def left(items: Sequence[Item]) -> list[Item]:
        failures, done = folder.failures(), {kind: folder.done(kind) for kind in ORDER}
        return [
            item
            for item in items
            if item.name not in failures
            and item.key not in done[item.kind]
            and (item.kind == "prepare" or not item.cell.prepared or item.cell.prepared in done["prepare"])
        ]

    with closing(Worker(folder.path)) as worker:
        for phase in (list(needed.values()), items):
            open_items, finished, waits = left(phase), 0, 0
            total = len(open_items)
            while open_items:
                finished_before, jobs = finished, _jobs(grid, folder, open_items)
                here = (result for job in jobs for result in worker.run(job))
                for item, failure in runner(folder.path, jobs, grid) if runner else here:
                    finished += 1
                    logger.info("[%d/%d] %s: %s", finished, total, item, f"failed: {failure}" if failure else "done")
                if (open_items := left(phase)) and finished == finished_before:  # another run makes them
                    if waits % 30 == 0:
                        logger.info("waiting for another run, which makes %d: %s, …", len(open_items), open_items[0])
                    waits += 1
                    sleep(POLL_SECONDS)
                    open_items = left(phase)
    failures, done = folder.failures(), folder.done("evaluate")
    failed = [entry for entry in entries if entry["key"] not in done]
    reasons = [(entry["variant"], entry["task"], reason_missing(entry, failures)) for entry in failed]
    return Summary(len(cells), len(cells) - len(failed) - len(done_before), reasons)


def _jobs(grid: Grid, folder: GridFolder, items: Sequence[Item]) -> list[Job]:
    """Group items into jobs: variants of one model on one task that differ only in masks, others singly.

    Jobs of one model are adjacent, and within them the jobs of one task, which share an answer store.
    """
    groups: dict[Any, list[Item]] = {}
    order: dict[Any, int] = {}  # models and tasks, in the order of the grid
    for item in items:
        cell = item.cell
        arguments = {name: str(value) for name, value in cell.model_args(folder.prepared).items()}
        model = tuple(arguments.get(name) for name in LOADING_ARGUMENTS)
        others = tuple(sorted((name, value) for name, value in arguments.items() if name not in MASK_ARGUMENTS))
        places = [order.setdefault(name, len(order)) for name in (model, cell.task.name)]
        position = (places[0], ORDER.index(item.kind), places[1])
        is_alone = item.key if item.kind in ("prepare", "measure") else ""
        origin = item.origin.key if item.origin else ""
        groups.setdefault((position, others, cell.variant.seed, origin, is_alone), []).append(item)
    return [
        group[start : start + grid.together]
        for _, group in sorted(groups.items(), key=lambda pair: pair[0][0])
        for start in range(0, len(group), grid.together)
    ]


def _plan_distances(grid: Grid, cells: Sequence[Cell]) -> tuple[dict[str, dict[str, str]], list[Item]]:
    """Return the fields of `grid.json` on distances, by cell, and the items that measure them.

    A variant with interventions or a preparation is measured from its model without them; another checkpoint from the
    model of the baseline's cell, which itself has no distance.
    """
    baseline = grid.baseline or grid.variants[0].name
    bases = {cell.task.name: cell for cell in cells if cell.variant.name == baseline}
    fields: dict[str, dict[str, str]] = {}
    items = []
    for cell in cells:
        base, is_routed, key = bases[cell.task.name], "router" in cell.variant.model_args, ""
        origin = None if cell.identity["interventions"] or cell.prepared or is_routed else base
        if origin and cell.identity["model"] == origin.identity["model"]:
            continue
        if cell.variant.served or (origin and origin.variant.served):
            note = "not measured: a server gives no probabilities of all tokens; measure the model by pruned-hf"
        elif is_routed:
            note = "not measured: a router answers under several masks; `lmeval-prune distance --heads` measures each"
        else:
            note = f"that of its checkpoint from the model of {baseline}" if origin else ""
            key = f"{grid.distance}-{cell.key}-{digest((origin or cell).identity['model'])[:12]}"
            items.append(Item("distance", key, cell, origin, grid.distance))
        fields[cell.key] = {"distance": key, "distance_note": note}
    return fields, items
