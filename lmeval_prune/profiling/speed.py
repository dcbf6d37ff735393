"""What models cost by the clock, measured in turn in one run, and what memory each needs in a process of its own."""

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
from lmeval_prune.checkpoints.pruned import load_pretrained
from lmeval_prune.checkpoints.skeleton import skeleton_of
from lmeval_prune.errors import InputError


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        prompt: tokens of a prompt.
        new: tokens decoded after it; of causal models.
        batches: prompts at once.
        rounds: how often each model has its turn.
        clock: `wall`, or `processor`: the time that this process had a processor for, on a busy machine and with one
            thread the fairer measure.
    """

    prompt: int = 128
    new: int = 32
    batches: Sequence[int] = (1, 8)
    rounds: int = 5
    clock: str = "wall"


def check_length(folder: str, work: Workload) -> None:
    """Refuse a workload that is longer than a model's positions.

    Raises:
        InputError: it is.
    """
    bare = skeleton_of(folder)
    positions = position_limit(bare)
    tokens = work.prompt + (work.new if _is_causal(bare) else 0)
    if positions and tokens > positions:
        raise InputError(f"{folder} has {positions} positions, and the workload {tokens} tokens; give a smaller prompt")


def measure(
    models: Mapping[str, Any], work: Workload, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Time models in turn: tokens a second, the median over rounds.

    Returns:
        By model and figure: `prefill_1`, `decode_1` and the like of causal models, `forward_1` of others.
    """
    times: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for model in models.values():
        _timed(model, work, min(work.batches), 2)  # warm
    for number in range(work.rounds):
        for batch in work.batches:
            for name, model in models.items():
                progress(f"round {number + 1} of {work.rounds}, batch {batch}: {name}")
                for figure, speed in _timed(model, work, batch, work.new).items():
                    times[name].setdefault(figure, []).append(speed)
    return {
        name: {figure: round(statistics.median(all_), 2) for figure, all_ in found.items()}
        for name, found in times.items()
    }


def peak_memory(folder: str, work: Workload) -> float:
    """MiB that a process needs at most for the largest batch, above what it has before the model is loaded.

    Raises:
        InputError: that process was killed.
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
            f"the process that measures the memory of {folder} was killed, probably for want of memory; "
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
    """Bytes that this process had at most.

    On Linux, what `getrusage` says begins with the highest of the process that started this one; elsewhere it is right.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.is_file() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _timed(model: Any, work: Workload, batch: int, new: int) -> dict[str, float]:
    """Tokens a second of one batch."""
    device = next(model.parameters()).device
    ids = torch.randint(3, model.config.vocab_size, (batch, work.prompt), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    with torch.no_grad():
        if not _is_causal(model):
            inputs = {"input_ids": ids}
            if getattr(model.config, "is_encoder_decoder", False):
                inputs["decoder_input_ids"] = ids
            _, took = _clock(lambda: model(**inputs), device, work)
            return {f"forward_{batch}": ids.numel() / took}
        out, took = _clock(lambda: model(ids, use_cache=True, logits_to_keep=1), device, work)
        found = {f"prefill_{batch}": ids.numel() / took}

        def decode() -> None:
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            for _ in range(new):
                step = model(token, past_key_values=cache, use_cache=True)
                cache, token = step.past_key_values, step.logits[:, -1:].argmax(-1)

        _, took = _clock(decode, device, work)
        return {**found, f"decode_{batch}": batch * new / took}


def _is_causal(model: Any) -> bool:
    return model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)


def _clock(function: Callable[[], Any], device: torch.device, work: Workload) -> tuple[Any, float]:
    now = time.perf_counter if work.clock == "wall" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = now()
    out = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return out, now() - begin
