"""Runners of a grid's jobs: in this process, or on a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from lmeval_prune.errors import DiskError, InputError, first_line
from lmeval_prune.grid.folder import GridFolder, measurement_key
from lmeval_prune.grid.worker import FAILED, Job, LoadedModel, Result, Worker
from lmeval_prune.models.registered import TARGETS
from lmeval_prune.tasks.loading import included_folder, including

# environment variables that a Ray worker needs to find the same data and models
ENVIRONMENT = ("LMEVAL_PRUNE_DATA", "LMEVAL_PRUNE_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


class Runner(Protocol):
    """Runs jobs."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run jobs in any order.

        A job that cannot finish (its machine is lost) yields a failure for each of its cells; it raises nothing.

        Yields:
            The result of each cell, as soon as it is known.
        """

    def close(self) -> None:
        """Release all resources after the last job."""


class LocalRunner:
    """Runs jobs one after another in this process. A model is loaded once."""

    def __init__(self) -> None:
        self._loaded = LoadedModel()

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run jobs in their order."""
        for job in jobs:
            yield from Worker(job, self._loaded).run()

    def close(self) -> None:
        """Free the model."""
        self._loaded.close()


@dataclass(frozen=True)
class RayRunner:
    """Runs jobs as Ray tasks. Every node must see the grid's folder under the same path.

    If a node dies, its jobs are restarted elsewhere and reuse the stored answers.

    Attributes:
        address: address of the cluster; default `RAY_ADDRESS`, else a local cluster is started.
        cpus, gpus: resources of a job.
        memory: bytes of a job, for Ray's scheduling.
        retries: restarts of a job whose worker or node died.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    memory: float | None = None
    retries: int = 5

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run jobs in parallel."""
        ray = self._connect()
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": self.retries}
        if self.memory:
            options["memory"] = self.memory
        task = ray.remote(**options)(_run_in_worker)
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        settings = TARGETS.get("process"), str(Path.cwd()), environment, included_folder()
        pending = {task.remote(job, *settings): job for job in jobs}
        while pending:
            (ready,), _ = ray.wait(list(pending), num_returns=1)
            job = pending.pop(ready)
            try:
                yield from ray.get(ready)
            except DiskError as error:
                raise DiskError(str(getattr(error, "cause", error))) from None
            except Exception as error:  # Ray gave up: the worker died repeatedly, or never saw the folder
                yield from self._lost(job, error)

    def close(self) -> None:
        """Do nothing: Ray's workers hold the models."""

    def _connect(self) -> Any:
        import ray

        if not ray.is_initialized():
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.WARNING)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for name, request in (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory or 0)):
            largest = max((resources.get(name, 0) for resources in nodes), default=0)
            if request > largest:
                raise InputError(
                    f"a job requests {request:g} {name}, and no node of the Ray cluster has more than {largest:g}"
                )
        return ray

    def _lost(self, job: Job, error: Exception) -> Iterator[Result]:
        """Record everything that a lost job did not finish as failed."""
        folder, reason = GridFolder(job.folder), f"lost by Ray: {first_line(getattr(error, 'cause', None) or error)}"
        for key in _unfinished(job, folder):
            folder.record_failure(key, reason, str(error))
            yield Result(key, FAILED, reason)


def _unfinished(job: Job, folder: GridFolder) -> list[str]:
    """Return the keys of a job's cells, preparations, measurements and distances that are not done."""
    if job.prepares:
        return [cell.prepared for cell in job.cells if not folder.preparation(cell.prepared).is_dir()]
    if job.distance:
        return [key for key in job.distance_keys if not folder.has_distances(key)]
    costs = {cell.costs for cell in job.cells if folder.has_cell(cell.key)} if job.measures else set()
    measures = [measurement_key(key) for key in sorted(costs) if folder.needs_costs(key)]
    return [cell.key for cell in job.cells if not folder.has_cell(cell.key)] + measures


@cache
def _loaded_in_worker() -> LoadedModel:
    return LoadedModel()


def _run_in_worker(
    job: Job, registration: str | None, folder: str, environment: dict[str, str], include_path: str | None
) -> list[Result]:
    """Run a job in a Ray worker, with the current folder, environment and folder of tasks of the main process."""
    import torch

    os.environ.update(environment)
    if Path(folder).is_dir():
        os.chdir(folder)
    if not (Path(job.folder) / "grid.json").is_file():
        raise InputError(f"this node does not see {job.folder}; name a folder that all nodes share")
    if registration:
        resolve_name(registration)()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else 1)
    with including(include_path):
        return list(Worker(job, _loaded_in_worker()).run())
