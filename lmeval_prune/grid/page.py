"""Write the page of a comparison: one HTML file that needs nothing beside it."""

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
from lmeval_prune.grid.comparison import COSTS, POOLED, TIMED, Comparison, Table, measured_range
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import read_answers
from lmeval_prune.reporting.documents import render

LONGEST_ANSWER = 1600  # characters; the middle of a longer one is left out
MOST_CHARACTERS = 40_000_000  # of all answers of a page; the page has none of what goes beyond


def write_page(comparison: Comparison, folder: GridFolder, path: Path, without_texts: Sequence[str] = ()) -> None:
    """Write the page.

    Args:
        comparison: its figures.
        folder: of the grid, for questions and answers.
        path: of the HTML file.
        without_texts: tasks whose questions and answers it leaves out.
    """
    questions = _Questions(comparison, folder)
    tasks = {
        task: questions.withheld(task, table) if task in without_texts else questions.of(task, table)
        for task, table in comparison.tables.items()
        if task != POOLED
    }
    data = {
        "title": comparison.title,
        "baseline": comparison.baseline,
        "tasks": comparison.tasks,
        "fronts": comparison.fronts,
        "pooled": POOLED,
        "made": f"Made by {CREATED_BY}.",
        "missing": comparison.missing,
        "notes": comparison.notes,
        "costs": [
            {"key": key, "label": label, "less": less, "varies": _varies(comparison, key), "timed": key in TIMED}
            for key, (label, less) in COSTS.items()
            if any(costs.get(key) is not None for costs in comparison.costs.values())
        ],
        "variants": [_variant(comparison, name) for name in comparison.variants],
        "questions": tasks,
        "questions_total": sum(len(task["shown"]) for task in tasks.values()),
    }
    text = json.dumps(_without_nan(data), ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    template = Path(__file__).with_name("page.html.jinja")
    write_text(path, render(template, title=comparison.title, data=packed))


def _varies(comparison: Comparison, key: str) -> bool:
    return len({costs.get(key) for costs in comparison.costs.values() if costs}) > 1


def _variant(comparison: Comparison, name: str) -> dict[str, Any]:
    costs = {key: value for key, value in comparison.costs[name].items() if key in COSTS}
    return {
        "name": name,
        "rows": {task: asdict(row) for (variant, task), row in comparison.rows.items() if variant == name},
        "costs": costs,
        "ranges": {key: measured_range(comparison.costs[name], key) for key in costs if key in TIMED},
        "commands": {task: cell["command"] for (variant, task), cell in comparison.cells.items() if variant == name},
    }


class _Questions:
    """Questions, figures and answers for the page, as many answers as there is room for."""

    def __init__(self, comparison: Comparison, folder: GridFolder) -> None:
        self.comparison, self.folder = comparison, folder
        self.room = MOST_CHARACTERS

    def withheld(self, task: str, table: Table) -> dict[str, Any]:
        """Return a task's figures without any text."""
        values = {
            name: [round(float(value), 6) for value in column]
            for name, column in zip(table.variants, table.values.T, strict=True)
        }
        several = len({part for part, _, _ in table.questions}) > 1
        return {
            "shown": [{"id": f"{part}, {number}" if several else f"{number}"} for part, number, _ in table.questions],
            "values": values,
            "binary": all(value in (0.0, 1.0) for column in values.values() for value in column),
            "withheld": True,
            "lower": table.lower_is_better,
        }

    def of(self, task: str, table: Table) -> dict[str, Any]:
        """Return a task's questions and figures, and its answers if there is room for all of them."""
        gold = self._cell(self.comparison.baseline, task)
        result = {**self.withheld(task, table), "withheld": False}
        for entry, (part, number, _) in zip(result["shown"], table.questions, strict=True):
            entry |= {key: _shortened(gold[part, number][key]) for key in ("question", "target")}
        answers: dict[str, list[int]] = {}
        likelihoods: dict[str, list[str]] = {}
        texts: dict[str, int] = {}
        for name in table.variants:
            if self.room <= 0:
                return result
            cell = self._cell(name, task)
            rows = [cell[part, number] for part, number, _ in table.questions]
            likelihoods[name] = [row["likelihood"] for row in rows]
            answers[name] = []
            for text in (_shortened(row["answer"]) for row in rows):
                self.room -= len(text) if text not in texts else 0
                answers[name].append(texts.setdefault(text, len(texts)))
        if self.room > 0:
            result |= {"texts": list(texts), "answers": answers}
            result |= {"likelihoods": likelihoods} if any(map(any, likelihoods.values())) else {}
        return result

    def _cell(self, variant: str, task: str) -> dict[tuple[str, int], dict[str, str]]:
        return read_answers(self.folder.cell(self.comparison.cells[variant, task]["key"]))


def _shortened(text: Any) -> str:
    """Leave out the middle of a long text."""
    text = str(text)
    if len(text) <= LONGEST_ANSWER:
        return text
    half = LONGEST_ANSWER // 2
    return f"{text[:half]}\n[… {len(text) - LONGEST_ANSWER} characters …]\n{text[-half:]}"


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON does not know them."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
