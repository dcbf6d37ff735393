"""A race against sampling: a policy is chosen on training questions, and compared on test questions that it never saw.

For each fold of the questions there is a model, a fold that chooses, and a test fold. On the choosing fold every
candidate, an order of variants with a mix, is fitted on a part of the questions and evaluated on the rest (cross
fitting); the one with the highest pass@N is fitted on all of them and tested. Its rival is sampling, with or without
the greedy answer first, in the form and at the temperature with the highest pass@N on the same questions.
`sprint_race_plan.py` has the plan that fixes this before the test run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lmeval_prune.sprint.mixes import Mix
from scipy import stats

from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE, is_single_head
from lmeval_prune.reporting.statistics import difference_interval, holm, mean_interval, sign_flip_test
from lmeval_prune.sprint import policies
from lmeval_prune.sprint.curves import Curve, policy_curve, random_curve, solved_cells
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.policies import Policy

ROUTER = "router:"  # begins the name of an order by a fitted router
PUBLISHED = "published"  # the order by SPRINT's router over SPRINT's pool: single heads and the unpruned model
LEVEL, POWER = 0.05, 0.8
SHINGLE = 3  # words of which texts are compared
_WORD = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|zero"
)
_NUMBER = re.compile(rf"\d+(?:[.,]\d+)*|\b(?:{_WORD})(?:-(?:{_WORD})|[ -](?:hundred|thousand|million))*\b")
Fit = Callable[[str, Outcomes], Policy]  # fits a router, by its method
Orders = dict[str, list[list[str]]]  # by name of an order: variants for each question, first choice first


@dataclass(frozen=True)
class Candidate:
    """A policy that training may choose: an order of variants, and how tries are made of it."""

    order: str  # `best`, `cover`, or `router:METHOD`
    mix: Mix

    def __str__(self) -> str:
        return f"{self.order}, {self.mix}"


def candidates(
    orders: Sequence[str], mixes: Sequence[str], temperatures: Sequence[float], sampling: float | None = None
) -> list[Candidate]:
    """Return all candidates.

    Args:
        orders: names of orders; see `Candidate`.
        mixes: `@T` in a mix stands for each temperature, `@sampling` for that of the chosen rival.
        temperatures: of sampling.
        sampling: temperature of the rival that training chose; see `choose_rival`.
    """
    parsed = _parsed(mixes, temperatures, sampling)
    if bad := next((mix for mix in parsed if not mix.uses_order), None):
        raise InputError(f"mixes: {bad} is sampling itself, which candidates are compared with; leave it out")
    return [Candidate(order, mix) for order in orders for mix in parsed]


def rivals(mixes: Sequence[str], temperatures: Sequence[float]) -> list[Mix]:
    """Return the mixes of the unpruned model alone; `@T` stands for each temperature."""
    parsed = _parsed(mixes, temperatures)
    if bad := next((mix for mix in parsed if mix.uses_order or not temperature_of(mix)), None):
        raise InputError(f"sampling: {bad} is no sampling of the unpruned model; write {DENSE}@T or {DENSE}|{DENSE}@T")
    return parsed


def temperature_of(mix: Mix) -> float:
    """Return the temperature of a mix's repeated samples."""
    return mix.repeated[-1].temperature


def _parsed(mixes: Sequence[str], temperatures: Sequence[float], sampling: float | None = None) -> list[Mix]:
    texts = []
    for mix in mixes:
        if sampling is not None:
            mix = mix.replace("@sampling", f"@{sampling:g}")
        texts += [mix.replace("@T", f"@{t:g}") for t in temperatures] if "@T" in mix else [mix]
    return [Mix.parse(text) for text in dict.fromkeys(texts)]


def make_policy(order: str, training: Outcomes, fit: Fit) -> Policy:
    """Fit an order on training questions.

    Args:
        order: see `Candidate`.
        training: outcomes; only greedy columns are used.
        fit: fits a router, by its method; `PUBLISHED` is fitted on SPRINT's pool.
    """
    if order.startswith(ROUTER):
        return fit(order.removeprefix(ROUTER), training.greedy())
    if order == PUBLISHED:
        return fit(PUBLISHED, published_pool(training))
    makers = {"best": policies.best, "cover": policies.cover}
    if order not in makers:
        raise InputError(f"orders: {order!r} is not known; use {', '.join(makers)} or {ROUTER}METHOD")
    return makers[order](training.greedy())


