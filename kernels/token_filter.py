"""Token Filtering's decisions: a compiled loop on a CPU, a kernel or a parallel scan on a GPU.

`tests/literal_filter.py` has the formulas as loops over single tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from lmeval_prune.kernels.dispatch import launch_on, needs_gradients, on_device, too_wide, use_kernel
from lmeval_prune.kernels.token_filter_memory import COUNT, Memory, Rule, begin_answers

MAX_NUMBERS = 2**15  # numbers in a token's keys or values that one program can hold
CHUNK = 64  # tokens in a chunk
SLICE = 2**24  # largest number of anchor values in memory


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
    rule, is_on_device = rule.of_pass(tokens), on_device(key)
    if is_on_device and tokens == 1 and use_kernel("decide", key, _unsupported(key, value, rule)):
        return _launch(key, value, valid, memory, rule)
    from lmeval_prune.kernels import token_filter_compiled as compiled  # numba takes a while to import

    is_token = _array(valid, torch.bool)
    if rule.similarity == "random":
        scores = _random_scores(is_token, _array(memory.states[:, COUNT], torch.long), rule)
    elif is_on_device:
        scores = _array(similarities(key, value, valid, memory, rule))
    else:
        anchors = memory.started.numpy(), memory.anchor_key.numpy(), memory.anchor_value.numpy()
        scores = compiled.similarities(
            _array(key), _array(value), is_token, *anchors, rule.smoothing, rule.kind, rule.as_printed
        )
    states = memory.states.cpu()
    skipped = compiled.thresholds(
        scores, is_token, states.numpy(), rule.share, rule.step_size, rule.warmup, rule.quantile
    )
    if not rule.may_skip(tokens):
        begin_answers(states, rule)
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
) -> torch.Tensor | None:
    """Decide about one token per row, and store it unless it skips, in one launch on a GPU.

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
        (rows, 1), true for skipped or padding. None, without a change, if the kernel does not support this.
    """
    rule = rule.of_pass(1)
    types = None if store[0].dtype == key.dtype == value.dtype == store[1].dtype else "the store has another type"
    if use_kernel("decide and store", key, _unsupported(key, value, rule), types, needs_gradients(key, value)):
        return _launch(key, value, valid, memory, rule, store, position, keep_skipped)
    return None


def _launch(
    key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, memory: Memory, rule: Rule, *stored: Any
) -> torch.Tensor:
    from lmeval_prune.kernels import token_filter_triton as triton

    numbers = _numbers(rule, key.device, memory.states.dtype)
    with launch_on(key):
        return triton.decide(key, value, valid, memory, numbers, rule.kind, rule.as_printed, *stored)


@cache
def _numbers(rule: Rule, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    numbers = rule.share, rule.step_size, rule.smoothing, rule.warmup, rule.quantile
    return torch.tensor(numbers, device=device, dtype=dtype)


def _array(tensor: torch.Tensor, dtype: torch.dtype = torch.float64) -> np.ndarray:
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def _unsupported(key: torch.Tensor, value: torch.Tensor, rule: Rule) -> str | None:
    if rule.similarity == "random":
        return "similarity=random is drawn on the CPU"
    numbers = key.shape[1] * max(key.shape[-1], value.shape[-1])
    return too_wide(key.shape[-1], value.shape[-1]) or (
        f"a token has {numbers} numbers, more than {MAX_NUMBERS}" if numbers > MAX_NUMBERS else None
    )


def _random_scores(valid: np.ndarray, counts: np.ndarray, rule: Rule) -> np.ndarray:
    """Return the standard normal number of each token by its position in the sequence, (rows, tokens)."""
    positions = np.maximum(counts[:, None] + valid.cumsum(1) - 1, 0)
    numbers = _normals(rule.seed, rule.layer, int(positions.max()).bit_length())[positions]
    return np.where(positions < rule.warmup, 1 - 2 * (positions % 2), numbers)  # a first threshold without chance


@cache
def _normals(seed: int, layer: int, bits: int) -> np.ndarray:
    return np.random.default_rng([seed, layer]).standard_normal(2**bits)  # a longer draw begins with the shorter one


# ---------------------------------------------------------------------- similarities of many tokens


def similarities(
    key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor, memory: Memory, rule: Rule
) -> torch.Tensor:
    """Return the similarity S of each token (eqs. 1, 2), (rows, tokens); update `started` and the anchors.

    The anchors are scanned in chunks. Let n_j be the number of tokens up to and including j, and m_i the number before
    i, without padding. The anchor for token i of a chunk is

        anchor_i = s^(m_i) · carry + Σ_{j<i} w_j s^(m_i − n_j) x_j,    w_j = 1 − s, or 1 for the first token of a row,

    with `carry` the anchor at the beginning of the chunk. So the anchors of a chunk are a product with a small lower
    triangular matrix. The carries are similar sums over chunks: a second product.

    Arguments as in `decide`. The first token of a row gets NaN; values of padding are undefined.
    """
    rows, heads, tokens, width = key.shape
    scores = memory.anchor_key.new_zeros(rows, tokens)
    is_padding = ~valid[:, None, :, None]  # padding may hold any value, also NaN
    size = max(1, SLICE // max(1, heads * tokens * max(width, value.shape[-1])))
    for part in (slice(row, row + size) for row in range(0, rows, size)):
        weights = _Weights(valid[part], memory.started[part], rule.smoothing, scores.dtype)
        cosines_k, cosines_v = (
            _cosines(tensor[part].to(anchor.dtype).masked_fill(is_padding[part], 0), weights, anchor[part])
            for tensor, anchor in ((key, memory.anchor_key), (value, memory.anchor_value))
        )
        scores[part] = _fuse(cosines_k, cosines_v, rule)
    scores[valid & ~memory.started[:, None] & (valid.cumsum(1) == 1)] = torch.nan
    memory.started |= valid.any(1)
    return scores


class _Weights:
    """Weights of the scan: of tokens in the anchors of a chunk, and of chunks in the carries."""

    def __init__(self, valid: torch.Tensor, started: torch.Tensor, smoothing: float, dtype: torch.dtype) -> None:
        padded = torch.nn.functional.pad(valid, (0, -valid.shape[1] % CHUNK))
        enters = padded.to(dtype) * (1 - smoothing)
        enters[padded & ~started[:, None] & (padded.cumsum(1) == 1)] = 1
        padded, enters = (tensor.unflatten(1, (-1, CHUNK)) for tensor in (padded, enters))
        after = padded.cumsum(2)  # tokens of the chunk up to and including each, n
        total = after[..., -1:]
        before = torch.cat([after - padded.long(), total], 2)  # m, with an extra entry for the end of the chunk
        self.of_tokens = _decays(before, after, smoothing, dtype) * enters[:, :, None]
        self.of_carry = smoothing ** before[..., :-1].to(dtype)
        ends = total[..., 0].cumsum(1)
        starts = torch.cat([torch.zeros_like(ends[:, :1]), ends], 1)  # with an extra entry for the end of the row
        self.of_chunks = _decays(starts, ends, smoothing, dtype)
        self.of_anchor = smoothing ** starts.to(dtype)


def _decays(before: torch.Tensor, after: torch.Tensor, smoothing: float, dtype: torch.dtype) -> torch.Tensor:
    """Return s^(m_i − n_j) for j < i, else 0; shape (…, n + 1, n)."""
    exponents = (before[..., :, None] - after[..., None, :]).clamp_(min=0).to(dtype)
    return (smoothing**exponents).tril_(-1)


def _cosines(x: torch.Tensor, weights: _Weights, anchor: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each token's vector to its anchor, (rows, heads, tokens); update the anchor."""
    tokens = x.shape[2]
    chunks = torch.nn.functional.pad(x, (0, 0, 0, -tokens % CHUNK)).unflatten(2, (-1, CHUNK))
    sums = weights.of_tokens[:, None] @ chunks  # (rows, heads, chunks, CHUNK + 1, width)
    carries = weights.of_chunks[:, None] @ sums[..., -1, :] + weights.of_anchor[:, None, :, None] * anchor[:, :, None]
    anchors = sums[..., :-1, :] + weights.of_carry[:, None, ..., None] * carries[:, :, :-1, None]
    anchor.copy_(carries[:, :, -1])
    anchors = anchors.flatten(2, 3)[:, :, :tokens]
    lengths = x.norm(dim=-1) * anchors.norm(dim=-1)
    return torch.where(lengths > 0, (x * anchors).sum(-1) / lengths, 0.0)


def _fuse(cosines_k: torch.Tensor, cosines_v: torch.Tensor, rule: Rule) -> torch.Tensor:
    s_k, s_v = cosines_k.mean(1), cosines_v.mean(1)
    if rule.kind:
        return s_k if rule.kind == 1 else s_v
    variance_k, variance_v = cosines_k.var(1, correction=0), cosines_v.var(1, correction=0)
    total = variance_k + variance_v
    alpha = torch.where(total == 0, 0.5, (variance_k if rule.as_printed else variance_v) / total)
    return alpha * s_k + (1 - alpha) * s_v
