"""Token Filtering of one sequence in one layer, token by token: the reference for all tests.

Names as in the paper (§3.2, §3.3): `s_k`, `s_v` similarities of a key and a value to their anchors, `alpha` the weight
of `s_k` (eq. 1), `S` the fused similarity (eq. 2), `T` the layer's threshold, `P` its target share of skipped tokens
(eq. 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import torch

from lmeval_prune.kernels.token_filter_memory import Rule


@dataclass
class State:
    """Memory of a layer for one sequence."""

    anchor_key: torch.Tensor | None = None  # (key-value heads, width); None before the first token
    anchor_value: torch.Tensor | None = None
    threshold: float = 1.0  # T
    count: int = 0  # tokens so far
    skipped: int = 0
    warmup_scores: list[float] = field(default_factory=list)  # similarities; the first token has none


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine of two vectors; 0 if one is zero."""
    length = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / length if length else 0.0


def similarity(key: torch.Tensor, value: torch.Tensor, state: State, rule: Rule) -> float | None:
    """Return S of a token from its keys and values, (key-value heads, width) each; eqs. 1 and 2; None of the first."""
    if rule.similarity == "random":
        if rule.phase == "all" and state.count < rule.warmup:
            return (-1.0) ** state.count
        return float(np.random.default_rng([rule.seed, rule.layer]).standard_normal(state.count + 1)[state.count])
    if state.anchor_key is None or state.anchor_value is None:
        return None
    cosines_k = [cosine(k, anchor) for k, anchor in zip(key, state.anchor_key, strict=True)]
    cosines_v = [cosine(v, anchor) for v, anchor in zip(value, state.anchor_value, strict=True)]
    heads = len(cosines_k)
    s_k, s_v = sum(cosines_k) / heads, sum(cosines_v) / heads
    if rule.similarity != "kv":
        return s_k if rule.similarity == "key" else s_v
    variance_k = sum((s - s_k) ** 2 for s in cosines_k) / heads
    variance_v = sum((s - s_v) ** 2 for s in cosines_v) / heads
    if variance_k + variance_v == 0:
        alpha = 0.5
    elif rule.fusion == "inverse_variance":  # 1/variance_k / (1/variance_k + 1/variance_v)
        alpha = variance_v / (variance_k + variance_v)
    else:  # 1/variance_v / (1/variance_k + 1/variance_v)
        alpha = variance_k / (variance_k + variance_v)
    return alpha * s_k + (1 - alpha) * s_v


def decide(key: torch.Tensor, value: torch.Tensor, state: State, rule: Rule, in_prompt: bool = False) -> bool:
    """Return whether a token skips; update the anchors, the counts and the threshold.

    With `phase="decode"`, tokens of the prompt never skip, and the counts begin after it.
    """
    warmup = 0 if rule.phase == "decode" else rule.warmup
    score, skip = similarity(key, value, state, rule), False
    if state.anchor_key is None or state.anchor_value is None:
        state.anchor_key, state.anchor_value = key, value
    else:
        state.anchor_key = rule.smoothing * state.anchor_key + (1 - rule.smoothing) * key
        state.anchor_value = rule.smoothing * state.anchor_value + (1 - rule.smoothing) * value
    if in_prompt:
        state.warmup_scores += [score] if score is not None else []
        if rule.similarity == "random":  # of mean 0 and variance 1
            state.threshold = -NormalDist().inv_cdf(rule.share)
        elif state.warmup_scores or rule.share in (0, 1):
            state.threshold = first_threshold(state.warmup_scores, rule.share)
        return False
    if state.count >= warmup:
        skip = score is not None and score > state.threshold
    elif score is not None:
        state.warmup_scores.append(score)
    state.count += 1
    state.skipped += skip
    if state.count == warmup and (state.warmup_scores or rule.share in (0, 1)):
        state.threshold = first_threshold(state.warmup_scores, rule.share)
    if state.count > warmup:
        state.threshold += rule.step_size * (state.skipped / state.count - rule.share)  # eq. 4
    return skip


def first_threshold(scores: list[float], share: float) -> float:
    """Return the value that `share` of a normal distribution with the mean and variance of `scores` exceeds."""
    if share in (0, 1):
        return math.inf if share == 0 else -math.inf
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / len(scores)
    return mean + math.sqrt(variance) * -NormalDist().inv_cdf(share)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    skipped: list[bool],
    scaling: float,
    window: int | None = None,
    keep_skipped_kv: bool = False,
) -> torch.Tensor:
    """Compute the causal attention of one sequence with skipped tokens, (tokens, heads, width of values).

    `query` is (heads, tokens, width); `key` and `value` are (key-value heads, tokens, width). Skipped tokens get zeros.
    """
    heads, tokens, _ = query.shape
    group = heads // key.shape[0]
    out = value.new_zeros(tokens, heads, value.shape[-1])
    for t in range(tokens):
        if skipped[t]:
            continue
        first = 0 if window is None else max(0, t - window + 1)
        visible = [u for u in range(first, t + 1) if keep_skipped_kv or not skipped[u]]
        for h in range(heads):
            scores = torch.stack([query[h, t] @ key[h // group, u] * scaling for u in visible])
            weights = scores.softmax(0)
            for weight, u in zip(weights, visible, strict=True):
                out[t, h] += weight * value[h // group, u]
    return out
