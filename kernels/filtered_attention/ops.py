"""Attention of the tokens that do not skip, over stored keys and values."""

from __future__ import annotations

import torch

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.dispatch import launch_on, too_wide, unsupported_tensors, use_kernel
from lmeval_prune.kernels.filtered_attention import naive


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    skipped: torch.Tensor,
    scaling: float,
    window: int | None = None,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Compute the attention of one token per row over the stored tokens of the row, the last of which is itself.

    Args:
        query: (rows, heads, width).
        keys, values: (rows, key-value heads, capacity, width), without gaps; only a row's length is read.
        lengths: number of stored tokens, (rows,).
        skipped: true if the row's token does not attend, (rows,).
        scaling: factor of the scores.
        window: number of text tokens that a token attends to, including itself; None: all.
        positions: text positions of stored tokens, increasing, (rows, capacity); needed with a window.
        softcap: bound of the scores.
        splits: number of programs that share a row's keys, a power of two; None: enough to fill the device.

    Returns:
        (rows, heads, width of values); zero for rows that are skipped or empty.

    Raises:
        InputError: shapes do not fit.
    """
    if keys.shape[:3] != values.shape[:3] or len(keys) != len(query) or query.shape[1] % max(1, keys.shape[1]):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, keys, values))
        raise InputError(f"queries, keys and values of shapes {shapes} do not fit; give as many rows and whole groups")
    if window is not None and positions is None:
        raise InputError(f"window={window} needs the positions of the stored tokens in the text")
    if not query.numel() or not keys.shape[2]:
        return query.new_zeros(*query.shape[:2], values.shape[-1])
    width = too_wide(query.shape[-1], values.shape[-1])
    if not use_kernel("filtered decode", query, unsupported_tensors(query, keys, values), width):
        return naive.decode(query, keys, values, lengths, skipped, scaling, window, positions, softcap)
    from lmeval_prune.kernels.filtered_attention import triton

    with launch_on(query):
        return triton.decode(query, keys, values, lengths, skipped, scaling, window, positions, softcap, splits)
