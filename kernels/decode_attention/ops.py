"""Attention of one token per row over stored keys and values, one row a sequence."""

from __future__ import annotations

from typing import Any

import torch

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.decode_attention import naive
from lmeval_prune.kernels.dispatch import (
    check_tensors,
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

    Raises:
        InputError: shapes, devices or types do not fit, or `window` or `splits` is out of range.
    """
    _check(query, keys, values, lengths, skipped, window, positions, splits)
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


def check_storage(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> None:
    """Refuse queries, storage and a window that do not fit each other; arguments as in `decode`."""
    if (query.dim(), keys.dim(), values.dim()) != (3, 4, 4):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, keys, values))
        raise InputError(f"queries, keys and values have shapes {shapes}; give tensors of 3, 4 and 4 dimensions")
    heads, kv_heads = query.shape[1], keys.shape[1]
    check_tensors(
        query.device,
        keys=(keys, (*keys.shape[:3], query.shape[2])),
        values=(values, (*keys.shape[:3], values.shape[3])),
    )
    if heads % kv_heads if kv_heads else heads:
        raise InputError(f"{heads} query heads are no whole groups of {kv_heads} key-value heads; repeat or drop some")
    if window is not None and window < 1:
        raise InputError(f"window is {window}; give at least 1 token, or None for all")


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    skipped: torch.Tensor | None,
    window: int | None,
    positions: torch.Tensor | None,
    splits: int | None,
) -> None:
    """Refuse arguments that do not fit: a kernel would read other rows' memory."""
    check_storage(query, keys, values, window)
    rows, capacity = len(query), values.shape[2]
    check_tensors(
        query.device,
        keys=(keys, (rows, *keys.shape[1:])),
        lengths=(lengths, (rows,)),
        skipped=(skipped, (rows,)),
        positions=(positions, (rows, capacity)),
    )
    for name, tensor in (("lengths", lengths), ("positions", positions)):
        if tensor is not None and tensor.is_floating_point():
            raise InputError(f"{name} has type {tensor.dtype}; give integers")
    if not all(tensor.is_floating_point() for tensor in (query, keys, values)):
        types = ", ".join(str(tensor.dtype) for tensor in (query, keys, values))
        raise InputError(f"queries, keys and values have types {types}; give floating-point numbers")
    if splits is not None and (splits < 1 or splits & (splits - 1)):
        raise InputError(f"splits is {splits}; give a power of two, or None")
