"""Output of `lmeval-prune grid compare`: Markdown, CSV, JSON, a plot, the page, and results in lm-eval's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from lmeval_prune.artefacts import CREATED_BY, digest, file_name, read_json, read_lines, write_text
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.grid.comparison import POOLED, Comparison, Row, compare
from lmeval_prune.grid.costs import COSTS, cost_range
from lmeval_prune.grid.folder import GridFolder, samples_file
from lmeval_prune.grid.page import write_page
from lmeval_prune.reporting.documents import one_line, render
from lmeval_prune.reporting.plot_style import COLOURS, figure, label_points, save
from lmeval_prune.reporting.tables import bold, csv, markdown, p_value, signed

TEXT_COLUMNS = ["variant"]


class Results(TypedDict):
    """Fields of lm-eval's results that its writer needs."""

    configs: dict[str, Any]


class Sample(TypedDict):
    """Fields of a sample that lm-eval's writer needs."""

    doc_hash: str
    prompt_hash: str
    target_hash: str
    arguments: list[list[Any]]
    resps: list[Any]
    filtered_resps: list[Any]
    target: Any


def write(
    path: str, baseline: str | None = None, output: str | None = None, seed: int = 0, without_texts: Sequence[str] = ()
) -> tuple[str, list[str], list[Path]]:
    """Compare a grid and write the report, the page and their data to `output`, by default `compare` in its folder.

    Returns:
        The table of the last task or of the pooled tasks; notes for the reader, a line each; and the written files.
    """
    target = Path(output) if output else GridFolder(path).path / "compare"
    if target.is_file():
        raise InputError(f"{target} is a file; name a folder")
    comparison = compare(path, baseline, seed)
    tasks = [task for task in comparison.tasks if task != POOLED]
    for task in without_texts:
        if task not in tasks:
            raise InputError(f"without_texts: the grid has no task {task!r}{did_you_mean(task, tasks)}")
    rows = [asdict(row) for row in comparison.rows.values()]
    notes = comparison.notes
    if comparison.missing:
        notes = [f"missing cells: {_missing_cells(comparison.missing)}", *notes]
    costs = [key for key in COSTS if any(figures.get(key) is not None for figures in comparison.costs.values())]
    write_text(target / "table.csv", csv(pd.DataFrame(rows)))
    write_text(target / "comparison.json", _comparison_json(comparison, rows))
    if costs:
        _draw_pareto(comparison, costs, target / "pareto")
    write_text(target / "report.md", _report_markdown(comparison, notes, costs, without_texts))
    write_page(comparison, GridFolder(path), target / "page.html", without_texts)
    pictures = ["pareto.png", "pareto.svg"] if costs else []
    names = ["report.md", "table.csv", "comparison.json", *pictures, "page.html"]
    return _task_table(comparison, comparison.tasks[-1]), notes, [target / name for name in names]


