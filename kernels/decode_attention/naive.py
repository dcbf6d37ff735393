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
    slots: torch.Tensor | None = None,
    new_key: torch.Tensor | None = None,
    new_value: torch.Tensor | None = None,
    skipped: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    window: int | None = None,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute the attention of `ops.decode`. Query heads h·G … h·G+G−1 share key-value head h.

    Inputs of several dtypes are promoted; NaN in a row's query, or in its visible keys or values, is NaN in its output.
    """
    rows, lengths = torch.arange(len(query), device=query.device), lengths.long()
    slots = rows if slots is None else slots.long()
    attends = torch.ones_like(rows, dtype=torch.bool) if skipped is None else ~skipped.bool()
    offsets = torch.arange(keys.shape[2], device=query.device).expand(len(rows), -1)
    visible = (offsets < lengths[:, None]) & attends[:, None]
    k, v = keys[slots], values[slots]  # copies, as they were before the new token
    token_positions = offsets if positions is None else positions[slots]
    if new_key is not None and new_value is not None:
        last = _position_at(token_positions, lengths) if positions is not None else lengths
        _write(keys, slots, lengths, attends, new_key)
        _write(values, slots, lengths, attends, new_value)
        k, v = torch.cat([k, new_key[:, :, None]], 2), torch.cat([v, new_value[:, :, None]], 2)
        visible = torch.cat([visible, attends[:, None]], 1)
        token_positions = torch.cat([token_positions, last[:, None]], 1)
    else:
        last = _position_at(token_positions, lengths - 1)
    if window is not None:
        visible &= token_positions > last[:, None] - window
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in (query, k, v)))
    k, v = (tensor.to(dtype).masked_fill(~visible[:, None, :, None], 0) for tensor in (k, v))
    scores = query.to(dtype).unflatten(1, (k.shape[1], -1)) @ k.mT * scaling  # (rows, key-value heads, G, tokens)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(scores == -torch.inf, 0)  # of rows without another score: NaN to 0
    out = (weights @ v).flatten(1, 2).to(query.dtype)
    return out if keep is None or masks is None else out * keep[masks.long()][..., None].to(out.dtype)


def _position_at(positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return each row's position at its offset; of an empty or full row, the nearest."""
    return positions.gather(1, offsets.clamp(0, positions.shape[1] - 1)[:, None])[:, 0]


def _write(
    stored: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, attends: torch.Tensor, new: torch.Tensor
) -> None:
    """Write the new tokens of rows that attend and whose slot is not full, without waiting for the device."""
    capacity = stored.shape[2]
    writes, offsets = attends & (offsets < capacity), offsets.clamp(max=capacity - 1)
    stored[slots, :, offsets] = torch.where(writes[:, None, None], new.to(stored.dtype), stored[slots, :, offsets])
