"""Output of a comparison: Markdown, CSV, JSON and the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_prune.artefacts import CREATED_BY, without_nan, write_text
from lmeval_prune.comparison.costs import COSTS, cost_range
from lmeval_prune.comparison.page import write_page
from lmeval_prune.comparison.rows import DETECTABLE, Comparison, Row
from lmeval_prune.comparison.tables import POOLED
from lmeval_prune.errors import InputError, did_you_mean, first_few
from lmeval_prune.reporting.documents import render
from lmeval_prune.reporting.tables import bold, csv, markdown, p_value, signed, significant

TEXT_COLUMNS = ["variant"]
DISTANCE = ["mean_kld", "mean_kld_se", "same_top", "same_top_se", "same_answers", "same_answers_se", "first_difference"]
MAX_ROWS = 2_000  # of the tables on a page without scripts; beyond it, the last task's alone
MAX_SUMMARY = 24  # rows of the summary with members of groups and parts of tasks


def write(comparison: Comparison, target: Path, without_texts: Sequence[str] = ()) -> tuple[list[str], list[Path]]:
    """Write the report, the page and their data to a folder.

    Returns:
        Notes for the reader, a line each, and the written files.
    """
    for task in without_texts:
        if task not in comparison.evaluated:
            raise InputError(f"without_texts: there is no task {task!r}{did_you_mean(task, comparison.evaluated)}")
    rows = [asdict(row) for row in comparison.rows.values()]
    notes = comparison.notes
    if comparison.missing:
        named = [f"{variant} on {task} ({reason})" for variant, task, reason in comparison.missing]
        notes = [f"missing: {first_few(named)}", *notes]
    costs = [key for key in COSTS if any(figures.get(key) is not None for figures in comparison.costs.values())]
    write_text(target / "table.csv", csv(pd.DataFrame(rows).astype({"better": "Int64", "worse": "Int64"})))
    write_text(target / "comparison.json", _comparison_json(comparison, rows))
    write_text(target / "report.md", _report_markdown(comparison, notes, costs, without_texts, comparison.tasks))
    shown = comparison.tasks if len(rows) <= MAX_ROWS else comparison.tasks[-1:]
    report = _report_markdown(comparison, notes, costs, without_texts, shown, on_page=True)
    write_page(comparison, target / "page.html", report, without_texts)
    return notes, [target / name for name in ("report.md", "table.csv", "comparison.json", "page.html")]


def _comparison_json(comparison: Comparison, rows: list[dict[str, Any]]) -> str:
    content = {
        "created_by": CREATED_BY,
        "title": comparison.title,
        "baseline": comparison.baseline,
        "rows": rows,
        **{name: getattr(comparison, name) for name in ("costs", "fronts", "missing", "notes")},
        "about": comparison.about,
        "metrics": {task: table.columns for task, table in comparison.tables.items() if task != POOLED},
    }
    return json.dumps(without_nan(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _report_markdown(
    comparison: Comparison,
    notes: list[str],
    costs: list[str],
    without_texts: Sequence[str],
    tasks: Sequence[str],
    on_page: bool = False,
) -> str:
    """Return the report with the tables of some tasks; on the page it names no other file."""
    rows, fronts = comparison.rows.values(), comparison.fronts.get(comparison.tasks[-1], {})
    return render(
        Path(__file__).with_name("report.md.jinja"),
        comparison=comparison,
        notes=notes,
        without_texts=without_texts,
        on_page=on_page,
        summary=summary_table(comparison) if comparison.about and len(tasks) > 1 else "",
        tables={task: task_table(comparison, task) for task in tasks},
        tests=sum(row.p is not None for row in rows),
        parts=sum(row.p is not None and comparison.tables[row.task].is_part for row in rows),
        has_same_answers=any(row.same_answers is not None and row.mean_kld is None for row in rows),
        has_choices=_any_has(rows, "choice_kld"),
        has_own_distances=any(row.same_answers is not None for row in rows if row.variant == comparison.baseline),
        units={row.unit for row in rows},
        detectable=DETECTABLE,
        marked=any(row.chosen_on for row in rows),
        distances=_any_has(rows, "mean_kld"),
        costs=_costs_table(comparison, costs) if costs else "",
        timed=any(COSTS[key].timed for key in costs),
        front_of_speeds=any(COSTS[key].timed for key in fronts),
        devices=_devices(comparison.costs.values()),
    )


def _devices(costs: Iterable[dict[str, Any]]) -> str:
    devices = {(figures.get("device", "cpu"), figures.get("threads", 1)) for figures in costs if figures}
    return ", ".join(sorted({f"a CPU ({threads} threads)" if name == "cpu" else name for name, threads in devices}))


def summary_table(comparison: Comparison) -> str:
    """Return a Markdown table of all tasks, a row for each variant; without parts if they are many."""
    tested = [row for row in comparison.rows.values() if row.variant != comparison.baseline]
    parts = [row for row in tested if comparison.tables[row.task].is_part]
    rows = []
    for row in tested:
        if row in parts and len(tested) > MAX_SUMMARY and len(parts) < len(tested):
            continue
        metric = "; ".join(comparison.tables[row.task].columns)
        base = _level_text(row, comparison.rows[comparison.baseline, row.task].mean)
        rows.append({"task": row.task, "metric": metric, **_row_cells(row), "baseline": base})
    figures = ["questions", "baseline", "mean", "difference", "+ / −", "p", "p Holm", "detectable"]
    frame = pd.DataFrame(rows, columns=["task", "metric", "variant", *figures])
    return markdown(frame, ["task", "metric", *TEXT_COLUMNS])


def task_table(comparison: Comparison, task: str) -> str:
    """Return the Markdown table of a task: a row for each variant."""
    rows = [comparison.rows[name, task] for name in comparison.variants if (name, task) in comparison.rows]
    frame = pd.DataFrame([_row_cells(row) for row in rows])
    if _any_has(rows, "mean_tokens"):
        frame["tokens"] = [_with_error(row.mean_tokens, None, 1, 0) for row in rows]
        frame["cut off"] = ["" if row.cut_off is None else f"{row.cut_off:.0%}" for row in rows]
    if _any_has(rows, "mean_kld"):
        from lmeval_prune.distance.summary import cells as distance_cells  # imports torch

        distances = [distance_cells({name: getattr(row, name) for name in DISTANCE}) for row in rows]
        frame = pd.concat([frame, pd.DataFrame(distances)], axis=1)
        frame = frame.loc[:, (frame != "").any()]  # choices have no answers
    elif _any_has(rows, "same_answers"):
        frame["same answers"] = [_with_error(row.same_answers, row.same_answers_se, 100, 1) for row in rows]
    if _any_has(rows, "choice_kld"):
        frame["KLD of choices"] = [_with_error(row.choice_kld, row.choice_kld_se, 1, 4) for row in rows]
    return markdown(frame, TEXT_COLUMNS)


def _any_has(rows: Iterable[Row], name: str) -> bool:
    return any(getattr(row, name) is not None for row in rows)


def _with_error(value: float | None, error: float | None, factor: int, digits: int) -> str:
    if value is None:
        return ""
    return f"{factor * value:.{digits}f}" + ("" if error is None else f" ± {factor * error:.{digits}f}")


def _row_cells(row: Row) -> dict[str, str]:
    name = f"{row.variant} †" if row.chosen_on else row.variant
    cells = {"variant": name, "questions": str(row.questions), "mean": _level_text(row, row.mean)}
    if row.difference is None:
        return {**cells, **dict.fromkeys(("difference", "+ / −", "p", "p Holm", "detectable"), "")}
    assert row.difference_low is not None and row.difference_high is not None
    interval = f"({_change_text(row, row.difference_low)} … {_change_text(row, row.difference_high)})"
    is_significant = row.p_holm is not None and row.p_holm < 0.05
    return {
        **cells,
        "difference": bold(f"{_change_text(row, row.difference)} {interval}", is_significant),
        "+ / −": f"{row.better} / {row.worse}",
        "p": p_value(row.p),
        "p Holm": bold(p_value(row.p_holm), is_significant),
        "detectable": "none" if row.detectable is None else _change_text(row, row.detectable).lstrip("+"),
    }


def _level_text(row: Row, value: float) -> str:
    return f"{100 * value:.1f}" if row.unit == "points" else significant(value)


def _change_text(row: Row, value: float) -> str:
    """Format a difference, in points for shares and in per cent for perplexities."""
    if row.unit == "value":
        return significant(value, 3, sign=True)
    return signed(100 * value) + ("%" if row.unit == "perplexity" else "")


def _costs_table(comparison: Comparison, keys: list[str]) -> str:
    """Return the Markdown table of costs; ◆ marks the Pareto front."""
    fronts = comparison.fronts[comparison.tasks[-1]]
    rows = []
    for variant in comparison.variants:
        if figures := comparison.costs[variant]:
            cells = {COSTS[key].label: _cost_text(figures, key, variant in fronts.get(key, ())) for key in keys}
            rows.append({"variant": variant, **cells})
    return markdown(pd.DataFrame(rows), TEXT_COLUMNS)


def _cost_text(costs: dict[str, Any], key: str, on_front: bool) -> str:
    if costs.get(key) is None:
        return ""
    low, high = cost_range(costs, key)
    value, *ends = (f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" for x in (costs[key], low, high))
    spread = f" ({' … '.join(ends)})" if low < high else ""
    return f"{value}{spread}{' ◆' if on_front else ''}"
