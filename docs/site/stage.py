"""Stage the pages of the documentation site in build/pages: `python docs/site/stage.py`.

The folder mirrors the repository, so that the links of the pages, which are those of GitHub, hold there, too: the
Markdown pages, every file that they link to, and pages that are made from the code and the results.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "build/pages"
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import gallery  # noqa: E402
import notebooks  # noqa: E402
import reference  # noqa: E402

PAGES = ("*.md", "docs/**/*.md", "configs/README.md", "kernels/README.md", "tasks/README.md", "tasks/*/README.md")
ASSETS = ("docs/site/*.css",)
BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[[^\]]*\]\(([^()\s:]+)\)")
NOTEBOOK = re.compile(r"(\]\([^()\s:]+)\.ipynb\)")  # a link to one leads to its page
LINK = re.compile(r"\]\(([^()\s#]+)[^()\s]*\)")


def linked(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to."""
    for name in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / name).resolve()
        if not re.match(r"\w+:", name) and target.is_file() and target.is_relative_to(ROOT):
            yield target


def indented(text: str) -> str:
    """Indent nested lists by four spaces, which the site's parser needs; GitHub takes two as well."""
    lines, is_code, inside = [], False, False
    for line in text.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        if is_code or not line.startswith("  "):
            inside = inside and not line.strip()
        elif re.match(r" {2,3}(?:[-*]|\d+\.) ", line):
            inside = True
        lines.append(f"  {line}" if inside and not is_code and line.startswith("  ") and line.strip() else line)
    return "\n".join(lines)


def navigation() -> set[str]:
    """Return the pages that the menu of the site lists."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return set(re.findall(r"([\w./-]+\.md)$", menu, re.MULTILINE))


def stage() -> None:
    """Write the folder anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    sources = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    results = {path for folder in ("docs/results", "benchmarks/results") for path in (ROOT / folder).rglob("*.*")}
    assets = {path for pattern in ASSETS for path in ROOT.glob(pattern)}
    for path in sources | results | assets | {target for page in sources for target in linked(page)}:
        copy = STAGE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = NOTEBOOK.sub(r"\1.md)", path.read_text(encoding="utf-8"))
            copy.write_text(indented(text), encoding="utf-8")
        else:
            shutil.copyfile(path, copy)
    generated = {"results.md": gallery.page(ROOT), **reference.pages(ROOT)}
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        copy = STAGE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        generated[str(path.relative_to(ROOT).with_suffix(".md"))] = notebooks.page(path, copy.parent / "pictures")
    pages = {str(path.relative_to(ROOT)) for path in sources if ROOT / "docs/results" not in path.parents}
    missing = sorted({*pages, *generated} - navigation())
    if missing:
        print(f"not in the menu, found by links and the search only: {', '.join(missing)} (nav: in mkdocs.yml)")
    for name, text in generated.items():
        path = STAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    check()


def check() -> None:
    """End the program for what the builder does not refuse: lines of the menu and pictures that lead nowhere."""
    absent = [name for name in sorted(navigation()) if not (STAGE / name).is_file()]
    for page in STAGE.rglob("*.md"):
        names = IMAGE.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
        absent += [f"{page.relative_to(STAGE)}: {name}" for name in names if not (page.parent / name).is_file()]
    if absent:
        raise SystemExit(f"no such file: {', '.join(absent)}")


if __name__ == "__main__":
    stage()
