"""Attention of one token per row over its stored keys.

    out = Σ_j softmax_j(scaling · q · k_j) v_j,    j < length, position_j > position_last − window

The kernel keeps a running maximum and sum of exponentials over blocks of keys. Products are accumulated in float32.
Rows have different lengths; storage behind a row's length is not read, nor is that of skipped rows.
"""

from __future__ import annotations

from functools import partial as bind

import torch
import triton
import triton.language as tl

from lmeval_prune.kernels.dispatch import INTERPRETED

_LOG2_E = tl.constexpr(1.4426950408889634)
MIN_KEYS_PER_SPLIT = 256  # shorter rows are not split
MAX_SPLITS = 64
TIMED_KEYS = 1024  # stored tokens of each row when configurations are timed
SMALL_GROUP = 4  # up to this number of query heads per key-value head, products without padding are tried

# Configurations of the decode kernel; the interpreter uses the first. `DOT`: products by `tl.dot`, which pads a group
# to 16 query heads; otherwise by sums, with few warps, since a sum over keys joins all warps. Hopper has room for more
# pipeline stages than Ampere.
DOT_CONFIGS = [
    triton.Config({"BLOCK_N": block, "DOT": True, "STAGES": None}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((32, 4, 2), (32, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
]
SUM_CONFIGS = [
    triton.Config({"BLOCK_N": block, "DOT": False, "STAGES": stages}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((16, 1, 2), (16, 1, 4), (16, 2, 3), (32, 4, 2), (32, 4, 3))
]
_CHOSEN: dict[tuple[object, ...], triton.Config] = {}  # the fastest configuration, by what `_configuration` says


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:  # tanh(x) = 2 sigmoid(2x) − 1
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@triton.jit
def _decode_kernel(
    query,  # (rows, heads, WIDTH)
    keys,  # (rows, key-value heads, capacity, WIDTH)
    values,  # (rows, key-value heads, capacity, WIDTH_V)
    lengths,  # (rows)
    skipped,  # (rows) or None
    positions,  # (rows, capacity) or None
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
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    padded: tl.constexpr = 16 if DOT and BLOCK_G < 16 else BLOCK_G
    # Offsets in 64 bits: storage may have more than 2^31 numbers, also in a row if a stride is large.
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    g, d, dv = tl.arange(0, padded), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    head = kv_head * GROUP + g
    is_value = (g < GROUP)[:, None] & (dv < WIDTH_V)[None, :]
    keys += row * stride_key_row + kv_head * stride_key_head
    values += row * stride_value_row + kv_head * stride_value_head
    length = tl.load(lengths + row).to(tl.int32)
    attends = length >= 0
    if skipped is not None:
        attends = tl.load(skipped + row) == 0

    first = 0
    if WINDOW:  # a window never covers more tokens than its width
        first = tl.maximum(length - window, 0)
    if WINDOW and positions is not None:
        positions += row * stride_position_row
        last_position = tl.load(positions + length - 1, mask=length > 0, other=0).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK_N) * BLOCK_N
    begin = first + split * part
    end = tl.where(attends, tl.minimum(begin + part, length), begin)

    is_query = (g < GROUP)[:, None] & (d < WIDTH)[None, :]
    query += row * stride_query_row + head[:, None] * stride_query_head + d[None, :]
    q = tl.load(query, mask=is_query, other=0.0)
    if UPCAST or not DOT:
        q = q.to(tl.float32)
    maximum = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    sums = tl.zeros([padded, BLOCK_DV], tl.float32)
    for block in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        n = block + tl.arange(0, BLOCK_N)
        visible, offsets = n < end, n.to(tl.int64)
        if WINDOW and positions is not None:
            position = tl.load(positions + n, mask=visible, other=0).to(tl.int32)
        v_mask = visible[:, None] & (dv < WIDTH_V)[None, :]
        v = tl.load(values + offsets[:, None] * stride_value + dv[None, :], mask=v_mask, other=0.0)
        if DOT:
            is_key = visible[None, :] & (d < WIDTH)[:, None]
            k = tl.load(keys + offsets[None, :] * stride_key + d[:, None], mask=is_key, other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee") * scale
        else:
            is_key = visible[:, None] & (d < WIDTH)[None, :]
            k = tl.load(keys + offsets[:, None] * stride_key + d[None, :], mask=is_key, other=0.0).to(tl.float32)
            v = v.to(tl.float32)
            scores = tl.sum(q[:, None, :] * k[None, :, :], 2) * scale
        if WINDOW and positions is not None:
            visible = visible & (position > last_position - window)
        scores = tl.where(visible[None, :], _capped(scores, softcap, SOFTCAP), float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        if DOT:
            sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
        maximum = higher
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        out += (row * heads + head)[:, None] * WIDTH_V + dv[None, :]
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
    out,  # (rows, heads, WIDTH_V): out
    SPLITS: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row, heads = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    at = row * heads + tl.program_id(1)
    s, dv = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    log_sums = tl.load(partial_log + at * SPLITS + s)
    highest = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - tl.where(highest == float("-inf"), 0.0, highest))
    parts = tl.load(
        partial + (at * SPLITS + s)[:, None] * WIDTH_V + dv[None, :], mask=(dv < WIDTH_V)[None, :], other=0.0
    )
    total = tl.sum(weights, 0)
    sums = tl.sum(weights[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at * WIDTH_V + dv, sums.to(out.dtype.element_ty), mask=dv < WIDTH_V)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    *,
    skipped: torch.Tensor | None = None,
    window: int | None = None,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    config: triton.Config | None = None,
) -> torch.Tensor:
    """Compute the attention of one token per row over the stored tokens, the last of which is itself.

    Shapes are not checked: a kernel would read other rows' memory.

    Args:
        query: (rows, heads, width).
        keys, values: (rows, key-value heads, capacity, width), without gaps; only a row's length is read.
        lengths: number of stored tokens of each row, (rows,).
        scaling: factor of the scores.
        skipped: true if a row's token does not attend, (rows,).
        window: number of text tokens that a token attends to, including itself; None: all.
        positions: text positions of the stored tokens, increasing, (rows, capacity); None: a token's offset.
        softcap: bound of the scores.
        splits: number of programs that share a row's keys, a power of two; None: enough to fill the device.
        config: None: the fastest.

    Returns:
        (rows, heads, width of values); zero for rows that are skipped or empty.
    """
    query, keys, values = (_contiguous_vectors(tensor) for tensor in (query, keys, values))
    positions = None if positions is None else _contiguous_vectors(positions)
    (rows, heads, width), (kv_heads, capacity, width_v) = query.shape, values.shape[1:]
    splits = splits or _splits(rows * kv_heads, min(capacity, window or capacity), query.device)
    config = config or _configuration(query, keys, values, splits)
    out = torch.empty(rows, heads, width_v, dtype=query.dtype, device=query.device)
    partial = partial_log = out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, width_v, dtype=torch.float32, device=query.device)
        partial_log = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    block_dv = max(16, triton.next_power_of_2(width_v))
    _decode_kernel[(rows, kv_heads, splits)](
        query=query,
        keys=keys,
        values=values,
        lengths=lengths.contiguous(),
        skipped=None if skipped is None else skipped.contiguous().view(torch.uint8),
        positions=positions,
        out=out,
        partial=partial,
        partial_log=partial_log,
        scale=scaling * _LOG2_E.value,
        softcap=(softcap or 1.0) * _LOG2_E.value,
        window=window or 0,
        stride_query_row=query.stride(0),
        stride_query_head=query.stride(1),
        stride_key_row=keys.stride(0),
        stride_key_head=keys.stride(1),
        stride_key=keys.stride(2),
        stride_value_row=values.stride(0),
        stride_value_head=values.stride(1),
        stride_value=values.stride(2),
        stride_position_row=0 if positions is None else positions.stride(0),
        GROUP=heads // kv_heads,
        BLOCK_G=triton.next_power_of_2(heads // kv_heads),
        WIDTH=width,
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        WIDTH_V=width_v,
        BLOCK_DV=block_dv,
        SPLITS=splits,
        WINDOW=window is not None,
        SOFTCAP=bool(softcap),
        UPCAST=INTERPRETED,  # the interpreter's bfloat16 products are wrong
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **config.kwargs,
    )
    if splits > 1:
        _join_kernel[(rows, heads)](partial, partial_log, out, SPLITS=splits, WIDTH_V=width_v, BLOCK_DV=block_dv)
    return out


def _contiguous_vectors(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _splits(programs: int, keys: int, device: torch.device) -> int:
    """Return the power of two that gives each processor two programs, if there are enough keys."""
    is_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
    splits = min(2 * processors // programs, triton.cdiv(keys, MIN_KEYS_PER_SPLIT), MAX_SPLITS)
    return 1 << (splits.bit_length() - 1) if splits > 1 else 1


def _configuration(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, splits: int) -> triton.Config:
    """Return the fastest configuration for this dtype and these widths, timed at the first call."""
    if not query.is_cuda:
        return DOT_CONFIGS[0]
    group = query.shape[1] // keys.shape[1]
    case = (query.device, query.dtype, group, keys.shape[-1], values.shape[-1], splits > 1)
    if case not in _CHOSEN:
        lengths = torch.full((len(query),), min(keys.shape[2], TIMED_KEYS), device=query.device)

        def milliseconds(config: triton.Config) -> float:
            launch = bind(decode, query, keys, values, lengths, 1.0, splits=splits, config=config)
            try:
                return float(triton.testing.do_bench(launch, warmup=10, rep=40, return_mode="median"))
            except triton.runtime.errors.OutOfResources:
                return float("inf")

        _CHOSEN[case] = min(DOT_CONFIGS + (SUM_CONFIGS if group <= SMALL_GROUP else []), key=milliseconds)
    return _CHOSEN[case]
