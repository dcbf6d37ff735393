"""`lmeval-prune grid compare`: Markdown, CSV, JSON, a picture and the page; and lm-eval's own layout of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from lmeval_prune.artefacts import CREATED_BY, digest, file_name, read_json, read_lines, write_text
from lmeval_prune.errors import InputError, nearest
from lmeval_prune.grid.comparison import COSTS, TIMED, Comparison, Row, compare, measured_range
from lmeval_prune.grid.folder import GridFolder, samples_file
from lmeval_prune.grid.page import write_page
from lmeval_prune.reporting.documents import one_line, render
from lmeval_prune.reporting.plot_style import COLOURS, figure, label_points, save
from lmeval_prune.reporting.tables import bold, csv, markdown

LEFT = ["variant"]


class Results(TypedDict):
    """What is read of lm-eval's results."""

    configs: dict[str, Any]


class Sample(TypedDict):
    """What lm-eval reads of a sample."""

    doc_hash: str
    prompt_hash: str
    target_hash: str
    arguments: list[list[Any]]
    resps: list[Any]
    filtered_resps: list[Any]
    target: Any


def write(
    path: str,
    baseline: str | None = None,
    output: str | None = None,
    seed: int = 0,
    without_texts: Sequence[str] = (),
) -> tuple[str, list[str], list[Path]]:
    """Compare a grid and write everything.

    Args:
        path: folder of the grid.
        baseline: name of a variant; default the grid's.
        output: folder; default `compare` in the grid's.
        seed: of tests.
        without_texts: tasks whose questions and answers the page does not show.

    Returns:
        The table of the last task or of all together, what a reader must know besides, a line each, and the files.

    Raises:
        InputError: as of `compare`, the output is a file, or there is no such task.
    """
    target = Path(output) if output else GridFolder(path).path / "compare"
    if target.is_file():
        raise InputError(f"{target} is a file; name a folder")
    found = compare(path, baseline, seed)
    for task in without_texts:
        if task not in found.outcomes:
            raise InputError(f"without_texts: the grid has no task {task!r}{nearest(task, found.outcomes)}")
    write_text(target / "table.csv", csv(pd.DataFrame([asdict(row) for row in found.rows.values()])))
    tests = [row for row in found.rows.values() if row.p is not None]
    costs = [name for name in COSTS if any(found.costs[variant].get(name) is not None for variant in found.variants)]
    content = {
        "created_by": CREATED_BY,
        "title": found.title,
        "baseline": found.baseline,
        "rows": [asdict(row) for row in found.rows.values()],
        "costs": found.costs,
        "fronts": found.fronts,
        "missing": found.missing,
        "notes": found.notes,
        "metrics": found.metrics,
    }
    write_text(target / "comparison.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if costs:
        _picture(found, costs, target / "pareto")
    notes = [f"missing cells: {_missing(found)}", *found.notes] if found.missing else found.notes
    text = render(
        Path(__file__).with_name("report.md.jinja"),
        found=found,
        notes=notes,
        without_texts=without_texts,
        tables={task: _table(found, task) for task in found.tasks},
        tests=len(tests),
        on_trial=_on_trial(found),
        marked=any(row.chosen_on for row in found.rows.values()),
        costs=_costs(found, costs) if costs else "",
        timed=any(name in TIMED for name in costs),
        front_of_speeds=any(name in TIMED for name in found.fronts[found.tasks[-1]]),
        where=", ".join(sorted({_where(one) for one in found.costs.values() if one})),
    )
    write_text(target / "report.md", text)
    write_page(found, GridFolder(path), target / "page.html", without_texts)
    pictures = ["pareto.png", "pareto.svg"] if costs else []
    names = ["report.md", "table.csv", "comparison.json", *pictures, "page.html"]
    return _table(found, found.tasks[-1]), notes, [target / name for name in names]


def _missing(found: Comparison) -> str:
    named = [f"{variant} on {task} ({reason})" for variant, task, reason in found.missing]
    return f"{len(named)}: {'; '.join(named[:10])}{'; …' if named[10:] else ''}"


def _on_trial(found: Comparison) -> list[str]:
    """Variants that hooks try out, so that nothing of them is smaller yet."""
    tried = {name for (name, _), cell in found.cells.items() if {"heads", "mask", "plan"} & set(cell["model_args"])}
    tried |= {name for (name, _), cell in found.cells.items() if cell["prepare"]}
    return [name for name in found.variants if name in tried]


def _where(measured: dict[str, Any]) -> str:
    device = measured.get("device", "cpu")
    return f"a CPU ({measured.get('threads', 1)} threads)" if device == "cpu" else str(device)


def _table(found: Comparison, task: str) -> str:
    rows = [found.rows[name, task] for name in found.variants if (name, task) in found.rows]
    frame = pd.DataFrame([_shown(row) for row in rows])
    if any(row.mean_tokens is not None for row in rows):
        frame["tokens"] = ["" if row.mean_tokens is None else f"{row.mean_tokens:.0f}" for row in rows]
        frame["cut off"] = ["" if row.cut_off is None else f"{row.cut_off:.0%}" for row in rows]
    return markdown(frame, LEFT)


def _shown(row: Row) -> dict[str, str]:
    name = f"{row.variant} †" if row.chosen_on else row.variant
    shown = {"variant": name, "questions": str(row.questions), "mean": f"{100 * row.mean:.1f}"}
    if row.difference is None:
        return {**shown, **dict.fromkeys(("difference", "+ / −", "p", "p Holm", "detectable"), "")}
    assert row.difference_low is not None and row.difference_high is not None
    between = f"{_signed(row.difference)} ({_signed(row.difference_low)} … {_signed(row.difference_high)})"
    is_clear = row.p_holm is not None and row.p_holm < 0.05
    return {
        **shown,
        "difference": bold(between, is_clear),
        "+ / −": f"{row.better} / {row.worse}",
        "p": _chance(row.p),
        "p Holm": bold(_chance(row.p_holm), is_clear),
        "detectable": "none" if row.detectable is None else f"{100 * row.detectable:.1f}",
    }


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _chance(p: float | None) -> str:
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _costs(found: Comparison, names: list[str]) -> str:
    fronts = found.fronts[found.tasks[-1]]

    def shown(variant: str, name: str) -> str:
        value = found.costs[variant].get(name)
        low, high = measured_range(found.costs[variant], name)
        between = f" ({_figure(low)} … {_figure(high)})" if low < high else ""
        on_front = " ◆" if variant in fronts.get(name, ()) else ""
        return "" if value is None else f"{_figure(value)}{between}{on_front}"

    rows = [
        {"variant": variant, **{COSTS[name][0]: shown(variant, name) for name in names}}
        for variant in found.variants
        if found.costs[variant]
    ]
    return markdown(pd.DataFrame(rows), LEFT)


def _picture(found: Comparison, names: list[str], stem: Path) -> None:
    """Mean of the last task against the cost in which the variants differ most."""
    task = found.tasks[-1]
    points = {name: found.rows[name, task] for name in found.variants if (name, task) in found.rows}

    def spread(cost: str) -> float:
        values = [found.costs[name].get(cost) for name in points]
        known = [value for value in values if value]
        differs = max(known) > min(known) if known else False
        return max(known) / min(known) + 1e6 * differs * (cost not in TIMED) if known else 0.0  # one that is no chance

    cost = max(names, key=spread)
    made, axes = figure(8.2, 4.6, one_line(f"{found.title}: mean ({task}) against {COSTS[cost][0]}"))
    front = found.fronts[task].get(cost, [])
    known = {name: row for name, row in points.items() if found.costs[name].get(cost) is not None}
    marks, named = [], []
    for name, row in known.items():
        value = found.costs[name][cost]
        low, high = measured_range(found.costs[name], cost)
        colour = COLOURS[1] if name == found.baseline else COLOURS[0] if name in front else COLOURS[6]
        above = int(name in front or name == found.baseline)
        axes.plot([value, value], [100 * row.low, 100 * row.high], color=colour, lw=1, alpha=0.5, zorder=2 + above)
        if low < high:
            axes.plot([low, high], [100 * row.mean] * 2, color=colour, lw=1, alpha=0.5, zorder=2 + above)
        axes.plot([value], [100 * row.mean], "o", color=colour, ms=6, zorder=3 + above)
        marks += [(value, 100 * row.low, value, 100 * row.high), (value, 100 * row.mean, value, 100 * row.mean)]
        if above:
            named.append((value, 100 * row.mean, one_line(name)))
    ordered = sorted((found.costs[name][cost], 100 * points[name].mean) for name in front)
    if ordered:
        axes.plot(*zip(*ordered, strict=True), "--", color=COLOURS[0], lw=1)
    axes.set(xlabel=COSTS[cost][0], ylabel="mean, points (lines: 95%)")
    axes.margins(x=0.12)
    axes.grid(axis="y", color="0.92")
    label_points(axes, named, marks)
    save(made, stem)


def write_lm_eval(path: str, output: str) -> Path:
    """Write the cells that are there as lm-eval's own writer does, a folder a variant.

    Folders are named as lm-eval names them; of variants that it would call the same, all but the first get a digest.

    Args:
        path: folder of the grid.
        output: folder for them.

    Raises:
        InputError: there is no grid, or lm-eval could not write.
    """
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.utils import sanitize_model_name

    folder = GridFolder(path)
    entries = folder.read()["cells"]
    names: dict[str, str] = {}  # of folders, by variant
    for variant in dict.fromkeys(entry["variant"] for entry in entries):
        name = file_name(sanitize_model_name(variant))
        is_taken = name.casefold() in {other.casefold() for other in names.values()}
        names[variant] = f"{name}__{digest(variant)}" if is_taken else name
    for entry in entries:
        if not folder.done(entry["key"]):
            continue
        cell = folder.cell(entry["key"])
        results = read_json(cell / "results.json", Results)
        files = {task: samples_file(cell, task) for task in sorted(results["configs"])}
        samples = {task: read_lines(file, Sample) for task, file in files.items() if file.is_file()}
        tracker = EvaluationTracker(output_path=output)
        general = tracker.general_config_tracker
        general.model_source, general.model_name = "pruned-hf", entry["variant"]
        general.model_name_sanitized = names[entry["variant"]]
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=file_name(task), samples=rows)
        if not list((Path(output) / general.model_name_sanitized).glob("results_*.json")):
            raise InputError(f"lm-eval could not write to {output}; name a folder that can be written")
    return Path(output)
