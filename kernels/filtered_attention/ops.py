"""Attention of tokens that do not skip, over keys and values of tokens that were stored."""

from __future__ import annotations

import torch

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.dispatch import device_of, takes_kernel, too_wide, unlike
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
    """Compute the attention of one token a row, which sees all that is stored of its row, itself last.

    Args:
        query: (rows, heads, width).
        keys, values: (rows, key-value heads, capacity, width), no gaps; what lies behind a row's length is not read.
        lengths: (rows,), number of stored tokens, at most the capacity.
        skipped: (rows,), true where the token does not attend; nothing of such a row is read.
        scaling: of the scores.
        window: number of tokens of the text that a token sees, itself included; None for all.
        positions: of stored tokens in the text, (rows, capacity), rising; needed with a window.
        softcap: bound of the scores.
        splits: number of programs among which each row's keys are split, a power of two; None: as many as fill the
            device.

    Returns:
        (rows, heads, width of values); zero where a row is skipped or has nothing stored.

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
    if not takes_kernel("filtered decode", query, unlike(query, keys, values), width):
        return naive.decode(query, keys, values, lengths, skipped, scaling, window, positions, softcap)
    from lmeval_prune.kernels.filtered_attention import triton

    with device_of(query):
        return triton.decode(query, keys, values, lengths, skipped, scaling, window, positions, softcap, splits)
