"""How often intervals hold the mean, and the power of *detectable*: `python benchmarks/interval_coverage.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _record import environment, timed, write

from lmeval_prune.reporting.statistics import (
    detectable,
    difference_interval,
    mcnemar_power,
    mcnemar_test,
    mean_interval,
    sign_flip_test,
)

TABLE = Path(__file__).parents[1] / "docs" / "results" / "grid" / "table.csv"
COLUMNS, SAMPLES = 4000, 400  # simulated intervals of a kind, and samples that `detectable` is plugged in from
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def tries(a: float, b: float) -> Draw:
    """Shares of eight tries that are right, whose chance varies from question to question."""
    return lambda rng, n, columns: rng.binomial(8, rng.beta(a, b, (n, columns))) / 8


def chosen(values: tuple[float, ...], chances: tuple[float, ...]) -> Draw:
    return lambda rng, n, columns: rng.choice(values, p=chances, size=(n, columns))


def lognormal(rng: np.random.Generator, n: int, columns: int) -> np.ndarray:
    return rng.lognormal(size=(n, columns))


# name, how figures are drawn, their mean, the largest figure
MEANS: list[tuple[str, Draw, float, float]] = [
    ("shares, most of them none", tries(0.15, 1.5), 0.15 / 1.65, 1.0),
    ("shares, nearly all none", tries(0.05, 1), 0.05 / 1.05, 1.0),
    ("shares, nearly all whole", tries(3, 0.2), 3 / 3.2, 1.0),
    ("shares of all sizes", tries(2, 2), 0.5, 1.0),
    ("exponential", lambda rng, n, columns: rng.exponential(size=(n, columns)), 1.0, np.inf),
    ("lognormal", lognormal, float(np.exp(0.5)), np.inf),
]
HALVES = ((0, 0.5, -0.5, 1, -1), (0.85, 0.06, 0.03, 0.04, 0.02))
WHOLE = ((1, 0.875, 0.5, 0, -0.5), (0.85, 0.05, 0.05, 0.03, 0.02))
DIFFERENCES: list[tuple[str, Draw, float, float]] = [
    ("right and wrong, 10% differ", chosen((0, 1, -1), (0.9, 0.08, 0.02)), 0.06, 1.0),
    ("right and wrong, 4% differ", chosen((0, 1, -1), (0.96, 0.03, 0.01)), 0.02, 1.0),
    ("right and wrong, 4% differ, no difference", chosen((0, 1, -1), (0.96, 0.02, 0.02)), 0.0, 1.0),
    ("right and wrong, half differ", chosen((0, 1, -1), (0.5, 0.3, 0.2)), 0.1, 1.0),
    ("halves, 15% differ", chosen(*HALVES), float(np.dot(*HALVES)), 1.0),
    ("shares, nearly all differ by 1", chosen(*WHOLE), float(np.dot(*WHOLE)), 1.0),
    ("lognormal, all one way", lognormal, float(np.exp(0.5)), np.inf),
    ("two lognormals, no difference", lambda *of: lognormal(*of) - lognormal(*of), 0.0, np.inf),
]


def tests(differences: np.ndarray) -> np.ndarray:
    if np.isin(differences, (-1, 0, 1)).all():
        return mcnemar_test((differences > 0).sum(0), (differences < 0).sum(0))
    return sign_flip_test(differences, draws=1999)


def coverage(low: np.ndarray, high: np.ndarray, mean: float) -> dict[str, float]:
    held = {"held": (low <= mean) & (mean <= high), "mean below": mean < low, "mean above": mean > high}
    shares = {name: round(float(mask.mean()), 3) for name, mask in held.items()}
    return {**shares, "median width": round(float(np.median(high - low)), 3)}


def of_differences(rng: np.random.Generator, n: int, draw: Draw, mean: float, unit: float) -> dict[str, float]:
    differences = draw(rng, n, COLUMNS)
    ps = tests(differences)
    low, high = difference_interval(differences, unit, ps)
    contradicted = ((low <= 0) & (high >= 0)) == (ps < 0.05)
    return {**coverage(low, high, mean), "contradict the test": int(contradicted.sum())}


def powers_of(of_all: float, of_samples: list[float]) -> dict[str, float]:
    """Return the power at the difference that is called detectable: by the population, and by samples of it."""
    powers = [power for power in of_samples if not np.isnan(power)]
    return {
        "by the population": round(of_all, 3),
        "by a sample, mean": round(float(np.mean(powers)), 3),
        "by a sample, a tenth is below": round(float(np.quantile(powers, 0.1)), 3),
        "samples with none": len(of_samples) - len(powers),
    }


def power_of_right_and_wrong(rng: np.random.Generator, n: int, share: float) -> dict[str, float]:
    """Return `powers_of` where a share of the questions differs, or as many more as make the difference."""

    def powers(differing: np.ndarray) -> list[float]:
        least = detectable((np.arange(n)[:, None] < differing).astype(float), 1.0)
        return [mcnemar_power(n, max(share, difference), difference) for difference in least]

    return powers_of(powers(np.array([round(n * share)]))[0], powers(rng.binomial(n, share, SAMPLES)))


def power_of_figures(rng: np.random.Generator, n: int, draw: Draw, moved: bool = False) -> dict[str, float]:
    """Return `powers_of` where questions differ by as much as is drawn, or as many more as make the difference.

    Args:
        rng: of all draws.
        n: questions.
        draw: how much they differ.
        moved: not more of them in one direction, but all by the difference.
    """
    many = draw(rng, 1_000_000, 1)[:, 0]
    sizes, share, mean = many[many > 0], float((many > 0).mean()), float(many.mean())

    def power(least: float, columns: int) -> float:
        if np.isnan(least):
            return least
        more = max(least / mean, 1.0)
        differ = rng.random((n, columns)) < share * more
        up = rng.random((n, columns)) < (0.5 if moved else 0.5 + least / (mean * more) / 2)
        differences = differ * rng.choice(sizes, (n, columns)) * np.where(up, 1, -1) + moved * least
        return float((sign_flip_test(differences, draws=999) < 0.05).mean())

    of_all = np.quantile(many, (np.arange(n) + 0.5) / n)[:, None]
    least = detectable(draw(rng, n, SAMPLES), np.inf)
    return powers_of(
        power(float(detectable(of_all, np.inf)[0]), COLUMNS), [power(difference, 50) for difference in least]
    )


def of_the_grid() -> dict[str, Any]:
    """Return what the committed grid's tests could have shown, in points, from the numbers of questions that differ."""
    rows = pd.read_csv(TABLE).dropna(subset="p")
    points_by_task: dict[str, list[float]] = {}
    for row in rows.itertuples():
        differences = np.zeros((row.questions, 1))
        differences[: int(row.better)], differences[row.questions - int(row.worse) :] = 1, -1
        points_by_task.setdefault(row.task, []).append(100 * float(detectable(differences, 1.0, 0.05 / len(rows))[0]))
    ranges = {task: [round(min(points), 1), round(max(points), 1)] for task, points in points_by_task.items()}
    return {"tests": len(rows), "points": ranges}


