"""What README, CONTRIBUTING and docs/ say of links, commands, arguments and families is there; their Python can be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmeval_prune.architectures.table import FAMILIES
from lmeval_prune.cli import COMMANDS
from lmeval_prune.models.arguments import our_names
from tests.conftest import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("tasks", "configs", "kernels")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = {path: str(path.relative_to(ROOT)) for path in PAGES}


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What its headings can be reached by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", prose(page), re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


def blocks(page: Path, language: str) -> Iterator[str]:
    return (text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_commands_exist(page: Path) -> None:
    named = re.findall(r"\blmeval-prune ([a-z-]+(?: [a-z]+)?)", page.read_text(encoding="utf-8"))
    for words in named:
        assert words in COMMANDS or words.split()[0] in COMMANDS, words


def test_arguments_and_families_of_the_readme_are_those_of_the_code() -> None:
    readme = ROOT / "README.md"
    rows = re.findall(r"^\| (`.+?) \|", section(readme, "Arguments of `pruned-hf`"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert {"heads", "mask", "responses", "engine", "router"} <= named <= set(our_names())
    families = section(readme, "What it does, and what not yet").partition("Not yet:")[0].partition("hand:")[2]
    assert set(re.findall(r"[a-z][\w-]*", families)) - {"encoders", "encoder-decoders"} == set(FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_python_can_be_read(page: Path) -> None:
    for text in blocks(page, "python"):
        is_entry = re.match(r'"\w+":', text)  # of a dictionary
        ast.parse(f"{{{text}}}" if is_entry else text)
