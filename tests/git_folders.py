"""Git repositories in temporary folders."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path


def make_git_folder(folder: Path) -> Callable[..., str]:
    """Make a folder a repository, and return a function that runs git there and returns what it prints."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (folder / "docs").mkdir()
    return git
