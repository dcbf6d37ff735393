"""Measure models: speed in alternation, the peak memory of each in a separate process; as JSON and a table."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import psutil
import torch
import transformers
from transformers import GenerationConfig

from lmeval_prune.architectures import cache_argument, map_model
from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.checkpoints.loading import load_pretrained, skeleton_of
from lmeval_prune.profiling.costs import counted_flops, formula_flops, parameters, random_inputs
from lmeval_prune.reporting.documents import markdown

# Tokens per second of further ways to answer prompts, by name: gets a causal model, prompts (batch, tokens), the number
# of new tokens and the clock; None if the model cannot be run so.
Answerers = Mapping[str, Callable[[Any, torch.Tensor, int, str], float | None]]


@dataclass(frozen=True)
class Workload:
    """Size of the timed prompts and answers."""

    prompt: int = 128  # tokens of a prompt
    new: int = 32  # tokens that causal models decode after it
    batches: Sequence[int] = (1, 8)  # batch sizes
    rounds: int = 5  # measurements of each model
    clock: str = "wall"  # `wall`, or `processor`: CPU time of this process, for busy machines, with one thread


def measure(
    models: Mapping[str, Any], work: Workload, answerers: Answerers = MappingProxyType({})
) -> dict[str, dict[str, float]]:
    """Return the median tokens per second of models over rounds, in each of which they are timed one after the other.

    Returns:
        By model, then by pass and batch size: `prefill_1`, `decode_1` for causal models, `forward_1` for others; and
        new tokens per second of whole answers by the names of `answerers`, `generate_1`.
    """
    for model in models.values():
        _time(model, work, min(work.batches), 2, answerers)  # warm up
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in models}
    for number, batch in itertools.product(range(work.rounds), work.batches):
        for name, model in models.items():
            _show_progress(f"round {number + 1} of {work.rounds}, batch {batch}: {name}")
            for kind, rate in _time(model, work, batch, work.new, answerers).items():
                rates[name].setdefault(f"{kind}_{batch}", []).append(rate)
    return {name: {kind: round(statistics.median(x), 2) for kind, x in kinds.items()} for name, kinds in rates.items()}


def peak_memory(folder: str, work: Workload, device: Any = "cpu") -> float:
    """Return the peak memory in MiB at the largest batch, on a CPU minus the memory before the model is loaded."""
    if torch.device(device).type == "cuda":
        model = load_pretrained(folder).to(device)
        torch.cuda.reset_peak_memory_stats(device)
        _time(model, work, max(work.batches), work.new)
        return torch.cuda.max_memory_allocated(device) / 2**20
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_memory, folder, work, torch.get_num_threads()).result()


def _peak_memory(folder: str, work: Workload, threads: int) -> float:
    torch.set_num_threads(threads)
    skeleton_of(folder)  # imports the model's code
    before = psutil.Process().memory_info().rss
    model = load_pretrained(folder)
    _time(model, work, max(work.batches), work.new)
    return (peak_memory_of_process() - before) / 2**20


def peak_memory_of_process() -> int:
    """Return the peak memory of this process in bytes, on Linux without that of the parent process."""
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"VmHWM:\s*(\d+)", status.read_text(errors="replace"))):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _time(
    model: Any, work: Workload, batch: int, new: int, answerers: Answerers = MappingProxyType({})
) -> dict[str, float]:
    """Return the tokens per second of a model at one batch size, by pass and answerer."""
    inputs = random_inputs(model, batch, work.prompt)
    if model.can_generate() and not getattr(model.config, "is_encoder_decoder", False):
        ids = inputs["input_ids"]
        rates = decoding_rates(model, ids, new, work.clock, logits_to_keep=1)
        answered = {name: answer(model, ids, new, work.clock) for name, answer in answerers.items()}
        return rates | {name: rate for name, rate in answered.items() if rate is not None}
    with torch.no_grad():
        _, seconds = _run_timed(lambda: model(**inputs), inputs["input_ids"].device, work.clock)
    return {"forward": inputs["input_ids"].numel() / seconds}


def decoding_rates(model: Any, ids: torch.Tensor, new: int, clock: str = "wall", **forward: Any) -> dict[str, float]:
    """Return the tokens per second of a causal model in reading prompts (`prefill`) and in decoding (`decode`).

    `ids` has the shape (batch, tokens); `forward` are further arguments of the forward pass over the prompts.
    """
    with torch.no_grad():
        out, prefill = _run_timed(lambda: model(ids, use_cache=True, **forward), ids.device, clock)

        def decode() -> None:
            step = out
            for _ in range(new):
                step = model(step.logits[:, -1:].argmax(-1), use_cache=True, **cache_argument(step))

        _, decoding = _run_timed(decode, ids.device, clock)
    return {"prefill": ids.numel() / prefill, "decode": len(ids) * new / decoding}


def generate_rate(model: Any, ids: torch.Tensor, new: int, clock: str = "wall") -> float:
    """Return the new tokens per second of transformers' `generate`, greedy, with prompts (batch, tokens) and no end."""
    # `eos_token_id=None` would be filled in from the model's generation config
    config = GenerationConfig(min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0)
    generate = partial(model.generate, ids, attention_mask=torch.ones_like(ids), generation_config=config)
    _, seconds = _run_timed(generate, ids.device, clock)
    return len(ids) * new / seconds


