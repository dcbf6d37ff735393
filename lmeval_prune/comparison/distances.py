"""Distances of a run's answers from the baseline's: what accuracy does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

Answers = Mapping[tuple[str, int], Mapping[str, Any]]


class Response(NamedTuple):
    """What a run answered to a question, once."""

    prompt: str  # digest
    answer: str  # digest of the generated text, or of the likeliest choice; empty without either
    log_likelihoods: list[float]  # of the choices, or of a text; empty for generated answers


def distances(base: Answers, compared: Answers | None = None) -> dict[str, float | None]:
    """Return the distances of a run's answers from the baseline's, as fields of a row.

    `same_answers` is the share of equal texts, or of equal likeliest choices. `choice_kld` is the mean KL divergence of
    the probabilities of the choices, in nats. `…_se` are their standard errors over questions. What the answers do not
    have (choices, a text) is left out. A question that was answered several times (seeds) counts with the mean over
    pairs of an answer of each run, of those pairs that answer the same prompt if there are any.

    Args:
        base: answers of the baseline, by task and number, with `responses`.
        compared: answers of the run to the same questions; None compares the baseline's own answers with each other.
    """
    pairs = [
        _pairs(answer["responses"], compared[key]["responses"] if compared else None) for key, answer in base.items()
    ]
    if not pairs or not all(pairs):
        return {}
    has_answers = any(first.answer or second.answer for question_pairs in pairs for first, second in question_pairs)
    divergences = [
        [_divergence(first.log_likelihoods, second.log_likelihoods) for first, second in question_pairs]
        for question_pairs in pairs
    ]
    mean_divergences = [float(np.mean(values)) for values in divergences if None not in values]  # type: ignore[arg-type]
    same = [
        float(np.mean([first.answer == second.answer for first, second in question_pairs])) for question_pairs in pairs
    ]
    return {
        **(_mean("same_answers", same) if has_answers else {}),
        **(_mean("choice_kld", mean_divergences) if len(mean_divergences) == len(pairs) else {}),
    }


def _pairs(first: Sequence[Response], second: Sequence[Response] | None) -> list[tuple[Response, Response]]:
    """Return the pairs of responses to a question that are compared; without `second`, those of `first` with others."""
    pairs = list(combinations(first, 2) if second is None else product(first, second))
    return [pair for pair in pairs if pair[0].prompt == pair[1].prompt] or pairs


def _mean(name: str, values: list[float]) -> dict[str, float | None]:
    """Return the mean and its standard error; the error of a single value is None."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_se": error}


def _divergence(first: list[float], second: list[float]) -> float | None:
    """Return Σ p (log p − log q) over the choices, p and q their normalised likelihoods; None without choices."""
    if not len(first) == len(second) > 1:
        return None
    p, q = log_softmax(np.array([first, second]), axis=1)
    return float(np.exp(p) @ (p - q)) if np.isfinite(p).all() and np.isfinite(q).all() else None
