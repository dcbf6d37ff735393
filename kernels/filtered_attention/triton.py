"""Attention of tokens that do not skip, over keys of tokens that were stored. Formulas: `naive`.

    out_i = Σ_j softmax_j(scaling · q_i · k_j) v_j,    j < end_i,  place_j > place_(end_i − 1) − window

Both kernels keep a running maximum and sum of exponentials while they pass over blocks of keys; products are
accumulated in float32. Rows have their own lengths; what lies behind them in the store is not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmeval_prune.kernels.dispatch import INTERPRETED, processors

_LOG2_E = tl.constexpr(1.4426950408889634)
KEYS_A_SPLIT = 256  # so many at least, before one row's keys are shared among programs
MOST_SPLITS = 64

# The first is the interpreter's. Hopper has room for more stages of loads in flight, Ampere for fewer.
DECODE_CONFIGS = [
    triton.Config({"BLOCK_N": block}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((32, 4, 2), (32, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
]
PREFILL_CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        (32, 32, 4, 2),
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    )
]


@triton.jit
def _load_block(
    keys,
    values,
    n,
    is_stored,
    d,
    dv,
    stride_key,
    stride_value,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Stored tokens n of a row and head: keys (D, N) and values (N, DV); zeros where nothing is stored."""
    k = tl.load(keys + n[None, :] * stride_key + d[:, None], mask=is_stored[None, :] & (d < WIDTH)[:, None], other=0.0)
    is_value = is_stored[:, None] & (dv < WIDTH_V)[None, :]
    v = tl.load(values + n[:, None] * stride_value + dv[None, :], mask=is_value, other=0.0)
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    return k, v


