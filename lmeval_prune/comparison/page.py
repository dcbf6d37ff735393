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
from markdown_it import MarkdownIt
from markupsafe import Markup

from lmeval_prune.artefacts import CREATED_BY, without_nan, write_text
from lmeval_prune.comparison.costs import COSTS, cost_range
from lmeval_prune.comparison.rows import DETECTABLE, Comparison
from lmeval_prune.comparison.tables import POOLED, Table
from lmeval_prune.reporting.documents import render

MAX_CHARACTERS = 40_000_000  # of all answers of a page; tasks beyond this limit are shown without answers
FILES = Path(__file__).with_name("page_files")
SCRIPTS = ("page.js", "tables.js", "plot.js", "questions.js")  # in this order, as one program


def write_page(comparison: Comparison, path: Path, report: str, without_texts: Sequence[str] = ()) -> None:
    """Write the page.

    The questions of each task are a packed block of their own behind the program, which unpacks it when it is asked
    for, so that a large page can be used at once.

    Args:
        comparison: what is shown.
        path: the file.
        report: the report as Markdown, which is shown where scripts do not run.
        without_texts: tasks whose questions and answers are left out.
    """
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
        "detectable": DETECTABLE,
        "created_by": f"Made by {CREATED_BY}.",
        "missing": comparison.missing,
        "notes": comparison.notes,
        "costs": [
            {
                "key": key,
                "label": cost.label,
                "less": cost.less_is_better,
                "varies": len({costs.get(key) for costs in comparison.costs.values() if costs}) > 1,
                "timed": cost.timed,
            }
            for key, cost in COSTS.items()
            if any(costs.get(key) is not None for costs in comparison.costs.values())
        ],
        "variants": [_variant(comparison, name) for name in comparison.variants],
        "question_tasks": list(tasks),
        "questions_total": sum(len(task["shown"]) for task in tasks.values()),
    }
    page = render(
        FILES / "page.html.jinja",
        title=comparison.title,
        style=_file("page.css"),
        script=Markup("\n").join(map(_file, SCRIPTS)),
        report=Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(report)),
        data=_packed(data),
        blocks=[_packed(task) for task in tasks.values()],
    )
    write_text(path, page)


def _file(name: str) -> Markup:
    return Markup((FILES / name).read_text(encoding="utf-8"))


def _packed(data: Any) -> str:
    """Return JSON, compressed, in letters."""
    text = json.dumps(without_nan(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _variant(comparison: Comparison, name: str) -> dict[str, Any]:
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
        result = {**_values(table), "withheld": False}
        gold = self.comparison.answers(self.comparison.baseline, task)
        for entry, answer in zip(result["shown"], gold, strict=True):
            entry |= {"question": answer.question, "target": answer.target}
        answers = {name: self.comparison.answers(name, task) for name in table.variants}
        # All answers to a question stand together: they are much alike, so that they are compressed to less.
        texts = dict.fromkeys(answer.answer for row in zip(*answers.values(), strict=True) for answer in row)
        self.characters_left -= sum(map(len, texts))
        if self.characters_left > 0:
            numbers = {text: number for number, text in enumerate(texts)}
            result["texts"] = list(texts)
            result["answers"] = {name: [numbers[answer.answer] for answer in own] for name, own in answers.items()}
            likelihoods = {name: [answer.likelihood for answer in own] for name, own in answers.items()}
            result |= {"likelihoods": likelihoods} if any(map(any, likelihoods.values())) else {}
        return result


def _values(table: Table) -> dict[str, Any]:
    """Return a task's values for the page, without the texts of questions and answers."""
    return {
        "shown": [{"id": str(number)} for number in table.numbers],
        "values": {
            name: [round(float(value), 6) for value in column]
            for name, column in zip(table.variants, table.figures.T, strict=True)
        },
        "binary": table.are_shares and bool(np.isin(table.values, (0.0, 1.0)).all()),
        "withheld": True,
        "lower": table.lower_is_better,
    }