def published_pool(outcomes: Outcomes) -> Outcomes:
    """Select SPRINT's pool: the unpruned model, and one head pruned at a time."""
    return outcomes.columns([name for name in outcomes.pool if name == DENSE or is_single_head(name)])


def sampling_mix(temperature: float) -> Mix:
    """Return the mix of plain sampling of the unpruned model."""
    return Mix.parse(f"{DENSE}@{temperature:g}")


def sampling_curve(outcomes: Outcomes, mix: Mix, n: int) -> Curve:
    """Return the curve of a mix of the unpruned model alone, by all samples of the store."""
    return policy_curve(str(mix), policies.random_order([DENSE]), outcomes, n, mix)


def cross_fitted_orders(orders: Sequence[str], training: Outcomes, parts: int, seed: int, fit: Fit) -> Orders:
    """Order the pool for training questions by policies that were fitted on the others.

    Args:
        orders: names of orders; see `Candidate`.
        training: outcomes of the training questions under the whole pool.
        parts: number of parts; each is ordered after a fit on the others.
        seed: seed of the division into parts.
        fit: fits a router, by its method.

    Returns:
        By order, the pool's variants for each question, first choice first.
    """
    count = len(training.texts)
    if count < parts:
        raise InputError(f"{count} training questions cannot be divided into {parts} parts; use more questions")
    number = np.random.default_rng(seed).permutation(count) % parts
    result: Orders = {order: [[] for _ in range(count)] for order in orders}
    for part in range(parts):
        held_out = np.flatnonzero(number == part)
        other_parts, texts = training.rows(np.flatnonzero(number != part)), training.rows(held_out).texts
        for order in orders:
            for row, names in zip(held_out, make_policy(order, other_parts, fit).order(texts), strict=True):
                result[order][row] = names
    return result


def fixed_policy(orders: Sequence[Sequence[str]]) -> Policy:
    """Return the policy with a known order for each question of a store."""
    return Policy(list(orders[0]), {"policy": "known"}, lambda _: [list(names) for names in orders])


def cross_fitted(chosen: Sequence[Candidate], orders: Orders, training: Outcomes, n: int) -> np.ndarray:
    """Return pass@n of candidates on training questions, (questions, candidates).

    Args:
        chosen: the candidates.
        orders: their orders for each training question, from policies that did not see it.
        training: outcomes of the training questions with all attempts that the candidates use.
        n: number of tries.
    """
    curves = [
        policy_curve("", fixed_policy(orders[candidate.order]), training, n, candidate.mix) for candidate in chosen
    ]
    return np.stack([curve.values[:, n - 1] for curve in curves], axis=1)


def attempts_of(pairs: Iterable[tuple[Sequence[Sequence[str]], Mix, int]]) -> list[list[str]]:
    """Return the attempts that several policies make at each question: their union.

    Args:
        pairs: for each policy its order for each question, its mix and its number of tries.
    """
    rows: list[dict[str, None]] = []
    for orders, mix, n in pairs:
        rows = rows or [{} for _ in orders]
        for row, names in zip(rows, orders, strict=True):
            row |= dict.fromkeys(map(str, mix.attempts(names, n)))
    return [list(row) for row in rows]


