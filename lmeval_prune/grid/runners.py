"""Runners: who does the jobs of a grid, and where. A runner is one small class with one method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from lmeval_prune.grid.work import Finished, Job


class Runner(Protocol):
    """Does jobs."""

    def do(self, jobs: Sequence[Job]) -> Iterator[Finished]:
        """Do jobs, in any order.

        A job that cannot be ended (its machine is gone for good) is reported as failed, cell by cell; no exception.

        Yields:
            What became of each of their cells, as soon as it is known.
        """


class Here:
    """One after another, in this process; a model is loaded once."""

    def do(self, jobs: Sequence[Job]) -> Iterator[Finished]:
        """Do jobs in their order; see `Runner`."""
        for job in jobs:
            yield from job.do()
