"""Output projection that does not read what masked heads put out, nor their slices of the weight. Formula: `naive`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmeval_prune.kernels.dispatch import INTERPRETED

# The first is the interpreter's; narrow ones are for decode steps, which are bound by reading the weight.
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (16, 32, 32, 4, 2),
        (16, 16, 128, 2, 4),
        (16, 32, 128, 4, 4),
        (16, 64, 64, 4, 4),
        (32, 64, 64, 4, 4),
        (64, 64, 64, 4, 3),
        (128, 64, 64, 4, 3),
        (128, 128, 32, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
    )
]


@triton.autotune(configs=CONFIGS[: 1 if INTERPRETED else None], key=["tokens_bucket", "outputs", "WIDTH"])
@triton.jit
def _project_kernel(
    x,  # (tokens, heads · WIDTH)
    weight,  # (outputs, heads · WIDTH)
    kept,  # (count)
    bias,  # (outputs)
    out,  # (tokens, outputs): out
    tokens,
    tokens_bucket,
    outputs,
    count,
    stride_x,
    stride_weight,
    stride_weight_column,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x += m.to(tl.int64)[:, None] * stride_x
    weight += n.to(tl.int64)[None, :] * stride_weight
    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    head = tl.load(kept)
    for step in range(count * steps):  # one loop, and heads known a step ahead: else loads would not overlap
        in_head = step % steps * BLOCK_K + k
        columns = head.to(tl.int64) * WIDTH + in_head
        a = tl.load(x + columns[None, :], mask=(m < tokens)[:, None] & (in_head < WIDTH)[None, :], other=0.0)
        b = tl.load(
            weight + columns[:, None] * stride_weight_column,
            mask=(in_head < WIDTH)[:, None] & (n < outputs)[None, :],
            other=0.0,
        )
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        y += tl.dot(a, b, input_precision="ieee")
        head = tl.load(kept + (step + 1) // steps, mask=step + 1 < count * steps, other=0)
    if BIAS:
        y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    out += m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, y.to(out.dtype.element_ty), mask=(m < tokens)[:, None] & (n < outputs)[None, :])


def project(
    x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, width: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Launch; arguments as in `ops.project`."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    tokens, outputs = len(flat), len(weight)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)

    def grid(chosen: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(outputs, chosen["BLOCK_N"]), triton.cdiv(tokens, chosen["BLOCK_M"])

    _project_kernel[grid](
        flat,
        weight,
        kept,
        kept if bias is None else bias,
        out,
        tokens,
        min(4096, triton.next_power_of_2(tokens)),
        outputs,
        len(kept),
        flat.stride(0),
        *weight.stride(),
        WIDTH=width,
        BIAS=bias is not None,
        UPCAST=INTERPRETED,
    )
    return out.view(*x.shape[:-1], outputs)
