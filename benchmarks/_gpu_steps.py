"""Milliseconds of a decoding step by model, rows and keys, beside the roofline of the same machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _gpu_common import (
    NumberTokenizer,
    Report,
    alternating_medians,
    causal_model,
    check_static_step,
    clocks,
    filled_cache,
    head_masks,
    in_graph,
    milliseconds,
    new_step,
    random_prompts,
    refuse_torch_kernels,
    set_step_rows,
)
from _gpu_trace import decode_traced, kernels_of
from torch import nn

from lmeval_prune import map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule

# models in the order of their importance for the gates, with the numbers of keys that gate them first
MODELS = {
    "llama-3-8b-bfloat16": (300, 220, 1000),
    "smollm2-135m-float32": (220, 300, 1000),
    "smollm2-135m-bfloat16": (220, 300, 1000),
}
ROWS = (256, 128, 192, 512, 64, 8, 1)
GATES = {  # share of the limit: rows and keys, with graphs alone, compiled
    "llama-3-8b-bfloat16": ((128, 192, 256), 300, 0.50, 0.65),
    "smollm2-135m-float32": ((512,), 220, 0.45, 0.5),
    "smollm2-135m-bfloat16": ((512,), 220, 0.20, 0.40),
}
MARGIN = 64  # free tokens of a slot
STEPS = 16  # of a round


class Roofline:
    """The limit of a step: products at the device's peak or reading the weights, then reading keys and values.

    Attributes:
        flops_ms: floating-point operations a millisecond of a large product.
        bytes_ms: bytes a millisecond that a large copy reads and writes.
    """

    def __init__(self, model: Any, model_map: ModelMap, device: str, tiny: bool) -> None:
        self.device, self.model = device, model
        self.products = [module for module in model.modules() if isinstance(module, nn.Linear)]
        width = self.products[0].weight.element_size()
        self.weights = sum(module.weight.numel() for module in self.products)
        self.weight_bytes = self.weights * width
        self.token_bytes = width * sum(
            layer.kv_heads * (layer.query_dim + layer.head_dim) for layer in model_map.attention
        )
        size = 256 if tiny else 8192
        left, right = (torch.randn(size, size, device=device, dtype=model.dtype) for _ in range(2))
        left @ right
        self.flops_ms = 2 * size**3 / milliseconds(device, lambda: left @ right, 10)
        source = torch.empty(2**24 if tiny else 2**31, dtype=torch.int8, device=device)
        target = torch.empty_like(source).copy_(source)
        self.bytes_ms = 2 * source.numel() / milliseconds(device, lambda: target.copy_(source), 10)
        self._products_ms: dict[int, float] = {}

    def summary(self) -> dict[str, Any]:
        """Return the measured ceilings."""
        return {
            "peak_tflops": self.flops_ms / 1e9,
            "bandwidth_gbs": self.bytes_ms / 1e6,
            "product_weights": self.weights,
            "key_value_bytes_a_token": self.token_bytes,
            "clocks": clocks(self.device),
        }

    def limit(self, rows: int, keys: float) -> dict[str, float]:
        """Return the limit of a step by the peaks, and by the model's own products at this number of rows."""
        gemm, weights = 2 * rows * self.weights / self.flops_ms, self.weight_bytes / self.bytes_ms
        reading = rows * keys * self.token_bytes / self.bytes_ms
        return {
            "gemm_ms": gemm,
            "weights_ms": weights,
            "key_value_ms": reading,
            "limit_ms": max(gemm, weights) + reading,
            "products_ms": self.products_ms(rows),
            "limit_at_shapes_ms": self.products_ms(rows) + reading,
        }

    def products_ms(self, rows: int) -> float:
        """Measure the products of the model with its own weights, one after another."""
        if rows not in self._products_ms:
            inputs = {
                width: torch.randn(rows, width, device=self.device, dtype=self.model.dtype)
                for width in {module.in_features for module in self.products}
            }

            def run() -> None:
                for module in self.products:
                    nn.functional.linear(inputs[module.in_features], module.weight)

            with torch.inference_mode():
                self._products_ms[rows] = milliseconds(self.device, in_graph(self.device, run), 5)
        return self._products_ms[rows]


