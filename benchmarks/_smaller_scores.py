"""Score the answers of smaller_model.py's rows, and compare them with those of the dense models.

Differences are paired: a row against the dense model that it was pruned from. Intervals are clustered by fold: those of
the mean over folds of the mean differences over seeds, by Student's t. Nothing is run here.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from _smaller import Experiment, Row
from _smaller_power import power, spread_of
from _smaller_rows import PROBLEMS
from scipy import stats

from lmeval_prune.artefacts import read_json
from lmeval_prune.errors import InputError
from lmeval_prune.reporting.statistics import sign_flip_test


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

        The parent is the dense model that was pruned: its answers are in the row itself, if the dense row of
        the same fold and seed is of another training.
        """
        entries = (self.parent(row) if is_parent else self.records[row])[split]
        return np.array([self._score(entry) for entry in entries], dtype=float)

    def _score(self, entry: Any) -> float:
        """Return whether an answer is right; of several, whether any is."""
        if "right" in entry:  # of a results file
            return float(entry["right"])
        task = _task(self.experiment.settings["task"], self.experiment.settings["dense"].get("data_dir"))
        document, texts = self.documents[entry["id"]], entry.get("answers") or [entry["answer"]]
        return float(max(task.process_results(document, [text])["exact_match"] for text in texts))

    def sealed_test(self, row: Row, is_parent: bool = False) -> str:
        """Return which answers to the test are right in base64, to be kept and not to be read."""
        entries = (self.parent(row) if is_parent else self.records[row])["test"]
        return seal("".join(str(int(self._score(entry))) for entry in entries))

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

    def pairs(self, recipe: str, seeds: Collection[int]) -> list[Row]:
        """Return a recipe's rows by these seeds on declared folds that are there with answers of their dense models."""
        return [
            row
            for row in self.experiment.rows_of(recipe, list(seeds))
            if row in self.records and ("dense" in self.records[row] or row.dense in self.records)
        ]

    def difference(self, rows: Collection[Row], split: str) -> Difference:
        """Compare rows of a recipe with the dense models that they were pruned from."""
        by_row = {row: np.array(list(self.by_question(row, split).values())) for row in rows}
        return Difference(by_row, float(np.mean([self.right(row, split).mean() for row in rows])))

    def by_question(self, row: Row, split: str) -> dict[str, float]:
        """Return right answers of a row minus those of its dense model, by id of the problem."""
        own, dense = ([answer["id"] for answer in record[split]] for record in (self.records[row], self.parent(row)))
        if own != dense:
            raise InputError(f"{row.key} and its dense model have answered other {split} problems; make them again")
        return dict(zip(own, self.right(row, split) - self.right(row, split, True), strict=True))

    def between(self, first: str, second: str, seeds: Collection[int]) -> Difference | None:
        """Compare a recipe with another on the validation problems of the folds and seeds of both; None without any.

        Each is taken relative to the dense model that it was pruned from.
        """
        rows = self.common([first, second], seeds)
        if not rows[first]:
            return None
        own, other = (self.difference(rows[name], "validation") for name in (first, second))
        by_row = {row: own.by_row[row] - other.by_row[Row(second, row.fold, row.seed)] for row in rows[first]}
        return Difference(by_row, own.accuracy)

    def common(self, names: Sequence[str], seeds: Collection[int]) -> dict[str, list[Row]]:
        """Return the rows of recipes on the folds and seeds that all of them have."""
        pairs = {name: self.pairs(name, seeds) for name in names}
        combinations = [{(row.fold, row.seed) for row in rows} for rows in pairs.values()]
        shared = set.intersection(*combinations) if combinations else set()
        return {name: [row for row in rows if (row.fold, row.seed) in shared] for name, rows in pairs.items()}

    def divergence(self, row: Row) -> float | None:
        """Return the mean KL divergence of a model from its dense one on validation texts; None if not measured."""
        divergence: float | None = self.records[row]["stages"][-1].get("distance", {}).get("mean_kld")
        return divergence

    def smaller(self, rows: Collection[Row]) -> float:
        """Return the share of the parameters in blocks that a recipe removes, the mean over rows."""
        own, dense = (
            np.mean([record["parameters"][1] for record in group])
            for group in ([self.records[row] for row in rows], [self.parent(row) for row in rows])
        )
        return float(1 - own / dense)

    def power(self, rows: Sequence[Collection[Row]]) -> dict[str, Any]:
        """Estimate from validation differences of recipes' rows how likely the goal is with the declared seeds."""
        settings = self.experiment.settings
        spread = spread_of(
            [{row: self.by_question(row, "validation") for row in group} for group in rows],
            min(len(self.problems[f"fold{fold}"]) for fold in settings["folds"]),
        )
        return power(self.experiment.goal, spread, len(settings["seeds"]), len(settings["folds"]))


def seal(bits: str) -> str:
    """Encode bits, so that nobody reads them by chance."""
    return b64encode(bits.encode()).decode()


def unseal(sealed: str) -> str:
    """Decode bits that `seal` encoded."""
    return b64decode(sealed).decode()


@cache
def _task(name: str, folder: str | None) -> Any:
    from lmeval_prune.tasks.loading import load_task, task_manager

    return load_task(task_manager({"data_dir": folder} if folder else {}), name)
