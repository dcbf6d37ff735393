"""Write the gallery of results: every committed figure and table, with the command that makes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# The title of a folder of docs/results and the command that makes its files; the page of the same name explains them.
FOLDERS = {
    "athena": ("ATHENA on the embedded encoder", "lmeval-prune athena train --config configs/athena/minilm.yaml"),
    "compare": ("Two seeds of one model", "lmeval-prune compare out/seed1 out/seed2"),
    "sprint_race": ("A race against sampling, planned", "python benchmarks/sprint_race.py"),
    "baselines": ("Pruners under one budget", "python benchmarks/baselines_result.py --report"),
    "distillation": ("Recursive distillation", "python benchmarks/distillation_report.py"),
    "grid": (
        "A grid",
        "lmeval-prune grid run configs/grid/smollm2.yaml --output out/smollm2; lmeval-prune grid compare out/smollm2",
    ),
    "pruning": ("Heads, groups and channels by several scores", "python benchmarks/pruning_result.py"),
    "smaller_model": ("A smaller model", "python benchmarks/smaller_model_picture.py"),
    "sprint": ("SPRINT against sampling", "python benchmarks/sprint_result.py"),
    "token_filtering": ("Token Filtering", "python benchmarks/filter_quality.py"),
}


def page(root: Path) -> str:
    """Write the page; a folder or results file without a command ends the program."""
    results = {path.stem: path for path in sorted((root / "benchmarks/results").glob("*.json"))}
    parts = [
        "# Results",
        "Every figure and table that is committed, with the command that makes it. Where the page does not say "
        "otherwise, figures are of SmolLM2-135M, the embedded model, on two cores.",
    ]
    for folder in sorted(path for path in (root / "docs/results").iterdir() if path.is_dir()):
        title, command = FOLDERS.get(folder.name) or (folder.name.replace("_", " ").capitalize(), "")
        if not command and folder.name not in results:
            raise SystemExit(f"docs/results/{folder.name} has no command; add it to FOLDERS in {__file__}")
        command = command or record_of(results[folder.name])["command"]
        names = [f"docs/{folder.name}.md", f"docs/{folder.name.replace('_', '-')}.md"]
        document = next((root / name for name in names if (root / name).is_file()), None)
        explained = f", explained in [{document.stem}](docs/{document.name})" if document else ""
        parts += [f"## {title}", f"`{command}`{explained}."]
        files = sorted(path for path in folder.iterdir() if path.is_file())
        shown = [path for path in files if path.suffix == ".png"]
        others = [path for path in files if path.suffix not in (".png", ".svg")]
        parts.append(", ".join(f"[{path.name}]({path.relative_to(root)})" for path in others))
        parts += [f"![{path.stem.replace('_', ' ')}]({path.relative_to(root)})" for path in shown]
    parts += ["## Measurements", "Files of `benchmarks/results`. Each names its commit, processor and versions."]
    lines = ["| file | command | on |", "| --- | --- | --- |"]
    for name, path in results.items():
        record = record_of(path)
        lines.append(f"| [{name}]({path.relative_to(root)}) | `{record['command']}` | {record.get('device') or ''} |")
    return "\n\n".join([*filter(None, parts), "\n".join(lines)]) + "\n"


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
