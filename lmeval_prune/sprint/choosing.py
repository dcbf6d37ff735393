"""Choose one of N tries without the gold answer, and score the choice: accuracy at N.

    majority     the answer of most tries
    weighted     the answer with the largest sum of the tries' weights: probabilities that a variant solves the question
    variants     as majority, but each variant has one vote, shared by its tries that have an answer
    likelihood   the answer of largest mean log-probability of its tokens, under the unpruned model

Tries without an answer have no vote. Of several answers with most votes, the one that was given first is chosen; the
share of questions with such a tie is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import Attempt
from lmeval_prune.reporting.tables import markdown
from lmeval_prune.scoring.equality import same_text
from lmeval_prune.scoring.passes import Vote, vote
from lmeval_prune.scoring.passes import attempts as attempt_counts
from lmeval_prune.sprint.curves import Samples, tries_of, unknown_outcomes
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.outcomes import Outcomes
from lmeval_prune.sprint.policies import Policy
from lmeval_prune.tasks.results import EQUALITIES, GOLD_FORMS

RULES = ("majority", "weighted", "variants", "likelihood")
Same = Callable[[str, str], bool]


@dataclass(frozen=True)
class Strategy:
    """A policy with a mix, and its name in a report."""

    name: str
    policy: Policy
    mix: Mix


@dataclass(frozen=True)
class Choices:
    """Accuracy at N of a rule.

    Attributes:
        values: share of replicates in which the chosen try is right, for N = 1 …, shape (questions, N).
        ties: share of replicates in which another answer has as many votes, same shape.
        replicates: number of disjoint sets of samples that were evaluated, for each N; 1 for greedy tries.
    """

    values: np.ndarray
    ties: np.ndarray
    replicates: list[int]


def equality_of(tasks: Mapping[str, Mapping[str, Any]]) -> Same:
    """Return when two answers are the same, as the tasks' scoring says; as texts, if it is not of this package."""
    names = {str(task.get("scoring") or "") for task in tasks.values()}
    if len(names) > 1:
        raise InputError("votes need one way of scoring, the store has tasks with several; sweep them into own folders")
    name = next(iter(names), "")
    function = resolve_name(name) if name.startswith("lmeval_prune.tasks.results:") else None
    return cache(EQUALITIES.get(function, same_text))  # type: ignore[arg-type]


