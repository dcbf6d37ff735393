"""CONTRIBUTING's recipe for a method works as printed: it passes the linter and its row of the test matrix."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_docs import BLOCK

PASTED = ("lmeval_prune/interventions/scale_attention.py", "lmeval_prune/interventions/table.py", "tests/methods.py")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository and add the recipe's file, line and row."""
    folder = tmp_path_factory.mktemp("recipe") / "repository"
    for name in ("lmeval_prune", "tests", "tasks", "kernels", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    _, recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a method\n")
    file, line, row = [text for _, text in BLOCK.findall(recipe)][:3]
    (folder / PASTED[0]).write_text(file, encoding="utf-8")
    for name, opening, text in ((PASTED[1], "    own={\n", line), (PASTED[2], "ROWS = [\n", row)):
        before, actual, after = (folder / name).read_text(encoding="utf-8").partition(opening)
        assert actual
        margin = " " * (len(opening) - len(opening.lstrip()) + 4)
        indented = "".join(f"{margin}{value}\n" for value in text.splitlines())
        (folder / name).write_text(before + actual + indented + after, encoding="utf-8")
    return folder


def call(copy: Path, *command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=copy, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_the_recipe_is_clean(copy: Path, command: tuple[str, ...]) -> None:
    pytest.importorskip("ruff")
    call(copy, "ruff", *command, *PASTED)


@pytest.mark.long
def test_the_recipe_s_row_is_green(copy: Path) -> None:
    call(copy, "tests.arithmetic")  # as the guide says
    call(
        copy,
        "pytest",
        "tests/test_methods.py",
        "-k",
        "(scale_attention or has_a_row) and not qwen3",
        "-p",
        "no:cacheprovider",
    )