def measure_step(
    model_map: ModelMap, roofline: Roofline, rows: int, keys: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Time a step of `rows` rows of different masks over `keys` keys each, without and with CUDA graphs."""
    rng, masks, vocabulary = np.random.default_rng(0), head_masks(model_map, 9), roofline.model.config.vocab_size
    tokens, slots = rng.integers(3, vocabulary, rows).tolist(), rng.permutation(rows).tolist()
    lengths, numbers = [keys - STEPS // 2] * rows, [row % len(masks) for row in range(rows)]
    device, kinds = options.device, step_kinds(options)
    with filled_cache(model_map, rows, keys + MARGIN, masks) as (cache, runner):
        steps = {kind: new_step(model_map, cache, runner, kind) for kind in kinds}
        functions: dict[str, Callable[[], Any]] = {
            kind: lambda step=step: step.start(rows) for kind, step in steps.items()
        }
        for kind, function in functions.items():
            set_step_rows(steps[kind], tokens, lengths, slots, numbers)
            for _ in range(4):  # runs eagerly, is captured, is replayed
                function()

        def reset(kind: str) -> None:
            set_step_rows(steps[kind], tokens, lengths, slots, numbers)

        times = alternating_medians(device, functions, 2 if options.tiny else 5, 2 if options.tiny else STEPS, reset)
        now = clocks(device)
    limit = roofline.limit(rows, keys)
    out: dict[str, Any] = {f"{kind}_ms": times.get(kind, {}).get("median") for kind in ("eager", "graph", "compiled")}
    out |= {"rounds_ms": times, **limit, "capacity": keys + MARGIN, "clocks": now}
    out |= {"share_of_limit": limit["limit_ms"] / out["graph_ms"], "tokens_per_second": 1000 * rows / out["graph_ms"]}
    out["share_of_limit_at_shapes"] = limit["limit_at_shapes_ms"] / out["graph_ms"]
    out["compiled_share_of_limit"] = limit["limit_ms"] / out["compiled_ms"] if out["compiled_ms"] else None
    return out


def measure_loop(model: Any, model_map: ModelMap, rows: int, keys: int, options: argparse.Namespace) -> dict[str, Any]:
    """Decode with the engine's static loop; return the host's time of a step and the device's busy share."""
    new = 8 if options.tiny else 48
    prompt = max(2, keys - new // 2)
    prompts = random_prompts(rows, model.config.vocab_size, prompt)
    masks = head_masks(model_map, 9)
    params = SamplingParams(new, eos=(), stop=("\n\n",))
    requests = [
        Request((text * (1 + prompt // len(text)))[:prompt], masks[i % 9], params, tag=i)
        for i, text in enumerate(prompts)
    ]
    engine = Engine(
        model,
        NumberTokenizer(),
        model_map=model_map,
        max_rows=rows,
        context=prompt + new,
        memory=1 << 50,
        schedule=Schedule(static=True),
    )
    answers, trace = decode_traced(engine, requests, options.device)
    if [len(answer) for answer in answers.values()] != [new] * rows:
        raise RuntimeError("not each answer has its largest length")
    return {"prompt_tokens": prompt, "new_tokens": new, **trace.summary()}


def gates(report: Report) -> list[dict[str, Any]]:
    """Return what each gate asks for, and what was measured."""
    out = []
    for row in report.results["rows"]:
        rows, keys, graph, compiled = GATES.get(row.get("model", ""), ((), 0, 0.0, 0.0))
        if row["kind"] == "step" and row["rows"] in rows and row["keys"] == keys and "graph_ms" in row:
            for name, share, needed in (
                ("gate 1, graphs", row["share_of_limit"], graph),
                ("gate 2, compiled", row["compiled_share_of_limit"], compiled),
            ):
                case = {"gate": name, "model": row["model"], "rows": row["rows"], "keys": keys, "needed": needed}
                out.append({**case, "share_of_limit": share, "reached": None if share is None else share >= needed})
    return out


def step_kinds(options: argparse.Namespace) -> list[str]:
    """Return the kinds of steps that exist."""
    return ["eager", "graph", *(["compiled"] if options.compile else [])]


def cases(options: argparse.Namespace, name: str) -> list[tuple[int, int]]:
    """Return (rows, keys) in the order in which they are measured."""
    if options.tiny:
        return [(5, 12), (2, 12)]
    return [(rows, keys) for keys in options.keys or MODELS[name] for rows in options.rows or ROWS]


def measure_kernels(model_map: ModelMap, rows: int, keys: int, options: argparse.Namespace) -> dict[str, Any]:
    """Profile the kernels of a step."""
    masks = head_masks(model_map, 9)
    with filled_cache(model_map, rows, keys + MARGIN, masks) as (cache, runner):
        step = new_step(model_map, cache, runner, "eager")
        set_step_rows(step, [5] * rows, [keys] * rows, range(rows), [row % len(masks) for row in range(rows)])
        for _ in range(2):
            step.start(rows)
        return kernels_of(options.device, lambda: step.start(rows))


def named_model(name: str, options: argparse.Namespace) -> tuple[Any, ModelMap]:
    """Create a model of `MODELS`."""
    shape, _, dtype = name.rpartition("-")
    model = causal_model(shape, dtype, options.device, options.tiny, options.layers)
    return model, map_model(model)


def run_model(name: str, options: argparse.Namespace, report: Report) -> None:
    """Check a model, and measure its steps."""
    model, model_map = named_model(name, options)
    for kind in step_kinds(options):
        report.check(f"{name}, {kind}", partial(check_static_step, model, model_map, options.device, kind))
    report.check(f"{name}, kernels", partial(refuse_torch_kernels, options.device))
    roofline = Roofline(model, model_map, options.device, options.tiny)
    report.results.setdefault("ceilings", {})[name] = roofline.summary()
    gate_keys = cases(options, name)[0][1]
    for rows, keys in cases(options, name):
        case = {"model": name, "rows": rows, "keys": keys}
        report.row("step", case, partial(measure_step, model_map, roofline, rows, keys, options))
        if keys == gate_keys:
            report.row("loop", case, partial(measure_loop, model, model_map, rows, keys, options))
        report.results["gates"] = gates(report)
    report.write()


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure all models; then profile them, since a profiler slows what comes after it."""
    for name in options.models or MODELS:
        run_model(name, options, report)
    for name in options.models or MODELS:
        model_map = named_model(name, options)[1]
        rows, keys = cases(options, name)[0]
        case = {"model": name, "rows": rows, "keys": keys}
        report.row("kernels", case, partial(measure_kernels, model_map, rows, keys, options))
