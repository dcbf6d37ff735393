"""Attention of one token per row on a CPU, compiled by numba: each key and value is read once."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmeval_prune.kernels.compilation import njit

# Permissions of the compiler, without those to suppose that no number is NaN or infinite: NaN has to reach the output.
FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}
LARGE = 2**20  # elements of keys from which ending PyTorch's waiting threads (0.1 ms) pays
MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of a float32 without its sign


@njit(nogil=True)
def _largest(bits: Any, begin: int, end: int) -> Any:
    """Return the largest of float32 numbers, as their bits: minus infinity if there are none; of NaN, any number.

    With the lower bits of negative numbers inverted, bits are in the order of the numbers. The compiler uses vector
    instructions for integers, and for floats only if it may suppose that none is NaN.
    """
    largest = np.int32(-0x7F800001)  # of minus infinity
    for j in range(begin, end):
        ordered = np.int32(bits[j] ^ ((bits[j] >> np.int32(31)) & MAGNITUDE))
        if ordered > largest:
            largest = ordered
    return largest ^ ((largest >> np.int32(31)) & MAGNITUDE)


@njit(nogil=True, fastmath=FAST)
def _exponentials(scores: Any, score_bits: Any, begin: int, end: int, weights: Any, bits: Any) -> Any:
    """Write exp(score - largest score) to `weights`, which shares memory with `bits`; return the largest and the sum.

    exp(x) = 2^t exp(r), with t = round(x / log 2), and a polynomial of degree 7 for exp(r). The compiler uses vector
    instructions for it, but not for its own `exp`. If all scores are minus infinity, the weights are 0, the sum is 1.
    """
    if begin == end:
        return np.float32(-np.inf), np.float32(1)
    bits[begin] = _largest(score_bits, begin, end)
    largest = weights[begin]
    if largest == -np.inf:  # of each score that is a number
        for j in range(begin, end):
            weights[j] = np.float32(0) if scores[j] == largest else scores[j]
    else:
        for j in range(begin, end):
            x = scores[j] - largest
            x = np.float32(-87) if x < np.float32(-87) else x  # exp(-87) is the smallest normal number; NaN stays
            t = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
            r = x - t * np.float32(0.693359375) + t * np.float32(2.1219444e-4)  # log 2 in two parts
            p = np.float32(1 / 5040) * r + np.float32(1 / 720)
            p = p * r + np.float32(1 / 120)
            p = p * r + np.float32(1 / 24)
            p = p * r + np.float32(1 / 6)
            p = p * r + np.float32(1 / 2)
            weights[j] = p * r * r + r + np.float32(1)
            exponent = t if t == t else np.float32(0)  # of NaN, an integer is undefined
            bits[j] += np.int32(exponent) << np.int32(23)
    total = np.float32(0)
    for j in range(begin, end):
        total += weights[j]
    return largest, np.float32(1) if total == 0 else total


@njit(nogil=True)
def _from_bfloat16(row: Any, bits: Any, buffer: Any) -> Any:
    """Return a row of bfloat16, whose bits are the upper half of a float32; `bits` shares memory with `buffer`."""
    for d in range(len(row)):
        bits[d] = np.int32(row[d]) << np.int32(16)
    return buffer[: len(row)]


@cache
def _decode_rows(group: int, width: int, width_v: int, is_half: bool) -> Any:
    """Return the compiled loop for heads of one shape; the compiler unrolls loops of constant length.

    numba finds a compiled loop on disk by these constants; with a function among them it would never find it.
    """

    @njit(nogil=True, fastmath=FAST)
    def decode_rows(
        query: Any,
        keys: Any,
        values: Any,
        slots: Any,
        lengths: Any,
        scaling: Any,
        window: int,
        first: int,
        last: int,
        out: Any,
        lse: Any,
    ) -> None:
        scores, weights = np.empty((group, keys.shape[2]), np.float32), np.empty((group, keys.shape[2]), np.float32)
        score_bits, bits, sums = scores.view(np.int32), weights.view(np.int32), np.empty((group, width_v), np.float32)
        buffer = np.empty(max(width, width_v), np.float32)
        buffer_bits = buffer.view(np.int32)
        for row in range(first, last):
            end = lengths[row]
            begin = max(0, end - window) if window else 0
            for kv_head in range(keys.shape[1]):
                k, v, q = keys[slots[row], kv_head], values[slots[row], kv_head], query[row, kv_head * group :]
                for j in range(begin, end):
                    key = _from_bfloat16(k[j], buffer_bits, buffer) if is_half else k[j]
                    for g in range(group):
                        score = np.float32(0)
                        for d in range(width):
                            score += q[g, d] * key[d]
                        scores[g, j] = score * scaling
                sums[:] = 0
                for g in range(group):
                    largest, total = _exponentials(scores[g], score_bits[g], begin, end, weights[g], bits[g])
                    for j in range(begin, end):
                        weights[g, j] /= total
                    lse[row, kv_head * group + g] = largest + np.log(total)
                for j in range(begin, end):
                    value = _from_bfloat16(v[j], buffer_bits, buffer) if is_half else v[j]
                    for g in range(group):
                        weight = weights[g, j]
                        for d in range(width_v):
                            sums[g, d] += weight * value[d]
                out[row, kv_head * group : (kv_head + 1) * group] = sums

    return decode_rows


@cache
def _openmp() -> ctypes.CDLL | None:
    """Load the GNU OpenMP library of PyTorch, if its waiting threads spin."""
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libgomp*"))
    waits = "GOMP_SPINCOUNT" in os.environ or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if not libraries or waits:
        return None
    library = ctypes.CDLL(str(libraries[0]))
    return library if hasattr(library, "omp_pause_resource_all") else None


def _release_cores() -> None:
    """End PyTorch's waiting threads: after an operation they spin for a while on the cores that the kernel needs."""
    if openmp := _openmp():
        openmp.omp_pause_resource_all(1)  # 1: omp_pause_soft; the next operation starts them again


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has no threads, and would wait for them forever


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one token per row over the stored tokens of its slot, in float32.

    Shapes, slots and lengths are not checked: the loop does not look at bounds. Uses torch's number of threads.

    Args:
        query: (rows, heads, width).
        keys, values: (slots, key-value heads, capacity, width), in float32 or bfloat16.
        slots, lengths: slot of each row, and its number of stored tokens, (rows,).
        scaling: factor of the scores.
        window: number of tokens that a token attends to, including itself; None: all.

    Returns:
        Attention, (rows, heads, width of values), and the log-sum-exp of the scores, (rows, heads), in float32. Rows
        without tokens have zeros, and minus infinity.
    """
    out, lse = torch.empty(*query.shape[:2], values.shape[-1]), torch.empty(query.shape[:2])
    if not len(query):
        return out, lse
    results = (out.numpy(), lse.numpy())
    is_half = keys.dtype == torch.bfloat16
    keys, values = (x.view(torch.int16) if is_half else x for x in (keys, values))
    tensors = (query.float().contiguous(), keys, values, slots, lengths)
    arguments = (*(tensor.numpy() for tensor in tensors), np.float32(scaling), window or 0)
    decode_rows = _decode_rows(query.shape[1] // keys.shape[1], query.shape[-1], values.shape[-1], is_half)
    threads = min(torch.get_num_threads(), len(query))
    ends = lengths.cumsum(0).numpy()  # each thread reads as many keys
    bounds = [0, *np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads), len(query)]
    *others, last = pairwise(bounds)
    if others and int(ends[-1]) * keys.shape[1] * keys.shape[3] >= LARGE:
        _release_cores()
    pool = _threads(torch.get_num_threads())
    running = [pool.submit(decode_rows, *arguments, *part, *results) for part in others]
    decode_rows(*arguments, *last, *results)
    for part in running:
        part.result()
    return out, lse
