"""Output projection of an attention layer in which some heads are masked."""

from __future__ import annotations

import torch

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.dispatch import device_of, takes_kernel, unlike
from lmeval_prune.kernels.masked_projection import naive


def project(
    x: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor,
    width: int,
    bias: torch.Tensor | None = None,
    check: bool = True,
) -> torch.Tensor:
    """The projection of the heads that are kept; columns of the others are not read, neither of `x` nor of `weight`.

    Args:
        x: what heads put out, (…, heads · width).
        weight: (outputs, heads · width), a view of a transposed one, too.
        kept: the heads that are not masked, the same for all rows, (count,).
        width: of a head's output.
        bias: (outputs,).
        check: whether heads are checked, for which the device is waited for.

    Returns:
        (…, outputs).

    Raises:
        InputError: shapes do not fit, or there is no such head.
    """
    heads = x.shape[-1] // width
    if x.shape[-1] != weight.shape[1] or heads * width != x.shape[-1]:
        raise InputError(f"{x.shape[-1]} columns and a weight for {weight.shape[1]} are not whole heads of {width}")
    if check and kept.numel() and not (int(kept.min()) >= 0 and int(kept.max()) < heads):
        raise InputError(f"heads {sorted(kept.tolist())} are not all from 0 to {heads - 1}: there are {heads}")
    if not x.numel() or not kept.numel():
        out = x.new_zeros(*x.shape[:-1], len(weight))
        return out if bias is None else out + bias
    if not takes_kernel("masked projection", x, unlike(x, weight, bias)):
        return naive.project(x, weight, kept, width, bias)
    from lmeval_prune.kernels.masked_projection import triton

    with device_of(x):
        return triton.project(x, weight, kept, width, bias)
