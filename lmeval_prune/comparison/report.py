"""Output of a comparison: Markdown, CSV, JSON and the page, one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup

from lmeval_prune.artefacts import CREATED_BY, without_nan, write_text
from lmeval_prune.comparison.columns import COSTS, MARGIN, MEASURED, TESTED, cost_range, level
from lmeval_prune.comparison.tables import POOLED, Comparison, Row
from lmeval_prune.errors import InputError, did_you_mean, first_few
from lmeval_prune.reporting.documents import bold, csv, markdown, render

MAX_SUMMARY = 24  # rows of the summary with members of groups and parts of tasks
MAX_CHARACTERS = 40_000_000  # of all answers of a page; tasks beyond this limit are shown without answers
FILES = Path(__file__).with_name("page_files")
SCRIPTS = ("page.js", "tables.js", "plot.js", "questions.js")  # in this order, as one program


def write(comparison: Comparison, target: Path, without_texts: Sequence[str] = ()) -> tuple[list[str], list[Path]]:
    """Write the report, the page and their data to a folder; the page lacks the questions and answers of some tasks.

    Returns:
        Notes for the reader, a line each, and the written files.
    """
    for task in without_texts:
        if task not in comparison.evaluated:
            raise InputError(f"without_texts: there is no task {task!r}{did_you_mean(task, comparison.evaluated)}")
    names = [name for column in MEASURED for name in (column.key, f"{column.key}_se")]
    names = [name for name in names if any(name in row.measured for row in comparison.rows.values())]
    records = {key: asdict(row) for key, row in comparison.rows.items()}
    for record in records.values():  # all with the same fields
        measured = record.pop("measured")
        record |= {name: measured.get(name) for name in names}
    notes = comparison.notes
    if comparison.missing:
        named = [f"{variant} on {task} ({reason})" for variant, task, reason in comparison.missing]
        notes = [f"missing: {first_few(named)}", *notes]
    content = {
        "created_by": CREATED_BY,
        "title": comparison.title,
        "baseline": comparison.baseline,
        "rows": list(records.values()),
        **{name: getattr(comparison, name) for name in ("costs", "fronts", "missing", "notes", "about")},
        "metrics": {task: table.columns for task, table in comparison.tables.items() if task != POOLED},
    }
    frame = pd.DataFrame(records.values()).astype({"better": "Int64", "worse": "Int64"})
    write_text(target / "table.csv", csv(frame))
    write_text(
        target / "comparison.json",
        json.dumps(without_nan(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    )
    costs = [key for key in COSTS if any(own.get(key) is not None for own in comparison.costs.values())]
    devices = {(own.get("device", "cpu"), own.get("threads", 1)) for own in comparison.costs.values() if own}
    values = {
        "comparison": comparison,
        "notes": notes,
        "without_texts": without_texts,
        "summary": summary_table(comparison) if comparison.about and len(comparison.tasks) > 1 else "",
        "tables": {task: task_table(comparison, task) for task in comparison.tasks},
        "legends": _legends(comparison),
        "marked": any(row.chosen_on for row in comparison.rows.values()),
        "costs": _costs_table(comparison, costs) if costs else "",
        "timed": any(COSTS[key].timed for key in costs),
        "front_of_speeds": any(COSTS[key].timed for key in comparison.fronts.get(comparison.tasks[-1], {})),
        "devices": ", ".join(sorted({f"a CPU ({n} threads)" if name == "cpu" else name for name, n in devices})),
    }
    # on the page it names no other file
    file, report = (render(Path(__file__).with_name("report.md.jinja"), **values, on_page=x) for x in (False, True))
    write_text(target / "report.md", file)
    write_text(target / "page.html", _page(comparison, records, report, without_texts))
    return notes, [target / name for name in ("report.md", "table.csv", "comparison.json", "page.html")]


# ---------------------------------------------------------------------- Markdown


def _legends(comparison: Comparison) -> dict[str, str]:
    """Return the meaning of each column, by title."""
    tested = [row for row in comparison.rows.values() if row.p is not None]
    parts = sum(comparison.tables[row.task].is_part for row in tested)
    tests = f"all {len(tested)} tests of this report"
    if parts:
        tests = (
            f"the {len(tested) - parts} tests of tasks, groups and all tasks, and on their own for the {parts} tests "
        )
        tests += "of parts of tasks and members of groups"
    shown = [column for column in MEASURED if column.legend and _any_has(comparison.rows.values(), column.key)]
    return {column.title: column.legend.format(tests=tests) for column in (*TESTED, *shown)}


def summary_table(comparison: Comparison) -> str:
    """Return a Markdown table of all tasks, a row for each variant; without parts if they are many."""
    tested = [row for row in comparison.rows.values() if row.variant != comparison.baseline]
    parts = [row for row in tested if comparison.tables[row.task].is_part]
    rows = []
    for row in tested:
        if row in parts and len(tested) > MAX_SUMMARY and len(parts) < len(tested):
            continue
        metric = "; ".join(comparison.tables[row.task].columns)
        baseline = level(row, comparison.rows[comparison.baseline, row.task].mean)
        rows.append({"task": row.task, "metric": metric, **_cells(row), "baseline": baseline})
        rows[-1] |= {MARGIN.title: MARGIN.measured(row.measured)} if MARGIN.key in row.measured else {}
    texts = ["task", "metric", "variant"]
    columns = [*texts, "questions", "baseline", *(c.title for c in TESTED)]
    columns += [MARGIN.title] if _any_has(tested, MARGIN.key) else []
    return markdown(pd.DataFrame(rows, columns=columns).fillna(""), texts)


def task_table(comparison: Comparison, task: str) -> str:
    """Return the Markdown table of a task: a row for each variant."""
    rows = [comparison.rows[name, task] for name in comparison.variants if (name, task) in comparison.rows]
    measured = [column for column in MEASURED if column.legend and _any_has(rows, column.key)]
    cells = [{**_cells(row), **{column.title: column.measured(row.measured) for column in measured}} for row in rows]
    return markdown(pd.DataFrame(cells), ["variant"])


def _any_has(rows: Any, key: str) -> bool:
    return any(row.measured.get(key) is not None for row in rows)


def _cells(row: Row) -> dict[str, Any]:
    name = f"{row.variant} †" if row.chosen_on else row.variant
    cells: dict[str, Any] = {"variant": name, "questions": row.questions}
    for column in TESTED:
        assert column.text is not None
        text = column.text(row)
        if column.key == "difference" and text:
            text += f" ({column.interval(row)})"
        cells[column.title] = bold(text, row.is_significant and column.key in ("difference", "p_holm"))
    return cells


def _costs_table(comparison: Comparison, keys: list[str]) -> str:
    """Return the Markdown table of costs; ◆ marks the Pareto front."""
    fronts = comparison.fronts[comparison.tasks[-1]]

    def cell(variant: str, key: str) -> str:
        costs = comparison.costs[variant]
        if costs.get(key) is None:
            return ""
        low, high = cost_range(costs, key)
        value, *ends = (f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in (costs[key], low, high))
        spread = f" ({' … '.join(ends)})" if low < high else ""
        return f"{value}{spread}{' ◆' if variant in fronts.get(key, ()) else ''}"

    measured = [variant for variant in comparison.variants if comparison.costs[variant]]
    rows = [{"variant": name, **{COSTS[key].label: cell(name, key) for key in keys}} for name in measured]
    return markdown(pd.DataFrame(rows), ["variant"])


# ---------------------------------------------------------------------- page


def _page(
    comparison: Comparison, records: dict[tuple[str, str], dict[str, Any]], report: str, without_texts: Sequence[str]
) -> str:
    """Return the page; `report`, as Markdown, is shown where scripts do not run.

    The questions of each task are a packed block of their own behind the program, which unpacks it when it is asked
    for, so that a large page can be used at once.
    """
    characters_left, tasks = MAX_CHARACTERS, dict[str, dict[str, Any]]()
    for task, table in comparison.evaluated.items():
        figures = zip(table.variants, table.figures.T, strict=True)
        tasks[task] = {
            "shown": [{"id": str(number)} for number in table.numbers],
            "values": {name: [round(float(value), 6) for value in column] for name, column in figures},
            "binary": table.are_shares and bool(np.isin(table.values, (0.0, 1.0)).all()),
            "withheld": True,
            "lower": table.lower_is_better,
        }
        if task in without_texts:
            continue
        answers = {name: comparison.answers(name, task) for name in table.variants}
        gold = zip(table.numbers, answers[comparison.baseline], strict=True)
        shown = [{"id": str(i), "question": answer.question, "target": answer.target} for i, answer in gold]
        tasks[task] |= {"shown": shown, "withheld": False}
        # All answers to a question stand together: they are much alike, so that they are compressed to less.
        texts = list(dict.fromkeys(answer.answer for row in zip(*answers.values(), strict=True) for answer in row))
        characters_left -= sum(map(len, texts))
        if characters_left > 0:
            numbers = {text: number for number, text in enumerate(texts)}
            likelihoods = {name: [answer.likelihood for answer in own] for name, own in answers.items()}
            numbered = {name: [numbers[answer.answer] for answer in own] for name, own in answers.items()}
            tasks[task] |= {"texts": texts, "answers": numbered}
            tasks[task] |= {"likelihoods": likelihoods} if any(map(any, likelihoods.values())) else {}
    legends, rows = _legends(comparison), comparison.rows
    mean, difference, *others = (column for column in (*TESTED, *MEASURED) if column.title in legends)
    columns = [difference, mean, *others]  # a phone shows the first ones

    def cells(row: Row) -> dict[str, list[str]]:
        """Return the cell of each column, and what stands below it."""
        return {c.key: [c.text(row) if c.text else c.measured(row.measured), c.interval(row)] for c in columns}

    def variant(name: str) -> dict[str, Any]:
        measured = comparison.costs.get(name, {})
        costs = {key: value for key, value in measured.items() if key in COSTS}
        return {
            "name": name,
            "rows": {
                task: {**records[name, task], "text": cells(rows[name, task])}
                for task in comparison.tasks
                if (name, task) in rows
            },
            "costs": costs,
            "ranges": {key: cost_range(measured, key) for key in costs if COSTS[key].timed},
            "commands": {task: command for (own, task), command in comparison.commands.items() if own == name},
            "about": comparison.about.get(name, ""),
        }

    data = {
        **{name: getattr(comparison, name) for name in ("title", "baseline", "tasks", "fronts", "missing", "notes")},
        "columns": [{"key": c.key, "label": c.title, "legend": legends[c.title]} for c in columns],
        "pooled": POOLED,
        "parts": [task for task, table in comparison.tables.items() if table.is_part],
        "metrics": {task: table.columns for task, table in comparison.tables.items()},
        "created_by": f"Made by {CREATED_BY}.",
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
        "variants": [variant(name) for name in comparison.variants],
        "question_tasks": list(tasks),
        "questions_total": sum(len(task["shown"]) for task in tasks.values()),
    }
    return render(
        FILES / "page.html.jinja",
        title=comparison.title,
        style=Markup((FILES / "page.css").read_text(encoding="utf-8")),
        script=Markup("\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)),
        report=Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(report)),
        data=_packed(data),
        blocks=[_packed(task) for task in tasks.values()],
    )


def _packed(data: Any) -> str:
    """Return JSON, compressed, in letters."""
    text = json.dumps(without_nan(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
