"""Token Filtering in the static step: milliseconds of a step, and bytes of stored keys and values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from _gpu_common import (
    NumberTokenizer,
    Report,
    WrongResultsError,
    alternating_medians,
    causal_model,
    check_static_step,
    clocks,
    new_step,
    random_prompts,
    refuse_torch_kernels,
    set_step_rows,
)
from _gpu_steps import Roofline

from lmeval_prune import map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.static_step import StaticStep
from lmeval_prune.interventions.token_filter import TokenFilter

BATCH = 32
KEYS = (2048, 4096, 8192)
RATIOS = (0.0, 0.3, 0.5)
STEPS = 32  # of a round
AGREEMENT = 0.9  # share of equal texts: rounding decides a few tokens whose similarity is near the threshold
FREE_SHARE = 0.75  # of the device's memory, for keys and values


def filtered(ratio: float) -> TokenFilter:
    """Return a filter of all layers."""
    return TokenFilter(ratio, focus="uniform")


def check_engine(device: str, tiny: bool) -> dict[str, Any]:
    """Compare texts of a small filtered model: the engine's static loop, and its eager loop."""
    model = causal_model("smollm2-135m", "float32", device, tiny=True)
    prompts = random_prompts(4 if tiny else 24, model.config.vocab_size, 30)
    requests = [Request(prompt, None, SamplingParams(8 if tiny else 48, ())) for prompt in prompts]
    with filtered(0.3).applied_to(model):
        answers = {}
        for static in (True, False):
            engine = Engine(model, NumberTokenizer(), max_rows=8, schedule=Schedule(static=static))
            if engine.unsupported or engine.is_static != static:
                raise WrongResultsError("the engine does not run the filtered model; its warning says why")
            answers[static] = dict(engine.decode(requests))
    same = sum(answers[True][request] == answers[False][request] for request in requests)
    if same < AGREEMENT * len(requests) or (device == "cpu" and same < len(requests)):
        raise WrongResultsError(f"{same} of {len(requests)} texts agree")
    return {"texts": len(requests), "identical": same}


@contextmanager
def filled_slots(
    model_map: ModelMap, rows: int, keys: int, capacity: int, ratio: float, device: str
) -> Iterator[tuple[KVCache, ModelRunner]]:
    """Run one random prompt of `keys` tokens under a filter, and copy its slot to all rows."""
    vocabulary = model_map.model.config.vocab_size  # type: ignore[union-attr]
    prompt = np.random.default_rng(0).integers(3, vocabulary, keys).tolist()
    cache = KVCache(rows + 1, capacity)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if ratio:
            stack.enter_context(filtered(ratio).applied_to(model_map.model))
        runner = stack.enter_context(ModelRunner.attached(model_map, cache, [None]))
        runner.forward([Chunk(0, 0, 0, prompt, skip=keys - 1)])
        layers = len(model_map.attention)
        copies = cache.snapshot(0, keys, layers)
        for slot in range(1, rows):
            cache.restore(slot, copies, keys, layers)
        yield cache, runner


def stored_bytes(step: StaticStep, rows: int, keys: int) -> dict[str, float]:
    """Return the bytes of keys and values that the rows store, and their share of all tokens'."""
    stored = total = 0.0
    for layer in step.cache.keys:
        token = sum(
            tensors[layer].shape[1] * tensors[layer].shape[-1] * tensors[layer].element_size()
            for tensors in (step.cache.keys, step.cache.values)
        )
        lengths = step._stored_lengths.get(layer)
        stored += token * (rows * keys if lengths is None else int(lengths[:rows].sum()))
        total += token * rows * keys
    return {"stored_bytes": stored, "stored_share": stored / total}


def measure(
    model_map: ModelMap, roofline: Roofline, rows: int, keys: int, ratio: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Time steps of `rows` rows, each over a prompt of `keys` tokens."""
    device, vocabulary = options.device, roofline.model.config.vocab_size
    rounds, repeats = (1, 2) if options.tiny else (options.rounds + 1, STEPS)
    capacity = keys + rounds * repeats + 8
    with filled_slots(model_map, rows, keys, capacity, ratio, device) as (cache, runner):
        step = new_step(model_map, cache, runner, "graph")
        step.admit(list(range(rows)))
        before = stored_bytes(step, rows, keys)
        tokens = np.random.default_rng(1).integers(3, vocabulary, rows).tolist()
        set_step_rows(step, tokens, [keys] * rows, range(rows), [0] * rows)
        for _ in range(4):  # runs eagerly, is captured, is replayed
            step.start(rows)
        run = partial(step.start, rows)
        times = alternating_medians(device, {"graph": run}, rounds, repeats, lambda _: None)["graph"]
        decoded = 4 + rounds * repeats
        after = stored_bytes(step, rows, keys + decoded)
    reading = before["stored_bytes"] / roofline.bytes_ms
    weights = max(roofline.weight_bytes / roofline.bytes_ms, 2 * rows * roofline.weights / roofline.flops_ms)
    return {
        "graph_ms": times["median"],
        "rounds_ms": times,
        **before,
        "stored_share_after": after["stored_share"],
        "decoded_tokens": decoded,
        "limit_ms": weights + reading,
        "share_of_limit": (weights + reading) / times["median"],
        "clocks": clocks(device),
    }


def fitting_layers(options: argparse.Namespace, longest: int) -> int | None:
    """Return how many layers of the shape fit with their keys and values; None for all of them."""
    if options.device != "cuda" or options.layers:
        return options.layers
    config = causal_model("llama-3-8b", "bfloat16", "meta").config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    layer = 4 * heads * (BATCH + 1) * (longest + 256)  # bytes of keys and values, two each
    layer += 2 * (2 * config.hidden_size**2 + 2 * config.hidden_size * heads)  # attention's weights
    layer += 2 * 3 * config.hidden_size * config.intermediate_size
    free = FREE_SHARE * torch.cuda.mem_get_info()[0] - 4 * config.vocab_size * config.hidden_size
    return min(config.num_hidden_layers, max(1, int(free / layer)))


def run(options: argparse.Namespace, report: Report) -> None:
    """Check the filtered engine and the step, then measure contexts and ratios."""
    keys = [24, 40] if options.tiny else options.keys or KEYS
    rows = 4 if options.tiny else BATCH
    report.check("engine", partial(check_engine, options.device, options.tiny))
    layers = fitting_layers(options, max(keys))
    model = causal_model("llama-3-8b", "bfloat16", options.device, options.tiny, layers)
    model_map = map_model(model)
    report.check("static step", partial(check_static_step, model, model_map, options.device))
    report.check("kernels", partial(refuse_torch_kernels, options.device))
    roofline = Roofline(model, model_map, options.device, options.tiny)
    report.results |= {"ceilings": roofline.summary(), "layers": len(model_map.attention), "batch": rows}
    for context in keys:
        for ratio in RATIOS:
            case = {"batch": rows, "keys": context, "ratio": ratio}
            report.row("filter", case, partial(measure, model_map, roofline, rows, context, ratio, options))
        set_ratios(report, context)


def set_ratios(report: Report, keys: int) -> None:
    """Add to each filtered row its time against the unfiltered one."""
    rows = [row for row in report.results["rows"] if row["keys"] == keys and "graph_ms" in row]
    base = next((row["graph_ms"] for row in rows if row["ratio"] == 0), None)
    for row in rows:
        row["time_against_unfiltered"] = row["graph_ms"] / base if base else None
    report.write()
