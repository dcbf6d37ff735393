"""Runners do the jobs of a grid: in this process, or on a Ray cluster."""

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
from lmeval_prune.grid.folder import GridFolder, measuring
from lmeval_prune.grid.work import FAILED, Finished, Job, LoadedModel, Worker
from lmeval_prune.models.registered import TARGETS

# environment variables by which a job on Ray finds the same data and models
CARRIED = ("LMEVAL_PRUNE_DATA", "LMEVAL_PRUNE_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


class Runner(Protocol):
    """Does jobs."""

    def do(self, jobs: Sequence[Job]) -> Iterator[Finished]:
        """Do jobs, in any order.

        A job that cannot be ended (its machine is gone for good) is reported as failed, cell by cell; no exception.

        Yields:
            The end of each of their cells, as soon as it is known.
        """

    def close(self) -> None:
        """Release what it holds, after the last job."""


class Here:
    """Does jobs one after another, in this process; a model is loaded once."""

    def __init__(self) -> None:
        self._loaded = LoadedModel()

    def do(self, jobs: Sequence[Job]) -> Iterator[Finished]:
        """Do jobs in their order."""
        for job in jobs:
            yield from Worker(job, self._loaded).run()

    def close(self) -> None:
        """Free the model."""
        self._loaded.close()


@dataclass(frozen=True)
class OnRay:
    """Does jobs as Ray tasks. Every node must see the grid's folder under the same path.

    A job whose node dies is done again elsewhere, and goes on with the answers that are stored.

    Attributes:
        address: of the cluster; default `RAY_ADDRESS`, else a local one is started.
        cpus, gpus: of a job.
        memory: bytes of a job, for Ray's scheduling.
        retries: of a job whose worker or node died.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    memory: float | None = None
    retries: int = 5

    def do(self, jobs: Sequence[Job]) -> Iterator[Finished]:
        """Do jobs at once, as the cluster has room.

        Raises:
            InputError: Ray is not installed, the cluster cannot be reached, or a job requests more than it has.
        """
        ray = self._connected()
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": self.retries}
        if self.memory:
            options["memory"] = self.memory
        task = ray.remote(**options)(_do_in_worker)
        environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
        waiting = {task.remote(job, TARGETS.get("process"), str(Path.cwd()), environment): job for job in jobs}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(ready)
            try:
                yield from ray.get(ready)
            except DiskError as error:
                raise DiskError(str(getattr(error, "cause", error))) from None
            except Exception as error:  # Ray gave up: the worker died again and again, or never saw the folder
                yield from self._lost(job, error)

    def close(self) -> None:
        """Leave the models to Ray's workers."""

    def _connected(self) -> Any:
        try:
            import ray
        except ImportError:
            raise InputError('--runner ray needs Ray: pip install "lmeval-prune[ray]"') from None
        if not ray.is_initialized():
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(address=self.address, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"Ray cannot be reached at {self.address or 'this machine'} ({first_line(error)})"
                ) from None
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for name, request in (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory or 0)):
            largest = max((resources.get(name, 0) for resources in nodes), default=0)
            if request > largest:
                raise InputError(
                    f"a job asks for {request:g} {name}, and no node of the Ray cluster has more than {largest:g}"
                )
        return ray

    def _lost(self, job: Job, error: Exception) -> Iterator[Finished]:
        """Record as failed what is missing of a job that Ray gave up."""
        folder, reason = GridFolder(job.folder), f"lost by Ray: {first_line(getattr(error, 'cause', None) or error)}"
        for key in _missing(job, folder):
            folder.fail(key, reason, str(error))
            yield Finished(key, FAILED, reason)


def _missing(job: Job, folder: GridFolder) -> list[str]:
    """Return the keys of a job's cells, preparations or measurements that are not there."""
    if job.prepares:
        return [cell.prepared for cell in job.cells if not folder.is_prepared(cell.prepared)]
    costs = {cell.costs for cell in job.cells if folder.done(cell.key)} if job.measures else set()
    measures = [measuring(key) for key in sorted(costs) if folder.needs_measure(key)]
    return [cell.key for cell in job.cells if not folder.done(cell.key)] + measures


@cache
def _loaded_in_worker() -> LoadedModel:
    return LoadedModel()


def _do_in_worker(job: Job, registration: str | None, folder: str, environment: dict[str, str]) -> list[Finished]:
    """Do a job in a Ray worker, with the folder and the environment of the process that started the grid."""
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
    return list(Worker(job, _loaded_in_worker()).run())
