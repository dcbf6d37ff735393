"""`lmeval-prune grid compare`: Markdown, CSV, JSON, a picture and the page; and lm-eval's own layout of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_prune.artefacts import CREATED_BY, digest, write_text
from lmeval_prune.errors import InputError, nearest
from lmeval_prune.grid.comparison import COSTS, Comparison, Row, compare
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.page import write_page
from lmeval_prune.reporting.documents import render
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.tables import bold, csv, markdown

LEFT = ["variant"]


def write(
    path: str,
    baseline: str | None = None,
    output: str | None = None,
    seed: int = 0,
    without_texts: Sequence[str] = (),
) -> tuple[Path, list[str]]:
    """Compare a grid and write everything.

    Args:
        path: folder of the grid.
        baseline: name of a variant; default the grid's.
        output: folder; default `compare` in the grid's.
        seed: of bootstrap and tests.
        without_texts: tasks whose questions and answers the page does not show.

    Returns:
        The page, and what a reader must know besides, a line each.

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
    text = render(
        Path(__file__).with_name("report.md.jinja"),
        found=found,
        without_texts=without_texts,
        tables={task: _table(found, task) for task in found.tasks},
        tests=len(tests),
        on_trial=_on_trial(found),
        marked=any(row.chosen_on for row in found.rows.values()),
        costs=_costs(found, costs) if costs else "",
        where=", ".join(sorted({_where(one) for one in found.costs.values() if one})),
    )
    write_text(target / "report.md", text)
    write_page(found, GridFolder(path), target / "page.html", without_texts)
    return target / "page.html", found.notes


def _on_trial(found: Comparison) -> list[str]:
    """Variants that hooks try out, so that nothing of them is smaller yet."""
    tried = {name for (name, _), cell in found.cells.items() if {"heads", "mask", "plan"} & set(cell["model_args"])}
    tried |= {name for (name, _), cell in found.cells.items() if cell["prepare"]}
    return [name for name in found.variants if name in tried]


def _where(measured: dict[str, Any]) -> str:
    on_cpu = measured["device"] == "cpu"
    return f"a CPU ({measured['threads']} threads)" if on_cpu else str(measured["device"])


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


def _costs(found: Comparison, names: list[str]) -> str:
    def shown(variant: str, name: str) -> str:
        value = found.costs[variant].get(name)
        on_front = " ◆" if variant in found.fronts.get(name, ()) else ""
        return "" if value is None else f"{value:,.0f}{on_front}" if value >= 1000 else f"{value:.1f}{on_front}"

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
        deterministic = not COSTS[cost][0].startswith("tokens a second")  # a picture is the same each time
        return max(known) / min(known) + 1e6 * deterministic * (max(known) > min(known)) if known else 0.0

    cost = max(names, key=spread)
    made, axes = figure(8.2, 4.6, f"{found.title}: mean ({task}) against {COSTS[cost][0]}")
    front = found.fronts.get(cost, [])
    for name, row in points.items():
        value = found.costs[name].get(cost)
        if value is None:
            continue
        colour = COLOURS[1] if name == found.baseline else COLOURS[0] if name in front else COLOURS[6]
        axes.plot([value, value], [100 * row.low, 100 * row.high], color=colour, lw=1, alpha=0.5)
        axes.plot([value], [100 * row.mean], "o", color=colour, ms=6)
        if name in front or name == found.baseline:
            axes.annotate(name, (value, 100 * row.mean), xytext=(6, 4), textcoords="offset points", fontsize=8)
    ordered = sorted((found.costs[name][cost], 100 * points[name].mean) for name in front)
    axes.plot(*zip(*ordered, strict=True), "--", color=COLOURS[0], lw=1)
    axes.set(xlabel=COSTS[cost][0], ylabel="mean, points (lines: 95%)")
    axes.grid(axis="y", color="0.92")
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
        name = sanitize_model_name(variant)
        is_taken = name.casefold() in {other.casefold() for other in names.values()}
        names[variant] = f"{name}__{digest(variant)}" if is_taken else name
    for entry in entries:
        if not folder.done(entry["key"]):
            continue
        cell = folder.cell(entry["key"])
        results = json.loads((cell / "results.json").read_text(encoding="utf-8"))
        samples = {
            one.stem.removeprefix("samples_"): [
                json.loads(line) for line in one.read_text(encoding="utf-8").splitlines()
            ]
            for one in sorted(cell.glob("samples_*.jsonl"))
        }
        tracker = EvaluationTracker(output_path=output)
        general = tracker.general_config_tracker
        general.model_source, general.model_name = "pruned-hf", entry["variant"]
        general.model_name_sanitized = names[entry["variant"]]
        tracker.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=task, samples=rows)
        if not list((Path(output) / general.model_name_sanitized).glob("results_*.json")):
            raise InputError(f"lm-eval could not write to {output}; name a folder that can be written")
    return Path(output)