def environment(device: Any, threads: int) -> dict[str, Any]:
    """Return what times depend on besides the model: device, threads and versions."""
    device, facts, name = torch.device(device), Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif facts.is_file() and (found := re.search(r"model name\s*: (.*)", facts.read_text(errors="replace"))):
        name = found[1]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": f"{device.type}: {name}", "threads": threads, **versions}


def _run_timed(function: Callable[[], Any], device: torch.device, clock: str) -> tuple[Any, float]:
    """Return the result of a function call and its seconds."""
    read_clock = time.perf_counter if clock == "wall" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = read_clock()
    value = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return value, read_clock() - begin


# ---------------------------------------------------------------------- several models


def measure_models(
    names: Sequence[str], work: Workload, answerers: Answerers = MappingProxyType({}), device: Any = "cpu"
) -> dict[str, dict[str, Any]]:
    """Return the measured values by model; `answerers` as for `measure`."""
    memory = {}
    for name in names:  # first, because the measured process starts from this one, which is still small
        _show_progress(f"memory: {name}")
        memory[name] = round(peak_memory(name, work, device), 1)
    models = {name: load_pretrained(name).to(device) for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        total, without_embeddings = parameters(model)
        flops, counted = formula_flops(map_model(model), work.prompt), counted_flops(model, work.prompt)
        rows[name] = {"parameters": total, "without_embeddings": without_embeddings, "tokens": work.prompt}
        rows[name] |= {"flops": flops, "flops_counted": counted}
    speeds = measure(models, work, answerers)
    _show_progress("")
    return {name: {**row, **speeds[name], "peak_memory_mib": memory[name]} for name, row in rows.items()}


def _show_progress(line: str) -> None:
    print(f"\r{line:70}\r", end="", file=sys.stderr, flush=True)


def write(
    folder: Path, rows: dict[str, dict[str, Any]], settings: dict[str, Any], distances: Mapping[str, Mapping[str, str]]
) -> None:
    """Write and print the measured values; `distances` are further lines of the table, by model."""
    text = table(rows, distances)
    origin = {"created_by": CREATED_BY, **settings, "dtype": "as in each checkpoint"}
    write_text(folder / "profile.json", json.dumps({**origin, "models": rows}, indent=1) + "\n")
    write_text(folder / "profile.md", text)
    print(f"{text}\n{folder}/profile.json, .md")


def table(rows: Mapping[str, Mapping[str, Any]], further: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table with a column for each model; values are followed by their ratio to the first model's.

    `further` are formatted values by model and line, which models may lack.
    """
    shown = {  # label, digits and unit of each value
        "parameters": ("parameters (millions)", 2, 1e6),
        "without_embeddings": ("without embeddings (millions)", 2, 1e6),
        "flops_counted": ("GFLOPs of a prompt", 3, 1e9),
    }
    answered = {"generate": "answers by generate", "engine": "answers by the engine"}
    for key in dict.fromkeys(key for row in rows.values() for key in row):
        kind, _, batch = key.partition("_")
        if kind in ("prefill", "decode", "forward", *answered):
            shown[key] = (f"{answered.get(kind, kind)}, batch {batch} (tokens/s)", 1, 1.0)
    shown["peak_memory_mib"] = ("peak memory (MiB)", 1, 1)
    first, *_ = rows.values()
    lines = []
    for key, (label, digits, unit) in shown.items():
        cells = []
        for row in rows.values():
            value = row.get(key)
            ratio = f" ({value / first[key]:.3f})" if value is not None and row is not first and first.get(key) else ""
            places = 5 if unit == 1e6 and value is not None and value < 1e5 else digits
            cells.append("" if value is None else f"{value / unit:.{places}f}{ratio}")
        lines.append([label, *cells])
    for label in dict.fromkeys(label for values in further.values() for label in values):
        lines.append([label, *(further.get(name, {}).get(label, "") for name in rows)])
    names = [Path(name).name for name in rows]
    names = names if len({*names}) == len(names) else [*rows]
    return markdown(pd.DataFrame(lines, columns=["", *names]), [""]) + "\n"
