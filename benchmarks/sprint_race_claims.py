"""What a race may claim: its files were committed before the test run, and the test run had what training chose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sprint_race_costs import stored

from lmeval_prune.artefacts import digest, files_digest, read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.sprint.race import LEVEL
from lmeval_prune.sprint.registration import Registration


def plan_identity(race: Any) -> dict[str, str]:
    """Return the commit and the SHA-256 of a race's plan; `InputError` if the file is not committed as it is."""
    plan = Registration.of([race.plan_file])
    return {"commit": plan.commit, "sha256": next(iter(plan.files.values()))}


def register(race: Any) -> Registration | None:
    """Register the plan and what training chose; None in a race that makes no claim.

    Raises:
        InputError: a file is not committed, the choices are of another plan, or one differs from an earlier part of the
            test run.
    """
    if race.note:
        return None
    path, now = race.work / "registration.json", Registration.of([race.plan_file, race.choices_file])
    if read_json(race.choices_file).get("plan", {}).get("sha256") != next(iter(now.files.values())):
        raise InputError(f"{race.choices_file} was chosen by another plan than {race.plan_file}; put that plan back")
    tested = [number for number in range(race.plan.folds) if stored(race.store(number, "test"))]
    if tested and not path.exists():
        raise InputError(f"{race.store(tested[0], 'test')} has test answers from before the registration; remove it")
    if path.exists():
        before = Registration.from_json(read_json(path))
        if before.files != now.files:
            raise InputError(
                f"{path}: the test run began with the plan and choices of commit {before.commit[:12]}, and these "
                f"differ; put them back"
            )
        return before
    write_text(path, json.dumps(now.to_json(), indent=1) + "\n")
    return now


def fingerprints(race: Any, number: int, chosen: str) -> dict[str, Any]:
    """Return digests of what the test of a fold depends on: training outcomes, weights, and orders of the test texts.

    Args:
        race: its settings, folders and policies.
        number: the fold.
        chosen: the order that training chose; those of the rivals are added.
    """
    training, texts = race.training(number), race.texts(number, "test")
    model = Path(race.model_args(number)["pretrained"])
    names = dict.fromkeys([chosen, *(order for order, _ in race.rivals(number).values())])
    return {
        "training outcomes": digest([training.texts, training.pool, np.nan_to_num(training.z, nan=-1).tolist()]),
        "model": files_digest(model.glob("*.safetensors")) if model.is_dir() else None,
        **{f"order {name}": digest([texts, race.policy(number, name).order(texts)]) for name in names},
    }


def verify(race: Any, number: int) -> None:
    """Refuse a fold whose outcomes, weights or orders are not those that training chose by."""
    choice = race.choice(number)
    before, now = choice.get("digests", {}), fingerprints(race, number, choice["order"])
    if different := [name for name in now if before.get(name) != now[name]]:
        raise InputError(
            f"fold {number}: {', '.join(different)} of {race.work} differ from those of {race.choices_file}; put them "
            f"back, or begin again with another --work"
        )


def check_complete(race: Any) -> None:
    """Refuse to look at a part of a test."""
    missing = [number for number in range(race.plan.folds) if not race.marker(f"test {number}").exists()]
    if missing and not race.note:
        raise InputError(
            f"report: the test of fold {missing[0]} is not done; nothing is looked at before all folds are complete"
        )


def status(race: Any, folds: Sequence[int]) -> dict[str, Any]:
    """Return whether the race is pre-registered, and by which commit."""
    if race.note:
        return {"commit": None, "text": race.note}
    path = race.work / "registration.json"
    if not path.exists():
        return {"commit": None, "text": "Not pre-registered: the test run began without a registration."}
    registration = Registration.from_json(read_json(path))
    try:
        register(race)
        reason = registration.difference(race.plan_file.parent)
    except InputError as error:
        reason = str(error)
    if not reason and sorted(folds) != list(range(race.plan.folds)):
        reason = f"only folds {', '.join(map(str, sorted(folds)))} were tested"
    commit = f"commit {registration.commit[:12]} of {registration.date}"
    if reason:
        return {"commit": None, "named": registration.commit, "text": f"Not pre-registered ({commit}): {reason}."}
    return {
        "commit": registration.commit,
        "date": registration.date,
        "text": f"Pre-registered: plan and choices are those of {commit}, before the first test answer.",
    }


def verdict(primary: dict[str, Any], is_registered: bool) -> str:
    """Return the claim that the plan allows."""
    if not is_registered:
        return "No claim: the race is not pre-registered."
    if primary["p"] >= LEVEL or not primary["difference"]:
        return "The race shows no difference."
    return "Pruned variants beat sampling." if primary["difference"] > 0 else "Sampling beats pruned variants."


def code_text(states: dict[str, list[dict[str, Any]]]) -> str:
    """Return a sentence on the code that ran, from its states by stage."""
    commits = dict.fromkeys((state["commit"] or "unknown")[:12] for each in states.values() for state in each)
    changed = {stage: sorted({name for state in each for name in state["changed"]}) for stage, each in states.items()}
    dirty = [f"{stage} ({', '.join(names)})" for stage, names in changed.items() if names]
    text = f"Code of commit {', '.join(commits)}"
    return f"{text}; with uncommitted changes in the stages {'; '.join(dirty)}." if dirty else f"{text}."
