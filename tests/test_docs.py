"""What README, CONTRIBUTING and docs/ say of links, commands, arguments and families is there; their Python can be read."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import lmeval_prune
from lmeval_prune import decoding
from lmeval_prune.architectures.table import FAMILIES
from lmeval_prune.cli import COMMANDS, main
from lmeval_prune.interventions import attention_call, probe_pruning
from lmeval_prune.interventions.table import METHODS
from lmeval_prune.models.arguments import argument_names
from lmeval_prune.pruners import base
from tests.conftest import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("tasks", "configs", "kernels")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/guides").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "tasks").glob("*/README.md")),
    *sorted((ROOT / "docs/results").rglob("*.md")),
    *sorted((ROOT / "docs/notebooks").glob("*.ipynb")),
]
NAMES = {path: str(path.relative_to(ROOT)) for path in LINKED}


def prose(page: Path) -> str:
    """A page without its blocks of code; of a notebook the cells of text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return BLOCK.sub("", text)


def anchors(page: Path) -> set[str]:
    """What its headings can be reached by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, heading: str) -> str:
    """Return what stands under a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", prose(page), re.MULTILINE | re.DOTALL)
    assert match, heading
    return match[1]


def blocks(page: Path, language: str) -> Iterator[str]:
    return (text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language)


@pytest.mark.parametrize("page", LINKED, ids=NAMES.get)
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
    named = re.findall(r"(?<!this )\blmeval-prune ([a-z-]+(?: [a-z]+)?)", page.read_text(encoding="utf-8"))
    for words in named:
        assert words in COMMANDS or words.split()[0] in COMMANDS, words


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_options_and_tasks_of_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of commands of this package in blocks and sentences; an example's own tasks are shown on the same page."""
    tasks = {path.stem for path in (ROOT / "tasks").glob("*/*.yaml")}
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = "\n".join(block for name, block in BLOCK.findall(text) if name in ("", "bash")).splitlines()
    in_sentences = re.findall(r"`(lmeval-prune [a-z][^`]*)`", BLOCK.sub("", text))
    for line in [*lines, *(command.replace("\n", " ") for command in in_sentences)]:
        for names in re.findall(r"--tasks? (prune_[\w,]+)", line):
            assert all(name in tasks or f"task: {name}\n" in text for name in names.split(",")), line
        if match := re.match(r"lmeval-prune ([a-z-]+(?: [a-z]+)?)([^#]*)", line):
            words = match[1] if match[1] in COMMANDS else match[1].split()[0]
            with pytest.raises(SystemExit):
                main([*words.split(), "--help"])
            options = set(re.findall(r"--[\w-]+", capsys.readouterr().out.replace("_", "-")))
            assert {name.replace("_", "-") for name in re.findall(r"(?<!\S)--\w[\w-]*", match[2])} <= options, line


def test_arguments_and_families_of_the_pages_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`.+?) \|", section(ROOT / "docs/pruned-hf.md", "Arguments"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert {*METHODS, "mask", "responses", "engine", "router"} <= named <= set(argument_names())
    known = section(ROOT / "docs/pruning.md", "Families")
    families = known.partition("Other families")[0].partition("hand:")[2]
    assert set(re.findall(r"[a-z][\w-]*", families)) - {"encoders", "encoder-decoders"} == set(FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_lists_and_tables_are_read_alike_by_github_and_the_site(page: Path) -> None:
    """The site's parser needs an empty line before a list or table."""
    item = re.compile(r" *(?:[-*]|\d\.) ")
    for before, line in pairwise(prose(page).splitlines()):
        is_inside = not before.strip() or item.match(before) or before.startswith(" ")
        assert is_inside or not item.match(line), line
        assert not line.startswith("|") or not before.strip() or before.startswith("|"), line


def trees(page: Path) -> Iterator[ast.Module]:
    """A page's Python."""
    for text in blocks(page, "python"):
        is_entry = re.match(r'"\w+":', text)  # of a dictionary
        yield ast.parse(f"{{{text}}}" if is_entry else text)


def public() -> set[str]:
    """Return names that a reader of the pages may import."""
    own = {
        name
        for module in (attention_call, base, probe_pruning)
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
    }
    return own | set(lmeval_prune.__all__) | set(decoding.__all__)


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_python_is_shown_with_its_imports(page: Path) -> None:
    nodes = [node for tree in trees(page) for node in ast.walk(tree)]
    imports: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported: dict[str, object] = {}
    exec(compile(ast.Module(imports, []), str(page), "exec"), imported)
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    shown = {node.id for node in nodes if isinstance(node, ast.Name)}
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\(|`|\.)", prose(page)))
    assert not ((shown | named) & public()) - set(imported) - defined


def test_the_version_is_the_same_everywhere() -> None:
    """In CITATION.cff; and CHANGELOG.md begins with the release that it becomes."""
    version = lmeval_prune.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert changes.partition("\n## ")[2].startswith(version.partition(".dev")[0])


def test_the_pythons_of_the_package_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    named = [classifier.removeprefix(prefix) for classifier in project["classifiers"] if classifier.startswith(prefix)]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert named == workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={named[0]}"


def test_no_page_and_no_result_names_a_folder_of_a_machine() -> None:
    results = [*(ROOT / "benchmarks/results").glob("*.json"), *(ROOT / "docs/results").rglob("*.*")]
    texts = [path for path in results if path.suffix in (".json", ".csv", ".svg", ".html")]
    assert len(texts) > 30
    for path in (*LINKED, *texts):
        match = re.search(r"(?<![\w.])/(?:home|root|work|Users|tmp)/[\w.]+", path.read_text(encoding="utf-8"))
        assert not match, f"{path}: {match[0]}"


def test_the_site_is_staged_with_every_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/site"))
    stage = importlib.import_module("stage")
    monkeypatch.setattr(stage, "STAGE", tmp_path)
    stage.stage()  # ends the program for a folder of results without a command, and for a page or picture that is not there
    shown = (tmp_path / "results.md").read_text(encoding="utf-8")
    pictures = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/results").rglob("*.png")}
    assert pictures and all(f"]({name})" in shown for name in pictures)


def test_every_preset_is_in_their_table() -> None:
    table = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    presets = {path.name for path in (ROOT / "configs").rglob("*.yaml")}
    assert {name for name in presets if f"{name}`" not in table} == set()


def test_the_public_names_can_be_seen() -> None:
    assert {"HeadMask", "Plan", "TokenFilter", "cut", "load_pretrained"} <= set(dir(lmeval_prune))
    assert all(hasattr(lmeval_prune, name) for name in dir(lmeval_prune))
