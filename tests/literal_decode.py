"""Attention of one token per row over its stored tokens, row by row: the reference for all tests."""

from __future__ import annotations

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `decode_attention_triton.decode` returns, and the log-sum-exp of the scores, in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]  # query heads h·G … h·G+G−1 share key-value head h
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf)
    for row, length in enumerate(lengths.tolist()):
        if not length or (skipped is not None and skipped[row]):
            continue
        places = torch.arange(length, device=query.device) if positions is None else positions[row, :length]
        tokens = (places > places[-1] - (window or torch.inf)).nonzero()[:, 0]
        k, v = (x[row][:, tokens].repeat_interleave(group, 0) for x in (keys, values))  # (heads, tokens, width)
        scores = scaling * (query[row, :, None] * k).sum(-1)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        lse[row] = scores.logsumexp(-1)
        out[row] = (scores.softmax(-1)[..., None] * v).sum(1)
    return out, lse