def extraction_note(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a report says of answers that are extracted by the form of the gold answer; empty for others."""
    gold_forms = {f"{function.__module__}:{function.__qualname__}" for function in GOLD_FORMS}
    if not any(str(task.get("scoring")) in gold_forms for task in tasks.values()):
        return ""
    return (
        "The scoring of this task extracts answers by the form of the gold answer (a number, a text, …), so these "
        "figures are not wholly without it."
    )


def choose(
    rule: str,
    attempts: Sequence[Attempt],
    answers: Sequence[str],
    same: Same,
    weights: Sequence[float] | None = None,
    logprobs: Sequence[float] | None = None,
) -> Vote:
    """Choose one of several tries by a rule.

    Args:
        rule: one of `RULES`.
        attempts: the tries.
        answers: their extracted answers; empty for none.
        same: whether two answers are the same.
        weights: of the tries, for `weighted`.
        logprobs: mean log-probabilities of the tries' answers, for `likelihood`.
    """
    if rule == "majority":
        return vote(answers, [1.0] * len(answers), same)
    if rule == "variants":
        counts = Counter(attempt.variant for attempt, answer in zip(attempts, answers, strict=True) if answer)
        shares = [1.0 / max(counts[attempt.variant], 1) for attempt in attempts]
        return vote(answers, shares, same)
    if rule == "weighted":
        assert weights is not None
        return vote(answers, weights, same)
    assert rule == "likelihood" and logprobs is not None
    answered = [i for i, answer in enumerate(answers) if answer]
    if not answered:
        return Vote(None, 0, False)
    winner = max(answered, key=lambda i: (logprobs[i], -i))
    tied = any(logprobs[i] == logprobs[winner] and not same(answers[i], answers[winner]) for i in answered)
    return Vote(winner, vote(answers, [1.0] * len(answers), same).distinct, tied)


def accuracy_at(
    policy: Policy, outcomes: Outcomes, ns: Sequence[int], mix: Mix | None = None, rules: Sequence[str] = RULES
) -> dict[str, Choices]:
    """Compute the accuracy at N of each rule for a policy's tries.

    If the store has more samples than the tries use, disjoint sets of samples are replicates, which are averaged.
    Rules whose weights or log-probabilities are not known are left out.

    Args:
        policy: orders the variants.
        outcomes: of the test questions, with extracted answers.
        ns: values of N.
        mix: makes the tries; by default each takes the next variant, greedily.
        rules: the rules.
    """
    votes = _Votes(outcomes)
    tries = tries_of(policy, outcomes, max(ns), mix)
    weights = policy.vote_weights(outcomes.texts, tries)
    is_available = {"weighted": weights is not None, "likelihood": votes.has_logprobs(tries)}
    same = equality_of(outcomes.tasks)
    result = {}
    for rule in (rule for rule in rules if is_available.get(rule, True)):
        values, replicates = np.zeros((2, len(tries), len(ns))), []
        for column, n in enumerate(ns):
            count = min(votes.replicates(i, row[:n]) for i, row in enumerate(tries))
            replicates.append(count)
            for i, row in enumerate(tries):
                try_weights = None if weights is None else weights[i, :n].tolist()
                chosen = [votes.vote(rule, i, row[:n], number, same, try_weights) for number in range(count)]
                values[:, i, column] = np.mean(chosen, axis=0)
        result[rule] = Choices(values[0], values[1], replicates)
    return result


def choice_rows(entries: Sequence[Strategy], outcomes: Outcomes, most: int) -> pd.DataFrame:
    """Return accuracy at N = 1, 2, 4, … of each policy and rule, a row each; empty without extracted answers."""
    columns = ["policy", "rule", "n", "accuracy", "ties", "replicates"]
    ns, rows = attempt_counts(most), []
    for entry in entries if outcomes.extracted is not None and (outcomes.extracted != "").any() else ():
        for rule, choices in accuracy_at(entry.policy, outcomes, ns, entry.mix).items():
            figures = zip(ns, choices.values.mean(0), choices.ties.mean(0), choices.replicates, strict=True)
            rows += [(entry.name, rule, *figure) for figure in figures]
    return pd.DataFrame(rows, columns=columns)


def choice_table(rows: pd.DataFrame) -> str:
    """Return a Markdown table of accuracy at N with the share of ties in brackets: a row for each policy and rule."""
    if rows.empty:
        return ""
    texts = [f"{row.accuracy:.3f} ({row.ties:.0%})" for row in rows.itertuples()]
    wide = rows.assign(text=texts, n="N = " + rows["n"].astype(str))
    order = wide[["policy", "rule"]].drop_duplicates()
    table = wide.pivot(index=["policy", "rule"], columns="n", values="text")[list(dict.fromkeys(wide["n"]))]
    return markdown(table.loc[list(order.itertuples(index=False, name=None))].reset_index(), ["policy", "rule"])


class _Votes:
    """Votes among the tries at the questions of a store."""

    def __init__(self, outcomes: Outcomes) -> None:
        if outcomes.extracted is None:
            raise InputError("choosing needs the extracted answers, and the store has none; sweep again")
        self.outcomes, self.extracted = outcomes, outcomes.extracted
        self.samples = Samples(outcomes)

    def replicates(self, row: int, tries: Sequence[Attempt]) -> int:
        """Return how many disjoint sets of samples a question has for some tries; 1 if all are greedy."""
        used = Counter(attempt.kind for attempt in tries if attempt.is_sampled)
        sets = {kind: len(self.samples.known_columns(row, kind)) // number for kind, number in used.items()}
        if few := [kind for kind, number in sets.items() if not number]:
            have, kind = len(self.samples.known_columns(row, few[0])), Attempt(*few[0])
            raise InputError(f"question {row} of the test store has {have} samples of {kind}, too few; sweep more")
        return min(sets.values(), default=1)

    def has_logprobs(self, tries: Sequence[Sequence[Attempt]]) -> bool:
        """Return whether the log-probabilities of all answers to choose among are known."""
        values = self.outcomes.logprobs
        if values is None:
            return False
        used = {attempt.kind for row in tries for attempt in row}
        kinds = [kind for kind in self.samples.columns if kind in used or Attempt(*kind).is_sampled]
        chosen = [column for kind in kinds for column in self.samples.columns[kind]]
        return not (np.isnan(values[:, chosen]) & (self.extracted[:, chosen] != "")).any()

    def vote(
        self, rule: str, row: int, tries: Sequence[Attempt], replicate: int, same: Same, weights: Sequence[float] | None
    ) -> tuple[float, float]:
        """Return whether the chosen try of a replicate is right, and whether there is a tie."""
        used = Counter(attempt.kind for attempt in tries)
        self.samples.check(kind for kind in used if not Attempt(*kind).is_sampled)

        def column(attempt: Attempt) -> int:
            """Return the column of a try: sample n is the n-th that is known, after those of earlier replicates."""
            if not attempt.is_sampled:
                return self.samples.columns[attempt.kind][0]
            return self.samples.known_columns(row, attempt.kind)[attempt.draw + replicate * used[attempt.kind]]

        columns = [column(attempt) for attempt in tries]
        z = self.outcomes.z[row, columns]
        if np.isnan(z).any():
            raise unknown_outcomes(self.outcomes.z[:, columns], [self.outcomes.pool[j] for j in columns], row)
        logprobs = None if self.outcomes.logprobs is None else self.outcomes.logprobs[row, columns].tolist()
        chosen = choose(rule, tries, list(self.extracted[row, columns]), same, weights, logprobs)
        return float(chosen.winner is not None and z[chosen.winner] == 1), float(chosen.is_tied)
