"""Run the jobs of a grid as tasks on a Ray cluster: the same jobs over the same locked folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from lmeval_prune.errors import DiskError, InputError, first_line
from lmeval_prune.grid.cells import Item, Job, Made, Models, cells_of
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.worker import Worker
from lmeval_prune.models import TARGETS
from lmeval_prune.tasks.loading import included_folder, including

# environment variables by which a worker finds the same data and models
ENVIRONMENT = ("LMEVAL_PRUNE_DATA", "LMEVAL_PRUNE_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def run_on_ray(
    path: Path,
    jobs: Sequence[Job],
    grid: Grid,
    address: Any = None,
    cpus: float = 1,
    gpus: float = 0,
    memory: float = 0,
) -> Iterator[Made]:
    """Run jobs of a grid as Ray tasks; every node must see the grid's folder, `path`, under the same path.

    `address` is that of the cluster (default `RAY_ADDRESS`, else a local cluster is started); `cpus`, `gpus` and
    `memory` (in bytes) are those of a job.
    """
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    for name, request in (("CPU", cpus), ("GPU", gpus), ("memory", memory)):
        if not any(node["Alive"] and node["Resources"].get(name, 0) >= request for node in ray.nodes()):
            raise InputError(f"no node of the Ray cluster has the {request:g} {name} of a job")  # Ray would wait
    resources: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "memory": memory or None}
    task: Any = ray.remote(**resources, max_retries=5)(_in_worker)  # again if its node dies; answers are stored
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    settings = path, TARGETS.get("process"), str(Path.cwd()), environment, included_folder()
    pending = {}
    for job in jobs:  # a worker reads the part of the grid that has the job's cells, and finds them by their keys
        cells = [cell for item in job for cell in (item.cell, item.origin) if cell]
        variants = tuple({cell.variant.name: cell.variant for cell in cells}.values())
        tasks = tuple({cell.task.name: cell.task for cell in cells}.values())
        part = replace(grid, variants=variants, tasks=tasks, baseline=None)
        named = [(x.kind, x.key, x.cell.key, x.origin and x.origin.key, x.documents) for x in job]
        pending[task.remote(part, named, settings)] = job
    while pending:
        (ready,), _ = ray.wait(list(pending), num_returns=1)
        job = pending.pop(ready)
        try:
            made: dict[str, str] = ray.get(ready)
            yield from ((item, made[item.name]) for item in job if item.name in made)
        except DiskError as error:
            raise DiskError(str(getattr(error, "cause", error))) from None
        except Exception as error:  # Ray gave up: the worker died repeatedly, or never saw the folder
            folder, reason = GridFolder(path), first_line(getattr(error, "cause", None) or error)
            for item in job:
                if not folder.place(item.kind, item.key).exists():
                    folder.record_failure(item.name, f"lost by Ray: {reason}", str(error))
                    yield item, reason


_worker = cache(Worker)
_models: Models = {}  # whose files this process has read


def _in_worker(grid: Grid, named: list[tuple[Any, ...]], settings: tuple[Any, ...]) -> dict[str, str]:
    """Run a job in a Ray worker, with the current folder, environment and folder of tasks of the main process."""
    path, registration, folder, environment, included = settings
    os.environ.update(environment)
    if Path(folder).is_dir():
        os.chdir(folder)
    if not (path / "grid.json").is_file():
        raise InputError(f"this node does not see {path}; name a folder that all nodes share")
    if registration:
        resolve_name(registration)()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    with including(included):
        cells: dict[Any, Any] = {cell.key: cell for cell in cells_of(grid, _models)}  # as this node reads them
        if {key for _, _, *keys, _ in named for key in keys if key} - cells.keys():
            raise InputError("files that the grid reads have changed since it began; run it again")
        job = [Item(kind, key, cells[cell], cells.get(origin), count) for kind, key, cell, origin, count in named]
        return {item.name: reason for item, reason in _worker(path).run(job)}
