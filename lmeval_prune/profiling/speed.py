"""Measure the speed of models, alternating in one run, and the peak memory of each in a separate process."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from lmeval_prune.architectures import position_limit
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.checkpoints.skeleton import skeleton_of
from lmeval_prune.errors import InputError
from lmeval_prune.profiling.costs import random_inputs


@dataclass(frozen=True)
class Workload:
    """Size of the timed prompts and answers.

    Attributes:
        prompt: tokens in a prompt.
        new: tokens decoded after it, by causal models.
        batches: batch sizes.
        rounds: number of times that each model is timed.
        clock: `wall` for elapsed time, or `processor` for the processor time of this process: fairer on a busy
            machine, with one thread.
    """

    prompt: int = 128
    new: int = 32
    batches: Sequence[int] = (1, 8)
    rounds: int = 5
    clock: str = "wall"


def check_length(folder: str, work: Workload) -> None:
    """Refuse a workload with more tokens than the model has positions."""
    skeleton = skeleton_of(folder)
    positions = position_limit(skeleton)
    tokens = work.prompt + (work.new if _is_causal(skeleton) else 0)
    if positions and tokens > positions:
        raise InputError(f"{folder} has {positions} positions, and the workload {tokens} tokens; give a smaller prompt")


def measure(
    models: Mapping[str, Any], work: Workload, progress: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, float]]:
    """Time models alternately; return tokens per second, the median over rounds.

    Returns:
        By model and figure, with the batch size: `prefill_1`, `decode_1` for causal models, `forward_1` for others.
    """
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for model in models.values():
        _timed(model, work, min(work.batches), 2)  # warm up

    for number in range(work.rounds):
        for batch in work.batches:
            for name, model in models.items():
                progress(f"round {number + 1} of {work.rounds}, batch {batch}: {name}")
                for figure, rate in _timed(model, work, batch, work.new).items():
                    rates[name].setdefault(f"{figure}_{batch}", []).append(rate)
    return {
        name: {figure: round(statistics.median(values), 2) for figure, values in figures.items()}
        for name, figures in rates.items()
    }


def peak_memory(folder: str, work: Workload) -> float:
    """Return the peak memory in MiB at the largest batch, above what a process uses before it loads the model.

    Raises:
        InputError: the measuring process was killed.
    """
    if torch.cuda.is_available():
        model = load_pretrained(folder).cuda()
        torch.cuda.reset_peak_memory_stats()
        _timed(model, work, max(work.batches), work.new)
        return torch.cuda.max_memory_allocated() / 2**20
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context) as pool:
            return pool.submit(_peak, folder, work, torch.get_num_threads()).result()
    except BrokenProcessPool:
        raise InputError(
            f"the process that measures the memory of {folder} was killed, probably for lack of memory; "
            "give smaller batches or a shorter prompt"
        ) from None


def _peak(folder: str, work: Workload, threads: int) -> float:
    torch.set_num_threads(threads)
    skeleton_of(folder)  # imports what the model needs
    before = psutil.Process().memory_info().rss
    model = load_pretrained(folder)
    _timed(model, work, max(work.batches), work.new)
    return (highest_memory() - before) / 2**20


def highest_memory() -> int:
    """Return the peak memory of this process in bytes.

    `/proc` is read first: on Linux, the peak of `getrusage` includes that of the parent process.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.is_file() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _timed(model: Any, work: Workload, batch: int, new: int) -> dict[str, float]:
    inputs = random_inputs(model, batch, work.prompt)
    if _is_causal(model):
        return decoding_rates(model, inputs["input_ids"], new, work.clock, logits_to_keep=1)
    with torch.no_grad():
        _, seconds = _clocked(lambda: model(**inputs), inputs["input_ids"].device, work.clock)
    return {"forward": inputs["input_ids"].numel() / seconds}


def decoding_rates(model: Any, ids: torch.Tensor, new: int, clock: str = "wall", **reading: Any) -> dict[str, float]:
    """Time a causal model: tokens per second in reading prompts (`prefill`) and in decoding after them (`decode`).

    Args:
        model: a stock model, with any interventions applied.
        ids: prompts, shape (batch, tokens).
        new: tokens to decode.
        clock: as in `Workload`.
        reading: further arguments of the forward pass over the prompts.
    """
    with torch.no_grad():
        out, prefill = _clocked(lambda: model(ids, use_cache=True, **reading), ids.device, clock)

        def decode() -> None:
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            for _ in range(new):
                step = model(token, past_key_values=cache, use_cache=True)
                cache, token = step.past_key_values, step.logits[:, -1:].argmax(-1)

        _, decoding = _clocked(decode, ids.device, clock)
    return {"prefill": ids.numel() / prefill, "decode": len(ids) * new / decoding}


def _is_causal(model: Any) -> bool:
    return model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)


def _clocked(function: Callable[[], Any], device: torch.device, clock: str) -> tuple[Any, float]:
    """Return the value of a function and the seconds of its call."""
    now = time.perf_counter if clock == "wall" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = now()
    value = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return value, now() - begin
