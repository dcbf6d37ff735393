"""Token Filtering's decisions on a CPU: loops over tokens, compiled by numba, with the formulas of `naive`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from lmeval_prune.kernels.token_filter.state import DEVIATIONS, KNOWN, MEAN, SEEN, SKIPPED, THRESHOLD


@njit(cache=True)
def _cosine(a: Any, b: Any) -> float:
    product = squares_a = squares_b = 0.0
    for i in range(a.shape[0]):
        product += a[i] * b[i]
        squares_a += a[i] * a[i]
        squares_b += b[i] * b[i]
    length = math.sqrt(squares_a) * math.sqrt(squares_b)
    return product / length if length > 0 else 0.0


@njit(cache=True)
def _similarity(key: Any, value: Any, anchor_key: Any, anchor_value: Any, kind: int, as_printed: bool) -> float:
    """S of a token (eqs. 1, 2). `kind`: 0 keys and values, 1 keys, 2 values."""
    heads = key.shape[0]
    of_keys, of_values = np.zeros(heads), np.zeros(heads)
    for h in range(heads):
        if kind != 2:
            of_keys[h] = _cosine(key[h], anchor_key[h])
        if kind != 1:
            of_values[h] = _cosine(value[h], anchor_value[h])
    s_k, s_v = of_keys.mean(), of_values.mean()
    if kind == 1:
        return float(s_k)
    if kind == 2:
        return float(s_v)
    variance_k = variance_v = 0.0
    for h in range(heads):
        variance_k += (of_keys[h] - s_k) ** 2
        variance_v += (of_values[h] - s_v) ** 2
    both = variance_k + variance_v
    alpha = 0.5 if both == 0 else (variance_k if as_printed else variance_v) / both
    return float(alpha * s_k + (1 - alpha) * s_v)


@njit(cache=True)
def similarities(
    key: Any,
    value: Any,
    valid: Any,
    begun: Any,
    anchor_key: Any,
    anchor_value: Any,
    smoothing: float,
    kind: int,
    as_printed: bool,
) -> Any:
    """Compute the similarity of each token to its anchors, as `parallel.similarities` does, on arrays of float64."""
    rows, heads, tokens, _ = key.shape
    scores = np.full((rows, tokens), np.nan)
    for row in range(rows):
        for t in range(tokens):
            if not valid[row, t]:
                continue
            k, v = key[row, :, t], value[row, :, t]
            if begun[row]:
                scores[row, t] = _similarity(k, v, anchor_key[row], anchor_value[row], kind, as_printed)
            decay = smoothing if begun[row] else 0.0
            for h in range(heads):
                for i in range(k.shape[1]):
                    anchor_key[row, h, i] = decay * anchor_key[row, h, i] + (1 - decay) * k[h, i]
                for i in range(v.shape[1]):
                    anchor_value[row, h, i] = decay * anchor_value[row, h, i] + (1 - decay) * v[h, i]
            begun[row] = True
    return scores


@njit(cache=True)
def thresholds(
    scores: Any, valid: Any, states: Any, share: float, step_size: float, warmup: int, quantile: float
) -> Any:
    """Decide which tokens are skipped (eq. 4); update the states. Rows that share a state take turns, token by token.

    Args:
        scores: similarities (rows, tokens); not a number where a token has none, as the first one.
        valid: (rows, tokens), false for padding.
        states: (rows, `COLUMNS`), or one row for all; written.
        share, step_size, warmup, quantile: as in `Rule`.

    Returns:
        (rows, tokens), true where a token is skipped.
    """
    rows, tokens = scores.shape
    skipped = np.zeros((rows, tokens), dtype=np.bool_)
    for t in range(tokens):
        for row in range(rows):
            if not valid[row, t]:
                continue
            state, score, skip = states[row if states.shape[0] > 1 else 0], scores[row, t], False
            if state[SEEN] >= warmup:
                skip = score > state[THRESHOLD]
            elif not math.isnan(score):
                state[KNOWN] += 1
                deviation = score - state[MEAN]
                state[MEAN] += deviation / state[KNOWN]
                state[DEVIATIONS] += deviation * (score - state[MEAN])
            state[SEEN] += 1
            state[SKIPPED] += skip
            if state[SEEN] == warmup and math.isinf(quantile):
                state[THRESHOLD] = quantile
            elif state[SEEN] == warmup and state[KNOWN] > 0:
                state[THRESHOLD] = state[MEAN] + math.sqrt(state[DEVIATIONS] / state[KNOWN]) * quantile
            if state[SEEN] > warmup:
                state[THRESHOLD] += step_size * (state[SKIPPED] / state[SEEN] - share)
            skipped[row, t] = skip
    return skipped
