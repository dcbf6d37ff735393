"""Compute pass@k of all policies on the same questions, from outcome stores and lm-eval's samples files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from lmeval_prune.artefacts import digest, read_lines
from lmeval_prune.errors import InputError
from lmeval_prune.scoring.passes import pass_ordered, pass_unbiased
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
        kind: estimator of pass@k: `ordered`, `exact` (the expectation over random orders) or `unbiased`.
        values: probability that any of k tries is right, for k = 1 … N, shape (questions, N); NaN if unknown.
        heads: heads of each question's tries, if a policy chose them.
        is_bound: whether this is an upper bound, not a method.
    """

    name: str
    kind: str
    values: np.ndarray
    heads: Sequence[Sequence[str]] = ()
    is_bound: bool = False

    @property
    def mean(self) -> np.ndarray:
        """Mean pass@k over the questions, shape (N,)."""
        return self.values.mean(0)


def solved_cells(outcomes: Outcomes, heads: Sequence[str]) -> np.ndarray:
    """Return whether each head solves each question, shape (questions, heads); `InputError` if one is unknown."""
    part = outcomes.columns(heads)
    unknown = np.argwhere(np.isnan(part.z))
    if len(unknown):
        row, column = unknown[0]
        raise InputError(
            f"{len(unknown)} outcomes of the test store are unknown, e.g. {heads[column]} on question {row}; complete "
            f"the sweep over the whole pool"
        )
    return np.asarray(part.z == 1)


def policy_curve(name: str, policy: Policy, outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of a policy: try i takes its i-th head."""
    column_of = {head: i for i, head in enumerate(policy.pool)}
    solved = solved_cells(outcomes, policy.pool)
    heads = [order[:n] for order in policy.order(outcomes.texts)]
    tries = [[bool(row[column_of[head]]) for head in order] for row, order in zip(solved, heads, strict=True)]
    values = np.array([[float(pass_ordered(row, k)) for k in range(1, n + 1)] for row in tries])
    return Curve(name, "ordered", values, heads)


def oracle_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of the oracle: whether any head of the pool solves the question."""
    solved = solved_cells(outcomes, pool).any(axis=1, keepdims=True)
    return Curve(name, "ordered", np.repeat(solved.astype(float), n, axis=1), is_bound=True)


def random_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute the expected pass@k of m heads drawn without replacement, c of them right: 1 − C(m−c, k)/C(m, k)."""
    counts = solved_cells(outcomes, pool).sum(1)
    ks = [min(k, len(pool)) for k in range(1, n + 1)]
    return Curve(name, "exact", np.array([[pass_unbiased(len(pool), int(c), k) for k in ks] for c in counts]))


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
    return Curve(name, "ordered" if "heads" in settings else "unbiased", values)


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
        if "heads" in settings:
            passes = [float(sample.get(f"pass@{k}", np.nan)) for k in ks]
        else:
            passes = [pass_unbiased(tries, right, k) if k <= tries else np.nan for k in ks]
        return str(sample["doc"][field]), prompt, settings, np.array(passes)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError):
        raise InputError(
            f"{path} is not a samples file of a pass@N task; run e.g. prune_gsm8k_pass8 with --log_samples"
        ) from None
