"""Statistics over questions: bootstrap bands, paired tests by flipping signs, Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def bootstrap_band(values: np.ndarray, seed: int = 0, draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Draw questions with replacement, for 95% intervals of their means.

    Args:
        values: shape (questions, columns); the columns are of the same draws.
        seed: of the draws.
        draws: how many.

    Returns:
        Lower and upper ends, shape (columns,) each; NaN where a value is not known.
    """
    low, high = values.mean(0), values.mean(0)
    known = ~np.isnan(low)
    if len(values) < 2 or not known.any():
        return low, high
    drawn = stats.bootstrap(
        (values[:, known],),
        np.mean,
        axis=0,
        vectorized=True,
        method="percentile",
        n_resamples=draws,
        batch=100,
        rng=np.random.default_rng(seed),
    )
    low[known], high[known] = drawn.confidence_interval.low, drawn.confidence_interval.high
    return low, high


def sign_flip_test(differences: np.ndarray, seed: int = 0, draws: int = 10_000) -> np.ndarray:
    """Test whether paired differences are zero in the mean, by flipping the signs of the questions.

    Exact if under the null hypothesis a question's difference is as likely as its opposite, which holds for two
    policies of one answer each. Differences from an expectation are skewed: there it is right for many questions only.

    Args:
        differences: shape (questions, tests); all tests see the same flips.
        seed: of the flips.
        draws: how many, unless there are fewer: then all are taken, once each.

    Returns:
        Two-sided p-values, at least 1 / (draws + 1), shape (tests,); NaN where a difference is not known.
    """
    known = ~np.isnan(differences).any(0)
    found = np.where(known, 1.0, np.nan)
    if len(differences) > 1 and known.any():
        kept = differences[:, known]
        # the sample is the signs, all positive as observed: scipy flips them, and one product gives all tests' sums
        tested = stats.permutation_test(
            (np.ones(len(differences)),),
            lambda signs, axis: np.abs(signs @ kept),
            permutation_type="samples",
            vectorized=True,
            n_resamples=draws,
            batch=500,
            alternative="greater",
            rng=np.random.default_rng(seed),
        )
        found[known] = tested.pvalue
    return found


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of a family of tests, in the order given; NaN stays NaN."""
    order = sorted((p, i) for i, p in enumerate(values) if not np.isnan(p))
    adjusted, highest = [float("nan")] * len(values), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = highest
    return adjusted
