"""Choose a recipe of smaller_model.py by validation problems, and report whether the goal was reached.

Differences are paired: a row against the dense row of the same fold and seed. Intervals are clustered by fold: those of
the mean over folds of the mean differences over seeds, by Student's t. Nothing is run here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from _record import environment, write
from _smaller import DENSE, Experiment, Row
from _smaller_rows import PROBLEMS
from _smaller_speed import read_speeds
from scipy import stats
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.reporting.statistics import pareto, sign_flip_test

CHOSEN, TESTED = "chosen.json", "tested.json"


class Chosen(TypedDict):
    """Recipes that were chosen, in order."""

    recipes: list[dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """A recipe against the dense model, on rows of both.

    Attributes:
        by_row: right answers of the recipe minus those of the dense model, question by question.
        accuracy: share of right answers of the recipe, the mean over rows.
    """

    by_row: dict[Row, np.ndarray]
    accuracy: float

    @property
    def folds(self) -> np.ndarray:
        """Mean difference of each fold over its seeds, in points."""
        means = defaultdict(list)
        for row, differences in self.by_row.items():
            means[row.fold].append(100 * differences.mean())
        return np.array([np.mean(values) for values in means.values()])

    @property
    def mean(self) -> float:
        """Mean over folds, in points."""
        return float(self.folds.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean, clustered by fold; NaN of a single fold."""
        folds = self.folds
        return float(folds.std(ddof=1) / len(folds) ** 0.5) if len(folds) > 1 else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the mean; NaN of a single fold."""
        half = float(stats.t.ppf(0.975, len(self.folds) - 1)) * self.error if len(self.folds) > 1 else float("nan")
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float:
        """p of a sign-flip test of the fold means, the clusters: with five folds at least 1/16."""
        return float(sign_flip_test(self.folds[:, None])[0]) if len(self.folds) > 1 else float("nan")


class Scored:
    """Records of an experiment, with their answers scored when they are asked for."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.records = experiment, experiment.records()
        self.problems: dict[str, list[dict[str, Any]]] = read_json(experiment.work / PROBLEMS)
        self.documents = {str(doc["id"]): doc for docs in self.problems.values() for doc in docs}
        self.right = cache(self._right)

    def _right(self, row: Row, split: str, is_parent: bool = False) -> np.ndarray:
        """Return which answers of a row, or of its parent, are right; of `sampled`, if any to a problem is.

        The parent is the dense model that was pruned: its answers are in the dense row of the same fold and seed, or,
        if that row is of another training, in the row itself.
        """
        task = _task(self.experiment.settings["task"], self.experiment.settings["dense"].get("data_dir"))
        return np.array(
            [
                max(
                    task.process_results(self.documents[entry["id"]], [text])["exact_match"]
                    for text in entry.get("answers") or [entry["answer"]]
                )
                for entry in (self.parent(row) if is_parent else self.records[row])[split]
            ],
            dtype=float,
        )

    def parent(self, row: Row) -> Any:
        """Return the answers of the dense model that was pruned; `InputError` if nothing has them."""
        record = self.records[row]
        parent = record.get("dense") or self.records[row.dense]
        if parent["weights"] != record["parent"]:
            raise InputError(
                f"{row.key} was pruned from another model than the one that answered in {row.dense.key}; make both "
                f"again on one machine"
            )
        return parent

    def pairs(self, recipe: str) -> list[Row]:
        """Return the declared rows of a recipe that are there with their dense rows.

        Rows of further seeds do not count: they could be added until a result suits.
        """
        rows = [row for row in self.experiment.rows([recipe]) if row.recipe == recipe]
        return [row for row in rows if row in self.records and row.dense in self.records]

    def difference(self, rows: Collection[Row], split: str) -> Difference:
        """Compare rows of a recipe with the dense models that they were pruned from."""
        for row in rows:
            ids = [[answer["id"] for answer in each[split]] for each in (self.records[row], self.parent(row))]
            if ids[0] != ids[1]:
                raise InputError(f"{row.key} and its dense model have answered other {split} problems; make them again")
        by_row = {row: self.right(row, split) - self.right(row, split, True) for row in rows}
        return Difference(by_row, float(np.mean([self.right(row, split).mean() for row in rows])))

    def common(self, names: Sequence[str]) -> dict[str, list[Row]]:
        """Return the rows of recipes on the folds and seeds that all of them have."""
        pairs = {name: self.pairs(name) for name in names}
        places = [{(row.fold, row.seed) for row in rows} for rows in pairs.values()]
        shared = set.intersection(*places) if places else set()
        return {name: [row for row in rows if (row.fold, row.seed) in shared] for name, rows in pairs.items()}

    def smaller(self, rows: Collection[Row]) -> float:
        """Return the share of the parameters in blocks that a recipe removes, the mean over rows."""
        own, dense = (
            np.mean([self.records[each]["parameters"][1] for each in group])
            for group in (rows, [row.dense for row in rows])
        )
        return float(1 - own / dense)


@cache
def _task(name: str, folder: str | None) -> Any:
    from lmeval_prune.tasks.loading import load_task, task_manager

    return load_task(task_manager({"data_dir": folder} if folder else {}), name)


