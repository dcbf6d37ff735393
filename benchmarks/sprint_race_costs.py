"""What a race costs: rates that its stages measure, and the estimate of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sprint_race_plan import RacePlan

from lmeval_prune.errors import InputError

SWEEPS = ("train", "sampled", "ceiling", "test")  # parts of a race whose cost goes with the number of questions


def estimate(plan: RacePlan, rates: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Multiply the rates of a rehearsal by the counts of a race.

    Args:
        plan: the settings.
        rates: `rates.json` of a rehearsal: `finetune` has `seconds` and `steps`, each sweep an entry for each fold.
        counts: number of problems of all fine-tunes (`finetune`), and of questions of each sweep.

    Returns:
        Hours by part, as of the rehearsal's machine and threads.
    """
    missing = [name for name in ("finetune", *SWEEPS) if name not in rates]
    if missing:
        raise InputError(f"the rates lack {missing[0]}; rehearse all stages, e.g. with --limit 12, in a new --work")
    steps = training_steps(counts["finetune"], plan.finetune)
    hours = {"finetune": steps * rates["finetune"]["seconds"] / rates["finetune"]["steps"] / 3600}
    for name in SWEEPS:
        folds = [seconds_a_question(entry) for entry in rates[name].values()]
        hours[name] = counts[name] * sum(folds) / len(folds) / 3600
    environment = rates.get("environment") or {}
    return {
        "processor": environment.get("processor"),
        "threads": environment.get("threads"),
        "counts": dict(counts),
        "training_steps": steps,
        "hours": {name: round(value, 2) for name, value in hours.items()},
        "hours_of_all": round(sum(hours.values()), 1),
    }


def noted(entry: Mapping[str, Any] | None, before: int, after: int, seconds: float, questions: int) -> dict[str, Any]:
    """Add a run of a sweep to what is known of its cost.

    Args:
        entry: what is known; None before the first run.
        before, after: answers in the store before and after the run.
        seconds: time of the run.
        questions: number of questions of the sweep.

    Returns:
        `made`, the answers that the sweep added to the store; `answers` and `seconds` of the runs that were not killed.
    """
    entry = entry or {"start": before, "answers": 0, "seconds": 0.0}
    return {
        "start": entry["start"],
        "questions": questions,
        "made": after - entry["start"],
        "answers": entry["answers"] + after - before,
        "seconds": round(entry["seconds"] + seconds, 1),
    }


def seconds_a_question(entry: Mapping[str, Any]) -> float:
    """Seconds of a sweep for each question; those of answers that killed runs made are as for the others."""
    return float(entry["seconds"] / max(entry["answers"], 1) * entry["made"] / entry["questions"])


def training_steps(problems: int, options: Mapping[str, Any]) -> int:
    """Steps of a fine-tune, of which a tenth of the problems are validated on."""
    share = 1 - options.get("validation", 0.1)
    return math.ceil(problems * share / options["batch"]) * int(options["epochs"])


def stored(folder: Path) -> int:
    """Number of generated answers in a store."""
    from lmeval_prune.models.answer_store import read_answers

    if not folder.is_dir():
        return 0
    return len({record["key"] for record in read_answers(folder) if record.get("kind") == "generate_until"})


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
