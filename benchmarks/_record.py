"""What every results file records about the run, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    import torch

    packages = ("lmeval-prune", "lm_eval", "transformers", "torch", "triton")
    return {
        "command": " ".join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)]),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout that is not installed will do for some benchmarks
        return None


def commit() -> str:
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True)
        except FileNotFoundError:  # no git on this machine
            return ""
        return done.stdout.strip()

    copied_commit = os.environ.get("LMEVAL_PRUNE_COMMIT")  # of a copy elsewhere, whose own commit says nothing
    if copied_commit and not git("log", "-1", "--format=%h", copied_commit):
        return copied_commit
    # a results file or a page that was written before does not change what runs
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results", ":!/docs")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changes else "")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"CPU {name}, {os.cpu_count()} cores"


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function; return its result and the seconds it took."""
    begin = time.perf_counter()
    out = function()
    return out, time.perf_counter() - begin


def write(name: str, results: dict[str, Any], quiet: bool = False) -> None:
    """Write a results file, all of it or nothing: a name in benchmarks/results, or a path without its suffix."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(results, indent=2) + "\n")
    unfinished.replace(path)
    if not quiet:
        print(f"written: {path}")


def write_table(document: Path, name: str, table: str) -> None:
    """Write a table between its marks on a page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = document.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{document} has no {begin} with {end} after it")
    document.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")
    print(f"written: {document}, {name}")
