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
        InputError: shapes, devices or types do not fit, or `window` or `splits` is out of range.
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
    tensors = {
        "slots": slots,
        "new_key": new_key,
        "new_value": new_value,
        "skipped": skipped,
        "keep": keep,
        "masks": masks,
        "positions": positions,
    }
    check_storage(query, keys, values, window)
    _check_options(query, values, splits, {"lengths": lengths, **tensors})
    floats = [tensor for tensor in (query, keys, values, new_key, new_value) if tensor is not None]
    if not all(tensor.is_floating_point() for tensor in floats):
        types = ", ".join(str(tensor.dtype) for tensor in floats)
        raise InputError(f"queries, keys and values have types {types}; give floating-point numbers")
    if not query.numel() or not keys.shape[2]:
        return query.new_zeros(*query.shape[:2], values.shape[-1])
    strided = new_key is not None and (keys.stride(-1) != 1 or values.stride(-1) != 1)
    obstacles = (
        unsupported_types(*floats),
        needs_gradients(*floats, keep),
        too_wide(query.shape[-1], values.shape[-1]),
        "the stored keys and values must have stride 1 in their last dimension" if strided else None,
    )
    options: dict[str, Any] = {**tensors, "window": window, "softcap": softcap}
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


def _check_options(
    query: torch.Tensor, values: torch.Tensor, splits: int | None, tensors: dict[str, torch.Tensor | None]
) -> None:
    """Refuse options that do not fit: a kernel would read, or write, other rows' memory.

    `tensors` are the arguments of `decode` after `values`, by name.
    """
    (rows, heads, width), (slots, kv_heads, capacity, width_v) = query.shape, values.shape
    for name, other in (("new_key", "new_value"), ("keep", "masks")):
        if (tensors[name] is None) != (tensors[other] is None):
            raise InputError(f"{name} needs {other}, and {other} needs {name}; give both or none")
    keep = tensors["keep"]
    shapes: dict[str, tuple[int, ...]] = {
        "lengths": (rows,),
        "slots": (rows,),
        "new_key": (rows, kv_heads, width),
        "new_value": (rows, kv_heads, width_v),
        "skipped": (rows,),
        "keep": (0 if keep is None else len(keep), heads),
        "masks": (rows,),
        "positions": (slots, capacity),
    }
    check_tensors(query.device, **{name: (tensors[name], shape) for name, shape in shapes.items()})
    if tensors["slots"] is None and slots < rows:
        raise InputError(f"{rows} rows do not fit into {slots} slots; give slots")
    if tensors["new_key"] is not None and not capacity:
        raise InputError("new_key cannot be stored in slots of no tokens; give keys and values a capacity")
    for name in ("lengths", "slots", "masks", "positions"):
        if (tensor := tensors[name]) is not None and tensor.is_floating_point():
            raise InputError(f"{name} has type {tensor.dtype}; give integers")
    if splits is not None and (splits < 1 or splits & (splits - 1)):
        raise InputError(f"splits is {splits}; give a power of two, or None")
