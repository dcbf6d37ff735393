"""Programs in forks of this process: processes of their own that do not import everything again."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import IO, Any

Process: Any = multiprocessing.get_context("fork").Process


class Fork(Process):
    """A program in a fork of this process, with the part of `subprocess.Popen` that tests and their subjects use.

    Args:
        program: returns the exit status.
        stdout: a file for standard output and standard error.
        environment: variables that are changed.
    """

    def __init__(self, program: Callable[[], int], stdout: IO[str], **environment: str) -> None:
        super().__init__(target=self._run, args=(program, stdout.fileno(), environment))
        self.start()

    def _run(self, program: Callable[[], int], output: int, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        for handle in (1, 2):
            os.dup2(output, handle)
        sys.stdout, sys.stderr = (os.fdopen(handle, "w", buffering=1, closefd=False) for handle in (1, 2))
        sys.exit(program())

    def poll(self) -> int | None:
        """Return the exit status of a program that has ended."""
        return self.exitcode  # type: ignore[no-any-return]

    def wait(self) -> int | None:
        """Wait for the end and return the exit status; None if the program had to be killed."""
        self.join(timeout=300)
        if self.is_alive():
            self.kill()
        return self.poll()
