"""Where the time of an engine's run goes: the host's, the device's, and the kernels of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from _gpu_common import synchronize
from torch.utils._python_dispatch import TorchDispatchMode

from lmeval_prune.decoding import Engine, Request
from lmeval_prune.decoding.model_runner import ModelRunner
from lmeval_prune.decoding.static_step import StaticStep, StepResult

SETTLING = 3  # steps of a bucket until its graph is replayed: one runs eagerly, one captures
KERNEL_CLASSES = {
    "products": ("gemm", "gemv", "cutlass", "cublas", "nvjet", "splitk", "xmma"),
    "attention": ("decode", "attend", "combine", "flash", "fmha", "attention"),
}


@dataclass
class Trace:
    """Times of a run of the static loop, in seconds of the host, and the steps by the device's clock."""

    device: str
    rows: list[int] = field(default_factory=list)  # of each step
    events: list[tuple[Any, Any]] = field(default_factory=list)  # before and after each step on the device
    start: float = 0.0  # in `StaticStep.start`, on a GPU launching
    wait: float = 0.0  # in `StepResult.read`, on a GPU waiting for the device
    prompts: float = 0.0  # in prompt passes
    wall: float = 0.0

    def mark(self) -> Any:
        """Return the device's time, to be read later."""
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Return the milliseconds between two marks."""
        return first.elapsed_time(last) if self.device == "cuda" else 1000 * (last - first)

    def summary(self) -> dict[str, Any]:
        """Return milliseconds a step: of the host, and of the device in steps with all rows."""
        steps = len(self.rows)
        loop = self.wall - self.prompts - self.wait - self.start
        out: dict[str, Any] = {
            "loop_steps": steps,
            "loop_seconds": self.wall,
            "loop_prompt_seconds": self.prompts,
            "host_ms": 1000 * (loop + (self.start if self.device == "cuda" else 0)) / max(1, steps),
            "host_launch_ms": 1000 * self.start / max(1, steps) if self.device == "cuda" else None,
            "host_wait_ms": 1000 * self.wait / max(1, steps),
        }
        steady = [pair for pair, rows in zip(self.events, self.rows, strict=True) if rows == max(self.rows)][SETTLING:]
        if steady:
            busy = sum(self.between(*pair) for pair in steady)
            wall = self.between(steady[0][0], steady[-1][1])
            out |= {"steady_steps": len(steady), "steady_ms": wall / len(steady), "busy_share": busy / wall}
        return out


@contextmanager
def traced(device: str) -> Iterator[Trace]:
    """Trace the static loop inside the block."""
    trace = Trace(device)
    start, read, forward = StaticStep.start, StepResult.read, ModelRunner.forward

    def traced_start(step: StaticStep, rows: int, *args: Any, **kwargs: Any) -> Any:
        begin, first = time.perf_counter(), trace.mark()
        result = start(step, rows, *args, **kwargs)
        trace.events.append((first, trace.mark()))
        trace.rows.append(rows)
        trace.start += time.perf_counter() - begin
        return result

    def traced_read(result: StepResult) -> Any:
        begin = time.perf_counter()
        out = read(result)
        trace.wait += time.perf_counter() - begin
        return out

    def traced_forward(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = forward(runner, *args, **kwargs)
        trace.prompts += time.perf_counter() - begin
        return out

    with (
        patch.object(StaticStep, "start", traced_start),
        patch.object(StepResult, "read", traced_read),
        patch.object(ModelRunner, "forward", traced_forward),
    ):
        begin = time.perf_counter()
        yield trace
        synchronize(device)
        trace.wall = time.perf_counter() - begin


def decode_traced(engine: Engine, requests: Sequence[Request], device: str) -> tuple[dict[Request, list[int]], Trace]:
    """Decode requests; return the answers, and the trace without the engine's checks of the model."""
    if engine.unsupported or (engine.schedule.static and not engine.is_static):
        raise RuntimeError("the engine does not run this model as asked; its warning says why")
    synchronize(device)
    with traced(device) as trace:
        answers = dict(engine.decode(requests))
    return answers, trace


class _Operations(TorchDispatchMode):
    """Counts operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def kernels_of(device: str, function: Callable[[], Any]) -> dict[str, Any]:
    """Count the kernels of a call, and return their milliseconds by class; on a CPU, count its operations."""
    if device != "cuda":
        with _Operations() as operations:
            function()
        return {"kernels": operations.count, "kernel_ms": None}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    names: Counter[str] = Counter()
    count = 0
    for event in profile.events() or ():
        name = event.name.lower()
        if "cuda" not in str(event.device_type).lower() or name.startswith(("memcpy", "memset")):
            continue
        kind = next((kind for kind, words in KERNEL_CLASSES.items() if any(word in name for word in words)), "other")
        count += 1
        times[kind] += event.time_range.elapsed_us() / 1000
        names[event.name] += event.time_range.elapsed_us() / 1000
    kernel_ms = {**dict.fromkeys((*KERNEL_CLASSES, "other"), 0.0), **times}
    longest = {name[:80]: value for name, value in names.most_common(12)}
    share = kernel_ms["other"] / max(1e-9, sum(kernel_ms.values()))
    return {"kernels": count, "kernel_ms": kernel_ms, "longest_kernels_ms": longest, "other_kernels_share": share}
