"""Kernels of a decode step on a GPU: compiled, and captured in CUDA graphs. Skipped without a CUDA device.

tests/test_kernels.py runs there, too, with the kernels compiled; here is what needs a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason='kernels need triton (pip install -e ".[kernels]")')

from lmeval_prune.kernels import dispatch
from lmeval_prune.kernels.decode_attention import naive, ops
from lmeval_prune.kernels.token_filter import ops as token_filter
from lmeval_prune.kernels.token_filter.state import Memory, Rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS, SLOTS, CAPACITY, MASKS = 33, 65, 600, 5  # the last slot is scratch
SCRATCH = SLOTS - 1
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the relative RMS error
SHAPES = {"smollm2": (9, 3, 64), "llama": (32, 8, 128), "one head": (4, 4, 80), "gemma": (8, 1, 256)}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@dataclass
class Buffers:
    """What a step reads, at fixed addresses."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    new_key: torch.Tensor
    new_value: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    masks: torch.Tensor
    keep: torch.Tensor

    @staticmethod
    def random(shape: tuple[int, int, int], dtype: torch.dtype) -> Buffers:
        heads, kv_heads, width = shape
        generator = torch.Generator(device="cuda").manual_seed(heads)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda").to(dtype)

        buffers = Buffers(
            query=normal(1, heads, ROWS, width)[0].transpose(0, 1),  # as in a model: not contiguous
            keys=normal(SLOTS, kv_heads, CAPACITY, width),
            values=normal(SLOTS, kv_heads, CAPACITY, width),
            new_key=normal(1, kv_heads, ROWS, width)[0].transpose(0, 1),
            new_value=normal(1, kv_heads, ROWS, width)[0].transpose(0, 1),
            lengths=torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
            slots=torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
            masks=torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
            keep=(torch.rand(MASKS, heads, generator=generator, device="cuda") > 0.3).to(dtype),
        )
        buffers.change(0)
        return buffers

    def change(self, seed: int) -> None:
        """Overwrite all that changes between steps."""
        generator = torch.Generator().manual_seed(seed)
        self.slots.copy_(torch.randperm(SCRATCH, generator=generator)[:ROWS])
        self.lengths.copy_(torch.randint(0, CAPACITY, (ROWS,), generator=generator))
        self.masks.copy_(torch.randint(0, MASKS, (ROWS,), generator=generator))
        for tensor in (self.query, self.new_key, self.new_value):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.slots[-3:], self.lengths[-3:] = SCRATCH, 0  # padding rows

    def double(self) -> dict[str, Any]:
        return {name: x.double() if x.is_floating_point() else x.clone() for name, x in vars(self).items()}


def capture(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph of a step and its output, after one call outside of it, as `ops` asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 2.0, "splits": 4}, {"splits": 1}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_steps_attention_is_the_one_in_pytorch(shape: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    buffers, scaling = Buffers.random(SHAPES[shape], dtype), SHAPES[shape][2] ** -0.5
    doubles = buffers.double()
    limits = {name: value for name, value in options.items() if name != "splits"}
    dispatch.DISPATCHED.clear()
    actual = ops.decode(**vars(buffers), scaling=scaling, **options)
    assert set(dispatch.DISPATCHED) == {"decode attention: triton"}
    expected = naive.decode(**doubles, scaling=scaling, **limits)
    assert relative_error(actual, expected) < TOLERANCES[dtype]
    for stored in ("keys", "values"):
        assert getattr(buffers, stored)[:SCRATCH].double().equal(doubles[stored][:SCRATCH])


def test_every_configuration_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmeval_prune.kernels.decode_attention import triton

    buffers = Buffers.random(SHAPES["smollm2"], torch.float32)
    expected = naive.decode(**buffers.double(), scaling=0.125)
    for config in (*triton.DOT_CONFIGS, *triton.SUM_CONFIGS):
        monkeypatch.setattr(triton, "_configuration", lambda *_, config=config: config)
        assert relative_error(ops.decode(**vars(buffers), scaling=0.125), expected) < 1e-5, config


@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_captured_step_takes_other_slots_lengths_and_masks(dtype: torch.dtype, splits: int | None) -> None:
    buffers = Buffers.random(SHAPES["smollm2"], dtype)
    graph, out = capture(lambda: ops.decode(**vars(buffers), scaling=0.125, splits=splits))
    for seed in range(1, 6):
        buffers.change(seed)
        doubles = buffers.double()
        graph.replay()
        replayed, stored = out.clone(), buffers.keys[:SCRATCH].double()
        again = ops.decode(**vars(buffers), scaling=0.125, splits=splits)
        assert replayed.equal(again) and replayed.isfinite().all()
        assert relative_error(replayed, naive.decode(**doubles, scaling=0.125)) < TOLERANCES[dtype]
        assert stored.equal(doubles["keys"][:SCRATCH])


def test_a_captured_step_under_a_token_filter() -> None:
    """Deciding and storing, then attending, replayed token by token, against the same calls outside of a graph."""
    rule, results = Rule(0.4, warmup=3), []
    for is_captured in (False, True):
        buffers = Buffers.random(SHAPES["llama"], torch.bfloat16)
        new_key, new_value = buffers.new_key[:, :, None], buffers.new_value[:, :, None]
        shape = (SLOTS, *new_key.shape[1:])
        memory = Memory.fresh(SLOTS, new_key.new_zeros(shape), new_value.new_zeros(shape))
        positions = torch.zeros(SLOTS, CAPACITY, dtype=torch.int32, device="cuda")
        lengths, totals = torch.zeros(SLOTS, dtype=torch.int32, device="cuda"), torch.zeros(2, device="cuda").long()
        valid, at, ends = torch.ones(ROWS, 1, device="cuda").bool(), torch.zeros_like(buffers.slots), buffers.lengths

        def step(
            key=new_key, value=new_value, valid=valid, memory=memory, at=at, ends=ends, buffers=buffers,
            store=(buffers.keys, buffers.values, positions, lengths, totals),
        ) -> torch.Tensor:  # fmt: skip
            absent = token_filter.decide_and_store(
                key,
                value,
                valid,
                memory,
                rule,
                store=store,
                position=at,
                keep_skipped=False,
                slots=buffers.slots,
                ends=ends,
            )
            options = {"slots": buffers.slots, "keep": buffers.keep, "masks": buffers.masks}
            options |= {"skipped": absent[:, 0], "window": 20, "positions": store[2]}
            return ops.decode(buffers.query, buffers.keys, buffers.values, ends, 0.1, **options)

        valid.fill_(False)
        run = step
        if is_captured:
            graph, out = capture(step)

            def run(graph=graph, out=out) -> torch.Tensor:
                graph.replay()
                return out

        assert not lengths.any() and not memory.started.any() and not totals.any()  # no row was valid
        outputs = []
        for t in range(30):
            buffers.change(t % 2)  # other rows for the same slots
            buffers.new_key.add_(1)  # similar to each other
            valid.copy_((torch.arange(ROWS) < ROWS - 3)[:, None])
            at.fill_(t)
            outputs.append(run().clone())
        results.append([torch.stack(outputs), lengths, positions, totals, *memory.tensors, buffers.keys[:SCRATCH]])
    for eager, replayed in zip(*results, strict=True):
        assert eager.equal(replayed)
    totals = results[0][3]
    assert totals[0] == 30 * (ROWS - 3) and totals[1] > 0
