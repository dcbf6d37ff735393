"""The page of a comparison: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.grid.comparison import COSTS, POOLED, Comparison
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import read_answers_of, read_outcomes
from lmeval_prune.reporting.documents import render

LONGEST = 1600  # characters of an answer that are shown
MOST = 40_000_000  # characters of all answers of a page; beyond, a page has none


def write_page(found: Comparison, folder: GridFolder, path: Path) -> None:
    """Write the page.

    Args:
        found: what it shows.
        folder: of the grid, for questions and answers.
        path: of the HTML file.
    """
    known = [name for name in COSTS if any(found.costs[variant].get(name) is not None for variant in found.variants)]
    questions = _questions(found, folder)
    data = {
        "title": found.title,
        "baseline": found.baseline,
        "tasks": found.tasks,
        "pooled": POOLED,
        "made": f"Made by {CREATED_BY}.",
        "missing": found.missing,
        "costs": [
            {"key": name, "label": COSTS[name][0], "less": COSTS[name][1], "varies": _varies(found, name)}
            for name in known
        ],
        "variants": [_variant(found, name) for name in found.variants],
        "questions": questions,
        "questions_total": sum(len(one["shown"]) for one in questions.values()),
    }
    text = json.dumps(_plain(data), ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    template = Path(__file__).with_name("page.html.jinja")
    write_text(path, render(template, title=found.title, data=packed))


def _varies(found: Comparison, name: str) -> bool:
    return len({own.get(name) for own in found.costs.values() if own}) > 1


def _variant(found: Comparison, name: str) -> dict[str, Any]:
    own = {task: cell for (variant, task), cell in found.cells.items() if variant == name}
    rows = {task: asdict(row) for (variant, task), row in found.rows.items() if variant == name}
    costs = {key: value for key, value in found.costs[name].items() if key in COSTS}
    commands = {task: cell["command"] for task, cell in own.items()}
    return {"name": name, "rows": rows, "costs": costs, "commands": commands}


def _questions(found: Comparison, folder: GridFolder) -> dict[str, Any]:
    """Of each task its questions, and of each variant values and, if they are not too many, answers."""
    result: dict[str, Any] = {}
    written = 0
    for task in found.tasks:
        names = [name for name in found.variants if (name, task) in found.rows and task != POOLED]
        if not names:
            continue
        cells = {name: found.cells[name, task] for name in names}
        base = read_answers_of(folder.cell(cells[found.baseline]["key"]))
        places = list(zip(base["task"], base["doc_id"], strict=True))
        several = base["task"].nunique() > 1
        shown = [
            {
                "id": f"{own}, {number}" if several else f"{number}",
                "question": _short(question),
                "target": _short(target),
            }
            for own, number, question, target in zip(
                base["task"], base["doc_id"], base["question"], base["target"], strict=True
            )
        ]
        values: dict[str, list[float]] = {}
        answers: dict[str, list[int]] = {}
        texts: dict[str, int] = {}
        for name in names:
            path = folder.cell(cells[name]["key"])
            outcomes = read_outcomes(path, cells[name]["metric"])
            by_place = {
                question[:2]: value for question, value in zip(outcomes.questions, outcomes.values, strict=True)
            }
            values[name] = [round(float(by_place[place]), 6) for place in places]
            if written <= MOST:
                own = read_answers_of(path)
                said = dict(zip(zip(own["task"], own["doc_id"], strict=True), own["answer"], strict=True))
                before = len(texts)
                answers[name] = [texts.setdefault(_short(said[place]), len(texts)) for place in places]
                written += sum(map(len, list(texts)[before:]))
        binary = all(value in (0.0, 1.0) for own in values.values() for value in own)
        result[task] = {"shown": shown, "values": values, "binary": binary}
        if written <= MOST:
            result[task] |= {"texts": list(texts), "answers": answers}
    return result


def _short(text: Any) -> str:
    """The beginning and the end of a long text."""
    text = str(text)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]}\n[… {len(text) - LONGEST} characters …]\n{text[-LONGEST // 2 :]}"


def _plain(value: Any) -> Any:
    """Without NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