# ---------------------------------------------------------------- the choice


def choice(experiment: Experiment, recipes: Sequence[str] = ()) -> str:
    """Choose the recipe of the best pooled validation difference, write `chosen.json` and return a table.

    Only recipes that remove enough parameters, and are fast enough where that was measured, may be chosen. They are
    compared on the folds and seeds that all of them have.
    """
    experiment.check_names(recipes)
    scored, path = Scored(experiment), experiment.work / CHOSEN
    tested = _tested(experiment)
    earlier = [
        entry for entry in _chosen(experiment) if entry["recipe"] in tested
    ]  # until then a choice can be changed
    before = [entry["recipe"] for entry in earlier]
    names = [name for name in recipes or experiment.settings["recipes"] if recipes or scored.pairs(name)]
    rows = scored.common(names)
    if not any(rows.values()):
        raise InputError(
            "there are no folds and seeds that all recipes have; make the rows by train, or name --recipes"
        )
    differences = {name: scored.difference(rows[name], "validation") for name in names}
    failures = {name: _failures(experiment, scored, name, rows[name]) for name in names}
    eligible = [name for name in names if not failures[name] and name not in before]
    lines = [f"validation problems of {len(rows[names[0]])} folds and seeds:"]
    for name in sorted(names, key=lambda name: -differences[name].mean):
        lines.append(
            f"  {name}: {_points(differences[name])}{', ' if failures[name] else ''}{', '.join(failures[name])}"
        )
    if not eligible:
        return "\n".join([*lines, "no other recipe removes enough and is fast enough"])
    chosen = max(eligible, key=lambda name: differences[name].mean)
    means = {name: differences[name].mean for name in names}
    entry = {
        "recipe": chosen,
        "rows": [(row.fold, row.seed) for row in rows[chosen]],
        "differences": means,
    }
    write_text(path, json.dumps({"recipes": [*earlier, entry]}, indent=1) + "\n")
    order = f", as number {len(before) + 1}: the test of {', '.join(before)} is known already" if before else ""
    return "\n".join([*lines, f"chosen: {chosen}{order}"])


def _chosen(experiment: Experiment) -> list[dict[str, Any]]:
    path = experiment.work / CHOSEN
    entries: list[dict[str, Any]] = read_json(path, Chosen)["recipes"] if path.is_file() else []
    return entries


def _tested(experiment: Experiment) -> list[str]:
    """Return the recipes whose test is known."""
    path = experiment.work / TESTED
    names: list[str] = read_json(path, list[str]) if path.is_file() else []
    return names


def chosen_recipes(experiment: Experiment) -> list[str]:
    """Return the recipes that were chosen, in order: only the first before any test was known."""
    return [entry["recipe"] for entry in _chosen(experiment)]


def _failures(experiment: Experiment, scored: Scored, name: str, rows: Sequence[Row]) -> list[str]:
    """Return why a recipe cannot reach the goal, whatever its accuracy."""
    goal, failures = experiment.goal, []
    if scored.smaller(rows) < goal["parameters"]:
        failures.append(f"removes {scored.smaller(rows):.1%} of the parameters")
    failures += [
        f"{100 * gain:+.1f}% speed at batch {batch}"
        for batch, gain in _gains(experiment, name).items()
        if gain < goal["speed"]
    ]
    return failures


def _gains(experiment: Experiment, name: str) -> dict[str, float]:
    """Return the gains of a recipe by batch size, on the CPU if they were measured there; empty if not measured."""
    speeds = read_speeds(experiment.work)
    found = [speeds[key] for key in (f"{name} on cpu", f"{name} on cuda") if key in speeds]
    gains: dict[str, float] = found[0]["gains"] if found else {}
    return gains


def _points(difference: Difference) -> str:
    low, high = difference.interval
    errors = f"{difference.mean:+.2f} ± {difference.error:.2f} points ({low:+.2f} to {high:+.2f})"
    return f"{100 * difference.accuracy:.1f}%, {errors}"


# ---------------------------------------------------------------- the report


