"""The commands of the guides, in order and as they stand, with the embedded model: `make test-docs`.

A comment before a block, `<!-- needs: WHAT -->`, says what it needs besides: `data` (problems in LMEVAL_PRUNE_DATA), or something
that is not here, and then it is not run. A block `text` after a block `bash` is what that prints, among other lines; numbers may
differ, and a line `…` stands for others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError
from tests.conftest import ROOT, SHARED

GUIDES = [ROOT / "README.md", ROOT / "docs/start.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
QUICK = ("add-a-method",)  # in every run of the tests
BLOCK = re.compile(r"^(?:<!-- needs: (.+?) -->\n)?```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of a guide, what it needs and what it prints."""

    language: str
    text: str
    needs: str
    printed: list[str]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks that can be run, each with the output that follows it."""
    matches = BLOCK.findall(page.read_text(encoding="utf-8"))
    for index, (needs, language, text) in enumerate(matches):
        following = matches[index + 1] if index + 1 < len(matches) else ("", "", "")
        if language != "text":
            yield Block(language, text, needs, following[2].splitlines() if following[1] == "text" else [])


def without_numbers(line: str) -> str:
    """Return what of a printed line is the same on every machine."""
    return re.sub(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", "#", " ".join(line.split()))


def run(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """Run a block in the guide's folder, and look for the lines that it is said to print."""
    interpreter = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    done = subprocess.run([*interpreter, block.text], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "less than half of the top tokens" not in done.stdout, "the example destroys the model"
    printed = {without_numbers(line) for line in (done.stdout + done.stderr).splitlines()}
    for line in filter(lambda line: line.strip() != "…", block.printed):
        assert without_numbers(line) in printed, f"{line!r} was not printed:\n{done.stdout}"


def parameters() -> Iterator[object]:
    for page in GUIDES:
        yield pytest.param(page, id=page.stem, marks=[] if page.stem in QUICK else [pytest.mark.long])


@pytest.mark.real
@pytest.mark.parametrize("page", parameters())
def test_the_commands_of_a_guide_run(page: Path, tmp_path: Path) -> None:
    try:
        embedded.resolve("smollm2-135m")
    except InputError as error:
        pytest.skip(str(error))
    has_data, installed = SHARED.is_dir(), tmp_path / "installed"  # what a guide installs, besides the environment
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed), os.environ.get("PYTHONPATH", "")]),
        **{"PIP_TARGET": str(installed), "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"},
        **({"LMEVAL_PRUNE_DATA": str(SHARED)} if has_data else {}),
    }
    for name in ("configs", "docs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = [block for block in blocks_of(page) if block.needs in ("", "data")]
    assert blocks, "the guide shows nothing to run"
    for block in blocks:
        if block.needs == "data" and not has_data:
            pytest.skip(f"{block.text.splitlines()[0]} needs data in {SHARED}")
        run(block, tmp_path, environment)


def test_every_block_of_a_guide_says_what_it_is() -> None:
    """A block without a language would not be run unnoticed."""
    for page in GUIDES[1:]:
        opened = re.findall(r"^```(\w*)\n.*?^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert set(opened) <= {"bash", "python", "text"}, page
