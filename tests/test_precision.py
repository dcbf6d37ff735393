"""Checks and deterministic answers use exact products of float32, whatever precision is set for others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch

from lmeval_prune import Plan, map_model
from lmeval_prune.architectures import precision
from lmeval_prune.architectures.precision import exact_products, with_exact_products
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.decoding.fallback import decoding_differences, likelihood_differences, why_failing
from lmeval_prune.surgery.cut import cut
from tests.tiny_models import tiny

BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def by_backend(backend: Any, precision: str) -> None:
    backend.fp32_precision = precision


SETTINGS: dict[str, Callable[[], None]] = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "transformers' tf32": lambda: by_backend(torch.backends, "tf32"),
    "matmul on CUDA": lambda: by_backend(torch.backends.cuda.matmul, "tf32"),
    "matmul on a CPU": lambda: by_backend(torch.backends.mkldnn.matmul, "bf16"),
}


@pytest.fixture(params=SETTINGS, autouse=True)
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A precision that a user has set, on a machine where `highest` alone is exact."""
    monkeypatch.setattr(precision, "fast_precision", lambda: "highest")
    for backend in BACKENDS:
        by_backend(backend, "none")  # as in a new process, where that of all backends counts
    SETTINGS[request.param]()
    yield request.param
    by_backend(torch.backends, "none")
    torch.set_float32_matmul_precision("highest")


def precisions() -> list[str]:
    return [backend.fp32_precision for backend in BACKENDS]


def rounds() -> bool:
    return any(precision in ("tf32", "bf16") for precision in precisions())


def test_products_are_exact_inside_the_block(setting: str) -> None:
    before = precisions()
    assert rounds() == (setting != "highest")
    with exact_products():
        assert not rounds()
        with exact_products():
            assert not rounds()
        assert not rounds()
    assert precisions() == before
    if setting == "transformers' tf32":
        by_backend(torch.backends, "ieee")
        assert not rounds()
        by_backend(torch.backends, "tf32")
    with pytest.raises(ZeroDivisionError), exact_products():
        raise ZeroDivisionError
    assert precisions() == before


def test_items_are_computed_with_exact_products_and_used_as_set(setting: str) -> None:
    ended = []

    def items() -> Generator[bool]:
        try:
            for _ in range(3):
                yield rounds()
        finally:
            ended.append(True)

    for count in (3, 1):
        source = with_exact_products(items())
        for _ in range(count):
            assert not next(source) and rounds() == (setting != "highest")
        source.close()
    assert ended == [True, True] and list(with_exact_products(items())) == [False] * 3


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether products were rounded, at each call of a linear layer."""
    seen: list[bool] = []
    forward = torch.nn.Linear.forward

    def noted(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(rounds())
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    return seen


def test_checks_of_the_engine_and_of_cut_models_are_exact(seen: list[bool], setting: str) -> None:
    model = tiny("llama")
    for differences in (decoding_differences, likelihood_differences):
        assert why_failing(differences, map_model(model)) is None
    cut(model, Plan(blocks="L1"))
    assert seen and not any(seen)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_answers_are_exact(seen: list[bool], setting: str, deterministic: bool) -> None:
    engine = Engine(tiny("llama"), deterministic=deterministic)
    assert engine.unsupported is None
    seen.clear()
    params = SamplingParams(max_new_tokens=3)
    assert len(list(engine.decode([Request((3, 4, 5), params=params), Request((6, 7), params=params)]))) == 2
    assert set(seen) == {setting != "highest" and not deterministic}
