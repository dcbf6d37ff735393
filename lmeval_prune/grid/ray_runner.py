"""The runner on a Ray cluster: a job is a Ray task with its request, done again where a node dies."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import DiskError, InputError, first_line
from lmeval_prune.grid.folder import GridFolder, measuring
from lmeval_prune.grid.work import FAILED, Finished, Job
from lmeval_prune.models.registered import TARGETS

logger = logging.getLogger(__name__)
# of the environment, what a job needs to find the same data and models
CARRIED = ("LMEVAL_PRUNE_DATA", "LMEVAL_PRUNE_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class OnRay:
    """Does jobs as Ray tasks. Every node must see the grid's folder under the same path.

    A job whose node dies is done again elsewhere, and goes on with the answers that are stored.

    Attributes:
        address: of the cluster; default that of `RAY_ADDRESS`, else a local one is started.
        cpus, gpus: of a job.
        memory: bytes of a job, for Ray's placing.
        retries: how often a job is done again whose worker or node died.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    memory: float | None = None
    retries: int = 5

    def do(self, jobs: Sequence[Job]) -> Iterator[Finished]:
        """Do jobs at once, as the cluster has room; see `Runner`.

        Raises:
            InputError: Ray is not installed, the cluster cannot be reached, or asks for more than it has.
        """
        ray = self._connected()
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": self.retries}
        if self.memory:
            options["memory"] = self.memory
        task = ray.remote(**options)(_do)
        here = (str(Path.cwd()), {name: os.environ[name] for name in CARRIED if name in os.environ})
        waiting = {task.remote(job, TARGETS.get("process"), here): job for job in jobs}
        while waiting:
            (ready,), _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(ready)
            try:
                yield from ray.get(ready)
            except DiskError as error:
                raise DiskError(str(getattr(error, "cause", error))) from None
            except Exception as error:  # Ray gave up: the worker died again and again, or never saw the folder
                yield from self._lost(job, error)

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
        largest = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for name, wanted in (("CPU", self.cpus), ("GPU", self.gpus), ("memory", self.memory or 0)):
            has = max((resources.get(name, 0) for resources in largest), default=0)
            if wanted > has:
                raise InputError(
                    f"a job asks for {wanted:g} {name}, and no node of the Ray cluster has more than {has:g}"
                )
        return ray

    def _lost(self, job: Job, error: Exception) -> Iterator[Finished]:
        folder, reason = GridFolder(job.folder), f"lost by Ray: {first_line(getattr(error, 'cause', None) or error)}"
        if job.prepares:
            missing = [one.prepared for one in job.cells if not folder.is_prepared(one.prepared)]
        else:
            missing = [one.key for one in job.cells if not folder.done(one.key)]
            costs = {one.costs for one in job.cells if folder.done(one.key)} if job.measures else set()
            missing += [measuring(one) for one in sorted(costs) if folder.needs_measure(one)]
        for key in missing:
            folder.fail(key, reason, str(error))
            yield Finished(key, FAILED, reason)


def _do(job: Job, registration: str | None, here: tuple[str, dict[str, str]]) -> list[Finished]:
    """In a Ray worker, as if it were the process that asks: its folder, its environment."""
    import torch

    folder, environment = here
    os.environ.update(environment)
    if Path(folder).is_dir():
        os.chdir(folder)
    if not (Path(job.folder) / "grid.json").is_file():
        raise InputError(f"this node does not see {job.folder}; name a folder that all nodes share")
    if registration:
        resolve_name(registration)()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else 1)
    return list(job.do())
