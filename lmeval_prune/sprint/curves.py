"""Compute pass@k of all policies on the same questions, from outcome stores and lm-eval's samples files.

A policy's tries may be greedy or sampled. Where a store has more samples of a kind than the tries use, all of them
count: of n samples, c of them right, m tries are all wrong with probability C(n−c, m)/C(n, m).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from lmeval_prune.artefacts import digest, read_lines
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE, Attempt
from lmeval_prune.scoring.passes import pass_mixed, pass_unbiased
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.outcomes import Outcomes, question_field
from lmeval_prune.sprint.policies import Policy


class Sample(TypedDict, total=False):
    """Fields of a sample that are read."""

    arguments: dict[str, dict[str, Any]]
    filtered_resps: list[list[Any]]
    doc: dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """pass@k of each question.

    Attributes:
        name: label in the legend.
        kind: estimator of pass@k: `ordered`, `exact` (the expectation over random orders) or `unbiased` (over samples).
        values: probability that any of k tries is right, for k = 1 … N, shape (questions, N); NaN if unknown.
        attempts: attempts at each question, if a policy chose them.
        is_bound: whether this is an upper bound, not a method.
        tokens: expected number of generated tokens of the first k tries, shape (questions, N); None if unknown.
    """

    name: str
    kind: str
    values: np.ndarray
    attempts: Sequence[Sequence[Attempt]] = ()
    is_bound: bool = False
    tokens: np.ndarray | None = None

    @property
    def mean(self) -> np.ndarray:
        """Return the mean pass@k over the questions, shape (N,)."""
        return self.values.mean(0)

    @property
    def mean_tokens(self) -> np.ndarray | None:
        """Return the mean number of generated tokens of k tries over the questions, shape (N,)."""
        return None if self.tokens is None else self.tokens.mean(0)


def solved_cells(outcomes: Outcomes, attempts: Sequence[str]) -> np.ndarray:
    """Return whether each attempt solves each question, (questions, attempts).

    Raises:
        UnknownOutcomeError: an outcome is unknown.
    """
    if missing := [name for name in attempts if name not in outcomes.pool]:
        raise UnknownOutcomeError(f"the test store has no {missing[0]}", "sweep it too")
    part = outcomes.columns(attempts)
    if np.isnan(part.z).any():
        raise unknown_outcomes(part.z, attempts)
    return np.asarray(part.z == 1)


def unknown_outcomes(z: np.ndarray, attempts: Sequence[str], question: int | None = None) -> UnknownOutcomeError:
    """Return the error for unknown outcomes among those of attempts, z (questions, attempts)."""
    cells = np.argwhere(np.isnan(z))
    row, column = next((cell for cell in cells if question in (None, cell[0])), cells[0])
    return UnknownOutcomeError(
        f"{len(cells)} outcomes of the test store are unknown, e.g. {attempts[min(column, len(attempts) - 1)]} on "
        f"question {row}",
        "complete the sweep over the whole pool",
    )


class UnknownOutcomeError(InputError):
    """Outcomes that a curve needs, and that the store does not have."""


Kind = tuple[str, float]  # variant and temperature: greedy, or exchangeable samples


class Samples:
    """The columns of a store by kind of attempt: the greedy answer of a variant, or its samples at a temperature.

    Not every question needs every sample: the known ones of a question count.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.columns: dict[Kind, list[int]] = {}  # in the order of the samples' numbers
        attempts = [(Attempt.named(name), column) for column, name in enumerate(outcomes.pool)]
        for attempt, column in sorted(attempts, key=lambda pair: pair[0].draw):
            self.columns.setdefault(attempt.kind, []).append(column)
        self.known_columns = cache(self._known_columns)

    def check(self, kinds: Iterable[Kind]) -> None:
        """Refuse kinds that the store lacks."""
        if missing := [str(Attempt(*kind)) for kind in kinds if kind not in self.columns]:
            raise UnknownOutcomeError(f"the test store has no {missing[0]}", "sweep it too")

    def _known_columns(self, row: int, kind: Kind) -> list[int]:
        """Return the columns of a kind whose outcome at a question is known."""
        return [column for column in self.columns.get(kind, ()) if not np.isnan(self.outcomes.z[row, column])]

    def pass_of(self, row: int, drawn: Mapping[Kind, int]) -> float:
        """Return the chance that some of m draws of each kind is right; `UnknownOutcomeError` if fewer are known."""
        groups = []
        for kind, m in drawn.items():
            columns, observed = self.columns[kind], self.known_columns(row, kind)
            if m > len(columns):
                problem = f"the test store has only {len(columns)} of {m} samples of {Attempt(*kind)}"
                raise UnknownOutcomeError(problem, "sweep more")
            if m > len(observed):
                raise unknown_outcomes(self.outcomes.z[:, columns], [str(Attempt(*kind))], row)
            groups.append((len(observed), int(self.outcomes.z[row, observed].sum()), m))
        return pass_mixed(groups)

    def tokens_of(self, row: int, drawn: Mapping[Kind, int]) -> float:
        """Return the expected number of tokens of m draws of each kind; NaN if unknown."""
        tokens = self.outcomes.tokens
        if tokens is None:
            return float("nan")
        return float(sum(m * tokens[row, self.known_columns(row, kind)].mean() for kind, m in drawn.items()))


def sampled_temperatures(outcomes: Outcomes, least: int) -> list[float]:
    """Return the temperatures of at least so many samples of the unpruned model; a question may lack some of them."""
    attempts = map(Attempt.named, outcomes.pool)
    counts = Counter(attempt.temperature for attempt in attempts if attempt.is_sampled and attempt.variant == DENSE)
    return sorted(temperature for temperature, count in counts.items() if count >= least)


