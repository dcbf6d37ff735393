"""Distances of a run's answers from the baseline's: what accuracy does not show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax


class Response(NamedTuple):
    """What a run answered to a question, once."""

    prompt: str  # digest
    answer: str  # digest of the generated text, or of the likeliest choice; empty without either
    log_likelihoods: tuple[float, ...]  # of the choices, or of a text; empty for generated answers


Responses = Sequence[Sequence[Response]]  # to each question, one of each results file


def distances(base: Responses, compared: Responses | None = None) -> dict[str, float | None]:
    """Return the distances of a run's answers from the baseline's, as fields of a row.

    `same_answers` is the share of equal texts, or of equal likeliest choices. `choice_kld` is the mean KL divergence of
    the probabilities of the choices, in nats. `…_se` are their standard errors over questions. What the answers do not
    have (choices, a text) is left out. A question that was answered several times (seeds) counts with the mean over
    pairs of an answer of each run, of those pairs that answer the same prompt if there are any.

    Args:
        base: responses of the baseline.
        compared: responses of the run to the same questions; None compares the baseline's own with each other.
    """
    same, divergences, has_answers = [], [], False
    for first, second in zip(base, compared or base, strict=True):
        pairs = list(combinations(first, 2) if compared is None else product(first, second))
        pairs = [pair for pair in pairs if pair[0].prompt == pair[1].prompt] or pairs
        if not pairs:
            return {}
        has_answers |= any(one.answer or other.answer for one, other in pairs)
        same.append(float(np.mean([one.answer == other.answer for one, other in pairs])))
        own = [_divergence(one.log_likelihoods, other.log_likelihoods) for one, other in pairs]
        divergences += [float(np.mean(own))] if None not in own else []  # type: ignore[arg-type]
    return {
        **(_mean("same_answers", same) if has_answers else {}),
        **(_mean("choice_kld", divergences) if len(divergences) == len(same) > 0 else {}),
    }


def _mean(name: str, values: list[float]) -> dict[str, float | None]:
    """Return the mean and its standard error; the error of a single value is None."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_se": error}


def _divergence(first: tuple[float, ...], second: tuple[float, ...]) -> float | None:
    """Return Σ p (log p − log q) over the choices, p and q their normalised likelihoods; None without choices."""
    if not len(first) == len(second) > 1:
        return None
    p, q = log_softmax(np.array([first, second]), axis=1)
    return float(np.exp(p) @ (p - q)) if np.isfinite(p).all() and np.isfinite(q).all() else None
