"""The compiled attention of one token per row on a CPU, against its literal formula in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmeval_prune.kernels import decode_attention as compiled
from tests import literal_decode


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
    rows=st.integers(0, 7),
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
    lengths = torch.randint(0, 21, (rows,), generator=random)
    for slot, length in zip(slots, lengths, strict=True):
        keys[slot, :, length:] = values[slot, :, length:] = torch.nan
    expected, expected_lse = literal_decode.decode(query, keys[slots], values[slots], lengths, 0.3, window=window)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, lse = compiled.decode(query, keys, values, slots, lengths, 0.3, window)
    finally:
        torch.set_num_threads(before)
    assert out.dtype == torch.float32
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=2e-5 if scale > 1 else 2e-6)


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Three rows with two heads for each of two key-value heads, in the slots 2, 0, 1."""
    random = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(3, *shape, generator=random).to(dtype) for shape in ((4, 8), (2, 6, 8), (2, 6, 5))
    )
    slots, lengths = torch.tensor([2, 0, 1]), torch.tensor([6, 3, 1])
    return {"query": query, "keys": keys, "values": values, "slots": slots, "lengths": lengths, "scaling": 0.3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_what_is_not_a_number_is_seen(name: str, number: float, dtype: torch.dtype) -> None:
    """Of one key-value head in the row that reads it, as in PyTorch."""
    inputs = arguments(dtype)
    inputs[name][{"query": (1, 1), "keys": (0, 0, 2), "values": (0, 0, 2)}[name]] = number
    out, _ = compiled.decode(**inputs)
    keys, values = (inputs[name][0].repeat_interleave(2, 0)[:, :3].float() for name in ("keys", "values"))
    query = inputs["query"][1, :, None].float()
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.3)[:, 0]
    assert not expected.isfinite().all()
    torch.testing.assert_close(out[1], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert out[[0, 2]].isfinite().all()


def test_scores_of_minus_infinity_alone_attend_to_nothing() -> None:
    """As in PyTorch's own formula, where NaN stays NaN; a single other score has all of the weight."""
    query, keys = torch.full((1, 2, 4), -1.0), torch.full((1, 2, 3, 4), math.inf)
    values, slots, lengths = torch.ones(1, 2, 3, 4), torch.tensor([0]), torch.tensor([3])
    keys[0, 1, 2] = math.nan
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, scale=1.0)[:, :, 0]
    out, lse = compiled.decode(query, keys, values, slots, lengths, 1.0)
    assert not expected[0, 0].any() and expected[0, 1].isnan().all()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert lse[0, 0] == -math.inf and lse[0, 1].isnan()
    keys[0, 0, 1] = 1
    out, lse = compiled.decode(query, keys, values, slots, lengths, 1.0)
    assert out[0, 0].tolist() == [1] * 4 and lse[0, 0] == -4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_starts_threads_of_its_own() -> None:
    """In a process of its own, which has not used PyTorch's threads: those do not survive a fork."""
    program = """
import os, signal, torch
from lmeval_prune.kernels import decode_attention as compiled
torch.set_num_threads(2)
tensors = torch.ones(4, 1, 8), torch.ones(4, 1, 6, 8), torch.ones(4, 1, 6, 8), torch.arange(4), torch.full((4,), 6)
compiled.decode(*tensors, 0.3)
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
os._exit(0 if compiled.decode(*tensors, 0.3)[0].eq(1).all() else 1)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
