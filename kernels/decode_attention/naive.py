"""Attention of one token per row over stored keys: the reference for the kernel."""

from __future__ import annotations

from functools import reduce

import torch


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
) -> torch.Tensor:
    """Compute the attention of `ops.decode`. Query heads h·G … h·G+G−1 share key-value head h.

    Inputs of several dtypes are promoted; NaN in a row's query, or in its visible keys or values, is NaN in its output.
    """
    lengths = lengths.long()
    offsets = torch.arange(keys.shape[2], device=query.device).expand(len(query), -1)
    visible = offsets < lengths[:, None]
    if skipped is not None:
        visible &= ~skipped.bool()[:, None]
    if window is not None:
        token_positions = offsets if positions is None else positions
        last = token_positions.gather(1, (lengths - 1).clamp(min=0)[:, None])
        visible &= token_positions > last - window
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in (query, keys, values)))
    k, v = (tensor.to(dtype).masked_fill(~visible[:, None, :, None], 0) for tensor in (keys, values))
    scores = query.to(dtype).unflatten(1, (k.shape[1], -1)) @ k.mT * scaling  # (rows, key-value heads, G, tokens)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(scores == -torch.inf, 0)  # of rows without another score: NaN to 0
    return (weights @ v).flatten(1, 2).to(query.dtype)
