"""Products of float32 are fast where a setting of PyTorch makes them so without rounding them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmeval_prune import map_model
from lmeval_prune.architectures import precision
from lmeval_prune.architectures.precision import MANY_ROWS, exact_products, fast_precision, fast_products
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.pruners.base import PRUNERS
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from tests.tiny_models import tiny

HEAD = 64  # the vocabulary of tiny models is not smaller
BACKENDS: Any = torch.backends
MATMUL = (BACKENDS.mkldnn.matmul, BACKENDS.cuda.matmul)


@pytest.fixture(autouse=True)
def default_precision() -> Iterator[None]:
    """The precision of a new process, before and after."""
    set_default_precision()
    yield
    set_default_precision()


def set_default_precision() -> None:
    torch.set_float32_matmul_precision("highest")
    for backend in (*MATMUL, BACKENDS):
        backend.fp32_precision = "none"


@pytest.fixture
def medium_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where `medium` is also exact."""
    monkeypatch.setattr(precision, "fast_precision", lambda: "medium")


@pytest.mark.parametrize("bits", [7, 10, 16, 23])  # of mantissas: bfloat16, TF32, between, float32
def test_products_that_are_rounded_are_noticed(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.matmul

    def rounded(x: torch.Tensor) -> torch.Tensor:
        lost = 23 - bits
        half = (1 << lost) >> 1
        return ((x.view(torch.int32) + half) >> lost << lost).view(torch.float32)

    monkeypatch.setattr(torch, "matmul", lambda left, right: matmul(rounded(left), rounded(right)))
    assert precision._is_exact("highest") == (bits > 10)


def test_a_setting_that_rounds_or_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_is_amd_with_avx512", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for is_exact, expected in ((True, "medium"), (False, "highest")):
        monkeypatch.setattr(precision, "_is_exact", lambda _, answer=is_exact: answer)
        assert fast_precision.__wrapped__() == expected
    monkeypatch.setattr(precision, "_is_exact", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert fast_precision.__wrapped__() == "highest"


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_the_setting_follows_from_the_rows_and_is_put_back(before: str, medium_is_fast: None) -> None:
    torch.set_float32_matmul_precision(before)
    for rows, expected in ((MANY_ROWS, "medium"), (MANY_ROWS - 1, "highest")):
        with pytest.raises(ZeroDivisionError), fast_products(rows):
            assert torch.get_float32_matmul_precision() == ("high" if before == "high" else expected)
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == before
    with exact_products():
        assert torch.get_float32_matmul_precision() == ("highest" if before == "high" else before)


@pytest.mark.parametrize(
    ("before", "block", "inside"), [("highest", fast_products, "medium"), ("high", exact_products, "highest")]
)
def test_blocks_of_threads_may_overlap(before: str, block: Any, inside: str, medium_is_fast: None) -> None:
    """The first block ends inside the second: its setting stays until the second ends, and nothing stays afterwards."""
    torch.set_float32_matmul_precision(before)
    first, second = block(), block()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == inside
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == before


@pytest.fixture
def settings_by_rows(monkeypatch: pytest.MonkeyPatch, medium_is_fast: None) -> dict[int, set[str]]:
    """Settings by the number of rows of the products of linear layers, but for the head, which computes fewer rows."""
    settings: dict[int, set[str]] = {}
    forward = torch.nn.Linear.forward

    def noted(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.out_features < HEAD:
            settings.setdefault(x.numel() // x.shape[-1], set()).add(torch.get_float32_matmul_precision())
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    return settings


def test_the_engine_is_fast_for_many_rows(settings_by_rows: dict[int, set[str]]) -> None:
    engine = Engine(tiny("llama"))
    assert engine.unsupported is None
    settings_by_rows.clear()
    params = SamplingParams(max_new_tokens=3)
    list(engine.decode([Request(tuple(range(3, 13)), params=params)]))
    list(engine.decode([Request((number + 3,), params=params) for number in range(MANY_ROWS)]))
    assert {1, MANY_ROWS, 10} <= set(settings_by_rows)
    assert all(
        settings == {"medium" if rows >= MANY_ROWS else "highest"} for rows, settings in settings_by_rows.items()
    ), settings_by_rows


def test_scoring_is_fast(settings_by_rows: dict[int, set[str]]) -> None:
    model_map = map_model(tiny("llama"))
    text = CalibrationText.from_windows("text", torch.randint(3, 50, (4, 12)))
    options = PruneOptions(ratio=0.5, compensation="bias")
    list(stages(PRUNERS.load("flap")(), model_map, options, text))
    assert settings_by_rows and set().union(*settings_by_rows.values()) == {"medium"}