def tries_of(policy: Policy, outcomes: Outcomes, n: int, mix: Mix | None = None) -> list[list[Attempt]]:
    """Return the first n attempts of a policy at each question."""
    mix = mix or Mix()
    orders = policy.order(outcomes.texts) if mix.uses_order else [policy.pool for _ in outcomes.texts]
    return [mix.attempts(order, n) for order in orders]


def policy_curve(name: str, policy: Policy, outcomes: Outcomes, n: int, mix: Mix | None = None) -> Curve:
    """Compute pass@k of a policy whose tries a mix makes; by default try i takes its i-th variant, greedily.

    Raises:
        UnknownOutcomeError: the store lacks an attempt, or samples for so many tries.
    """
    attempts = tries_of(policy, outcomes, n, mix)
    kinds = {attempt.kind for row in attempts for attempt in row}
    samples = Samples(outcomes)
    samples.check(sorted(kinds))
    values, tokens = np.zeros((len(attempts), n)), np.full((len(attempts), n), np.nan)
    for i, row in enumerate(attempts):
        drawn: Counter[Kind] = Counter()
        for k, attempt in enumerate(row):
            drawn[attempt.kind] += 1
            values[i, k] = samples.pass_of(i, drawn)
            tokens[i, k] = samples.tokens_of(i, drawn)
    kind = "unbiased" if any(temperature for _, temperature in kinds) else "ordered"
    return Curve(name, kind, values, attempts, tokens=tokens if np.isfinite(tokens).all() else None)


def oracle_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of the oracle: whether any head of the pool solves the question."""
    solved = solved_cells(outcomes, pool).any(axis=1, keepdims=True)
    return Curve(name, "ordered", np.repeat(solved.astype(float), n, axis=1), is_bound=True)


def random_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute the expected pass@k of m variants drawn without replacement, c of them right: 1 − C(m−c, k)/C(m, k)."""
    counts = solved_cells(outcomes, pool).sum(1)
    ks = [min(k, len(pool)) for k in range(1, n + 1)]
    values = np.array([[pass_unbiased(len(pool), int(c), k) for k in ks] for c in counts])
    part = outcomes.columns(pool).tokens
    has_tokens = part is not None and bool(np.isfinite(part).all())
    return Curve(name, "exact", values, tokens=part.mean(1)[:, None] * np.array(ks) if has_tokens else None)  # type: ignore


def samples_curve(name: str, path: str, outcomes: Outcomes, n: int) -> Curve:
    """Estimate pass@k from a samples file of `lm_eval --log_samples` on a pass@N task, for the outcomes' questions.

    Random samples are exchangeable, so the unbiased estimator is used. The tries of a routed run are ordered, so its
    reported `pass@k` is used; pass@k that lm-eval did not report is NaN.
    """
    rows: dict[str, np.ndarray] = {}
    settings: dict[str, Any] = {}
    prompts = {row["question"]: row["prompt"] for row in outcomes.questions}
    lengths = {task["generation"].get("max_gen_toks") for task in outcomes.tasks.values() if "generation" in task}
    field = question_field(outcomes.tasks) or "question"
    for sample in read_lines(path, Sample):
        question, prompt, settings, passes = _read_sample(sample, path, field, n)
        is_same = digest(prompt) == prompts.get(question) and settings.get("max_gen_toks") in lengths
        if question in prompts and not is_same:
            raise InputError(
                f"{path} has other prompts or another max_gen_toks than the test store; run both with the same chat "
                f"template, exemplars and gen_kwargs"
            )
        rows[question] = passes
    if not rows:
        raise InputError(f"{path} has no samples")
    missing = set(outcomes.texts) - rows.keys()
    if missing:
        raise InputError(
            f"{path} lacks {len(missing)} of the test store's {len(outcomes.texts)} questions, "
            f"e.g. {min(missing)[:60]!r}; `lmeval-prune questions` prints them for lm_eval's --samples"
        )
    values = np.array([rows[text] for text in outcomes.texts])
    if np.isnan(values.mean(0)).all():
        raise InputError(f"{path} has no k up to {n} with pass@k for all questions; complete a pass@N task")
    return Curve(name, "ordered" if _is_routed(settings) else "unbiased", values)


def _is_routed(settings: dict[str, Any]) -> bool:
    """Return whether tries have an order: those of a routed run, unless all are samples of one variant."""
    names = settings.get("attempts", settings.get("heads"))
    kinds = {Attempt.named(name).kind for name in names or ()}
    return len(kinds) > 1 or any(not temperature for _, temperature in kinds)


def _read_sample(sample: Any, path: str, field: str, n: int) -> tuple[str, str, dict[str, Any], np.ndarray]:
    """Return a sample's question, prompt, settings, and pass@k for k = 1 … n."""
    try:
        ((prompt, settings),) = [(request["arg_0"], request["arg_1"]) for request in sample["arguments"].values()]
        if not isinstance(settings, dict):
            raise TypeError("generation settings are not a dictionary")
        tries = len(sample["filtered_resps"][0])  # excludes the copies that pad ranks
        right = round(float(sample["pass@1_unbiased"]) * tries)
        if not 0 <= right <= tries:
            raise ValueError("more right tries than tries")
        ks = range(1, n + 1)
        if _is_routed(settings):
            passes = [float(sample.get(f"pass@{k}", np.nan)) for k in ks]
        else:
            passes = [pass_unbiased(tries, right, k) if k <= tries else np.nan for k in ks]
        return str(sample["doc"][field]), prompt, settings, np.array(passes)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError):
        raise InputError(
            f"{path} is not a samples file of a pass@N task; run e.g. prune_gsm8k_pass8 with --log_samples"
        ) from None
