"""Starts the servers of engines on this machine, for the tests with real engines and for the benchmark."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

# Nothing is asked of a network, and a processor's thread count is what it is told.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
LONGEST_START = 600.0


class Server:
    """A server by the line that `lmeval-prune export` prints, in a process group of its own.

    Args:
        line: as a shell takes it, variables first.
        folder: of the program that the line names.
        log: file for what the server says.
        threads: of a processor.
        options: come after the line.
        cache: GiB that vLLM keeps for keys and values.

    Attributes:
        started_in: seconds that it took until the server answered.
    """

    started_in = 0.0

    def __init__(self, line: str, folder: Path, log: Path, threads: int = 1, options: str = "", cache: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.line = f"exec env {line} {options} --host 127.0.0.1 --port {self.port}"
        self.log = log
        paths = f"{folder}{os.pathsep}{os.environ['PATH']}"
        counts = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": str(cache)}
        self.environment = {**os.environ, **ENVIRONMENT, **counts, "PATH": paths}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and wait until it answers."""
        begin = time.monotonic()
        with self.log.open("ab") as out:
            shell = ["bash", "-c", self.line]
            self.process = subprocess.Popen(
                shell, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() - begin > LONGEST_START:
                self.kill()
                raise RuntimeError(f"{shlex.join(shell)} does not answer:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.5)
        self.started_in = time.monotonic() - begin

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """End it and its processes at once."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
