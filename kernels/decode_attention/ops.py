"""Attention of one new token per row over the stored keys and values of its slot.

`decode` is also the PyTorch operator `lmeval_prune::decode`, which `torch.compile` keeps as one node. Compiled code
calls the operator, other code the function: that saves 0.1 ms a call on a CPU, and has gradients in PyTorch.

Before a CUDA graph is captured, run the step once outside the capture: the first call with a dtype and shape compiles
the kernel and times its configurations, which a capture does not allow.
"""

from __future__ import annotations

from typing import Any

import torch

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.decode_attention import naive
from lmeval_prune.kernels.dispatch import launch_on, too_wide, unsupported_tensors, use_kernel


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
    splits: int | None = None,
) -> torch.Tensor:
    """Compute the attention of one token per row; store the token's key and value, if they are given.

    With `new_key` and `new_value`, a row writes them to its slot at offset `lengths[row]`, and attends to its stored
    tokens and to the new one. Without, it attends to its stored tokens, the last of which is itself.

    No argument's value that changes from step to step is a Python number: a captured CUDA graph can be replayed with
    other slots, lengths and masks.

    Args:
        query: (rows, heads, width).
        keys, values: (slots, key-value heads, capacity, width), without gaps; only a slot's length is read.
        lengths: number of stored tokens of each row, without the new one, (rows,).
        scaling: factor of the scores.
        slots: slot of each row, (rows,); None: row i has slot i. Rows that share a slot write to it in any order.
        new_key, new_value: (rows, key-value heads, width); not stored if the slot is full.
        skipped: true if a row's token neither attends nor is stored, (rows,).
        keep: factors of the heads' outputs, (masks, heads), in the query's dtype or bool; needs `masks`.
        masks: row of `keep` that a row uses, (rows,).
        window: number of text tokens that a token attends to, including itself; None: all.
        positions: text positions of the slots' tokens, increasing, and of the new ones, (slots, capacity); None: a
            token's offset in its slot.
        softcap: bound of the scores.
        splits: number of programs that share a row's keys, a power of two; None: enough to fill the device.

    Returns:
        (rows, heads, width of values); zero for rows that are skipped or empty.

    Raises:
        InputError: shapes do not fit.
    """
    compiles = torch.compiler.is_compiling()
    implementation = torch.ops.lmeval_prune.decode if compiles else _decode
    options = (slots, new_key, new_value, skipped, keep, masks, window, positions, softcap, splits)
    out: torch.Tensor = implementation(query, keys, values, lengths, scaling, *options)
    return out


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    slots: torch.Tensor | None,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    skipped: torch.Tensor | None,
    keep: torch.Tensor | None,
    masks: torch.Tensor | None,
    window: int | None,
    positions: torch.Tensor | None,
    softcap: float | None,
    splits: int | None,
) -> torch.Tensor:
    """Choose the implementation; arguments as in `decode`."""
    _check_storage(query, keys, values, slots)
    _check_options(query, values, keys, new_key, new_value, keep, masks)
    if not query.numel() or not keys.shape[2]:
        return query.new_zeros(*query.shape[:2], values.shape[-1])
    floats = (query, keys, values, *(tensor for tensor in (new_key, new_value) if tensor is not None))
    strided = new_key is not None and (keys.stride(-1) != 1 or values.stride(-1) != 1)
    obstacles = (
        unsupported_tensors(*floats),
        too_wide(query.shape[-1], values.shape[-1]),
        "the stored keys and values must have stride 1 in their last dimension" if strided else None,
    )
    options: dict[str, Any] = {
        "slots": slots,
        "new_key": new_key,
        "new_value": new_value,
        "skipped": skipped,
        "keep": keep,
        "masks": masks,
        "window": window,
        "positions": positions,
        "softcap": softcap,
    }
    if not use_kernel("decode attention", query, *obstacles):
        return naive.decode(query, keys, values, lengths, scaling, **options)
    from lmeval_prune.kernels.decode_attention import triton

    with launch_on(query):
        return triton.decode(query, keys, values, lengths, scaling, **options, splits=splits)


operator = torch.library.custom_op("lmeval_prune::decode", _decode, mutates_args=("keys", "values"))


@operator.register_fake
def _shape(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an output without contents."""
    return query.new_empty(query.shape[0], query.shape[1], values.shape[-1])


def _check_storage(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor | None) -> None:
    """Refuse storage that does not fit the queries."""
    too_few = len(keys) < len(query) if slots is None else len(slots) != len(query)
    if keys.shape[:3] != values.shape[:3] or too_few or query.shape[1] % max(1, keys.shape[1]):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, keys, values))
        raise InputError(
            f"queries, keys and values of shapes {shapes} do not fit; give a slot for each row, whole groups of heads"
        )


def _check_options(
    query: torch.Tensor,
    values: torch.Tensor,
    keys: torch.Tensor,
    new_key: torch.Tensor | None,
    new_value: torch.Tensor | None,
    keep: torch.Tensor | None,
    masks: torch.Tensor | None,
) -> None:
    """Refuse new tokens and head masks that are incomplete, or do not fit the queries."""
    rows, heads = query.shape[:2]
    if (new_key is None) != (new_value is None) or (keep is None) != (masks is None):
        raise InputError("new_key needs new_value, and keep needs masks")
    if new_key is not None and new_value is not None:
        expected = [(rows, stored.shape[1], stored.shape[3]) for stored in (keys, values)]
        if [tuple(new_key.shape), tuple(new_value.shape)] != expected or not keys.shape[2]:
            shapes = f"{tuple(new_key.shape)} and {tuple(new_value.shape)}"
            raise InputError(f"new keys and values of shapes {shapes} do not fit {rows} rows and the storage")
    if keep is not None and masks is not None and (keep.shape[1:] != (heads,) or masks.shape != (rows,)):
        shapes = f"{tuple(keep.shape)} and {tuple(masks.shape)}"
        raise InputError(f"keep and masks of shapes {shapes} do not fit {rows} rows and {heads} heads")
