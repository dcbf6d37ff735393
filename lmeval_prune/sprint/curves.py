"""Compute pass@k of all policies on the same questions, from outcome stores and lm-eval's samples files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmeval_prune.artefacts import digest, read_lines
from lmeval_prune.errors import InputError
from lmeval_prune.sprint.outcomes import Outcomes, question_field
from lmeval_prune.sprint.router import Policy
from lmeval_prune.tasks.tries import pass_unbiased


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
    attempts: Sequence[Sequence[str]] = ()
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


def policy_curve(name: str, policy: Policy, outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of a policy whose try i is the i-th of its order."""
    attempts = [order[:n] for order in policy.order(outcomes.texts)]
    part = outcomes.columns(list(dict.fromkeys(attempt for row in attempts for attempt in row)))
    column_of = {attempt: column for column, attempt in enumerate(part.pool)}
    rows, columns = np.arange(len(attempts))[:, None], np.array([[column_of[a] for a in row] for row in attempts])
    values = np.maximum.accumulate(part.z[rows, columns] == 1, axis=1).astype(float)
    tokens = np.full(values.shape, np.nan) if part.tokens is None else part.tokens[rows, columns].cumsum(1)
    return Curve(name, "ordered", values, attempts, tokens=tokens if np.isfinite(tokens).all() else None)


def oracle_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of the oracle: whether any head of the pool solves the question."""
    solved = (outcomes.columns(pool).z == 1).any(axis=1, keepdims=True)
    return Curve(name, "ordered", np.repeat(solved.astype(float), n, axis=1), is_bound=True)


def random_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute the expected pass@k of m heads drawn without replacement, c of them right: 1 − C(m−c, k)/C(m, k)."""
    part = outcomes.columns(pool)
    ks = [min(k, len(pool)) for k in range(1, n + 1)]
    values = np.array([[pass_unbiased(len(pool), int(c), k) for k in ks] for c in (part.z == 1).sum(1)])
    tokens = part.tokens if part.tokens is not None and np.isfinite(part.tokens).all() else None
    return Curve(name, "exact", values, tokens=None if tokens is None else tokens.mean(1)[:, None] * np.array(ks))


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
    for sample in read_lines(path):
        (request,) = sample["arguments"].values()
        question, prompt, settings = str(sample["doc"][field]), request["arg_0"], request["arg_1"]
        is_same = digest(prompt) == prompts.get(question) and settings.get("max_gen_toks") in lengths
        if question in prompts and not is_same:
            raise InputError(
                f"{path} has other prompts or another max_gen_toks than the test store; run both with the same chat "
                f"template, exemplars and gen_kwargs"
            )
        ks = range(1, n + 1)
        if "attempts" in settings:
            passes = [float(sample.get(f"pass@{k}", np.nan)) for k in ks]
        else:
            tries = len(sample["filtered_resps"][0])  # excludes the copies that pad ranks
            right = round(float(sample["pass@1_unbiased"]) * tries)
            passes = [pass_unbiased(tries, right, k) if k <= tries else np.nan for k in ks]
        rows[question] = np.array(passes)
    missing = set(outcomes.texts) - rows.keys()
    if missing:
        raise InputError(
            f"{path} lacks {len(missing)} of the test store's {len(outcomes.texts)} questions, "
            f"e.g. {min(missing)[:60]!r}; `lmeval-prune questions` prints them for lm_eval's --samples"
        )
    values = np.array([rows[text] for text in outcomes.texts])
    return Curve(name, "ordered" if "attempts" in settings else "unbiased", values)