def measured() -> dict[str, Any]:
    rng, simulated = np.random.default_rng(0), {}
    halves, eighths = chosen((0, 0.5, 1), (0.7, 0.2, 0.1)), tries(0.15, 1.5)
    for n in (20, 100):
        simulated[f"{n} questions"] = {
            "means": {
                name: coverage(*mean_interval(draw(rng, n, COLUMNS), unit), mean) for name, draw, mean, unit in MEANS
            },
            "differences": {name: of_differences(rng, n, *of) for name, *of in DIFFERENCES},
            "power of detectable": {
                "right and wrong, 10% differ": power_of_right_and_wrong(rng, n, 0.1),
                "right and wrong, half differ": power_of_right_and_wrong(rng, n, 0.5),
                "halves": power_of_figures(rng, n, halves),
                "eighths": power_of_figures(rng, n, eighths),
                "lognormal": power_of_figures(rng, n, lognormal),
                "lognormal, all moved": power_of_figures(rng, n, lognormal, moved=True),
            },
        }
    return {"simulated": simulated, "detectable in docs/results/grid/table.csv": of_the_grid()}


def main() -> None:
    machine = environment()
    results, seconds = timed(measured)
    write("interval_coverage", {"environment": machine, "seconds": round(seconds, 1), **results})


if __name__ == "__main__":
    main()
