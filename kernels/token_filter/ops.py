"""Token Filtering's decisions: by a compiled loop on a CPU, by a kernel or in parallel on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lmeval_prune.kernels.dispatch import device_of, on_device, takes_kernel, too_wide
from lmeval_prune.kernels.token_filter import parallel
from lmeval_prune.kernels.token_filter.state import Memory, Rule

LARGEST = 2**15  # keys or values of one token that a program can hold


def decide(key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, memory: Memory, rule: Rule) -> torch.Tensor:
    """Decide which tokens are skipped, (rows, tokens); update the memory.

    On a GPU one token a row is one launch. Of several, similarities are computed there at once; the device is waited
    for, since the CPU follows the threshold over them.

    Args:
        key, value: (rows, key-value heads, tokens, width).
        valid: (rows, tokens), false for padding.
        memory: of the rows; written.
        rule: of the layer.
    """
    rows, _, tokens, _ = key.shape
    if not rows or not tokens:
        return valid.clone()
    is_on_device = on_device(key)
    if is_on_device and tokens == 1 and takes_kernel("decide", key, _too_large(key, value)):
        return _launch(key, value, valid, memory, rule)
    from lmeval_prune.kernels.token_filter import compiled  # numba takes a while to import

    is_token = _array(valid, torch.bool)
    if is_on_device:
        scores = _array(parallel.similarities(key, value, valid, memory, rule))
    else:
        anchors = memory.begun.numpy(), memory.anchor_key.numpy(), memory.anchor_value.numpy()
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
    """Decide about one token a row, and store it unless it is skipped; one launch on a GPU.

    Args:
        key, value, valid, memory, rule: as in `decide`, one token a row.
        store: keys and values, (rows, key-value heads, capacity, width); their positions, (rows, capacity); lengths,
            (rows,), all below the capacity; totals, (2,), tokens and skipped ones so far. All contiguous, all written.
        position: of these tokens in the text.
        keep_skipped: whether skipped tokens are stored, too.

    Returns:
        (rows, 1), true where a token is skipped or padding.
    """
    keys, values, positions, lengths, totals = store
    types = None if keys.dtype == key.dtype == value.dtype == values.dtype else "the store has another type"
    if len(key) and takes_kernel("decide", key, _too_large(key, value), types):
        return _launch(key, value, valid, memory, rule, store, position, keep_skipped)
    skipped = decide(key, value, valid, memory, rule)
    rows, ends = torch.arange(len(key), device=key.device), lengths.long()
    keys[rows, :, ends] = key[:, :, 0].to(keys.dtype)  # what lies behind a row's length is not read
    values[rows, :, ends] = value[:, :, 0].to(values.dtype)
    positions[rows, ends] = position
    lengths += (valid if keep_skipped else valid & ~skipped)[:, 0]
    totals += torch.stack([valid.sum(), skipped.sum()])
    return skipped | ~valid


def _launch(
    key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, memory: Memory, rule: Rule, *stored: Any
) -> torch.Tensor:
    from lmeval_prune.kernels.token_filter import triton

    numbers = _numbers(rule, key.device, memory.states.dtype)
    with device_of(key):
        return triton.decide(key, value, valid, memory, numbers, rule.kind, rule.as_printed, *stored)


@lru_cache(maxsize=64)
def _numbers(rule: Rule, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    numbers = rule.share, rule.step_size, rule.smoothing, rule.warmup, rule.quantile
    return torch.tensor(numbers, device=device, dtype=dtype)


def _array(tensor: torch.Tensor, dtype: torch.dtype = torch.float64) -> np.ndarray:
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def _too_large(key: torch.Tensor, value: torch.Tensor) -> str | None:
    numbers = key.shape[1] * max(key.shape[-1], value.shape[-1])
    return too_wide(key.shape[-1], value.shape[-1]) or (
        f"a token has {numbers} numbers, more than {LARGEST}" if numbers > LARGEST else None
    )
