"""Mathematical equivalence by math-verify, in worker processes that can be killed.

SymPy can hang or eat memory on what a model writes. Each comparison has a time limit; a worker that passes
it, or dies, is replaced, and the item counts as wrong and is reported as `timeout` or `crash`.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
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
START_SECONDS = 120.0
MAX_LENGTH = 2000  # characters; longer answers are no answers


class _Worker:
    """One process; answers one comparison at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmeval_prune.scoring._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines = queue.Queue()
        threading.Thread(target=_read, args=(self.process, self.lines), daemon=True).start()
        if self.lines.get(timeout=START_SECONDS) != "ready\n":
            raise RuntimeError("the comparison worker did not start: is math-verify installed and working?")

    def compare(self, gold: str, answer: str, seconds: float) -> Verdict:
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([gold, answer]) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            return "timeout"
        except OSError:
            line = ""
        if not line:
            self.stop()
            return "crash"
        return "equal" if json.loads(line) else "different"

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
        InputError: math-verify is not installed.
    """

    def __init__(self, workers: int = 2, seconds: float = 5.0) -> None:
        require_math_verify()
        self.seconds = seconds
        self.size = workers
        self._idle: queue.Queue[_Worker] = queue.Queue()
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
    """The pool that tasks use; it ends with the program."""
    verifier = Verifier()
    atexit.register(verifier.close)
    return verifier
