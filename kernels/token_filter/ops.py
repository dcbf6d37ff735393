"""Token Filtering's decisions with everything on the device: arguments as in `compiled.decide`, as tensors."""

from __future__ import annotations

from functools import lru_cache

import torch

from lmeval_prune.kernels.dispatch import device_of, takes_kernel, too_wide
from lmeval_prune.kernels.token_filter import parallel

# share, step size, smoothing, warm-up, quantile, kind, as printed: see `compiled.decide`
Rule = tuple[float, float, float, int, float, int, bool]
LARGEST = 2**15  # keys or values of one token that a program can hold


@lru_cache(maxsize=64)
def _numbers(rule: Rule, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(rule[:5], device=device, dtype=dtype)


def decide(
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    begun: torch.Tensor,
    anchor_key: torch.Tensor,
    anchor_value: torch.Tensor,
    state: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Which tokens are skipped, (rows, tokens); moves anchors and states on, without waiting for the device.

    One token a row is one launch. Of several, similarities are computed at once, and one program a row follows the
    threshold over them.

    Args:
        key, value: (rows, key-value heads, tokens, width).
        valid: (rows, tokens), false for padding.
        begun: (rows,), whether a row has had a token; written.
        anchor_key, anchor_value: (rows, key-value heads, width) in float32 or float64; written.
        state: (rows, `state.COLUMNS`), or one row where all rows share it, in float32 or float64; written.
        rule: the remaining arguments of `compiled.decide`, share, step size, smoothing, warm-up, quantile, kind and
            whether as printed.
    """
    rows, _, tokens, _ = key.shape
    if not rows or not tokens:
        return valid.clone()
    share, step_size, smoothing, warmup, quantile, kind, as_printed = rule
    if tokens == 1 and takes_kernel("decide", key, _too_large(key, value)):
        from lmeval_prune.kernels.token_filter import triton

        with device_of(key):
            numbers = _numbers(rule, key.device, state.dtype)
            return triton.decide(key, value, valid, begun, anchor_key, anchor_value, state, numbers, kind, as_printed)
    scores, what = parallel.similarities(
        key, value, valid, begun, anchor_key, anchor_value, smoothing, kind, as_printed
    )
    if takes_kernel("thresholds", key):
        from lmeval_prune.kernels.token_filter import triton

        with device_of(key):
            return triton.thresholds(scores, what, state, _numbers(rule, key.device, state.dtype))
    from lmeval_prune.kernels.token_filter import compiled

    moved = state.to("cpu", torch.float64)
    skipped = compiled.thresholds(
        scores.to("cpu", torch.float64).numpy(), what.cpu().numpy(), moved.numpy(), share, step_size, warmup, quantile
    )
    state.copy_(moved)
    return torch.from_numpy(skipped).to(key.device)


def decide_and_store(
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    begun: torch.Tensor,
    anchor_key: torch.Tensor,
    anchor_value: torch.Tensor,
    state: torch.Tensor,
    rule: Rule,
    *,
    store: tuple[torch.Tensor, ...],
    place: int,
    keep_skipped: bool,
) -> torch.Tensor:
    """`decide` of one token a row, which then goes to its row's store unless it is skipped; one launch.

    Args:
        key, value, valid, begun, anchor_key, anchor_value, state, rule: as in `decide`, one token a row.
        store: keys and values, (rows, key-value heads, capacity, width); their places, (rows, capacity); lengths,
            (rows,), all below the capacity; totals, (2,), tokens and skipped ones so far. All contiguous, all written.
        place: of these tokens.
        keep_skipped: whether skipped tokens are stored, too.

    Returns:
        (rows, 1), true where a token is skipped or padding.
    """
    keys, values, places, lengths, totals = store
    types = None if keys.dtype == key.dtype == value.dtype == values.dtype else "the store has another type"
    if len(key) and takes_kernel("decide", key, _too_large(key, value), types):
        from lmeval_prune.kernels.token_filter import triton

        kind, as_printed = rule[5:]
        with device_of(key):
            numbers = _numbers(rule, key.device, state.dtype)
            moved = (key, value, valid, begun, anchor_key, anchor_value, state, numbers)
            return triton.decide(*moved, kind, as_printed, store, place, keep_skipped)
    skipped = decide(key, value, valid, begun, anchor_key, anchor_value, state, rule)
    rows = torch.arange(len(key), device=key.device)
    keys[rows, :, lengths.long()] = key[:, :, 0].to(keys.dtype)  # what is not counted does not matter
    values[rows, :, lengths.long()] = value[:, :, 0].to(values.dtype)
    places[rows, lengths.long()] = place
    lengths += (valid if keep_skipped else valid & ~skipped)[:, 0]
    totals += torch.stack([valid.sum(), skipped.sum()])
    return skipped | ~valid


def _too_large(key: torch.Tensor, value: torch.Tensor) -> str | None:
    held = key.shape[1] * max(key.shape[-1], value.shape[-1])
    return too_wide(key.shape[-1], value.shape[-1]) or (
        f"a token has {held} numbers, more than {LARGEST}" if held > LARGEST else None
    )
