"""Statistics over questions: bootstrap bands, paired tests, Holm's correction, what n questions could have shown."""

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
    kept = values[:, known]

    def means(places: np.ndarray, axis: int) -> np.ndarray:
        """Of the questions drawn, (…, questions), how often each was: one product gives all columns' means."""
        rows = places.reshape(-1, len(kept))
        counts = np.bincount((rows + len(kept) * np.arange(len(rows))[:, None]).ravel(), minlength=rows.size)
        found = kept.T @ counts.reshape(rows.shape).T / len(kept)
        return found[:, 0] if places.ndim == 1 else found

    drawn = stats.bootstrap(
        (np.arange(len(kept)),),
        means,
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


def detectable(deviation: np.ndarray, questions: int, right_or_wrong: bool, level: float = 0.05) -> np.ndarray:
    """The smallest mean difference that so many questions would have shown four times in five.

    That is (z(1 − level/2) + z(0.8)) · deviation / √questions. For right and wrong it is at least what the exact test
    needs if no question goes the other way: k questions with 2 · 0.5ᵏ ≤ level.

    Args:
        deviation: standard deviation of the questions' differences.
        questions: how many.
        right_or_wrong: whether outcomes are 0 or 1.
        level: of the two-sided test.
    """
    normal = stats.norm.ppf(1 - level / 2) + stats.norm.ppf(0.8)
    least = np.ceil(np.log2(2 / level)) / questions if right_or_wrong else 0.0
    return np.maximum(normal * np.asarray(deviation) / np.sqrt(questions), least)


def pareto(costs: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Which points no other one beats: none costs as little and gains as much, and one of both strictly.

    Args:
        costs: smaller is better; NaN is never on the front.
        gains: larger is better.
    """
    front = np.zeros(len(costs), dtype=bool)
    best = -np.inf
    order = [i for i in np.lexsort((-gains, costs)) if not (np.isnan(costs[i]) or np.isnan(gains[i]))]
    last = None
    for i in order:
        if gains[i] > best:
            front[i], best, last = True, gains[i], i
        elif last is not None and gains[i] == best and costs[i] == costs[last]:
            front[i] = True
    return front


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
