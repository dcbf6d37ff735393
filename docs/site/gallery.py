"""Write the gallery of results: every committed figure and table, with the command that makes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of a folder of docs/results: its title, the command and the commit that made it; PAGES: the page that explains it.
FOLDERS = {
    "athena": (
        "ATHENA on the embedded encoder",
        "lmeval-prune athena train --config configs/athena/minilm.yaml",
        "fa3da2a7",
    ),
    "compare": ("Notes on comparisons, two seeds of one model", "lmeval-prune compare out/seed1 out/seed2", "899734ca"),
    "sprint_race": (
        "A race against sampling, planned",
        "python benchmarks/sprint_race.py",
        "7ddf599a (choices d87d707b, plan 4971af87, rates 7211b0f4)",
    ),
    "distillation": (
        "Recursive distillation",
        "python benchmarks/distillation_result.py --report",
        "9c2bbf9a (rows e8836950, pictures 9968324d, 981e6898)",
    ),
    "grid": (
        "A grid",
        "lmeval-prune grid run configs/grid/packaged.yaml --output out/p; lmeval-prune grid compare out/p",
        "c14737e6",
    ),
    "leaderboard": ("Leaderboard", "python benchmarks/leaderboard.py --report", "19b174f2 and after"),
    "scoring": ("How well answers are scored", "make scoring-report", "34fb7324 (families left out: 3e71e7b)"),
    "smaller_model": ("A smaller model", "python benchmarks/smaller_model_picture.py", "df130eb0"),
    "sprint": ("SPRINT against sampling", "python benchmarks/sprint_result.py", "94200958 (pictures 2c26f9a7)"),
    "token_filtering": (
        "Token Filtering",
        "python benchmarks/filter_quality.py",
        "2bb5e152 (map d513a835)",
    ),
}
PAGES = {"athena": "distillation", "grid": "compare", "scoring": "tasks",
         "leaderboard": "results/leaderboard", "sprint_race": "sprint", "token_filtering": "methods"}  # fmt: skip
# Where a file records no single clean commit: the one that wrote it.
WRITTEN = {
    "distillation": "e8836950",
    "distillation_recipes": "ed93acbd", "smaller_model_cpu": "05dde7ad",
    "smaller_model_greedy": "b4a59f96", "smaller_model_untrained": "69e1a559", "smaller_model_verdict": "df130eb0",
    "sprint_race": "7ddf599a", "sprint_result": "94200958",
}  # fmt: skip
MISSING = {"3c3bff8", "6b1bf028", "2bcd5138"}  # recorded, but not in the history


def page(root: Path) -> str:
    """Write the page; a folder or results file without a command ends the program."""
    results = {path.stem: path for path in sorted((root / "benchmarks/results").glob("*.json"))}
    parts = [
        "# Results",
        "Every figure and table that is committed, with the command that makes it. Where the page does not say "
        "otherwise, figures are of SmolLM2-135M, the embedded model, on two cores.",
    ]
    for folder in sorted(path for path in (root / "docs/results").iterdir() if path.is_dir()):
        if folder.name not in FOLDERS:
            raise SystemExit(f"docs/results/{folder.name} has no command; add it to FOLDERS in {__file__}")
        title, command, commit = FOLDERS[folder.name]
        document = root / f"docs/{PAGES.get(folder.name, folder.name.replace('_', '-'))}.md"
        parts += [
            f"## {title}",
            f"`{command}` at {commit}, explained in [{document.stem}]({document.relative_to(root)}).",
        ]
        files = sorted(path for path in folder.iterdir() if path.is_file())
        shown = [path for path in files if path.suffix == ".png"]
        others = [path for path in files if path.suffix not in (".png", ".svg")]
        parts.append(", ".join(f"[{path.name}]({path.relative_to(root)})" for path in others))
        parts += [f"![{path.stem.replace('_', ' ')}]({path.relative_to(root)})" for path in shown]
    lines = ["| file | command | check out | state | on |", "| --- | --- | --- | --- | --- |"]
    unclean = 0
    for name, path in results.items():
        record, (commit, state) = record_of(path), made_by(path)
        unclean += bool(state)
        command = record["command"].replace("|", "\\|")
        cells = (f"[{name}]({path.relative_to(root)})", f"`{command}`", commit, state, record.get("device"))
        lines.append(f"| {' | '.join(cell or '' for cell in cells)} |")
    parts += [
        "## Measurements",
        "Files of `benchmarks/results`; each names its processor and versions. A command whose script is not in "
        "`benchmarks/` any more: `git worktree add ../then COMMIT && cd ../then`, and there. "
        f"*State*: {unclean} of {len(results)} files name code that was not committed or a commit that is not in the "
        "repository; the commit is then the one that wrote the file. They are of the smaller model, of ATHENA and "
        "SmolLM2 distilled, and of SPRINT's first comparison, which stay as measured.",
    ]
    return "\n\n".join([*filter(None, parts), "\n".join(lines)]) + "\n"


def made_by(path: Path) -> tuple[str, str]:
    """Return the commit whose tree has a results file's script, and what is not in it of the code that ran."""
    recorded = sorted(set(commits(json.loads(path.read_text(encoding="utf-8")))))
    names = [commit.partition("+")[0] for commit in recorded]
    states = [f"absent commit {name}" for name in dict.fromkeys(names) if name in MISSING]
    states += ["uncommitted code"] * any("+" in commit for commit in recorded)
    written = WRITTEN.get(path.stem) or (names[0] if len(names) == 1 else "")
    return written, ", ".join(states) if recorded else "no commit recorded"


def commits(value: Any) -> Iterator[str]:
    """Yield every commit that is recorded, in depth."""
    if isinstance(value, dict) and isinstance(value.get("commit"), str):
        yield value["commit"]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from commits(child)


def record_of(path: Path) -> dict[str, Any]:
    """Return what a results file records about its run, with the command as it is typed in the repository."""
    record = find(json.loads(path.read_text(encoding="utf-8")), "command")
    if not record:
        raise SystemExit(f"{path} names no command; write it by `_record.environment()`")
    return {**record, "command": re.sub(r"^python (?:benchmarks/)?", "python benchmarks/", record["command"])}


def find(value: Any, name: str) -> dict[str, Any] | None:
    """Return the first dictionary with a key, in depth."""
    if isinstance(value, dict):
        if name in value:
            return value
        return next((record for child in value.values() if (record := find(child, name))), None)
    if isinstance(value, list):
        return next((record for child in value if (record := find(child, name))), None)
    return None