def write_report(experiment: Experiment, name: str) -> str:
    """Write the results file, and return the report; its first line says whether the goal was reached."""
    scored, chosen = Scored(experiment), chosen_recipes(experiment)
    lines = [verdict(experiment, scored, chosen[0] if chosen else None), ""]
    lines += [
        f"Tested as number {n}: {verdict(experiment, scored, name)}" for n, name in enumerate(chosen[1:], start=2)
    ]
    lines += [
        "| recipe | rows | parameters in blocks | speed at batch "
        + ", ".join(map(str, experiment.goal["batches"]))
        + " | "
        "validation, difference ± error (95%) | pass@"
        f"{experiment.settings['samples']} of validation | test, difference ± error (95%), p | KLD | device |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    names = [each for each in experiment.settings["recipes"] if scored.pairs(each)]
    tested = [each for each in chosen if not missing(experiment, scored, each)]
    lines += [_line(experiment, scored, each, each in tested) for each in names]
    lines += ["", _front(scored, names)]
    if tested:
        write_text(experiment.work / TESTED, json.dumps(tested) + "\n")
    rows = {row.key: _summary(scored, row, tested) for row in scored.records}
    content = {"written": environment(), "goal": experiment.goal, "chosen": chosen, "verdict": lines[0], "rows": rows}
    write(name, {**content, "settings": experiment.settings, "speed": read_speeds(experiment.work)}, quiet=True)
    return "\n".join(lines)


def conditions(experiment: Experiment, scored: Scored, chosen: str) -> dict[str, tuple[str, bool]]:
    """Return the parts of the goal, each with what was measured and whether it was reached."""
    goal, rows = experiment.goal, scored.pairs(chosen)
    difference = scored.difference(rows, "test")
    gains = _gains(experiment, chosen)
    low, high = difference.interval
    speeds = ", ".join(f"{100 * gain:+.1f}%" for gain in gains.values()) or "not measured"
    wanted = {str(batch) for batch in goal["batches"]}
    return {
        f"parameters in blocks (at least −{goal['parameters']:.0%})": (
            f"−{scored.smaller(rows):.1%}",
            scored.smaller(rows) >= goal["parameters"],
        ),
        f"speed (at least {100 * goal['speed']:+.1f}%)": (
            speeds,
            gains.keys() >= wanted and min(gains.values()) >= goal["speed"],
        ),
        f"mean loss (at most {goal['loss']} points)": (f"{-difference.mean:.2f}", -difference.mean <= goal["loss"]),
        f"95% interval (above {goal['lower_bound']:g})": (f"{low:+.2f} to {high:+.2f}", low > goal["lower_bound"]),
    }


def reached(experiment: Experiment, scored: Scored, chosen: str) -> bool:
    """Return whether all parts of the goal were reached on all folds and seeds."""
    return not missing(experiment, scored, chosen) and all(
        met for _, met in conditions(experiment, scored, chosen).values()
    )


def missing(experiment: Experiment, scored: Scored, chosen: str) -> int:
    """Return the number of rows of the experiment, its own and dense ones, that a recipe lacks."""
    return sum(row not in scored.records for row in experiment.rows([chosen]))


def verdict(experiment: Experiment, scored: Scored, chosen: str | None) -> str:
    """Return the first line: whether the goal was reached, and by what."""
    if chosen is None:
        return "The goal is not decided: no recipe is chosen yet."
    if count := missing(experiment, scored, chosen):
        return f"The goal is not decided: {chosen} lacks {count} rows, and no test is looked at before all are there."
    parts = "; ".join(
        f"{name}: {value}, {'reached' if met else 'not reached'}"
        for name, (value, met) in conditions(experiment, scored, chosen).items()
    )
    return f"The goal is {'reached' if reached(experiment, scored, chosen) else 'not reached'} by {chosen}: {parts}."


def _line(experiment: Experiment, scored: Scored, name: str, is_tested: bool) -> str:
    """Return a recipe's line of the table."""
    rows = scored.pairs(name)
    gains = ", ".join(f"{100 * gain:+.1f}%" for gain in _gains(experiment, name).values())
    test = ""
    if is_tested:
        difference = scored.difference(rows, "test")
        test = f"{_points(difference)}, {difference.p_value:.3f}"
    distances = [record["stages"][-1].get("distance", {}).get("mean_kld") for record in map(scored.records.get, rows)]  # type: ignore[index]
    kld = f"{np.mean([each for each in distances if each is not None]):.3f}" if any(distances) else ""
    devices = ", ".join(sorted({scored.records[row]["device"] for row in rows}))
    validation = _points(scored.difference(rows, "validation"))
    sampled = _points(scored.difference(rows, "sampled"))
    cells = [name, len(rows), f"−{scored.smaller(rows):.1%}", gains, validation, sampled, test, kld, devices]
    return f"| {' | '.join(map(str, cells))} |"


def _front(scored: Scored, names: Sequence[str]) -> str:
    """Return the recipes that no other beats in both parameters and validation difference, on common rows."""
    rows = scored.common(names)
    if not any(rows.values()):
        return ""
    left = np.array([1 - scored.smaller(rows[name]) for name in names])
    gains = np.array([scored.difference(rows[name], "validation").mean for name in names])
    front = [name for name, best in zip(names, pareto(np.stack([left, left], 1), gains), strict=True) if best]
    count = len(rows[names[0]])
    return (
        f"Pareto front of parameters and validation difference on {count} common folds and seeds: {', '.join(front)}."
    )


def _summary(scored: Scored, row: Row, tested: Sequence[str]) -> dict[str, Any]:
    """Return a row of the results file; its test is scored with that of a recipe that has all rows."""
    record = scored.records[row]
    splits = ("validation", "sampled", *(["test"] if tested and row.recipe in (DENSE, *tested) else []))
    return {
        **{name: record[name] for name in ("recipe", "fold", "seed", "device", "seconds", "parameters", "stages")},
        "right": {split: "".join(str(int(x)) for x in scored.right(row, split)) for split in splits},
        "ids": {split: [answer["id"] for answer in record[split]] for split in splits},
    }
