"""Write a variant's results as the Hub reads them: `.eval_results/*.yaml` in the folder of a model.

The format is https://huggingface.co/docs/hub/eval-results; huggingface_hub builds it. Nothing is uploaded or looked up
on the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml, try_to_load_from_cache

from lmeval_prune.artefacts import file_name, read_json, write_text
from lmeval_prune.comparison.rows import Comparison
from lmeval_prune.errors import InputError
from lmeval_prune.grid.folder import GridFolder, check_name
from lmeval_prune.interventions.table import METHODS
from lmeval_prune.tasks.hub import HubDataset, hub_dataset

FOLDER = ".eval_results"
PREFIX = "lmeval_prune_"  # of file names, so that no file of others is replaced
MODEL = ("pretrained", "mask", "router", "adapters", "base_url", *METHODS)  # model_args that say which model answered


def parse_targets(texts: Sequence[str], variants: list[str]) -> list[tuple[str, Path]]:
    """Return the variant and the folder of each `VARIANT=FOLDER`; `InputError` for anything else."""
    targets = []
    for text in texts:
        variant, is_pair, folder = text.rpartition("=")
        if not is_pair or not variant or not folder:
            raise InputError(f"--eval_results {text}: write VARIANT=FOLDER, with the folder of the variant's model")
        check_name("variant", variant, variants)
        if Path(folder).is_file():
            raise InputError(f"--eval_results {text}: {folder} is a file; name the folder of the variant's model")
        targets.append((variant, Path(folder)))
    return targets


def write_eval_results(
    path: str | Path, comparison: Comparison, targets: Sequence[str]
) -> tuple[list[Path], list[str]]:
    """Write the results of variants on tasks from the Hub, a file for each task, with the compared metric.

    Args:
        path: folder of the grid.
        comparison: its comparison.
        targets: `VARIANT=FOLDER` each.

    Returns:
        The written files, and notes on what was left out or has to be checked, a line each.
    """
    folder, written, notes = GridFolder(path), list[Path](), list[str]()
    cells = {(entry["variant"], entry["task"]): entry for entry in folder.read()["cells"]}
    for variant, target in parse_targets(targets, comparison.variants):
        count = len(written)
        for (name, task), entry in cells.items():
            if name != variant or not folder.has_cell(entry["key"]) or task not in comparison.tables:
                continue
            if comparison.rows[variant, task].chosen_on:
                notes.append(f"{variant} on {task} is left out: the variant was selected on questions of this task")
                continue
            entries = list(_entries(folder.cell(entry["key"]), comparison.tables[task].metrics, notes))
            if entries:
                file = target / FOLDER / f"{PREFIX}{file_name(task)}.yaml"
                content = eval_result_entries_to_yaml(entries)
                write_text(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
                written.append(file)
                notes += _other_model(entry, target)
        if len(written) == count:
            notes.append(f"{variant}: there is no result for the Hub, and nothing is written to {target}")
    return written, list(dict.fromkeys(notes))


def _other_model(entry: Mapping[str, Any], target: Path) -> list[str]:
    """Return a note if a cell was evaluated with another model than that of a folder, as far as its arguments show."""
    arguments = {name: entry["model_args"][name] for name in MODEL if name in entry["model_args"]} | entry["prepare"]
    if list(arguments) == ["pretrained"] and Path(arguments["pretrained"]).resolve() == target.resolve():
        return []
    evaluated = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return [f"{entry['variant']} was evaluated with {evaluated}; see to it that {target} holds this model"]


def _entries(cell: Path, metrics: Mapping[str, Any], notes: list[str]) -> Iterator[EvalResultEntry]:
    """Yield the entries of a cell's tasks; add a note for each that is left out."""
    results, revisions = read_json(cell / "results.json"), read_json(cell / "cell.json").get("revisions") or {}
    for task, config in results["configs"].items():
        counts = results.get("n-samples", {}).get(task, {})
        column = metrics[task].column if task in metrics else ""
        value = results["results"].get(task, {}).get(column)
        source = hub_dataset(config)
        if source is None:
            notes.append(f"{task} is left out: its data set is not on the Hub")
        elif counts.get("effective") != counts.get("original"):
            coverage = f"{counts.get('effective')} of its {counts.get('original')} questions were asked"
            notes.append(f"{task} is left out: {coverage}, and the Hub shows whole runs")
        elif not isinstance(value, int | float) or not math.isfinite(value):
            notes.append(f"{task} is left out: its compared metric is no figure of lm-eval")
        else:
            revision = source.revision or revisions.get(task)
            task_id, is_known = _task_id(source, revision)
            if not is_known:
                notes.append(
                    f"{task}: task_id {task_id!r} is a guess; compare it with eval.yaml of {source.id} on the Hub"
                )
            yield EvalResultEntry(
                source.id, task_id, value, revision, date=_date(results), notes=_setup(task, column, results)
            )


def _task_id(source: HubDataset, revision: str | None) -> tuple[str, bool]:
    """Return the id of the task in the benchmark's `eval.yaml`, if that is in the cache, and whether it was found.

    Without it the configuration's name is taken, which it mostly is.
    """
    guess = source.config or "default"
    cached = try_to_load_from_cache(source.id, "eval.yaml", revision=revision, repo_type="dataset")
    if not isinstance(cached, str):
        return guess, False
    try:
        tasks = yaml.safe_load(Path(cached).read_text(encoding="utf-8"))["tasks"]
        fitting = [
            str(task["id"])
            for task in tasks
            if task.get("config", source.config) == source.config and task.get("split", "test") == source.split
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return guess, False
    return (fitting[0], True) if len(fitting) == 1 else (guess, False)


def _date(results: Mapping[str, Any]) -> str | None:
    """Return when the run began, as the Hub reads it."""
    date = results.get("date")
    return f"{datetime.fromtimestamp(date, UTC):%Y-%m-%dT%H:%M:%SZ}" if isinstance(date, int | float) else None


def _setup(task: str, column: str, results: Mapping[str, Any]) -> str:
    """Describe the evaluation in one line."""
    metric, _, filter_name = column.partition(",")
    shots = results.get("n-shot", {}).get(task)
    parts = [
        f"lm-evaluation-harness {results.get('lm_eval_version') or ''}".strip(),
        f"task {task}",
        metric if filter_name in ("", "none") else f"{metric} ({filter_name})",
        f"{shots}-shot" if isinstance(shots, int) else "",
        "chat template" if results.get("chat_template") else "",
    ]
    return ", ".join(filter(None, parts))
