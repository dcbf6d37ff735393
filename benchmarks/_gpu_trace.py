"""Where the time of an engine's run goes: the host's, the device's, and the kernels of a step."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
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
class StepTrace:
    """A step of the static loop; seconds of the host since the run began, and marks of the device's clock."""

    rows: int
    passes: int  # number of prompt passes before the step
    earlier: int  # number of earlier steps with as many rows
    begin: float
    waited: float  # in `StepResult.read` before the step, on a GPU for the device
    first: Any
    started: float = 0.0  # in `StaticStep.start`, on a GPU launching
    last: Any = None


@dataclass
class Trace:
    """Times of a run of the static loop."""

    device: str
    steps: list[StepTrace] = field(default_factory=list)
    waited: float = 0.0
    passes: int = 0
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

    def host_seconds(self, step: StepTrace, following: StepTrace) -> float:
        """Return the host's own time from one start to the next: without waiting and, on a CPU, without the step."""
        spent = following.begin - step.begin - (following.waited - step.waited)
        return spent if self.device == "cuda" else spent - step.started

    def summary(self) -> dict[str, Any]:
        """Return milliseconds of host and device from step to step, of the same rows without a pass between."""
        busy = sum(self.between(step.first, step.last) for step in self.steps)
        out: dict[str, Any] = {"loop_steps": len(self.steps), "step_share_of_run": busy / (1000 * self.wall)}
        steady = [
            (step, following)
            for step, following in pairwise(self.steps)
            if step.rows == following.rows and step.passes == following.passes and step.earlier >= SETTLING
        ]
        if steady:
            periods = [self.between(step.first, following.first) for step, following in steady]
            durations = [self.between(step.first, step.last) for step, _ in steady]
            out |= {
                "steady_steps": len(steady),
                "steady_ms": statistics.median(periods),
                "busy_share": sum(durations) / sum(periods),
                "host_ms": 1000 * statistics.median(self.host_seconds(*pair) for pair in steady),
                "host_wait_ms": 1000 * statistics.median(after.waited - step.waited for step, after in steady),
            }
            if self.device == "cuda":
                out["host_launch_ms"] = 1000 * statistics.median(step.started for step, _ in steady)
        return out


@contextmanager
def traced(device: str) -> Iterator[Trace]:
    """Trace the static loop inside the block."""
    trace, counts = Trace(device), Counter[int]()
    start, read, forward = StaticStep.start, StepResult.read, ModelRunner.forward

    def traced_start(step: StaticStep, rows: int, *args: Any, **kwargs: Any) -> Any:
        earlier = counts[rows]
        record = StepTrace(rows, trace.passes, earlier, time.perf_counter(), trace.waited, trace.mark())
        result = start(step, rows, *args, **kwargs)
        record.last = trace.mark()
        record.started = time.perf_counter() - record.begin
        trace.steps.append(record)
        counts[rows] += 1
        return result

    def traced_read(result: StepResult) -> Any:
        begin = time.perf_counter()
        out = read(result)
        trace.waited += time.perf_counter() - begin
        return out

    def traced_forward(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        trace.passes += 1
        return forward(runner, *args, **kwargs)

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
