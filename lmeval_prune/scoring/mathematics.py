"""Mathematical equivalence by math-verify, in worker processes that can be killed.

SymPy can hang or eat memory on what a model writes. Each comparison has a time limit; a worker that passes
it, or dies, is replaced, and the item counts as wrong and is reported as `timeout` or `crash`.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Literal

from lmeval_prune.errors import InputError

Verdict = Literal["equal", "different", "timeout", "crash"]
COMMAND = [sys.executable, "-m", "lmeval_prune.scoring._worker"]
START_SECONDS = 120.0
STARTS = 2  # how often a start is tried
MAX_WORKERS = 8  # of the shared pool; each is a Python process with SymPy
MAX_LENGTH = 2000  # characters; longer answers are no answers


class _Worker:
    """One process; answers one comparison at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()
        self.has_worked = False

    def compare(self, gold: str, answer: str, seconds: float) -> Verdict:
        try:
            if not self._running(seconds):
                return "crash"
            assert self.process is not None and self.process.stdin is not None
            self.process.stdin.write(json.dumps([gold, answer]) + "\n")
            self.process.stdin.flush()
            return "equal" if json.loads(self.lines.get(timeout=seconds)) else "different"
        except queue.Empty:
            self.stop()
            return "timeout"
        except (OSError, json.JSONDecodeError):  # gone, perhaps in the middle of its answer
            self.stop()
            return "crash"
        except BaseException:  # an interrupt: the answer still to come must not be taken for the next one's
            self.stop()
            raise

    def _running(self, seconds: float) -> bool:
        if self.process is not None and self.process.poll() is None:
            return True
        for _ in range(STARTS):
            if self._start(seconds):
                self.has_worked = True
                return True
            self.stop()
        if self.has_worked:
            return False
        raise InputError(
            f"the process that compares MATH answers does not start; `{' '.join(COMMAND)} 5 < {os.devnull}` says why"
        )

    def _start(self, seconds: float) -> bool:
        self.process = subprocess.Popen(
            [*COMMAND, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines = queue.Queue()
        threading.Thread(target=_read, args=(self.process, self.lines), daemon=True).start()
        try:
            return self.lines.get(timeout=START_SECONDS) == "ready\n"
        except queue.Empty:
            return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")  # the process has ended


class Verifier:
    """A pool of workers.

    Args:
        workers: processes.
        seconds: time limit of one comparison.

    Raises:
        InputError: math-verify is not installed, or (when comparing) no worker can be started.
    """

    def __init__(self, workers: int = 2, seconds: float = 5.0) -> None:
        require_math_verify()
        self.seconds = seconds
        self.size = workers
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # one comparison at a time starts one process
        self._all = [_Worker() for _ in range(workers)]
        for worker in self._all:
            self._idle.put(worker)

    def verify(self, gold: str, answer: str) -> Verdict:
        """Whether `answer` is mathematically equal to `gold`; both LaTeX without dollar signs."""
        if not answer or len(answer) > MAX_LENGTH:
            return "different"
        worker = self._idle.get()
        try:
            return worker.compare(gold, answer, self.seconds)
        finally:
            self._idle.put(worker)

    def verify_many(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """`verify` for many (gold, answer) pairs, on all workers at once, in order."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda pair: self.verify(*pair), pairs))

    def close(self) -> None:
        """End the processes."""
        for worker in self._all:
            worker.stop()


def require_math_verify() -> None:
    """Refuse to go on without math-verify.

    Raises:
        InputError: saying how to install it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise InputError(
            "MATH answers are compared by math-verify, which is not installed: pip install lmeval-prune[math]"
        )


@lru_cache(maxsize=1)
def shared() -> Verifier:
    """The pool that tasks use, a worker for each CPU up to `MAX_WORKERS`; it ends with the program."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    verifier = Verifier(min(cpus, MAX_WORKERS))
    atexit.register(verifier.close)
    return verifier
