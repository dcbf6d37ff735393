"""Statistics over questions: intervals, paired tests, Holm's correction, detectable differences, Pareto fronts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

import numpy as np
from scipy import optimize, stats

_LEVEL = 0.05  # significance level of tests; intervals have a confidence level of 95%


def mean_interval(values: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Return 95% intervals of means: Clopper and Pearson's for right and wrong answers, Johnson's for other metrics.

    A metric with a largest value (a share) gets two additional questions, with the values 0 and `unit`. Without them,
    the interval would be far too short if (nearly) all values are equal.

    Args:
        values: shape (questions, columns).
        unit: the largest possible value: 1 for shares, infinite for metrics without a bound.

    Returns:
        Lower and upper ends, each of shape (columns,); NaN where a value is NaN.
    """
    is_share, columns = np.isfinite(unit), values.shape[1]
    low, high = _johnson_interval(values, np.outer([0.0, unit], np.ones(columns)) if is_share else values[:0])
    if is_share:
        low, high = np.clip(low, 0.0, unit), np.clip(high, 0.0, unit)
    count, is_binary = len(values), np.isin(values, (0.0, 1.0)).all(0)
    right = values[:, is_binary].sum(0)
    low[is_binary] = np.nan_to_num(stats.beta.ppf(_LEVEL / 2, right, count - right + 1), nan=0.0)
    high[is_binary] = np.nan_to_num(stats.beta.ppf(1 - _LEVEL / 2, right + 1, count - right), nan=1.0)
    return low, high


