"""Attention of one token per row over stored keys: the reference for the kernel."""

from __future__ import annotations

import torch


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
) -> torch.Tensor:
    """Compute the attention of `ops.decode`. Query heads h·G … h·G+G−1 share key-value head h."""
    group, lengths = query.shape[1] // keys.shape[1], lengths.long()
    visible = torch.arange(keys.shape[2], device=query.device) < torch.where(skipped, 0, lengths)[:, None]
    if window is not None and positions is not None:
        last = positions.gather(1, (lengths - 1).clamp(min=0)[:, None])
        visible &= positions > last - window
    k, v = (tensor.masked_fill(~visible[:, None, :, None], 0).repeat_interleave(group, 1) for tensor in (keys, values))
    scores = (k @ query[..., None])[..., 0] * scaling  # (rows, heads, capacity)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    return (weights[:, :, None] @ v)[:, :, 0]
