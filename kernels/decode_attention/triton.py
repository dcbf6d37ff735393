"""Attention of one token per row over the stored keys of its row. Formulas: `naive`.

    out = Σ_j softmax_j(scaling · q · k_j) v_j,    j < length,  position_j > position_(length − 1) − window

The kernel keeps a running maximum and sum of exponentials over blocks of keys. Products are accumulated in float32.
Rows have different lengths; storage behind a row's length is not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmeval_prune.kernels.dispatch import INTERPRETED

_LOG2_E = tl.constexpr(1.4426950408889634)
MIN_KEYS_PER_SPLIT = 256  # shorter rows are not split
MAX_SPLITS = 64

# The interpreter uses the first. Hopper has room for more pipeline stages than Ampere.
DECODE_CONFIGS = [
    triton.Config({"BLOCK_N": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((32, 4, 2), (32, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
]


@triton.autotune(configs=DECODE_CONFIGS[: 1 if INTERPRETED else None], key=["GROUP", "WIDTH", "WIDTH_V", "SPLITS"])
@triton.jit
def _decode_kernel(
    query,  # (rows, heads, WIDTH)
    keys,  # (rows, key-value heads, capacity, WIDTH)
    values,  # (rows, key-value heads, capacity, WIDTH_V)
    lengths,  # (rows)
    skipped,  # (rows)
    positions,  # (rows, capacity)
    out,  # (rows, heads, WIDTH_V): out, if SPLITS is 1
    partial,  # (rows, heads, SPLITS, WIDTH_V): out, otherwise
    partial_log,  # (rows, heads, SPLITS): out, otherwise
    scale,
    softcap,
    window,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_key,
    stride_value_row,
    stride_value_head,
    stride_value,
    stride_position_row,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    g, d, dv = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    head = kv_head * GROUP + g
    is_value = (g < GROUP)[:, None] & (dv < WIDTH_V)[None, :]
    out += (row * heads + head)[:, None] * WIDTH_V + dv[None, :]
    if tl.load(skipped + row) != 0:
        if SPLITS == 1:
            tl.store(out, tl.zeros([BLOCK_G, BLOCK_DV], out.dtype.element_ty), mask=is_value)
        return

    length = tl.load(lengths + row).to(tl.int32)
    first = 0
    if WINDOW:  # a window never covers more stored tokens than its width
        first = tl.maximum(length - window, 0)
        query_position = tl.load(positions + row * stride_position_row + length - 1, mask=length > 0, other=0).to(
            tl.int32
        )
    part = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N
    begin = first + split * part
    end = tl.minimum(begin + part, length)

    is_query = (g < GROUP)[:, None] & (d < WIDTH)[None, :]
    query += row * stride_query_row + head[:, None] * stride_query_head + d[None, :]
    q = tl.load(query, mask=is_query, other=0.0)
    keys += row * stride_key_row + kv_head * stride_key_head
    values += row * stride_value_row + kv_head * stride_value_head
    if UPCAST:
        q = q.to(tl.float32)
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for block in range(begin, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        visible = n < end
        is_key = visible[None, :] & (d < WIDTH)[:, None]
        k = tl.load(keys + n[None, :] * stride_key + d[:, None], mask=is_key, other=0.0)
        v_mask = visible[:, None] & (dv < WIDTH_V)[None, :]
        v = tl.load(values + n[:, None] * stride_value + dv[None, :], mask=v_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        if WINDOW:
            position = tl.load(positions + row * stride_position_row + n, mask=visible, other=0).to(tl.int32)
            visible = visible & (position > query_position - window)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:  # tanh(x) = 2 sigmoid(2x) − 1
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = higher
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out, sums.to(out.dtype.element_ty), mask=is_value)
    else:
        at = (row * heads + head) * SPLITS + split
        tl.store(partial + at[:, None] * WIDTH_V + dv[None, :], sums, mask=is_value)
        log_sum = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_log + at, log_sum, mask=g < GROUP)


@triton.jit
def _join_kernel(
    partial,  # (rows, heads, SPLITS, WIDTH_V)
    partial_log,  # (rows, heads, SPLITS)
    skipped,  # (rows)
    out,  # (rows, heads, WIDTH_V): out
    SPLITS: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row, heads = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    at = row * heads + tl.program_id(1)
    s, dv = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    out += at * WIDTH_V + dv
    if tl.load(skipped + row) != 0:
        tl.store(out, tl.zeros([BLOCK_DV], out.dtype.element_ty), mask=dv < WIDTH_V)
        return
    log_sums = tl.load(partial_log + at * SPLITS + s)
    highest = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - tl.where(highest == float("-inf"), 0.0, highest))
    parts = tl.load(
        partial + (at * SPLITS + s)[:, None] * WIDTH_V + dv[None, :], mask=(dv < WIDTH_V)[None, :], other=0.0
    )
    total = tl.sum(weights, 0)
    sums = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out, sums.to(out.dtype.element_ty), mask=dv < WIDTH_V)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    *,
    slots: torch.Tensor | None,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    skipped: torch.Tensor | None,
    keep: torch.Tensor | None,
    masks: torch.Tensor | None,
    window: int | None,
    positions: torch.Tensor | None,
    softcap: float | None,
    splits: int | None,
) -> torch.Tensor:
    """Launch the kernels; arguments as in `ops.decode`."""
    query, keys, values = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, keys, values)
    )
    rows, heads, width = query.shape
    kv_heads, capacity, width_v = values.shape[1:]
    group = heads // kv_heads
    splits = splits or _splits(rows * kv_heads, min(capacity, window or capacity), query.device)
    out = torch.empty(rows, heads, width_v, dtype=query.dtype, device=query.device)
    partial, partial_log = out, out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, width_v, dtype=torch.float32, device=query.device)
        partial_log = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    block_dv = max(16, triton.next_power_of_2(width_v))
    skipped = torch.zeros_like(lengths, dtype=torch.bool) if skipped is None else skipped
    lengths, skipped = lengths.contiguous(), skipped.contiguous().view(torch.uint8)
    _decode_kernel[(rows, kv_heads, splits)](
        query,
        keys,
        values,
        lengths,
        skipped,
        lengths if positions is None else positions,
        out,
        partial,
        partial_log,
        scaling * _LOG2_E.value,
        (softcap or 1.0) * _LOG2_E.value,
        window or 0,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if positions is None else positions.stride(0),
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        WIDTH_V=width_v,
        BLOCK_DV=block_dv,
        SPLITS=splits,
        WINDOW=window is not None,
        SOFTCAP=bool(softcap),
        UPCAST=INTERPRETED,  # the interpreter's bfloat16 products are wrong
    )
    if splits > 1:
        _join_kernel[(rows, heads)](
            partial, partial_log, skipped, out, SPLITS=splits, WIDTH_V=width_v, BLOCK_DV=block_dv
        )
    return out


def _splits(programs: int, keys: int, device: torch.device) -> int:
    """Return the power of two that gives each processor two programs, if there are enough keys."""
    is_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
    splits = min(2 * processors // programs, triton.cdiv(keys, MIN_KEYS_PER_SPLIT), MAX_SPLITS)
    return 1 << (splits.bit_length() - 1) if splits > 1 else 1
