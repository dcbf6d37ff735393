"""The page of a comparison: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.grid.comparison import COSTS, POOLED, TIMED, Comparison, measured_range
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import read_answers
from lmeval_prune.reporting.documents import render

LONGEST = 1600  # characters of an answer that are shown
MOST = 40_000_000  # characters of all answers of a page; beyond, a page has none


def write_page(found: Comparison, folder: GridFolder, path: Path, without_texts: Sequence[str] = ()) -> None:
    """Write the page.

    Args:
        found: what it shows.
        folder: of the grid, for questions and answers.
        path: of the HTML file.
        without_texts: tasks whose questions and answers it does not show.
    """
    known = [name for name in COSTS if any(found.costs[variant].get(name) is not None for variant in found.variants)]
    questions = _questions(found, folder, without_texts)
    data = {
        "title": found.title,
        "baseline": found.baseline,
        "tasks": found.tasks,
        "fronts": found.fronts,
        "pooled": POOLED,
        "made": f"Made by {CREATED_BY}.",
        "missing": found.missing,
        "notes": found.notes,
        "costs": [
            {
                "key": name,
                "label": COSTS[name][0],
                "less": COSTS[name][1],
                "varies": _varies(found, name),
                "timed": name in TIMED,
            }
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
    ranges = {key: measured_range(found.costs[name], key) for key in costs if key in TIMED}
    commands = {task: cell["command"] for task, cell in own.items()}
    return {"name": name, "rows": rows, "costs": costs, "ranges": ranges, "commands": commands}


def _questions(found: Comparison, folder: GridFolder, without_texts: Sequence[str]) -> dict[str, Any]:
    """Of each task its questions, and of each variant figures and, if they are not too many, answers."""
    result: dict[str, Any] = {}
    left = MOST
    for task, (questions, outcomes) in found.outcomes.items():
        withheld = task in without_texts
        base = {} if withheld else read_answers(folder.cell(found.cells[found.baseline, task]["key"]))
        several = len({own for own, _, _ in questions}) > 1
        shown = []
        for own, number, _ in questions:
            place = f"{own}, {number}" if several else f"{number}"
            texts_of = {} if withheld else {key: _short(base[own, number][key]) for key in ("question", "target")}
            shown.append({"id": place, **texts_of})
        answers: dict[str, list[int]] = {}
        likelihoods: dict[str, list[str]] = {}
        texts: dict[str, int] = {}
        for name in outcomes if left > 0 and not withheld else ():
            said = read_answers(folder.cell(found.cells[name, task]["key"]))
            answers[name] = []
            likelihoods[name] = [said[own, number]["likelihood"] for own, number, _ in questions]
            for own, number, _ in questions:
                text = _short(said[own, number]["answer"])
                left -= len(text) if text not in texts else 0
                answers[name].append(texts.setdefault(text, len(texts)))
            if left <= 0:
                break
        values = {name: [round(float(value), 6) for value in figures] for name, figures in outcomes.items()}
        binary = all(value in (0.0, 1.0) for own in values.values() for value in own)
        result[task] = {"shown": shown, "values": values, "binary": binary, "withheld": withheld}
        result[task]["lower"] = found.rows[found.baseline, task].lower_is_better
        if left > 0 and not withheld:
            result[task] |= {"texts": list(texts), "answers": answers}
            if any(any(own) for own in likelihoods.values()):
                result[task]["likelihoods"] = likelihoods
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