@triton.jit
def _attend_block(q, k, v, visible, maximum, total, found, scale, softcap, SOFTCAP: tl.constexpr):
    """One block of keys. q (M, D), k (D, N), v (N, DV), visible (M or 1, N); `scale` has log2(e) in it."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:  # tanh(x) = 2 sigmoid(2x) − 1
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maximum - base)
    total = total * shrink + tl.sum(weights, 1)
    found = found * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, found


@triton.autotune(configs=DECODE_CONFIGS[: 1 if INTERPRETED else None], key=["GROUP", "WIDTH", "WIDTH_V", "SPLITS"])
@triton.jit
def _decode_kernel(
    query,  # (rows, heads, WIDTH)
    keys,  # (rows, key-value heads, capacity, WIDTH)
    values,  # (rows, key-value heads, capacity, WIDTH_V)
    lengths,  # (rows)
    skipped,  # (rows)
    places,  # (rows, capacity)
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
    stride_place_row,
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
    if WINDOW:  # stored tokens are at most as many as the window is wide
        first = tl.maximum(length - window, 0)
        own = tl.load(places + row * stride_place_row + length - 1, mask=length > 0, other=0).to(tl.int32)
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
    found = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for block in range(begin, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        is_stored = n < end
        k, v = _load_block(keys, values, n, is_stored, d, dv, stride_key, stride_value, WIDTH, WIDTH_V, UPCAST)
        visible = is_stored
        if WINDOW:
            place = tl.load(places + row * stride_place_row + n, mask=is_stored, other=0).to(tl.int32)
            visible = is_stored & (place > own - window)
        maximum, total, found = _attend_block(q, k, v, visible[None, :], maximum, total, found, scale, softcap, SOFTCAP)
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(out, found.to(out.dtype.element_ty), mask=is_value)
    else:
        at = (row * heads + head) * SPLITS + split
        tl.store(partial + at[:, None] * WIDTH_V + dv[None, :], found, mask=is_value)
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
    found = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out, found.to(out.dtype.element_ty), mask=dv < WIDTH_V)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    skipped: torch.Tensor,
    scaling: float,
    window: int | None,
    places: torch.Tensor | None,
    softcap: float | None,
    splits: int | None,
) -> torch.Tensor:
    """Launch; arguments as in `ops.decode`."""
    query, keys, values = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, keys, values))
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
    lengths, skipped = lengths.contiguous(), skipped.contiguous().view(torch.uint8)
    _decode_kernel[(rows, kv_heads, splits)](
        query,
        keys,
        values,
        lengths,
        skipped,
        lengths if places is None else places,
        out,
        partial,
        partial_log,
        scaling * _LOG2_E.value,
        (softcap or 1.0) * _LOG2_E.value,
        window or 0,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if places is None else places.stride(0),
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        WIDTH_V=width_v,
        BLOCK_DV=block_dv,
        SPLITS=splits,
        WINDOW=window is not None,
        SOFTCAP=bool(softcap),
        UPCAST=INTERPRETED,  # whose products of bfloat16 are wrong
    )
    if splits > 1:
        _join_kernel[(rows, heads)](
            partial, partial_log, skipped, out, SPLITS=splits, WIDTH_V=width_v, BLOCK_DV=block_dv
        )
    return out


def _splits(programs: int, keys: int, device: torch.device) -> int:
    """A power of two that gives each processor two programs, if there are enough keys."""
    wanted = min(2 * processors(device) // programs, triton.cdiv(keys, KEYS_A_SPLIT), MOST_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


@triton.autotune(configs=PREFILL_CONFIGS[: 1 if INTERPRETED else None], key=["WIDTH", "WIDTH_V", "WINDOW"])
@triton.jit
def _prefill_kernel(
    query,  # (rows, heads, tokens, WIDTH)
    keys,  # (rows, key-value heads, capacity, WIDTH)
    values,  # (rows, key-value heads, capacity, WIDTH_V)
    chosen,  # (rows, room)
    counts,  # (rows)
    ends,  # (rows, room)
    places,  # (rows, capacity)
    out,  # (rows, tokens, heads, WIDTH_V): out
    scale,
    softcap,
    window,
    room,
    stride_query_row,
    stride_query_head,
    stride_query,
    stride_key_row,
    stride_key_head,
    stride_key,
    stride_value_row,
    stride_value_head,
    stride_value,
    stride_place_row,
    stride_out_row,
    stride_out,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    last = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    count = tl.load(counts + row)
    if last * BLOCK_M >= count:
        return
    i, d, dv = last * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    asks = i < count
    token = tl.load(chosen + row * room + i, mask=asks, other=0).to(tl.int64)
    end = tl.load(ends + row * room + i, mask=asks, other=0).to(tl.int32)
    query += row * stride_query_row + head * stride_query_head
    q = tl.load(
        query + token[:, None] * stride_query + d[None, :], mask=asks[:, None] & (d < WIDTH)[None, :], other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
    first = 0
    if WINDOW:
        places += row * stride_place_row
        first = tl.maximum(tl.min(tl.where(asks, end, 2147483647), 0) - window, 0) // BLOCK_N * BLOCK_N
        own = tl.load(places + end - 1, mask=end > 0, other=0).to(tl.int32)
    keys += row * stride_key_row + head // GROUP * stride_key_head
    values += row * stride_value_row + head // GROUP * stride_value_head
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    found = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    beyond = tl.max(end, 0)
    for block in range(first, beyond, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        is_stored = n < beyond
        k, v = _load_block(keys, values, n, is_stored, d, dv, stride_key, stride_value, WIDTH, WIDTH_V, UPCAST)
        visible = n[None, :] < end[:, None]
        if WINDOW:
            place = tl.load(places + n, mask=is_stored, other=0).to(tl.int32)
            visible = visible & (place[None, :] > own[:, None] - window)
        maximum, total, found = _attend_block(q, k, v, visible, maximum, total, found, scale, softcap, SOFTCAP)
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    out += row * stride_out_row + head * WIDTH_V
    tl.store(
        out + token[:, None] * stride_out + dv[None, :],
        found.to(out.dtype.element_ty),
        mask=asks[:, None] & (dv < WIDTH_V)[None, :],
    )


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    ends: torch.Tensor,
    scaling: float,
    window: int | None,
    places: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Launch; arguments as in `ops.prefill`."""
    query, keys, values = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, keys, values))
    rows, heads, tokens, width = query.shape
    width_v, room = values.shape[-1], chosen.shape[1]
    chosen, counts, ends = chosen.contiguous(), counts.contiguous(), ends.contiguous()
    out = torch.zeros(rows, tokens, heads, width_v, dtype=query.dtype, device=query.device)

    def grid(chosen_config: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(room, chosen_config["BLOCK_M"]), heads, rows

    _prefill_kernel[grid](
        query,
        keys,
        values,
        chosen,
        counts,
        ends,
        counts if places is None else places,
        out,
        scaling * _LOG2_E.value,
        (softcap or 1.0) * _LOG2_E.value,
        window or 0,
        room,
        *query.stride()[:3],
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if places is None else places.stride(0),
        *out.stride()[:2],
        GROUP=heads // keys.shape[1],
        WIDTH=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        WIDTH_V=width_v,
        BLOCK_DV=max(16, triton.next_power_of_2(width_v)),
        WINDOW=window is not None,
        SOFTCAP=bool(softcap),
        UPCAST=INTERPRETED,
    )
    return out
