"""Take the rows of smaller_model.py back from a results file: which answers were right, without the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _smaller import DENSE, Experiment, Row
from _smaller_plan import CHOSEN, chosen_entries, note_tested
from _smaller_scores import unseal
from _smaller_speed import take_speeds

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError

SAME = ("goal", "task", "new_tokens", "samples", "sample_temperature", "dense")  # settings on which all rows depend
COPIED = (
    *("recipe", "fold", "seed", "device", "products", "made"),
    *("weights", "parent", "seconds", "parameters", "stages"),
)


def take_results(experiment: Experiment, file: Path) -> tuple[int, int]:
    """Write the records of a results file's rows that are not here, its choice and its speeds.

    A row by a seed of the verdict counts only with its test, which can be sealed. If a row was made with other options,
    nothing is written: an `InputError`.

    Returns:
        The numbers of rows that were taken, and of those left without a test or without their dense model's answers.
    """
    results: Any = read_json(file)
    if not isinstance(results, dict) or not {"rows", "settings"} <= set(results):
        raise InputError(f"{file} is no results file of a report; give one of benchmarks/results/smaller_model*.json")
    rows = {Row(summary["recipe"], summary["fold"], summary["seed"]): summary for summary in results["rows"].values()}
    _check_same(experiment, results, {row.recipe for row in rows}, file)
    taken, left = dict[Row, Any](), 0
    for row, summary in rows.items():
        if experiment.path(row).is_file():
            continue
        if row.seed in experiment.settings["seeds"] and not {"test", "sealed"} & set(summary["right"]):
            left += 1
        elif row.recipe == DENSE or "dense" in summary:
            taken[row] = _record(experiment, row, rows)
        else:
            left += 1
    for row, record in taken.items():
        write_text(experiment.path(row), json.dumps(record) + "\n")
    if taken and not chosen_entries(experiment) and results.get("chosen"):
        write_text(experiment.work / CHOSEN, json.dumps({"recipes": results["chosen"]}, indent=1) + "\n")
    note_tested(experiment, [row.recipe for row in taken if row.recipe != DENSE and "test" in rows[row]["right"]])
    take_speeds(experiment, results.get("speed") or {})
    return len(taken), left


def _check_same(experiment: Experiment, results: Any, recipes: set[str], file: Path) -> None:
    """Raise an `InputError` if the file's rows are of other options than this experiment's."""
    own, other = experiment.settings, results["settings"]
    names = [name for name in SAME if own[name] != other.get(name)]
    names += [name for name in sorted(recipes - {DENSE}) if own["recipes"].get(name) != other["recipes"].get(name)]
    if any("corpus" in own["recipes"].get(name, {}) for name in recipes) and own.get("prompts") != other.get("prompts"):
        names.append("prompts")
    changes = {name: getattr(experiment, name) for name in ("changes", "recipe_changes")}
    names += [f"--{name}" for name, value in changes.items() if value != results.get(name, {})]
    if names:
        raise InputError(f"the rows of {file} were made with other options ({', '.join(names)}); nothing is taken")
    dense = [summary for summary in results["rows"].values() if summary["recipe"] == DENSE]
    if not dense:
        raise InputError(f"{file} has no dense rows, with which the others are compared; nothing is taken")
    if any(summary["parent"] != experiment.base for summary in dense):
        raise InputError(
            f"the rows of {file} were made from another model than {experiment.pretrained}; nothing is taken"
        )


def _record(experiment: Experiment, row: Row, rows: dict[Row, Any]) -> dict[str, Any]:
    """Return the record of a row of a results file."""
    summary, ids = rows[row], rows[row]["ids"]
    if summary.get("settings", experiment.digest(row)) != experiment.digest(row):
        raise InputError(f"{row.key} of the results file was made from another model or corpus; nothing is taken")

    def answers(right: dict[str, str]) -> dict[str, Any]:
        bits = {split: right[split] for split in ("validation", "sampled", "test") if split in right}
        bits |= {"test": unseal(right["sealed"])} if "sealed" in right else {}
        lists = {
            split: [{"id": name, "right": int(bit)} for name, bit in zip(ids[split], digits, strict=True)]
            for split, digits in bits.items()
        }
        return {"test": [], **lists}

    record = {name: summary[name] for name in COPIED if name in summary}
    record |= {"settings": experiment.digest(row), **answers(summary["right"])}
    if row.recipe != DENSE:
        dense = next(rows[other] for other in rows if other.recipe == DENSE)  # all have one shape
        record["dense"] = {
            "weights": summary["parent"],
            "parameters": dense["parameters"],
            **answers(summary["dense"]),
        }
    return record
