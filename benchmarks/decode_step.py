"""Time of a decoding step of the engine on a CPU, of its parts, and of what was tried for them.

    python benchmarks/decode_step.py [--threads 1] [--rounds 8] [--name decode_step]

SmolLM2-135M in float32 under nine variants. Attention: the compiled kernel against PyTorch's own on the same slots.
Prefixes: common tokens stored once against the same tokens in every slot. Products: q, k, v and gate, up as one
product each against the model's own modules. Each pair is compared before it is timed; rounds alternate, and the
fastest of each counts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from _record import environment, write
from sweep_speed import SWEEP, peak
from transformers import AutoModelForCausalLM

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.checkpoints import embedded
from lmeval_prune.decoding import attention
from lmeval_prune.decoding.engine import BLOCK
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.prefixes import SharedPrefix
from lmeval_prune.interventions import HeadMask

KEYS, OWN = 221, 180  # average tokens of a row in the zero-shot sweep, and after gsm8k_cot's examples
PREFIXES = (16, 32, 64, 128, 727)  # gsm8k_cot's examples have 727 tokens
MASKS = [None, *map(HeadMask, SWEEP)]
FIRST = {0: 30} | {i: int(head[1 : head.index("H")]) for i, head in enumerate(SWEEP, 1)}


def fastest(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The fastest of several rounds of each run, in milliseconds; rounds of all runs alternate."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number:  # the first round allocates and compiles
                best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
    return {name: round(value, 2) for name, value in best.items()}


class Step:
    """A decoding step of `rows` rows, each with `own` tokens in its slot, after a common prefix if there is one."""

    def __init__(self, runner: ModelRunner, rows: int, own: int, prefix: SharedPrefix | None = None) -> None:
        self.runner, self.cache = runner, KVCache(rows, own + 8, BLOCK)
        for layer in range(runner.layers):
            for storage in (self.cache.keys, self.cache.values):
                storage[layer] = torch.randn(rows, 3, own + 8, 64, generator=torch.Generator().manual_seed(layer))
        if prefix:
            self.cache.prefixes[:] = [prefix.for_mask(row % len(MASKS), runner) for row in range(rows)]
        self.batch = [Chunk(row, own + row % 5, row % len(MASKS), [17]) for row in range(rows)]

    def __call__(self) -> torch.Tensor:
        with self.runner.storing_in(self.cache):
            return self.runner.forward(self.batch)[0]

    def by_sdpa(self) -> torch.Tensor:
        """Run the step with PyTorch's attention."""
        with patch.object(attention, "_COMPILED", ()):
            return self()

    def with_prefix_in_slots(self, tokens: int) -> Step:
        """Return the same step with the prefix of so many tokens in each slot."""
        other = Step(self.runner, len(self.batch), tokens + OWN)
        other.batch = [Chunk(chunk.slot, chunk.cached + tokens, chunk.mask, chunk.tokens) for chunk in self.batch]
        for row, own in enumerate(self.cache.prefixes):
            assert own is not None
            for layer in range(self.runner.layers):
                for kind in ("keys", "values"):
                    slot = getattr(other.cache, kind)[layer][row]
                    slot[:, :tokens] = getattr(own, kind)[layer]
                    slot[:, tokens:] = getattr(self.cache, kind)[layer][row]
        return other


def check(first: torch.Tensor, second: torch.Tensor) -> float:
    """Refuse logits that differ; return the largest difference."""
    difference = float((first - second).abs().max())
    assert difference < 1e-3 * float(second.abs().max()), difference
    return difference


def products(model: Any, rows: int, rounds: int) -> dict[str, Any]:
    """The products of a step: all of them, and the five of each layer that could be two."""
    layers, linear = model.model.layers, torch.nn.functional.linear
    x, wide = torch.randn(rows, 576), torch.randn(rows, 1536)
    separate = [
        [*(getattr(layer.self_attn, f"{n}_proj") for n in "qkv"), layer.mlp.gate_proj, layer.mlp.up_proj]
        for layer in layers
    ]
    fused = [[torch.cat([m.weight for m in five[part]]) for part in (slice(3), slice(3, 5))] for five in separate]
    check(torch.cat([m(x) for m in separate[0]], -1), torch.cat([linear(x, weight) for weight in fused[0]], -1))
    modules = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    times = fastest(
        {
            "all_ms": lambda: [m(wide if m.in_features == 1536 else x) for m in modules],
            "five_ms": lambda: [m(x) for five in separate for m in five],
            "fused_ms": lambda: [linear(x, weight) for two in fused for weight in two],
        },
        rounds,
    )
    return {**times, "fused_ratio": round(times["five_ms"] / times["fused_ms"], 3)}


def least_ms(model: Any, rows: int, keys: int, highest: float) -> float:
    """The arithmetic of a step at the rate of a large product."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 1e3 * 2 * rows * (weights + 30 * 2 * 576 * keys) / highest


def measure(model: Any, model_map: ModelMap, rounds: int) -> dict[str, Any]:
    highest = peak("cpu")
    results: dict[str, Any] = {"gemm_peak_gflops": round(highest / 1e9, 1), "steps": {}}
    with torch.inference_mode(), ModelRunner.attached(model_map, KVCache(1, 1), MASKS) as runner:
        for rows in (1, 16, 64, 192):
            step = Step(runner, rows, KEYS)
            difference = check(step(), step.by_sdpa())
            times = fastest({"step_ms": step, "step_with_sdpa_ms": step.by_sdpa}, rounds)
            least = least_ms(model, rows, KEYS, highest)
            results["steps"][rows] = {
                **times, "ratio": round(times["step_with_sdpa_ms"] / times["step_ms"], 3),
                "limit_ms": round(least, 2), "share_of_limit": round(least / times["step_ms"], 3),
                "largest_difference": difference, "products": products(model, rows, rounds),
            }  # fmt: skip
            print(rows, results["steps"][rows], flush=True)
        results["prefixes"] = {}
        for tokens in PREFIXES:
            results["prefixes"][tokens] = with_prefix(runner, tokens, rounds)
            print(tokens, results["prefixes"][tokens], flush=True)
    return results


def with_prefix(runner: ModelRunner, tokens: int, rounds: int) -> dict[str, Any]:
    """A step of 192 rows with a common prefix, stored once and in every slot."""
    random.seed(0)
    prefix = SharedPrefix(tuple(random.choices(range(100, 49_000), k=tokens)), FIRST, unanswered=1, is_copied=False)
    shared = Step(runner, 192, OWN, prefix)
    in_slots = shared.with_prefix_in_slots(tokens)
    difference = check(shared(), in_slots())
    times = fastest({"shared_ms": shared, "in_slots_ms": in_slots, "in_slots_with_sdpa_ms": in_slots.by_sdpa}, rounds)
    ratio = round(times["in_slots_ms"] / times["shared_ms"], 3)
    return {"rows": 192, "own": OWN, **times, "ratio": ratio, "largest_difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--name", default="decode_step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(embedded.resolve("smollm2-135m"), dtype=torch.float32).eval()
    record = {"environment": environment(), "rounds": options.rounds}
    write(options.name, record | measure(model, map_model(model), options.rounds))


if __name__ == "__main__":
    main()
