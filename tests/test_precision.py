"""Checks and near-ties allow what matrix products are rounded by: half types, and float32 as TF32 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmeval_prune.architectures.precision import has_rough_products, product_eps
from lmeval_prune.decoding.sampling import near_tied_argmax
from lmeval_prune.decoding.self_check import LogitsDiffer, _compare
from lmeval_prune.surgery.depth import Depth, run, why_different
from tests.tiny_models import tiny


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


ROUNDED = {"highest": 1e-6, "high": 6e-4, "medium": 6e-3}  # of logits, relative to the largest


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("precision_set", ROUNDED)
def test_checks_allow_what_products_are_rounded_by(precision_set: str) -> None:
    torch.set_float32_matmul_precision(precision_set)
    model = tiny("llama").float()
    logits = run(model).detach()
    for setting, rounding in ROUNDED.items():
        error = 4 * rounding * float(logits.abs().max())
        is_allowed = precision_set != "highest" or setting == "highest"
        assert (why_different(model, Depth(logits=logits + error)) == "") == is_allowed, setting
        if is_allowed:
            _compare(model, [error], [logits])
        else:
            with pytest.raises(LogitsDiffer):
                _compare(model, [error], [logits])
    assert why_different(model, Depth(logits=logits + 0.1 * float(logits.abs().max())))


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("precision_set", ROUNDED)
def test_near_ties_are_those_that_rounded_products_can_change(precision_set: str) -> None:
    torch.set_float32_matmul_precision(precision_set)
    gaps = {"highest": 5e-4, "high": 0.5, "medium": 4.0}  # below 32 roundings of the largest logit, or 1e-3
    near = [bool(near_tied_argmax(torch.tensor([[20.0, 20.0 - gap, 0.0]]))) for gap in gaps.values()]
    assert near == [list(gaps).index(setting) <= list(gaps).index(precision_set) for setting in gaps]


@pytest.mark.usefixtures("precision")
def test_the_rounding_of_products_is_that_of_the_type_and_the_setting() -> None:
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert product_eps(dtype) == torch.finfo(dtype).eps
    assert [has_rough_products(dtype) for dtype in (torch.float64, torch.float32, torch.float16)] == [
        False,
        False,
        True,
    ]
    torch.set_float32_matmul_precision("high")
    assert product_eps(torch.float32) == 2**-10 and has_rough_products(torch.float32)  # TF32: 10 bits of mantissa


def test_precisions_that_were_set_by_backend_count_as_rough(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert has_rough_products(torch.float32) and not has_rough_products(torch.float64)
