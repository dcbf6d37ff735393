"""The budget: `make size` counts the lines of each room and refuses more than `budget.json` allows; `--lower` writes what is left.

A number may only be raised by hand, in a commit that says what a user gets for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "tests" / "budget.json"


def sizes() -> Counter[str]:
    """Return lines of Python by room, and words of Markdown written by hand."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts: Counter[str] = Counter()
    for name in dict.fromkeys(listed.stdout.splitlines()):
        path, parts = ROOT / name, Path(name).parts
        if not path.is_file() or path.is_symlink():
            continue
        if path.suffix == ".py":
            room = "/".join(parts[:2]) if parts[0] == "lmeval_prune" and len(parts) > 2 else parts[0]
            counts[room] += path.read_text(encoding="utf-8").count("\n")
        elif (
            path.suffix == ".md"
            and "results" not in parts
            and parts[0] in ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
        ):
            counts[f"words of {parts[0]}"] += len(path.read_text(encoding="utf-8").split())
    product = [room for room in counts if room.split("/")[0] in ("lmeval_prune", "tasks", "kernels")]
    counts["product"] = sum(counts[room] for room in product)
    return counts


def main() -> int:
    now, budget = sizes(), json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    over = [
        f"{room}: {count}, budget {budget.get(room, 0)}"
        for room, count in sorted(now.items())
        if count > budget.get(room, 0)
    ]
    if "--lower" in sys.argv:
        lowered = {room: min(count, budget.get(room, count)) for room, count in sorted(now.items())}
        BUDGET.write_text(json.dumps(lowered, indent=1) + "\n")
    else:
        print(
            f"product {now['product']} lines of {budget.get('product')}, tests {now['tests']}, benchmarks {now['benchmarks']}, docs {now['words of docs']} words"
        )
        print(
            *(f"over the budget: {line} (remove as much as you add)" for line in over),
            sep="\n",
            end="\n" if over else "",
        )
    return bool(over) and "--lower" not in sys.argv


if __name__ == "__main__":
    sys.exit(main())
