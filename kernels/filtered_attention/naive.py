"""Attention of tokens that do not skip, over keys of tokens that were stored: what the kernels are tested against.

Query heads h·G … h·G+G−1 share key-value head h. With a window, a token sees stored tokens whose place in the text is
less than `window` before its own, which is the place of the last key that it sees: it is stored, too.
"""

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
    places: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One token a row; arguments as in `ops.decode`."""
    rows, heads, _ = query.shape
    ends = torch.where(skipped, 0, lengths.to(torch.long))[:, None]
    chosen = torch.zeros(rows, 1, dtype=torch.long, device=query.device)
    counts = torch.ones(rows, dtype=torch.long, device=query.device)
    out = prefill(query[:, :, None], keys, values, chosen, counts, ends, scaling, window, places, softcap)
    return out.view(rows, heads, values.shape[-1])


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    ends: torch.Tensor,
    scaling: float,
    window: int | None = None,
    places: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Several tokens a row; arguments as in `ops.prefill`."""
    rows, heads, tokens, width = query.shape
    share, room = heads // keys.shape[1], chosen.shape[1]
    asks = torch.arange(room, device=query.device) < counts[:, None]
    chosen, ends = (torch.where(asks, one, 0).to(torch.long) for one in (chosen, ends))
    q = query.gather(2, chosen[:, None, :, None].expand(-1, heads, -1, width))
    k, v = (one.repeat_interleave(share, 1) for one in (keys, values))
    at = torch.arange(keys.shape[2], device=query.device)
    visible = at < ends[:, :, None]
    if window is not None and places is not None:
        own = places.gather(1, (ends - 1).clamp(min=0))
        visible &= places[:, None] > own[:, :, None] - window
    scores = q @ k.masked_fill(~visible.any(1)[:, None, :, None], 0).mT * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    found = weights @ v.masked_fill(~visible.any(1)[:, None, :, None], 0)  # (rows, heads, room, width of values)
    out = query.new_zeros(rows, tokens, heads, v.shape[-1])
    row, i = asks.nonzero(as_tuple=True)
    out[row, chosen[row, i]] = found[row, :, i]
    return out
