"""Keep matrix products of float32 exact where PyTorch may round them, and fast; refuse logits of NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lmeval_prune.errors import InputError

Item = TypeVar("Item")
# What to give where a model's numbers are not finite.
FINITE_REMEDY = (
    "give another dtype, attn_implementation=sdpa or batch_size=1 (eager attention in float64 cannot read padding), or "
    "mend the method that is applied to it"
)


class NaNError(InputError):
    """Logits that are NaN."""


def refuse_nan(logits: torch.Tensor) -> None:
    """Raise a `NaNError` for logits that are NaN: the first token would be the largest, without a word.

    A hidden state with a NaN has no other logits, so a single token's logits show it.
    """
    if bool(logits.isnan().any()):
        raise NaNError("the model's logits are NaN, so they choose no tokens", remedy=FINITE_REMEDY)


MANY_ROWS = 8  # of a matrix that is multiplied by weights; oneDNN takes longer to start a product
# Errors of float32 reach about 2**-21 of a product of absolute values, of bfloat16 2**-10.
SMALL_ERROR = 2.0**-17
CHECKED_SHAPES = (((8, 64), (64, 64)), ((64, 576), (576, 192)), ((512, 192), (192, 512)), ((6, 32, 64), (6, 64, 96)))


@cache
def fast_precision() -> str:
    """Return the setting by which this machine multiplies matrices of float32 fastest without rounding them.

    PyTorch multiplies them by MKL, which takes AVX2 on processors of AMD, also if they have AVX-512. With the setting
    `medium` it takes oneDNN, which knows AVX-512. That may round to bfloat16, but does so with AMX alone; a few
    products are compared with those of float64. On all other machines it is `highest`.
    """
    if torch.accelerator.is_available() or not _is_amd_with_avx512() or not _is_exact("medium"):
        return "highest"
    return "medium"


def _is_amd_with_avx512() -> bool:
    """Return whether the processor is one whose AVX-512 oneDNN takes and MKL does not, and both libraries are there."""
    processors = Path("/proc/cpuinfo")
    facts = processors.read_text(encoding="utf-8", errors="replace") if processors.is_file() else ""  # else not Linux
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and "AuthenticAMD" in facts and "avx512f" in facts


def _is_exact(precision: str) -> bool:
    """Return whether products of float32 are not rounded to fewer bits by a setting."""
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(size, generator=generator) for size in sizes] for sizes in CHECKED_SHAPES]
    with _setting(torch.set_float32_matmul_precision, precision):
        products = [torch.matmul(left, right) for left, right in pairs]
    return all(
        bool(((product - left.double() @ right.double()).abs() <= SMALL_ERROR * (left.abs() @ right.abs())).all())
        for product, (left, right) in zip(products, pairs, strict=True)
    )


_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_lock, _open = threading.Lock(), list[partial[None]]()  # settings of the open blocks of all threads; the last counts
_before: tuple[str | None, list[str]] = (None, [])  # precisions outside of the blocks: PyTorch's, and each backend's


def _matmul_precision() -> str | None:
    """Return PyTorch's precision of products; None if `torch.backends` has another, as transformers' `tf32` sets."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_backends_exact() -> None:
    for backend in _BACKENDS:
        backend.fp32_precision = "ieee"


@contextmanager
def _setting(set_precision: Callable[..., None], *args: Any) -> Iterator[None]:
    """Set the precision of products by a function inside the block; after the last block, all are as before the first.

    `torch.set_float32_matmul_precision` gives backends a precision of their own, which does not follow a later
    `torch.backends.fp32_precision`, so each backend gets its own again, or follows all.
    """
    global _before
    setting = partial(set_precision, *args)
    with _lock:
        if not _open:
            _before = _matmul_precision(), [backend.fp32_precision for backend in _BACKENDS]
        _open.append(setting)
        setting()
    try:
        yield
    finally:
        with _lock:
            _open.remove(setting)
            if _open:
                _open[-1]()
            else:
                precision, precisions = _before
                if precision is not None:
                    torch.set_float32_matmul_precision(precision)
                for backend, own in zip(_BACKENDS, precisions, strict=True):
                    backend.fp32_precision = "none"  # that of all backends
                    if backend.fp32_precision != own:
                        backend.fp32_precision = own


def fast_products(rows: int = MANY_ROWS) -> AbstractContextManager[None]:
    """Multiply matrices of float32 fast inside the block, but exactly unless a setting allows that they are rounded.

    The setting is that of the process; blocks of threads may overlap. `rows` are those of the matrices (tokens).
    """
    if _matmul_precision() in (None, "high") or fast_precision() == "highest":
        return nullcontext()
    return _setting(torch.set_float32_matmul_precision, fast_precision() if rows >= MANY_ROWS else "highest")


def exact_products() -> AbstractContextManager[None]:
    """Multiply matrices of float32 in float32 inside the block, whatever precision is set; see `fast_products`."""
    with _lock:
        precision = _before[0] if _open else _matmul_precision()
    if precision is None:
        return _setting(_set_backends_exact)
    if precision in ("highest", fast_precision()):
        return nullcontext()
    return _setting(torch.set_float32_matmul_precision, "highest")


def with_exact_products(items: Generator[Item]) -> Generator[Item]:
    """Yield the items of a generator, each computed with `exact_products`; between them the precision is as set."""
    with closing(items):
        while True:
            with exact_products():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
