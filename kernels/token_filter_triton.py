"""Token Filtering's decode step on a GPU, in one launch.

A program handles one row, or the whole batch if all rows share one state. There are no tiles to tune; the number of
warps follows from the size of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmeval_prune.kernels.token_filter_memory import COLUMNS, Memory

_COLUMNS = tl.constexpr(COLUMNS)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _threshold_step(
    score, is_token, has_score, threshold, count, skipped, scored, mean, deviations, share, step_size, warmup, quantile
):  # `token_filter_compiled.thresholds` without branches
    skip = has_score & (count >= warmup) & (score > threshold)
    is_scored = has_score & (count < warmup)
    deviation = score - mean
    scored = tl.where(is_scored, scored + 1, scored)
    mean = tl.where(is_scored, mean + deviation / tl.maximum(scored, 1.0), mean)
    deviations = tl.where(is_scored, deviations + deviation * (score - mean), deviations)
    count = tl.where(is_token, count + 1, count)
    skipped = tl.where(skip, skipped + 1, skipped)
    spread = tl.sqrt(deviations / tl.maximum(scored, 1.0))
    is_extreme = tl.abs(quantile) == _INFINITY
    first = tl.where(is_extreme, quantile, mean + spread * tl.where(is_extreme, 0.0, quantile))
    threshold = tl.where(is_token & (count == warmup) & ((scored > 0) | is_extreme), first, threshold)
    feedback = step_size * (skipped / tl.maximum(count, 1.0) - share)  # eq. 4
    threshold = tl.where(is_token & (count > warmup), threshold + feedback, threshold)
    return skip, threshold, count, skipped, scored, mean, deviations


@triton.jit
def _cosines(x, anchor):
    lengths = tl.sqrt(tl.sum(x * x, 1)) * tl.sqrt(tl.sum(anchor * anchor, 1))
    return tl.where(lengths > 0, tl.sum(x * anchor, 1) / tl.where(lengths > 0, lengths, 1.0), 0.0)


@triton.jit
def _mean_variance(s, is_head, HEADS: tl.constexpr):
    mean = tl.sum(s, 0) / HEADS
    off = tl.where(is_head, s - mean, 0.0)
    return mean, tl.sum(off * off, 0) / HEADS


@triton.jit
def _similarity(
    key, anchor_key, value, anchor_value, is_head, HEADS: tl.constexpr, KIND: tl.constexpr, AS_PRINTED: tl.constexpr
):
    s_k, variance_k = _mean_variance(_cosines(key, anchor_key), is_head, HEADS)
    s_v, variance_v = _mean_variance(_cosines(value, anchor_value), is_head, HEADS)
    if KIND == 1:
        score = s_k
    elif KIND == 2:
        score = s_v
    else:
        total_variance = variance_k + variance_v
        if AS_PRINTED:
            alpha = variance_k / tl.where(total_variance == 0, 1.0, total_variance)
        else:
            alpha = variance_v / tl.where(total_variance == 0, 1.0, total_variance)
        alpha = tl.where(total_variance == 0, 0.5, alpha)
        score = alpha * s_k + (1 - alpha) * s_v
    return score


@triton.jit(do_not_specialize=["position"])
def _decide_kernel(
    key,  # (rows, HEADS, 1, WIDTH)
    value,  # (rows, HEADS, 1, WIDTH_V)
    valid,  # (rows, 1)
    started,  # (rows)
    anchor_key,  # (rows, HEADS, WIDTH)
    anchor_value,  # (rows, HEADS, WIDTH_V)
    state,  # (rows or 1, COLUMNS)
    rule,  # share, step size, smoothing, warm-up, quantile
    absent,  # (rows): out, skipped tokens, and padding if STORE
    stored_keys,  # (rows, HEADS, capacity, WIDTH); this and the next four only if STORE
    stored_values,  # (rows, HEADS, capacity, WIDTH_V)
    positions,  # (rows, capacity)
    lengths,  # (rows)
    totals,  # (2): tokens, skipped
    position,
    rows,
    capacity,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_valid,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    KIND: tl.constexpr,
    AS_PRINTED: tl.constexpr,
    SHARED: tl.constexpr,
    STORE: tl.constexpr,
    KEEP_SKIPPED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64)
    last = first + 1
    states = state
    if SHARED:
        last = first + rows
    else:
        states += first * _COLUMNS
    threshold, count, skipped = tl.load(states), tl.load(states + 1), tl.load(states + 2)
    scored, mean, deviations = tl.load(states + 3), tl.load(states + 4), tl.load(states + 5)
    share, step_size, smoothing = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2)
    warmup, quantile = tl.load(rule + 3), tl.load(rule + 4)
    heads = tl.arange(0, BLOCK_H)[:, None]
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    is_key, is_value = (heads < HEADS) & (d < WIDTH), (heads < HEADS) & (dv < WIDTH_V)
    is_head = tl.arange(0, BLOCK_H) < HEADS
    of_key, of_value = heads * WIDTH + d, heads * WIDTH_V + dv
    has_token = first < 0
    for row in range(first, last):
        is_token = tl.load(valid + row * stride_valid) != 0
        has_token = has_token | is_token
        has_started = tl.load(started + row) != 0
        new_key = tl.load(key + row * stride_key_row + heads * stride_key_head + d, mask=is_key, other=0.0)
        new_value = tl.load(value + row * stride_value_row + heads * stride_value_head + dv, mask=is_value, other=0.0)
        anchors_k = anchor_key + row * HEADS * WIDTH + of_key
        anchors_v = anchor_value + row * HEADS * WIDTH_V + of_value
        old_k, old_v = tl.load(anchors_k, mask=is_key, other=0.0), tl.load(anchors_v, mask=is_value, other=0.0)
        k, v = new_key.to(old_k.dtype), new_value.to(old_v.dtype)

        score = _similarity(k, old_k, v, old_v, is_head, HEADS, KIND, AS_PRINTED).to(threshold.dtype)
        skip, threshold, count, skipped, scored, mean, deviations = _threshold_step(
            score, is_token, is_token & has_started,
            threshold, count, skipped, scored, mean, deviations, share, step_size, warmup, quantile,
        )  # fmt: skip

        if STORE:
            length = tl.load(lengths + row)
        tl.debug_barrier()  # every warp must have read the anchors and the length before they are overwritten
        decay = tl.where(has_started, smoothing, 0.0)
        decay_k, decay_v = decay.to(old_k.dtype), decay.to(old_v.dtype)
        if is_token:
            tl.store(anchors_k, decay_k * old_k + (1 - decay_k) * k, mask=is_key)
            tl.store(anchors_v, decay_v * old_v + (1 - decay_v) * v, mask=is_value)
            tl.store(started + row, 1)
        if STORE:
            stays = is_token
            if not KEEP_SKIPPED:
                stays = is_token & (skip == 0)
            if stays:
                at = row * HEADS * capacity + heads.to(tl.int64) * capacity + length
                tl.store(stored_keys + at * WIDTH + d, new_key, mask=is_key)
                tl.store(stored_values + at * WIDTH_V + dv, new_value, mask=is_value)
                tl.store(positions + row * capacity + length, position)
                tl.store(lengths + row, length + 1)
            tl.atomic_add(totals, is_token.to(tl.int64))
            tl.atomic_add(totals + 1, skip.to(tl.int64))
            tl.store(absent + row, (skip | (is_token == 0)).to(tl.uint8))
        else:
            tl.store(absent + row, skip.to(tl.uint8))
    if has_token:
        tl.store(states, threshold)
        tl.store(states + 1, count)
        tl.store(states + 2, skipped)
        tl.store(states + 3, scored)
        tl.store(states + 4, mean)
        tl.store(states + 5, deviations)


def decide(
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    memory: Memory,
    rule: torch.Tensor,
    kind: int,
    as_printed: bool,
    store: tuple[torch.Tensor, ...] | None = None,
    position: int = 0,
    keep_skipped: bool = False,
) -> torch.Tensor:
    """Launch one decode step; arguments as in `token_filter.decide_and_store`, with the rule as a tensor."""
    # the kernel computes their addresses from shapes alone
    assert all(tensor.is_contiguous() for tensor in (*memory.tensors, *(store or ())))
    rows, heads, _, width = key.shape
    width_v = value.shape[-1]
    key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (key, value))
    absent = torch.empty(rows, 1, dtype=torch.bool, device=key.device)
    stored = store or (memory.states,) * 5
    shared = memory.is_shared
    block_h, block_d, block_dv = (triton.next_power_of_2(size) for size in (heads, width, width_v))
    _decide_kernel[(1 if shared else rows,)](
        key,
        value,
        valid.view(torch.uint8),
        memory.started.view(torch.uint8),
        memory.anchor_key,
        memory.anchor_value,
        memory.states,
        rule,
        absent.view(torch.uint8),
        *stored,
        position,
        rows,
        stored[2].shape[1] if store else 0,
        *key.stride()[:2],
        *value.stride()[:2],
        valid.stride(0),
        HEADS=heads,
        WIDTH=width,
        WIDTH_V=width_v,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        KIND=kind,
        AS_PRINTED=as_printed,
        SHARED=shared,
        STORE=store is not None,
        KEEP_SKIPPED=keep_skipped,
        num_warps=min(8, max(1, block_h * max(block_d, block_dv) // 512)),
    )
    return absent