def difference_interval(differences: np.ndarray, unit: float, ps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return 95% intervals of mean differences; an interval contains 0 exactly if the paired test has p ≥ 0.05.

    These are Johnson's intervals with two additional questions, one in favour of each variant, with a difference of the
    typical size; Bonett and Price do this for right and wrong answers. Without them, an interval is far too short if
    only few questions differ. If the interval and the test disagree about 0, its end near 0 is replaced by the end of
    Miettinen's test-based interval.

    Args:
        differences: differences of paired questions, shape (questions, columns).
        unit: as for `detectable`.
        ps: p-values of the paired tests, shape (columns,).

    Returns:
        Lower and upper ends, each of shape (columns,).
    """
    size = _size(differences, unit)
    size = np.where(np.isinf(size), 0.0, size)
    low, high = _johnson_interval(differences, np.stack([size, -size]))
    means, critical = differences.mean(0), stats.norm.isf(_LEVEL / 2)
    disagree = (means != 0) & ((low <= 0) & (high >= 0) == (ps < _LEVEL))
    ends = means * (1 - critical / np.maximum(stats.norm.isf(ps / 2), 1e-9))
    low = np.where(disagree & (means > 0), ends, low)
    high = np.where(disagree & (means < 0), ends, high)
    return np.maximum(low, -unit), np.minimum(high, unit)


def _size(differences: np.ndarray, unit: float) -> np.ndarray:
    """Return the typical size of a difference, Σd² / Σ|d|; the unit if all differences are 0."""
    sums = np.abs(differences).sum(0)
    return np.divide((differences**2).sum(0), sums, out=np.full(len(sums), unit), where=sums > 0)


def _johnson_interval(values: np.ndarray, added: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Student's intervals of means, extended by Johnson's t on the side of the skew.

    The values in `added` are used for the variance and the skew, not for the mean.
    """
    means, values = values.mean(0), np.concatenate([values, added])
    count = len(values)
    centred = values - values.mean(0)
    variance = (centred**2).sum(0) / max(count - 1, 1)
    third = np.divide((centred**3).mean(0), variance, out=np.zeros(len(means)), where=variance > 0)
    critical = stats.t.isf(_LEVEL / 2, max(count - 1, 1))
    half = critical * np.sqrt(variance / count)
    skew = third * (1 + 2 * critical**2) / (6 * count)
    return means - half + np.minimum(skew, 0), means + half + np.maximum(skew, 0)


def sign_flip_test(differences: np.ndarray, seed: int = 0, draws: int = 10_000) -> np.ndarray:
    """Test whether the mean of paired differences is zero, by flipping the signs of the differences.

    The test is exact if, under the null hypothesis, a difference d is as likely as −d. This holds if both policies give
    one answer to each question. If one value is an expectation (of random heads), use many questions.

    Args:
        differences: shape (questions, tests); all tests use the same flips.
        seed: seed of the flips.
        draws: number of random flips; if there are no more possible flips than this, each is used once.

    Returns:
        Two-sided p-values, at least 1 / (draws + 1), shape (tests,); NaN where a difference is NaN.
    """
    is_complete = ~np.isnan(differences).any(0)
    ps = np.where(is_complete, 1.0, np.nan)
    if len(differences) > 1 and is_complete.any():
        complete = differences[:, is_complete]
        # SciPy flips the signs of a vector of ones; its product with the differences gives the sums of all tests.
        tested = stats.permutation_test(
            (np.ones(len(differences)),),
            lambda signs, axis: np.abs(signs @ complete),
            permutation_type="samples",
            vectorized=True,
            n_resamples=draws,
            batch=500,
            alternative="greater",
            rng=np.random.default_rng(seed),
        )
        ps[is_complete] = tested.pvalue
    return ps


def mcnemar_test(better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Return exact two-sided p-values of the hypothesis that two variants are right equally often, shape (tests,).

    `better` and `worse` are the numbers of questions that only the first or only the second variant answers correctly.
    """
    differ = np.asarray(better) + np.asarray(worse)
    return np.minimum(1.0, 2 * stats.binom.cdf(np.minimum(better, worse), differ, 0.5))


def noninferiority_test(better: np.ndarray, worse: np.ndarray, questions: int, margin: float) -> np.ndarray:
    """Return p-values of the hypothesis that a variant's share of right answers is `margin` lower, or more.

    This is Tango's score test (1998) of paired shares, one-sided: if it is small, the variant loses less.

    Args:
        better, worse: as for `mcnemar_test`.
        questions: number of all questions.
        margin: between 0 and 1.
    """
    better, worse = np.asarray(better, float), np.asarray(worse, float)
    # the likeliest share of questions that only the baseline answers, given that the variant loses the margin
    linear = -better - worse - (2 * questions - better + worse) * margin
    lost = (np.sqrt(linear**2 - 8 * questions * worse * margin * (1 + margin)) - linear) / (4 * questions)
    variance = questions * (2 * lost - margin - margin**2)
    return stats.norm.sf((better - worse + questions * margin) / np.sqrt(variance))


def detectable(differences: np.ndarray, unit: float, level: float = _LEVEL) -> np.ndarray:
    """Return the smallest mean differences that the paired tests detect with a power of 0.8.

    This is the power of McNemar's exact test for the observed share of differing questions. If they are too few for
    this power even with all of them in favour of one variant, the smallest sufficient number is assumed. Sign
    flips of other metrics count as McNemar's test of (Σ|d|)² / Σd² questions that differ by Σd² / Σ|d| each.

    Args:
        differences: differences of paired questions, shape (questions, tests).
        unit: the largest possible difference of a question: 1 for shares, infinite for metrics without a bound. If no
            question differs, this is the assumed size of a difference.
        level: level of a two-sided test; 0.05 / m suffices for Holm's correction of m tests.

    Returns:
        Shape (tests,); NaN if no difference would be significant, or the size of a difference is unknown.
    """
    count, size = len(differences), _size(differences, unit)
    squares = (differences**2).sum(0)
    shares = np.divide(np.abs(differences).mean(0), size, out=np.zeros(len(size)), where=squares > 0)
    smallest = size * [_detectable(count, round(float(share), 6), level) for share in shares]
    return np.where(np.isfinite(smallest), smallest, np.nan)


@cache
def _detectable(count: int, share: float, level: float) -> float:
    """Return the smallest detectable difference of right and wrong answers if a share of the questions differs."""

    def missing_power(share: float, difference: float) -> float:
        return 0.8 - mcnemar_power(count, share, difference, level)

    if np.isnan(share) or missing_power(1.0, 1.0) > 0:
        return float("nan")
    if share and missing_power(share, share) <= 0:
        return float(optimize.brentq(lambda difference: missing_power(share, difference), 0.0, share, xtol=1e-5)) + 1e-5
    return float(optimize.brentq(lambda larger: missing_power(larger, larger), share, 1.0, xtol=1e-5)) + 1e-5


def mcnemar_power(count: int, share: float, difference: float, level: float = _LEVEL) -> float:
    """Return the exact power of McNemar's exact test.

    Args:
        count: number of questions.
        share: share of differing questions in the population.
        difference: difference of the means in the population; at most the share.
        level: level of the test.
    """
    low, high = stats.binom.ppf((1e-9, 1 - 1e-9), count, share)
    differ = np.arange(max(low, 1), high + 1)
    # a result is significant if at most this many of the differing questions are in favour of the other variant
    most = stats.binom.ppf(level / 2, differ, 0.5) - 1
    better = min(1.0, (1 + difference / share) / 2) if share else 0.5
    significant = stats.binom.cdf(most, differ, better) + stats.binom.sf(differ - most - 1, differ, better)
    return float(stats.binom.pmf(differ, count, share) @ significant)


def pareto(costs: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Return a mask of the points on the Pareto front: no other point is as good in cost and gain and better in one.

    Args:
        costs: lower and upper ends of the measured costs, shape (points, 2); smaller is better. A point costs less than
            another if its upper end is below the other's lower end. NaN is never on the front.
        gains: shape (points,); larger is better.
    """
    low, high = costs.T
    point, other = (slice(None), None), (None, slice(None))
    is_as_good = (high[other] <= low[point]) & (gains[other] >= gains[point])
    is_better = (high[other] < low[point]) | (gains[other] > gains[point])
    return ~(is_as_good & is_better).any(1) & ~np.isnan(low + high + gains)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's correction for all of them together, in the same order; NaN stays NaN."""
    order = sorted((p, i) for i, p in enumerate(values) if not np.isnan(p))
    adjusted, highest = [float("nan")] * len(values), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = highest
    return adjusted


def clustered_means(values: np.ndarray, clusters: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Return means over rows, and their standard errors if the rows of a cluster are dependent (tokens of a text).

    A mean is the ratio of a sum and a number of rows, both sums over clusters; its error is the linearised one of
    survey statistics, with the clusters' sums of residuals.

    Args:
        values: shape (rows, columns).
        clusters: the cluster of each row.

    Returns:
        Means and errors, each of shape (columns,); errors are NaN for a single cluster.
    """
    numbers: dict[Hashable, int] = {}
    index = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
    means, count = values.mean(0), len(numbers)
    if count < 2:
        return means, np.full(len(means), np.nan)
    residuals = np.zeros((count, len(means)))
    np.add.at(residuals, index, values - means)
    return means, np.sqrt(count / (count - 1) * (residuals**2).sum(0)) / len(values)
