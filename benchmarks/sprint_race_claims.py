"""What a race may claim: its files were committed before the test run, and the test run had what training chose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sprint_race_choice import LEVEL
from sprint_race_costs import stored
from sprint_race_plan import Registration

from lmeval_prune.artefacts import digest, files_digest, read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.sprint.outcomes import Outcomes


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
    tested = [number for number in range(len(race.plan.folds)) if stored(race.store(number, "test"))]
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
        "training outcomes": outcomes_digest(training),
        "model": files_digest(model.glob("*.safetensors")) if model.is_dir() else None,
        **{f"order {name}": digest([texts, race.policy(number, name).order(texts)]) for name in names},
    }


def outcomes_digest(outcomes: Outcomes) -> str:
    """Return the digest of outcomes with their questions and attempts."""
    return digest([outcomes.texts, outcomes.pool, np.nan_to_num(outcomes.z, nan=-1).tolist()])


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
    """Refuse to look at a part of a race."""
    steps = [f"{stage} {number}" for stage in ("ceiling", "test", "lm-eval") for number in range(len(race.plan.folds))]
    missing = [step for step in steps if not race.marker(step).exists()]
    if missing and not race.note:
        raise InputError(f"report: {missing[0]} is not done; nothing is looked at before all folds are complete")


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
    if not reason and sorted(folds) != list(range(len(race.plan.folds))):
        reason = f"only these folds were tested: {', '.join(map(str, sorted(folds)))}"
    commit = f"commit {registration.commit[:12]} of {registration.date}"
    if reason:
        return {"commit": None, "named": registration.commit, "text": f"Not pre-registered ({commit}): {reason}."}
    return {
        "commit": registration.commit,
        "date": registration.date,
        "text": f"Pre-registered: plan and choices are those of {commit}, before the first test answer.",
    }


def verdict(primary: dict[str, Any], is_registered: bool, margin: float) -> str:
    """Return the claim that the plan allows.

    Args:
        primary: the primary comparison, with its 90% interval (`low_90`, `high_90`).
        is_registered: whether the race is pre-registered.
        margin: difference that counts as none.
    """
    if not is_registered:
        return "No claim: the race is not pre-registered."
    if primary["p"] < LEVEL and primary["difference"]:
        winner, loser = "The policy that training chose", "sampling"
        if primary["difference"] < 0:
            winner, loser = "Sampling", "the policy that training chose"
        return f"{winner} beats {loser}, for this model, pool and task."
    if -margin < primary["low_90"] and primary["high_90"] < margin:
        return f"The race shows no difference, and none of {margin:g} or more (the 90% interval is within it)."
    return f"The race shows no difference, and does not exclude one of {margin:g}: undecided."


def code_text(states: dict[str, list[dict[str, Any]]]) -> str:
    """Return a sentence on the code that ran, from its states by stage."""
    stages: dict[str, dict[str, None]] = {}
    for stage, runs in states.items():
        for state in runs:
            stages.setdefault((state["commit"] or "unknown")[:12], {})[stage] = None
    changed = {stage: sorted({name for state in runs for name in state["changed"]}) for stage, runs in states.items()}
    dirty = [f"{stage} ({', '.join(names)})" for stage, names in changed.items() if names]
    text = "Code: " + "; ".join(f"commit {commit} for {', '.join(names)}" for commit, names in stages.items())
    return f"{text}; with uncommitted changes in the stages {'; '.join(dirty)}." if dirty else f"{text}."
