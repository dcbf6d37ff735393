"""Estimate how likely the goal of smaller_model.py is to be reached, from the spread of validation differences."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _smaller import Goal, Row
from scipy import stats

TARGET = 0.8  # probability for which the number of seeds is printed
MOST_SEEDS = 100
GRID = 2000  # quantiles of the variance over which the probability is averaged

Questions = Mapping[str, float]  # by id of a problem: right answer of a recipe minus that of its dense model


@dataclass(frozen=True)
class Spread:
    """Standard deviations of a test's differences, in points.

    Attributes:
        row: of a row about the mean of its fold, by luck of training and answering.
        fold: of folds, which further seeds do not reduce.
    """

    row: float
    fold: float

    def of_means(self, seeds: int) -> float:
        """Return the standard deviation of the means of folds over seeds: √(fold² + row² / seeds)."""
        return float((self.fold**2 + self.row**2 / seeds) ** 0.5)


def probability(goal: Goal, deviation: float, folds: int, loss: float = 0.0) -> float:
    """Return the probability that mean and interval of a difference reach the goal.

    The means of folds are normal with mean −loss and this standard deviation σ, in points. The mean over F folds is at
    least m = max(−largest loss, lower bound + t·s/√F) with Φ((−loss − m)√F/σ); s² is distributed as σ²χ²/(F − 1).
    """
    variances = stats.chi2.ppf((np.arange(GRID) + 0.5) / GRID, folds - 1) / (folds - 1)
    error = max(deviation, 1e-9) / folds**0.5
    needed = np.maximum(-goal["loss"], goal["lower_bound"] + stats.t.ppf(0.975, folds - 1) * error * variances**0.5)
    return float(stats.norm.cdf((-loss - needed) / error).mean())


def seeds_needed(goal: Goal, spread: Spread, folds: int) -> int | None:
    """Return the smallest number of seeds that reaches the goal with probability 0.8 at a true loss of 0, if any."""
    enough = (n for n in range(1, MOST_SEEDS + 1) if probability(goal, spread.of_means(n), folds) >= TARGET)
    return next(enough, None)


def spread_of(recipes: Sequence[Mapping[Row, Questions]], count: int) -> Spread | None:
    """Estimate the spread of differences on tests of `count` questions; None if no recipe has two rows.

    A row's validation difference varies by its questions, by the luck of its training and by its fold. Its questions
    are fewer than a test's, and other seeds of its fold have others, but are tested on the same. So the variance
    between questions is estimated apart: in all, and the part that trainings share (the covariance of the differences
    of two rows on the questions that both have). With one seed, the spread of folds is taken for luck of training.
    Variances are means over recipes.
    """
    variances = [_variances(rows) for rows in recipes if len(rows) > 1]
    if not variances:
        return None
    columns = list(zip(*variances, strict=True))
    within, between, questions, validated = (float(np.mean(column)) for column in columns[:4])
    products, pairs = map(sum, columns[4:])
    shared = float(np.clip(products / pairs if pairs else 0.0, 0.0, questions))
    row = max(within - questions / validated, 0.0) + (questions - shared) / count
    return Spread(row**0.5, (max(between, 0.0) + shared / count) ** 0.5)


def _variances(rows: Mapping[Row, Questions]) -> tuple[float, float, float, float, float, int]:
    """Return a recipe's variances in points².

    Returns:
        Variance of rows within folds; of folds beyond that; of questions; the number of questions; the sum of products
        of two rows' centred differences on a question; their number.
    """
    differences = {row: 100 * np.array(list(questions.values())) for row, questions in rows.items()}
    folds = defaultdict(list)  # means of the rows of each
    for row, points in differences.items():
        folds[row.fold].append(points.mean())
    free = len(differences) - len(folds)
    means = np.array([np.mean(row_means) for row_means in folds.values()])
    if free:
        within = sum(np.var(row_means) * len(row_means) for row_means in folds.values()) / free
        per_mean = within * np.mean([1 / len(row_means) for row_means in folds.values()])
        between = np.var(means, ddof=1) - per_mean if len(means) > 1 else 0.0
    else:
        within, between = np.var(means, ddof=1), 0.0
    questions = np.mean([np.var(points, ddof=1) for points in differences.values()])
    centred = {row: dict(zip(rows[row], points - points.mean(), strict=True)) for row, points in differences.items()}
    products = [
        a[name] * b[name] for a, b in itertools.combinations(centred.values(), 2) for name in a.keys() & b.keys()
    ]
    validated = np.mean([len(points) for points in differences.values()])
    return float(within), float(between), float(questions), float(validated), float(sum(products)), len(products)


def power(goal: Goal, spread: Spread | None, seeds: int, folds: int) -> dict[str, Any]:
    """Return what is stored of an estimate: deviations in points, the probability to reach the goal, seeds for 0.8."""
    if spread is None or folds < 2:
        return {}
    return {
        "row_deviation": spread.row,
        "fold_deviation": spread.fold,
        "deviation_of_means": spread.of_means(seeds),
        "seeds": seeds,
        "probability": probability(goal, spread.of_means(seeds), folds),
        "seeds_needed": seeds_needed(goal, spread, folds),
    }


def power_text(estimate: Mapping[str, Any]) -> str:
    """Return an estimate as a line."""
    if not estimate:
        return "power: unknown; it needs two folds and two rows of a recipe"
    needed = estimate["seeds_needed"] or f"more than {MOST_SEEDS}"
    return (
        f"power: test differences vary by {estimate['row_deviation']:.1f} points (sd) between trainings and "
        f"{estimate['fold_deviation']:.1f} between folds, means of folds over {estimate['seeds']} seeds by "
        f"{estimate['deviation_of_means']:.1f}; a recipe that loses nothing reaches accuracy and certainty with "
        f"probability {estimate['probability']:.2f}, and with {TARGET} by {needed} seeds"
    )
