"""Statistics over questions: intervals, paired tests, Holm's correction, what n questions could have shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import optimize, stats


def mean_interval(values: np.ndarray, seed: int = 0, draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Return 95% intervals of means: of right and wrong Clopper and Pearson's, of figures by studentised bootstrap.

    Args:
        values: shape (questions, columns).
        seed: of the bootstrap's draws, which are the same for all columns.
        draws: how many.

    Returns:
        Lower and upper ends, shape (columns,) each; NaN where a value is not known.
    """
    low, high = _studentised(values, seed, draws)
    count, is_binary = len(values), np.isin(values, (0.0, 1.0)).all(0)
    right = values[:, is_binary].sum(0)
    low[is_binary] = np.nan_to_num(stats.beta.ppf(0.025, right, count - right + 1), nan=0.0)
    high[is_binary] = np.nan_to_num(stats.beta.ppf(0.975, right + 1, count - right), nan=1.0)
    return low, high


def difference_interval(
    differences: np.ndarray, unit: float, seed: int = 0, draws: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """Return 95% intervals of mean differences: studentised bootstrap, with one question added in each direction.

    Without the two, an interval from few questions that differ is far too short, and from none a point. (Bonett and
    Price add them for right and wrong; here figures get them, too, of the size by which their questions differ.)

    Args:
        differences: of paired questions, shape (questions, columns).
        unit: as of `detectable`.
        seed: of the bootstrap's draws, which are the same for all columns.
        draws: how many.
    """
    size = _size(differences, unit)
    size = np.where(np.isinf(size), 0.0, size)
    low, high = _studentised(np.concatenate([differences, [size, -size]]), seed, draws)
    return np.maximum(low, -unit), np.minimum(high, unit)


def _size(differences: np.ndarray, unit: float) -> np.ndarray:
    """Return how much questions differ that do; the unit where none does."""
    sums = np.abs(differences).sum(0)
    return np.divide((differences**2).sum(0), sums, out=np.full(len(sums), unit), where=sums > 0)


def _studentised(values: np.ndarray, seed: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return intervals of means; a column of one value has it as both ends."""
    count, means = len(values), values.mean(0)
    low, high = means.copy(), means.copy()
    spread = values.std(0)
    varied = spread > 1e-12 * np.abs(values).max(0, initial=0.0)  # false where a value is NaN
    if not varied.any():
        return low, high
    scaled = (values[:, varied] - means[varied]) / spread[varied]
    generator, share = np.random.default_rng(seed), np.full(count, 1 / count)
    scores = []
    for start in range(0, draws, 100):  # how often each question is drawn: one product gives all columns' sums
        drawn = generator.multinomial(count, share, size=min(100, draws - start)) / count
        mean = drawn @ scaled
        variance = drawn @ scaled**2 - mean**2
        scores.append(mean / np.sqrt(np.where(variance > 1e-9, variance, np.nan)))  # a draw of one value has no score
    ends = np.nanquantile(np.concatenate(scores), (0.975, 0.025), axis=0)
    low[varied], high[varied] = means[varied] - ends * spread[varied]
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


def mcnemar_test(better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Test exactly whether two variants are right equally often, from the questions that one of them alone has right.

    Args:
        better: of each test, how many questions the first alone has right.
        worse: how many the second alone has right.

    Returns:
        Two-sided p-values of the binomial test with probability one half.
    """
    differ = np.asarray(better) + np.asarray(worse)
    return np.minimum(1.0, 2 * stats.binom.cdf(np.minimum(better, worse), differ, 0.5))


def detectable(differences: np.ndarray, unit: float, level: float = 0.05) -> np.ndarray:
    """Return the smallest mean differences that the paired tests show at least four times in five.

    It is McNemar's exact power if as many questions differ as here; where even all of these going one way are too few,
    if as many more differ, all one way. Sign flips of figures are as powerful as McNemar's test of
    (Σ|d|)² / Σd² questions that differ by Σd² / Σ|d| each.

    Args:
        differences: of paired questions, shape (questions, tests).
        unit: the largest difference a question can have, 1 for shares; infinite where there is no largest. Where no
            question differs it stands for how much one would.
        level: of a two-sided test. For one that Holm's correction of m tests leaves clear whatever the others say: of
            0.05, an m-th.

    Returns:
        Shape (tests,); NaN where no difference would be shown, or how much a question differs is not known.
    """
    count, size = len(differences), _size(differences, unit)
    squares = (differences**2).sum(0)
    shares = np.divide(np.abs(differences).mean(0), size, out=np.zeros(len(size)), where=squares > 0)
    found = size * [_detectable(count, round(float(share), 6), level) for share in shares]
    return np.where(np.isfinite(found), found, np.nan)


@cache
def _detectable(count: int, share: float, level: float) -> float:
    """Return it for right and wrong, of a share of questions that differ."""

    def lack(share: float, difference: float) -> float:
        return 0.8 - mcnemar_power(count, share, difference, level)

    if np.isnan(share) or lack(1.0, 1.0) > 0:
        return float("nan")
    if share and lack(share, share) <= 0:
        return float(optimize.brentq(lambda difference: lack(share, difference), 0.0, share, xtol=1e-5)) + 1e-5
    return float(optimize.brentq(lambda more: lack(more, more), share, 1.0, xtol=1e-5)) + 1e-5


def mcnemar_power(count: int, share: float, difference: float, level: float = 0.05) -> float:
    """Return the exact power of McNemar's exact test.

    Args:
        count: of questions.
        share: of questions that the two answer differently, in the population.
        difference: of the means of the two there; at most the share.
        level: of the two-sided test.
    """
    low, high = stats.binom.ppf((1e-9, 1 - 1e-9), count, share)
    differ = np.arange(max(low, 1), high + 1)
    most = stats.binom.ppf(level / 2, differ, 0.5) - 1  # so few may go the other way
    better = min(1.0, (1 + difference / share) / 2) if share else 0.5
    shown = stats.binom.cdf(most, differ, better) + stats.binom.sf(differ - most - 1, differ, better)
    return float(stats.binom.pmf(differ, count, share) @ shown)


def pareto(costs: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Return which points are better than every other, in cost or in gain; equal points are so together.

    Args:
        costs: shape (points, 2), the ends of what was measured of each; smaller is better. One is better than another
            if its upper end is below the other's lower one. NaN is never on the front.
        gains: larger is better.
    """
    low, high = costs.T
    may_cost_less = low[None, :] <= high[:, None]  # (point, other)
    is_same = (low[None, :] == high[:, None]) & (high[None, :] == low[:, None]) & (gains[None, :] == gains[:, None])
    is_beaten = (may_cost_less & (gains[None, :] >= gains[:, None]) & ~is_same & ~np.eye(len(gains), dtype=bool)).any(1)
    return ~is_beaten & ~np.isnan(low + high + gains)


def two_sample_test(one: np.ndarray, other: np.ndarray, seed: int = 0, draws: int = 10_000) -> float:
    """Test whether two groups have the same mean, by permuting what belongs to which.

    Args:
        one: values of a group.
        other: those of the other.
        seed: of the permutations.
        draws: how many, unless there are fewer: then all are taken, once each.

    Returns:
        Two-sided p-value; NaN where a group is empty.
    """
    if not len(one) or not len(other):
        return float("nan")
    tested = stats.permutation_test(
        (one, other),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        vectorized=True,
        n_resamples=draws,
        batch=500,
        rng=np.random.default_rng(seed),
    )
    return float(tested.pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values of a family of tests, in the order given; NaN stays NaN."""
    order = sorted((p, i) for i, p in enumerate(values) if not np.isnan(p))
    adjusted, highest = [float("nan")] * len(values), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        adjusted[i] = highest
    return adjusted
