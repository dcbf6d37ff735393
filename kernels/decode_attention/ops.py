"""Attention of one token per row over stored keys and values, one row a sequence."""

from __future__ import annotations

from typing import Any

import torch

from lmeval_prune.kernels.decode_attention import naive
from lmeval_prune.kernels.dispatch import (
    launch_on,
    needs_gradients,
    too_wide,
    unsupported_types,
    use_kernel,
)


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

    Returns:
        (rows, heads, width of values); zero for rows that are skipped or empty.
    """
    if not query.numel() or not keys.shape[2]:
        return query.new_zeros(*query.shape[:2], values.shape[-1])
    obstacles = (
        unsupported_types(query, keys, values),
        needs_gradients(query, keys, values),
        too_wide(query.shape[-1], values.shape[-1]),
    )
    options: dict[str, Any] = {"skipped": skipped, "window": window, "positions": positions, "softcap": softcap}
    if not use_kernel("decode attention", query, *obstacles):
        return naive.decode(query, keys, values, lengths, scaling, **options)
    from lmeval_prune.kernels.decode_attention import triton

    with launch_on(query):
        return triton.decode(query, keys, values, lengths, scaling, **options, splits=splits)
