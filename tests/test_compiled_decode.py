"""The compiled attention of one token per row on a CPU, against its literal formula in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmeval_prune.kernels.decode_attention import compiled


def literal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor,
    scaling: float, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One head and one key at a time."""
    rows, heads, _ = query.shape
    out = torch.zeros(rows, heads, values.shape[-1], dtype=torch.float64)
    lse = torch.zeros(rows, heads, dtype=torch.float64)
    for row in range(rows):
        slot, length = int(slots[row]), int(lengths[row])
        for head in range(heads):
            kv_head = head // (heads // keys.shape[1])
            visible = range(length if window is None else min(window, length))
            offsets = [length - 1 - back for back in visible]
            scores = [scaling * float(query[row, head].double() @ keys[slot, kv_head, j].double()) for j in offsets]
            weights = [math.exp(score - max(scores)) for score in scores]
            lse[row, head] = max(scores) + math.log(sum(weights))
            for weight, j in zip(weights, offsets, strict=True):
                out[row, head] += weight / sum(weights) * values[slot, kv_head, j].double()
    return out, lse


@pytest.fixture(autouse=True)
def always_release_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LARGE", 0)


def test_pytorch_works_on_after_its_waiting_threads_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    compiled._openmp.cache_clear()
    if not compiled._openmp():
        pytest.skip("this PyTorch has no GNU OpenMP of its own")

    def threads() -> int:
        return len([*Path("/proc/self/task").iterdir()])

    before, x = torch.get_num_threads(), torch.randn(300, 300, dtype=torch.float64)
    torch.set_num_threads(3)
    try:
        product = x @ x
        for _ in range(3):
            running = threads()
            compiled._release_cores()
            assert threads() == running - 2
            assert torch.equal(x @ x, product) and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        compiled._openmp.cache_clear()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # kv heads, group, widths and type: each is compiled by itself
    loop=st.sampled_from([(1, 1, 8, 8, torch.float32), (3, 3, 64, 64, torch.float32), (2, 4, 16, 24, torch.bfloat16)]),
    rows=st.integers(1, 7),
    window=st.sampled_from([None, 1, 5]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
)
def test_formula(
    loop: tuple[int, int, int, int, torch.dtype],
    rows: int,
    window: int | None,
    scale: float,
    threads: int,
    seed: int,
) -> None:
    """Scores up to thousands apart, slots in any order, and memory behind a slot's length that is not read."""
    kv_heads, group, width, width_v, dtype = loop
    random = torch.Generator().manual_seed(seed)
    query = scale * torch.randn(rows, kv_heads * group, width, generator=random)
    keys, values = (torch.randn(9, kv_heads, 20, size, generator=random).to(dtype) for size in (width, width_v))
    slots = torch.randperm(9, generator=random)[:rows]
    lengths = torch.randint(1, 21, (rows,), generator=random)
    for slot, length in zip(slots, lengths, strict=True):
        keys[slot, :, length:] = values[slot, :, length:] = torch.nan
    expected, expected_lse = literal(query, keys, values, slots, lengths, 0.3, window)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, lse = compiled.decode(query, keys, values, slots, lengths, 0.3, window)
    finally:
        torch.set_num_threads(before)
    assert out.dtype == torch.float32
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=2e-5 if scale > 1 else 2e-6)


@pytest.mark.parametrize("difference", [0.0, 1e-6, 1.0, 20.0, 86.0, 200.0, 1e30])
def test_exponential(difference: float) -> None:
    """Two keys with a difference of scores: the weights are those of a softmax, without overflow."""
    query, values = torch.ones(1, 1, 1), torch.tensor([1.0, 0.0])[None, None, :, None]
    keys = torch.tensor([0.0, difference])[None, None, :, None]
    out, _ = compiled.decode(query, keys, values, torch.tensor([0]), torch.tensor([2]), 1.0)
    assert float(out) == pytest.approx(
        math.exp(-min(difference, 700)) / (1 + math.exp(-min(difference, 700))), rel=2e-6, abs=2e-38
    )
