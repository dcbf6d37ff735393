"""Write the page of a comparison: one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.artefacts import CREATED_BY, without_nan, write_text
from lmeval_prune.comparison.costs import COSTS, cost_range
from lmeval_prune.comparison.rows import Comparison
from lmeval_prune.comparison.tables import POOLED, Table
from lmeval_prune.reporting.documents import render

MAX_TEXT = 1640  # characters; the middle of a longer text is left out
MAX_CHARACTERS = 40_000_000  # of all answers of a page; tasks beyond this limit are shown without answers


def write_page(comparison: Comparison, path: Path, without_texts: Sequence[str] = ()) -> None:
    """Write the page; the questions and answers of the tasks `without_texts` are left out."""
    questions = _Questions(comparison)
    tasks = {
        task: _values(table) if task in without_texts else questions.of(task, table)
        for task, table in comparison.evaluated.items()
    }
    data = {
        "title": comparison.title,
        "baseline": comparison.baseline,
        "tasks": comparison.tasks,
        "fronts": comparison.fronts,
        "pooled": POOLED,
        "parts": [task for task, table in comparison.tables.items() if table.is_part],
        "metrics": {task: table.columns for task, table in comparison.tables.items()},
        "created_by": f"Made by {CREATED_BY}.",
        "missing": comparison.missing,
        "notes": comparison.notes,
        "costs": [
            {
                "key": key,
                "label": cost.label,
                "less": cost.less_is_better,
                "varies": _varies(comparison, key),
                "timed": cost.timed,
            }
            for key, cost in COSTS.items()
            if any(costs.get(key) is not None for costs in comparison.costs.values())
        ],
        "variants": [_variant(comparison, name) for name in comparison.variants],
        "questions": tasks,
        "questions_total": sum(len(task["shown"]) for task in tasks.values()),
    }
    text = json.dumps(without_nan(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    template = Path(__file__).with_name("page.html.jinja")
    write_text(path, render(template, title=comparison.title, data=packed))


def _varies(comparison: Comparison, key: str) -> bool:
    """Return whether the variants differ in a cost."""
    return len({costs.get(key) for costs in comparison.costs.values() if costs}) > 1


def _variant(comparison: Comparison, name: str) -> dict[str, Any]:
    """Return a variant's rows, costs and commands for the page, as JSON."""
    measured = comparison.costs.get(name, {})
    costs = {key: value for key, value in measured.items() if key in COSTS}
    return {
        "name": name,
        "rows": {task: asdict(row) for (variant, task), row in comparison.rows.items() if variant == name},
        "costs": costs,
        "ranges": {key: cost_range(measured, key) for key in costs if COSTS[key].timed},
        "commands": {task: command for (variant, task), command in comparison.commands.items() if variant == name},
        "about": comparison.about.get(name, ""),
    }


class _Questions:
    """Questions, values and answers for the page, limited to `MAX_CHARACTERS`."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.characters_left = MAX_CHARACTERS

    def of(self, task: str, table: Table) -> dict[str, Any]:
        """Return a task's questions and values, and its answers unless they exceed the limit."""
        gold = self.comparison.answers(self.comparison.baseline, task)
        result = {**_values(table), "withheld": False}
        for entry, (part, number, _) in zip(result["shown"], table.questions, strict=True):
            entry |= {key: shortened(gold[part, number][key]) for key in ("question", "target")}
        answers: dict[str, list[int]] = {}
        likelihoods: dict[str, list[str]] = {}
        texts: dict[str, int] = {}
        for name in table.variants:
            if self.characters_left <= 0:
                return result
            cell = self.comparison.answers(name, task)
            rows = [cell[part, number] for part, number, _ in table.questions]
            likelihoods[name] = [row["likelihood"] for row in rows]
            answers[name] = []
            for text in (shortened(row["answer"]) for row in rows):
                self.characters_left -= len(text) if text not in texts else 0
                answers[name].append(texts.setdefault(text, len(texts)))
        if self.characters_left > 0:
            result |= {"texts": list(texts), "answers": answers}
            result |= {"likelihoods": likelihoods} if any(map(any, likelihoods.values())) else {}
        return result


def _values(table: Table) -> dict[str, Any]:
    """Return a task's values for the page, without the texts of questions and answers."""
    values = {
        name: [round(float(value), 6) for value in column]
        for name, column in zip(table.variants, table.figures.T, strict=True)
    }
    several = len({part for part, _, _ in table.questions}) > 1
    return {
        "shown": [{"id": f"{part}, {number}" if several else f"{number}"} for part, number, _ in table.questions],
        "values": values,
        "binary": table.are_shares and bool(np.isin(table.values, (0.0, 1.0)).all()),
        "withheld": True,
        "lower": table.lower_is_better,
    }


def shortened(text: Any) -> str:
    """Return a text; of a text longer than `MAX_TEXT`, leave out the middle."""
    text = str(text)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2 - 20
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
