"""Token Filtering's decisions: a compiled loop on a CPU, a kernel or a parallel scan on a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from lmeval_prune.kernels.dispatch import launch_on, needs_gradients, on_device, too_wide, use_kernel
from lmeval_prune.kernels.token_filter import parallel
from lmeval_prune.kernels.token_filter.state import Memory, Rule

MAX_NUMBERS = 2**15  # numbers in a token's keys or values that one program can hold


def decide(key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, memory: Memory, rule: Rule) -> torch.Tensor:
    """Return which tokens skip, (rows, tokens); update the memory.

    On a GPU, one token per row is one kernel launch. For several tokens the GPU computes all similarities in one pass,
    and the CPU waits for them and computes the thresholds.

    Args:
        key, value: (rows, key-value heads, tokens, width).
        valid: (rows, tokens), false for padding.
        memory: of the rows; updated.
        rule: of the layer.
    """
    rows, _, tokens, _ = key.shape
    if not rows or not tokens:
        return valid.clone()
    is_on_device = on_device(key)
    if is_on_device and tokens == 1 and use_kernel("decide", key, _too_large(key, value)):
        return _launch(key, value, valid, memory, rule)
    from lmeval_prune.kernels.token_filter import compiled  # numba takes a while to import

    is_token = _array(valid, torch.bool)
    if is_on_device:
        scores = _array(parallel.similarities(key, value, valid, memory, rule))
    else:
        anchors = memory.started.numpy(), memory.anchor_key.numpy(), memory.anchor_value.numpy()
        scores = compiled.similarities(
            _array(key), _array(value), is_token, *anchors, rule.smoothing, rule.kind, rule.as_printed
        )
    states = memory.states.cpu()
    skipped = compiled.thresholds(
        scores, is_token, states.numpy(), rule.share, rule.step_size, rule.warmup, rule.quantile
    )
    if memory.states.is_cuda:
        memory.states.copy_(states)
    return torch.from_numpy(skipped).to(key.device)


def decide_and_store(
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    memory: Memory,
    rule: Rule,
    *,
    store: tuple[torch.Tensor, ...],
    position: int,
    keep_skipped: bool,
) -> torch.Tensor:
    """Decide about one token per row, and store it unless it skips; one launch on a GPU.

    Args:
        key, value: (rows, key-value heads, 1, width).
        valid: (rows, 1); where it is false, a row's memory, storage and length stay as they are.
        memory: of the rows; updated.
        rule: of the layer.
        store: keys and values (rows, key-value heads, capacity, width), positions (rows, capacity), lengths (rows,), of
            valid rows below the capacity, and totals (2,), tokens and skipped tokens so far. All are contiguous, and
            updated.
        position: of these tokens in the text.
        keep_skipped: store skipped tokens, too.

    Returns:
        (rows, 1), true for skipped or padding.
    """
    keys, values, positions, lengths, totals = store
    types = None if keys.dtype == key.dtype == value.dtype == values.dtype else "the store has another type"
    if len(key) and use_kernel("decide and store", key, _too_large(key, value), types, needs_gradients(key, value)):
        return _launch(key, value, valid, memory, rule, store, position, keep_skipped)
    skipped = decide(key, value, valid, memory, rule)
    rows = (valid if keep_skipped else valid & ~skipped)[:, 0].nonzero()[:, 0]
    offsets = lengths[rows].long()
    keys[rows, :, offsets] = key[rows, :, 0].to(keys.dtype)
    values[rows, :, offsets] = value[rows, :, 0].to(values.dtype)
    positions[rows, offsets] = position
    lengths[rows] += 1
    totals += torch.stack([valid.sum(), skipped.sum()])
    return skipped | ~valid


def _launch(
    key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, memory: Memory, rule: Rule, *stored: Any
) -> torch.Tensor:
    from lmeval_prune.kernels.token_filter import triton

    numbers = _numbers(rule, key.device, memory.states.dtype)
    with launch_on(key):
        return triton.decide(key, value, valid, memory, numbers, rule.kind, rule.as_printed, *stored)


@cache
def _numbers(rule: Rule, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    numbers = rule.share, rule.step_size, rule.smoothing, rule.warmup, rule.quantile
    return torch.tensor(numbers, device=device, dtype=dtype)


def _array(tensor: torch.Tensor, dtype: torch.dtype = torch.float64) -> np.ndarray:
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def _too_large(key: torch.Tensor, value: torch.Tensor) -> str | None:
    numbers = key.shape[1] * max(key.shape[-1], value.shape[-1])
    return too_wide(key.shape[-1], value.shape[-1]) or (
        f"a token has {numbers} numbers, more than {MAX_NUMBERS}" if numbers > MAX_NUMBERS else None
    )
