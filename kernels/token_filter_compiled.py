"""Token Filtering's decisions on a CPU: loops over tokens, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lmeval_prune.kernels.compilation import njit
from lmeval_prune.kernels.token_filter_memory import COUNT, DEVIATIONS, MEAN, SCORED, SKIPPED, THRESHOLD


@njit()
def _cosine(a: Any, b: Any) -> float:
    product = squares_a = squares_b = 0.0
    for i in range(a.shape[0]):
        product += a[i] * b[i]
        squares_a += a[i] * a[i]
        squares_b += b[i] * b[i]
    length = math.sqrt(squares_a) * math.sqrt(squares_b)
    return product / length if length > 0 else 0.0


@njit()
def _similarity(key: Any, value: Any, anchor_key: Any, anchor_value: Any, kind: int, as_printed: bool) -> float:
    """Return S of a token (eqs. 1, 2). `kind`: 0 keys and values, 1 keys, 2 values."""
    heads = key.shape[0]
    cosines_k, cosines_v = np.zeros(heads), np.zeros(heads)
    for h in range(heads):
        if kind != 2:
            cosines_k[h] = _cosine(key[h], anchor_key[h])
        if kind != 1:
            cosines_v[h] = _cosine(value[h], anchor_value[h])
    s_k, s_v = cosines_k.mean(), cosines_v.mean()
    if kind == 1:
        return float(s_k)
    if kind == 2:
        return float(s_v)
    variance_k = variance_v = 0.0
    for h in range(heads):
        variance_k += (cosines_k[h] - s_k) ** 2
        variance_v += (cosines_v[h] - s_v) ** 2
    total = variance_k + variance_v
    alpha = 0.5 if total == 0 else (variance_k if as_printed else variance_v) / total
    return float(alpha * s_k + (1 - alpha) * s_v)


@njit()
def similarities(
    key: Any,
    value: Any,
    valid: Any,
    started: Any,
    anchor_key: Any,
    anchor_value: Any,
    smoothing: float,
    kind: int,
    as_printed: bool,
) -> Any:
    """Return `token_filter.similarities`, computed on float64 arrays."""
    rows, heads, tokens, _ = key.shape
    scores = np.full((rows, tokens), np.nan)
    for row in range(rows):
        for t in range(tokens):
            if not valid[row, t]:
                continue
            k, v = key[row, :, t], value[row, :, t]
            if started[row]:
                scores[row, t] = _similarity(k, v, anchor_key[row], anchor_value[row], kind, as_printed)
            decay = smoothing if started[row] else 0.0
            for h in range(heads):
                for i in range(k.shape[1]):
                    anchor_key[row, h, i] = decay * anchor_key[row, h, i] + (1 - decay) * k[h, i]
                for i in range(v.shape[1]):
                    anchor_value[row, h, i] = decay * anchor_value[row, h, i] + (1 - decay) * v[h, i]
            started[row] = True
    return scores


@njit()
def thresholds(
    scores: Any, valid: Any, states: Any, share: float, step_size: float, warmup: int, quantile: float
) -> Any:
    """Return which tokens skip, (rows, tokens), by eq. 4; update the states.

    `scores` are similarities (rows, tokens), NaN for the first token; `valid` (rows, tokens) is false for padding;
    `states` has `COLUMNS` for each row, or one row that all rows share, token by token.
    """
    rows, tokens = scores.shape
    skipped = np.zeros((rows, tokens), dtype=np.bool_)
    for t in range(tokens):
        for row in range(rows):
            if not valid[row, t]:
                continue
            state, score, skip = states[row if states.shape[0] > 1 else 0], scores[row, t], False
            if state[COUNT] >= warmup:
                skip = score > state[THRESHOLD]
            elif not math.isnan(score):
                state[SCORED] += 1
                deviation = score - state[MEAN]
                state[MEAN] += deviation / state[SCORED]
                state[DEVIATIONS] += deviation * (score - state[MEAN])
            state[COUNT] += 1
            state[SKIPPED] += skip
            if state[COUNT] == warmup and math.isinf(quantile):
                state[THRESHOLD] = quantile
            elif state[COUNT] == warmup and state[SCORED] > 0:
                state[THRESHOLD] = state[MEAN] + math.sqrt(state[DEVIATIONS] / state[SCORED]) * quantile
            if state[COUNT] > warmup:
                state[THRESHOLD] += step_size * (state[SKIPPED] / state[COUNT] - share)
            skipped[row, t] = skip
    return skipped
