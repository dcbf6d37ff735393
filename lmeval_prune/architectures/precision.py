"""Keep matrix products of float32 exact where PyTorch may round them to TF32 or bfloat16, and refuse logits of NaN."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lmeval_prune.errors import InputError

Item = TypeVar("Item")
# What to give where a model's numbers are not finite.
FINITE_REMEDY = (
    "give another dtype, attn_implementation=sdpa or batch_size=1 (eager attention in float64 cannot read padding), or "
    "mend the method that is applied to it"
)


def refuse_nan(logits: torch.Tensor) -> None:
    """Raise an `InputError` for logits that are NaN: the first token would be the largest, without a word.

    A hidden state with a NaN has no other logits, so a single token's logits show it.
    """
    if bool(logits.isnan().any()):
        raise InputError("the model's logits are NaN, so they choose no tokens", remedy=FINITE_REMEDY)


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply matrices of float32 in float32 inside the block, whatever precision is set; then set that again.

    The setting is that of the process: other threads see it, too.
    """
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by `torch.backends`, as transformers' `tf32` does
        with _exact_backends():
            yield
        return
    if precision == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _exact_backends() -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = "none"  # that of all backends
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


def with_exact_products(items: Generator[Item]) -> Generator[Item]:
    """Yield the items of a generator, each computed with `exact_products`; between them the precision is as set."""
    try:
        while True:
            with exact_products():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
    finally:
        items.close()
