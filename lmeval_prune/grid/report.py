"""Output of `lmeval-prune grid compare`: the report of a comparison, and results in lm-eval's layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import digest, file_name, read_json, read_lines
from lmeval_prune.comparison import report
from lmeval_prune.errors import InputError
from lmeval_prune.grid.comparison import compare
from lmeval_prune.grid.folder import GridFolder, samples_file


def write(
    path: str,
    baseline: str | None = None,
    output: str | None = None,
    seed: int = 0,
    without_texts: Sequence[str] = (),
) -> tuple[str, list[str], list[Path]]:
    """Compare a grid and write the report to `output`, by default `compare` in its folder; see `report.write`."""
    target = Path(output) if output else GridFolder(path).path / "compare"
    return report.write(compare(path, baseline, seed), target, without_texts)


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
    for entry, results, samples in _done(folder, entries):
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


def _done(
    folder: GridFolder, entries: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, list[Any]]]]:
    """Yield the entries of the cells that are done, with lm-eval's results and samples."""
    for entry in entries:
        if not folder.has_cell(entry["key"]):
            continue
        cell = folder.cell(entry["key"])
        results = read_json(cell / "results.json")
        files = {task: samples_file(cell, task) for task in sorted(results["configs"])}
        yield entry, results, {task: read_lines(file) for task, file in files.items() if file.is_file()}
