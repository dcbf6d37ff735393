"""Token Filtering's decisions on a CPU: a compiled loop over tokens, the same formulas as `naive`.

numba compiles it when it is first called, and keeps the result; no compiler is needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from lmeval_prune.kernels.token_filter.parallel import PADDING, SCORED
from lmeval_prune.kernels.token_filter.state import COLUMNS, DEVIATIONS, KNOWN, MEAN, SEEN, SKIPPED, THRESHOLD

__all__ = ["COLUMNS", "THRESHOLD", "decide", "thresholds"]


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
def threshold_step(
    state: Any, score: float, has_score: bool, share: float, step_size: float, warmup: int, quantile: float
) -> bool:
    """One token: whether it is skipped; moves counts and threshold on (eq. 4). `state`: a row of `COLUMNS` numbers."""
    skip = False
    if has_score:
        if state[SEEN] < warmup:
            state[KNOWN] += 1
            deviation = score - state[MEAN]
            state[MEAN] += deviation / state[KNOWN]
            state[DEVIATIONS] += deviation * (score - state[MEAN])
        else:
            skip = score > state[THRESHOLD]
    state[SEEN] += 1
    state[SKIPPED] += skip
    if state[SEEN] == warmup and math.isinf(quantile):
        state[THRESHOLD] = quantile
    elif state[SEEN] == warmup and state[KNOWN] > 0:
        state[THRESHOLD] = state[MEAN] + math.sqrt(state[DEVIATIONS] / state[KNOWN]) * quantile
    if state[SEEN] > warmup:
        state[THRESHOLD] += step_size * (state[SKIPPED] / state[SEEN] - share)
    return skip


@njit(cache=True)
def decide(
    key: Any,
    value: Any,
    valid: Any,
    begun: Any,
    anchor_key: Any,
    anchor_value: Any,
    state: Any,
    share: float,
    step_size: float,
    smoothing: float,
    warmup: int,
    quantile: float,
    kind: int,
    as_printed: bool,
) -> Any:
    """Which tokens are skipped; moves anchors and states on.

    Args:
        key, value: (rows, key-value heads, tokens, width).
        valid: (rows, tokens), false for padding.
        begun: (rows,), whether a row has had a token; written.
        anchor_key, anchor_value: (rows, key-value heads, width); written.
        state: (rows, `COLUMNS`), or (1, `COLUMNS`) where all rows share it; written. Rows take turns, token by token.
        share, step_size, smoothing, warmup: as in `naive.Rule`.
        quantile: of the standard normal distribution that `share` of it exceeds.
        kind, as_printed: as in `_similarity`.

    Returns:
        (rows, tokens), true where a token is skipped.
    """
    rows, heads, tokens, _ = key.shape
    skipped = np.zeros((rows, tokens), dtype=np.bool_)
    for t in range(tokens):
        for row in range(rows):
            if not valid[row, t]:
                continue
            own = state[row if state.shape[0] > 1 else 0]
            k, v = key[row, :, t], value[row, :, t]
            score = 0.0
            if begun[row]:
                score = _similarity(k, v, anchor_key[row], anchor_value[row], kind, as_printed)
            skipped[row, t] = threshold_step(own, score, begun[row], share, step_size, warmup, quantile)
            decay = smoothing if begun[row] else 0.0
            for h in range(heads):
                for i in range(k.shape[1]):
                    anchor_key[row, h, i] = decay * anchor_key[row, h, i] + (1 - decay) * k[h, i]
                for i in range(v.shape[1]):
                    anchor_value[row, h, i] = decay * anchor_value[row, h, i] + (1 - decay) * v[h, i]
            begun[row] = True
    return skipped


@njit(cache=True)
def thresholds(scores: Any, what: Any, state: Any, share: float, step_size: float, warmup: int, quantile: float) -> Any:
    """The decisions alone, from similarities (rows, tokens) and `what` as `parallel.similarities` gives them."""
    rows, tokens = scores.shape
    skipped = np.zeros((rows, tokens), dtype=np.bool_)
    for t in range(tokens):
        for row in range(rows):
            if what[row, t] != PADDING:
                own = state[row if state.shape[0] > 1 else 0]
                has_score = what[row, t] == SCORED
                skipped[row, t] = threshold_step(own, scores[row, t], has_score, share, step_size, warmup, quantile)
    return skipped