@dataclass(frozen=True)
class Choice:
    """What training chose for a fold.

    Attributes:
        candidate: the policy.
        rival: the mix of sampling.
        passes: cross-fitted pass@n of each candidate, by name.
        sampled: pass@n of each rival, by its mix.
        differences: pass@n of the chosen candidate minus that of the chosen rival, (questions,).
    """

    candidate: Candidate
    rival: Mix
    passes: dict[str, float]
    sampled: dict[str, float]
    differences: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON."""
        order, mix = self.candidate.order, str(self.candidate.mix)
        figures = {"order": order, "mix": mix, "rival": str(self.rival), "temperature": temperature_of(self.rival)}
        return {**figures, "questions": len(self.differences), "candidates": self.passes, "sampling": self.sampled}


def _sampled(sampling: Sequence[Mix], training: Outcomes, n: int) -> np.ndarray:
    """Return pass@n of rivals on training questions, (questions, rivals)."""
    return np.stack([sampling_curve(training, mix, n).values[:, n - 1] for mix in sampling], axis=1)


def choose_rival(sampling: Sequence[Mix], training: Outcomes, n: int) -> Mix:
    """Choose the form and temperature of sampling by pass@n on training questions; of equals, the first."""
    return sampling[int(_sampled(sampling, training, n).mean(0).argmax())]


def choose(chosen: Sequence[Candidate], orders: Orders, sampling: Sequence[Mix], training: Outcomes, n: int) -> Choice:
    """Choose policy and rival by pass@n on training questions; of equals, the first. Arguments as above."""
    values, sampled = cross_fitted(chosen, orders, training, n), _sampled(sampling, training, n)
    best, rival = int(values.mean(0).argmax()), int(sampled.mean(0).argmax())
    return Choice(
        chosen[best],
        sampling[rival],
        {str(candidate): round(float(mean), 6) for candidate, mean in zip(chosen, values.mean(0), strict=True)},
        {str(mix): round(float(mean), 6) for mix, mean in zip(sampling, sampled.mean(0), strict=True)},
        values[:, best] - sampled[:, rival],
    )


def random_passes(training: Outcomes, n: int) -> dict[str, float]:
    """Return the expected pass@n of the pool in random order, alone and after the unpruned model, greedily."""
    greedy = training.greedy()
    pruned = [name for name in greedy.pool if name != DENSE]
    dense = solved_cells(greedy, [DENSE])[:, 0]
    after = random_curve("", pruned, greedy, n - 1).values[:, -1] if n > 1 else np.zeros(len(dense))
    alone = random_curve("", greedy.pool, greedy, n).values[:, -1]
    return {"next": float(alone.mean()), f"{DENSE}|next": float(np.where(dense, 1.0, after).mean())}


def smallest_difference(deviation: float, questions: int, level: float = LEVEL, power: float = POWER) -> float:
    """Return the smallest mean difference that a two-sided paired test shows with a given power.

    The mean of many differences is nearly normal: (z_{1−level/2} + z_power) · deviation / √questions.

    Args:
        deviation: standard deviation of the differences, e.g. on training questions.
        questions: number of test questions.
        level: level of the test.
        power: probability that the test is significant.
    """
    return float((stats.norm.isf(level / 2) + stats.norm.ppf(power)) * deviation / questions**0.5)


# ---------------------------------------------------------------------- questions


def near_duplicates(texts: Sequence[str], groups: Sequence[int], least: float = 0.8) -> dict[int, int]:
    """Return the questions that are left out of a test, each with its twin: both by index.

    Two questions are twins if they share at least a share `least` of all their sequences of three words (Jaccard), with
    all numbers alike, in digits or words. A question is left out if it has a twin in another group (fold), or an
    earlier one in its own.
    """
    shingles = [_shingles(text) for text in texts]
    by_shingle: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, own in enumerate(shingles):
        for shingle in own:
            by_shingle[shingle].append(i)
    left_out: dict[int, int] = {}
    for i, own in enumerate(shingles):
        for j, shared in Counter(j for shingle in own for j in by_shingle[shingle] if j < i).items():
            if shared >= least * (len(own) + len(shingles[j]) - shared):
                left_out.setdefault(i, j)
                if groups[i] != groups[j]:
                    left_out.setdefault(j, i)
    return dict(sorted(left_out.items()))


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+|#", _NUMBER.sub("#", text.lower()))
    return {tuple(words[i : i + SHINGLE]) for i in range(max(len(words) - SHINGLE + 1, 1))}


# ---------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Comparison:
    """Paired values of a policy and of sampling, its rival.

    Attributes:
        name: what is compared.
        policy, sampling: values between 0 and 1, (questions,).
        is_primary: whether it is the primary comparison.
    """

    name: str
    policy: np.ndarray
    sampling: np.ndarray
    is_primary: bool = False


def test_comparisons(comparisons: Sequence[Comparison], seed: int = 0) -> list[dict[str, Any]]:
    """Test the primary comparison alone, and the secondary ones with Holm's correction for all of them together.

    Returns:
        For each comparison its means, the mean difference with its 95% interval, p, and for secondary ones p after
        Holm's correction. p is that of 10,000 random flips of the questions' signs.
    """
    differences = np.stack([comparison.policy - comparison.sampling for comparison in comparisons], axis=1)
    p = sign_flip_test(differences, seed)
    low, high = difference_interval(differences, 1.0, p)
    secondary = [i for i, comparison in enumerate(comparisons) if not comparison.is_primary]
    adjusted = dict(zip(secondary, holm([float(p[i]) for i in secondary]), strict=True))
    return [
        {
            "name": comparison.name,
            "primary": comparison.is_primary,
            "questions": len(comparison.policy),
            "policy": float(comparison.policy.mean()),
            "sampling": float(comparison.sampling.mean()),
            "difference": float(differences[:, i].mean()),
            "low": float(low[i]),
            "high": float(high[i]),
            "p": float(p[i]),
            "p_holm": adjusted.get(i),
        }
        for i, comparison in enumerate(comparisons)
    ]


test_comparisons.__test__ = False  # type: ignore[attr-defined] # pytest takes the name for a test


def solved_only(outcomes: Sequence[Outcomes], temperatures: Sequence[float], samples: int) -> dict[str, Any]:
    """Count the questions that some greedy pruned variant solves and the unpruned model does not, and the reverse.

    The unpruned model solves a question if its greedy answer or one of its samples does.

    Args:
        outcomes: of each fold's questions; those that lack a sample are left out.
        temperatures: of each fold's sampling.
        samples: number of samples.

    Returns:
        Shares with 95% intervals (Clopper and Pearson), and the numbers of questions, variants and samples.
    """
    pruned, sampled, variants = [], [], set()
    for fold_outcomes, temperature in zip(outcomes, temperatures, strict=True):
        names = [name for name in fold_outcomes.greedy().pool if name != DENSE]
        variants.add(len(names))
        draws = list(map(str, sampling_mix(temperature).attempts([DENSE], samples)))
        complete = fold_outcomes.rows(np.flatnonzero(fold_outcomes.columns([DENSE, *draws]).observed.all(1)))
        pruned.append(solved_cells(complete, names).any(1))
        sampled.append(solved_cells(complete, [DENSE, *draws]).any(1))
    by_variants, by_samples = np.concatenate(pruned), np.concatenate(sampled)
    if not len(by_variants):
        raise InputError(f"no question has {samples} samples; run the stage ceiling first")
    columns = {
        "variants": by_variants,
        "samples": by_samples,
        "only_variants": by_variants & ~by_samples,
        "only_samples": by_samples & ~by_variants,
        "both": by_variants & by_samples,
        "neither": ~by_variants & ~by_samples,
    }
    values = np.stack(list(columns.values()), axis=1).astype(float)
    low, high = mean_interval(values, 1.0)
    shares = {
        name: {"share": float(values[:, i].mean()), "low": float(low[i]), "high": float(high[i])}
        for i, name in enumerate(columns)
    }
    return {"questions": len(values), "greedy_variants": sorted(variants), "samples": samples, "shares": shares}


def summarise(
    choices: Sequence[Mapping[str, Any]], differences: Sequence[np.ndarray], questions: int
) -> dict[str, Any]:
    """Return what the race can show, from training: the spread of differences and the smallest difference."""
    together = np.concatenate(list(differences))
    deviation = float(together.std(ddof=1))
    return {
        "folds": list(choices),
        "training_questions": len(together),
        "training_difference": float(together.mean()),
        "training_deviation": deviation,
        "test_questions": questions,
        "smallest_difference": smallest_difference(deviation, questions),
    }