def _comparison_json(comparison: Comparison, rows: list[dict[str, Any]]) -> str:
    """Return the content of `comparison.json`."""
    content = {
        "created_by": CREATED_BY,
        "title": comparison.title,
        "baseline": comparison.baseline,
        "rows": rows,
        **{name: getattr(comparison, name) for name in ("costs", "fronts", "missing", "notes")},
        "metrics": {task: table.metrics for task, table in comparison.tables.items() if task != POOLED},
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _missing_cells(cells: list[tuple[str, str, str]]) -> str:
    """Describe cells that are not done, with their reasons, in one line."""
    named = [f"{variant} on {task} ({reason})" for variant, task, reason in cells]
    return f"{len(named)}: {'; '.join(named[:10])}{'; …' if named[10:] else ''}"


def _report_markdown(comparison: Comparison, notes: list[str], costs: list[str], without_texts: Sequence[str]) -> str:
    cells, rows = comparison.cells.items(), comparison.rows.values()
    by_hooks = {"heads", "mask", "plan"}
    hooked = {name for (name, _), cell in cells if by_hooks & cell["model_args"].keys() or cell["prepare"]}
    return render(
        Path(__file__).with_name("report.md.jinja"),
        comparison=comparison,
        notes=notes,
        without_texts=without_texts,
        tables={task: _task_table(comparison, task) for task in comparison.tasks},
        tests=sum(row.p is not None for row in rows),
        hooked=[name for name in comparison.variants if name in hooked],
        marked=any(row.chosen_on for row in rows),
        costs=_costs_table(comparison, costs) if costs else "",
        timed=any(COSTS[key].timed for key in costs),
        front_of_speeds=any(COSTS[key].timed for key in comparison.fronts[comparison.tasks[-1]]),
        devices=", ".join(sorted({_device_text(figures) for figures in comparison.costs.values() if figures})),
    )


def _device_text(costs: dict[str, Any]) -> str:
    device = costs.get("device", "cpu")
    return f"a CPU ({costs.get('threads', 1)} threads)" if device == "cpu" else str(device)


def _task_table(comparison: Comparison, task: str) -> str:
    """Return the Markdown table of a task: a row for each variant."""
    rows = [comparison.rows[name, task] for name in comparison.variants if (name, task) in comparison.rows]
    frame = pd.DataFrame([_row_cells(row) for row in rows])
    if any(row.mean_tokens is not None for row in rows):
        frame["tokens"] = ["" if row.mean_tokens is None else f"{row.mean_tokens:.0f}" for row in rows]
        frame["cut off"] = ["" if row.cut_off is None else f"{row.cut_off:.0%}" for row in rows]
    return markdown(frame, TEXT_COLUMNS)


def _row_cells(row: Row) -> dict[str, str]:
    """Format a row of a task's table, by column."""
    name = f"{row.variant} †" if row.chosen_on else row.variant
    cells = {"variant": name, "questions": str(row.questions), "mean": f"{100 * row.mean:.1f}"}
    if row.difference is None:
        return {**cells, **dict.fromkeys(("difference", "+ / −", "p", "p Holm", "detectable"), "")}
    assert row.difference_low is not None and row.difference_high is not None
    interval = f"({signed(100 * row.difference_low)} … {signed(100 * row.difference_high)})"
    is_significant = row.p_holm is not None and row.p_holm < 0.05
    return {
        **cells,
        "difference": bold(f"{signed(100 * row.difference)} {interval}", is_significant),
        "+ / −": f"{row.better} / {row.worse}",
        "p": p_value(row.p),
        "p Holm": bold(p_value(row.p_holm), is_significant),
        "detectable": "none" if row.detectable is None else f"{100 * row.detectable:.1f}",
    }


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


def _draw_pareto(comparison: Comparison, keys: list[str], stem: Path) -> None:
    """Plot the mean of the last task against the cost in which the variants differ most."""
    task, costs = comparison.tasks[-1], comparison.costs
    rows = {name: comparison.rows[name, task] for name in comparison.variants if (name, task) in comparison.rows}
    key = max(keys, key=lambda key: _spread([costs[name].get(key) for name in rows], COSTS[key].timed))
    label, front = COSTS[key].label, comparison.fronts[task].get(key, [])
    canvas, axes = figure(8.2, 4.6, one_line(f"{comparison.title}: mean ({task}) against {label}"))
    marks, labels = [], []
    for name, row in rows.items():
        if costs[name].get(key) is None:
            continue
        x, y = costs[name][key], 100 * row.mean
        low, high = cost_range(costs[name], key)
        colour = COLOURS[1] if name == comparison.baseline else COLOURS[0] if name in front else COLOURS[6]
        is_labelled = name in front or name == comparison.baseline
        line = {"color": colour, "lw": 1, "alpha": 0.5, "zorder": 2 + is_labelled}
        axes.plot([x, x], [100 * row.low, 100 * row.high], **line)
        if low < high:
            axes.plot([low, high], [y, y], **line)
        axes.plot([x], [y], "o", color=colour, ms=6, zorder=3 + is_labelled)
        marks += [(x, 100 * row.low, x, 100 * row.high), (x, y, x, y)]
        labels += [(x, y, one_line(name))] if is_labelled else []
    if front:
        ordered = sorted((costs[name][key], 100 * rows[name].mean) for name in front)
        axes.plot(*zip(*ordered, strict=True), "--", color=COLOURS[0], lw=1)
    axes.set(xlabel=label, ylabel="mean, points (lines: 95%)")
    axes.margins(x=0.12)
    axes.grid(axis="y", color="0.92")
    label_points(axes, labels, marks)
    save(canvas, stem)


def _spread(values: Sequence[float | None], timed: bool) -> float:
    """Return the ratio of the largest to the smallest value; costs that are not timed take precedence."""
    known = [value for value in values if value]
    if not known:
        return 0.0
    return max(known) / min(known) + 1e6 * (max(known) > min(known) and not timed)


def write_lm_eval(path: str, output: str) -> Path:
    """Write the cells that are done with lm-eval's own writer, a folder for each variant.

    Folders are named as lm-eval names them; variants with the same folder name get a digest, except the first.
    """
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.utils import sanitize_model_name

    folder = GridFolder(path)
    entries = folder.read()["cells"]
    folder_names: dict[str, str] = {}  # by variant
    for variant in dict.fromkeys(entry["variant"] for entry in entries):
        name = file_name(sanitize_model_name(variant))
        is_taken = name.casefold() in {other.casefold() for other in folder_names.values()}
        folder_names[variant] = f"{name}__{digest(variant)}" if is_taken else name
    for entry in entries:
        if not folder.has_cell(entry["key"]):
            continue
        cell = folder.cell(entry["key"])
        results = read_json(cell / "results.json", Results)
        files = {task: samples_file(cell, task) for task in sorted(results["configs"])}
        samples = {task: read_lines(file, Sample) for task, file in files.items() if file.is_file()}
        tracker = EvaluationTracker(output_path=output)
        general = tracker.general_config_tracker
        general.model_source, general.model_name = "pruned-hf", entry["variant"]
        general.model_name_sanitized = folder_names[entry["variant"]]
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=file_name(task), samples=rows)
        if not list((Path(output) / general.model_name_sanitized).glob("results_*.json")):
            raise InputError(f"lm-eval could not write to {output}; name a folder that can be written")
    return Path(output)
