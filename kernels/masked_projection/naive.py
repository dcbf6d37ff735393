"""Output projection of an attention layer in which some heads are masked: y = x[:, kept] W[:, kept]ᵀ + b."""

from __future__ import annotations

import torch


def project(
    x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, width: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Arguments as in `ops.project`."""
    columns = (kept.to(torch.long)[:, None] * width + torch.arange(width, device=x.device)).flatten()
    return torch.nn.functional.linear(x[..., columns], weight[:, columns], bias)
