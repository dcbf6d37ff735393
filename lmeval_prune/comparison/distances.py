"""Distances of a run's answers from the baseline's: what accuracy does not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import log_softmax

Answers = Mapping[tuple[str, int], Mapping[str, Any]]


def distances(base: Answers, own: Answers) -> dict[str, float | None]:
    """Return the distances of a run's answers from the baseline's, as fields of a row.

    `same_answers` is the share of equal texts, or of equal likeliest choices. `choice_kld` is the mean KL divergence of
    the probabilities of the choices, in nats. `…_se` are their standard errors over questions. What the answers do not
    have (choices, a text, an answer of a single run) is left out.

    Args:
        base: answers of the baseline, by task and number, with `answer_key` and `log_likelihoods`.
        own: answers of the run to the same questions.
    """
    pairs = [(base[key], own[key]) for key in base]
    keys = [(first.get("answer_key"), second.get("answer_key")) for first, second in pairs]
    same = [float(first == second) for first, second in keys if first is not None and second is not None]
    has_answers = len(same) == len(pairs) and any(map(any, keys))
    divergences = [_divergence(first.get("log_likelihoods"), second.get("log_likelihoods")) for first, second in pairs]
    known = [value for value in divergences if value is not None]
    return {
        **(_mean("same_answers", same) if has_answers else {}),
        **(_mean("choice_kld", known) if len(known) == len(pairs) else {}),
    }


def _mean(name: str, values: list[float]) -> dict[str, float | None]:
    """Return the mean and its standard error; the error of a single value is None."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_se": error}


def _divergence(first: list[float] | None, second: list[float] | None) -> float | None:
    """Return Σ p (log p − log q) over the choices, p and q their normalised likelihoods; None without choices."""
    if first is None or second is None or not len(first) == len(second) > 1:
        return None
    p, q = log_softmax(np.array([first, second]), axis=1)
    return float(np.exp(p) @ (p - q)) if np.isfinite(p).all() and np.isfinite(q).all() else None
