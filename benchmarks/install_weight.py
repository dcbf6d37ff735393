"""What the installation weighs: size, import time and share of each dependency, and the time of an installation.

    python benchmarks/install_weight.py --name NAME --imports  # of the environment that runs this
    python benchmarks/install_weight.py --name NAME --install  # installs this checkout in a fresh environment, too

Writes the entry NAME of `results/install_weight.json`. *own* is what would not be installed without a dependency.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from _record import RESULTS, environment, timed, write
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MODULES = {"pyyaml": "yaml", "lm-eval": "lm_eval", "typing-extensions": "typing_extensions"}


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def direct() -> list[str]:
    """Return the dependencies that pyproject.toml names, without extras."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """Return all installed distributions that requirements lead to, by name."""
    distributions: dict[str, Distribution] = {}
    todo = [Requirement(text) for text in requirements]
    visited = set()
    while todo:
        requirement = todo.pop()
        name = name_of(str(requirement))
        if (name, frozenset(requirement.extras)) in visited:
            continue
        visited.add((name, frozenset(requirement.extras)))
        try:
            distributions[name] = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        for text in distributions[name].requires or ():
            inner = Requirement(text)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(inner)
    return distributions


def size(package: Distribution) -> int:
    """Return the bytes of the files that a distribution installed."""
    paths = (Path(str(package.locate_file(file))) for file in package.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file() and path.suffix != ".pyc")


def import_seconds(module: str, repeats: int = 3) -> float | None:
    """Return the median time to import a module in a fresh process, without the start of Python."""

    def run(code: str) -> float:
        done, seconds = timed(lambda: subprocess.run([sys.executable, "-c", code], capture_output=True))
        return seconds if not done.returncode else float("nan")

    start = statistics.median(run("pass") for _ in range(repeats))
    seconds = statistics.median(run(f"import {module}") for _ in range(repeats))
    return None if seconds != seconds else round(seconds - start, 3)


def weigh(imports: bool) -> dict[str, Any]:
    requirements = direct()
    everything = closure(requirements)
    sizes = {name: size(package) for name, package in everything.items()}
    rows = {}
    for requirement in requirements:
        name = name_of(requirement)
        without = closure([other for other in requirements if other != requirement])
        own = sorted(everything.keys() - without.keys(), key=lambda other: -sizes[other])
        rows[name] = {
            "mb": round(sizes[name] / 1e6, 1),
            "own_mb": round(sum(sizes[other] for other in own) / 1e6, 1),
            "own": own,
        }
        if imports:
            rows[name]["import_seconds"] = import_seconds(MODULES.get(name, name.replace("-", "_")))
    largest = sorted(sizes, key=lambda name: -sizes[name])[:20]
    return {
        "packages": len(everything),
        "mb": round(sum(sizes.values()) / 1e6, 1),
        "mb_without_torch": round((sum(sizes.values()) - sizes["torch"]) / 1e6, 1),
        "dependencies": dict(sorted(rows.items(), key=lambda row: -row[1]["own_mb"])),
        "largest": {name: round(sizes[name] / 1e6, 1) for name in largest},
    }


def install(torch: str) -> dict[str, Any]:
    """Install this checkout in a fresh environment, without pip's cache of wheels, and time the steps."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = {}
        _, seconds["environment"] = timed(lambda: venv.create(folder, with_pip=True))
        for step, words in (("torch", [torch]), ("lmeval-prune", [str(ROOT)])):
            command = [f"{folder}/bin/python", "-m", "pip", "install", "-q", "--no-cache-dir", *words]
            before = os.times()
            _, seconds[step] = timed(lambda command=command: subprocess.run(command, check=True))
            after = os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            seconds[f"{step}_processor"] = cpu
        total = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink())
        return {"seconds": {name: round(value, 1) for name, value in seconds.items()}, "mb_on_disk": round(total / 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="entry of the results file")
    parser.add_argument("--imports", action="store_true", help="also time the import of each dependency")
    parser.add_argument("--install", action="store_true", help="also time an installation")
    parser.add_argument("--torch", default="torch==2.13.0")
    options = parser.parse_args()
    path = RESULTS / "install_weight.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    entry = {"environment": environment(), "written": time.strftime("%Y-%m-%d"), **weigh(options.imports)}
    if options.install:
        entry["install"] = install(options.torch)
    write("install_weight", {**results, options.name: entry})


if __name__ == "__main__":
    main()
