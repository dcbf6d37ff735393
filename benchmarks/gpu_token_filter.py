"""Token Filtering's time and memory: against stock transformers on a GPU, and what a CPU can show.

    python benchmarks/gpu_token_filter.py [--models llama-3-8b] [--batches 1 8] [--shrink 8] [--budget 500]
    python benchmarks/gpu_token_filter.py --cpu [--pretrained smollm2-135m | --models llama-3-8b --shrink 16]

Runs from a checkout, without lm_eval and without a model's files: weights are random, in the shapes of LLaMA-2-13B and
LLaMA-3-8B. First a check that results are right; nothing is timed if they are not. Variants alternate, and medians are
given. What does not fit into memory, or into the budget of seconds, is said so in its place.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
import transformers
from _record import commit, processor, write
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

from lmeval_prune import map_model
from lmeval_prune.interventions.filtered_attention import FilteredAttention
from lmeval_prune.interventions.filtered_cache import FilteredCacheLayer
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.kernels import dispatch
from lmeval_prune.kernels.decode_attention import naive as naive_attention
from lmeval_prune.kernels.decode_attention import ops as attention
from lmeval_prune.kernels.token_filter import ops as token_filter
from lmeval_prune.kernels.token_filter.state import Memory, Rule

SHAPES = {
    "llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
}
WIDTH = 128
NOTHING = Rule(0.0, step_size=0.01, warmup=8)  # nothing is skipped
SDPA, SCALING = torch.nn.functional.scaled_dot_product_attention, WIDTH**-0.5
DEVICE = "cuda"
BEGIN = time.perf_counter()


def shaped(name: str, shrink: int) -> LlamaConfig:
    """Return a configuration of this shape, or one `shrink` times smaller in every direction but a head's width."""
    shape = dict(SHAPES[name])
    for field in shape:
        if field != "rope_theta" and shrink > 1:
            shape[field] = max(1, int(shape[field]) // shrink)
    shape["num_hidden_layers"] = max(2, int(shape["num_hidden_layers"]))
    shape["num_attention_heads"] -= shape["num_attention_heads"] % shape["num_key_value_heads"]
    shape["hidden_size"] = WIDTH * int(shape["num_attention_heads"])
    return LlamaConfig(**shape, head_dim=WIDTH, max_position_embeddings=8192, pad_token_id=0, eos_token_id=None)


def built(config: LlamaConfig, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@contextmanager
def nothing_skipped(model: Any) -> Iterator[None]:
    """Filter half of the layers, by a rule that never skips: what deciding and storing cost."""
    model_map = map_model(model)
    with ExitStack() as stack:
        layers = TokenFilter(0.1).layers(model_map)
        FilteredAttention(NOTHING, False, False).attach(model_map, layers, stack)
        yield


def variants(model: Any, options: argparse.Namespace) -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Return by name what is applied to the model, and settings of `generate`."""
    methods: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {"stock, dynamic cache": (nullcontext, {})}
    if not options.cpu:
        methods["stock, static cache"] = (nullcontext, {"cache_implementation": "static"})
    methods["ours, nothing skipped"] = (lambda: nothing_skipped(model), {})
    for ratio in options.ratios:
        filtered = TokenFilter(ratio, focus=options.focus, tail=options.tail)
        methods[f"ours, {ratio:.0%}"] = (lambda filtered=filtered: filtered.applied_to(model), {})
    return methods


# ---------------------------------------------------------------------- is it right?


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def gate_kernels(config: LlamaConfig, options: argparse.Namespace) -> dict[str, float]:
    """Return relative RMS errors of the kernels in this shape, against their twins in double precision."""
    heads, kv_heads, rows, keys = config.num_attention_heads, config.num_key_value_heads, 5, options.gate_keys
    lengths = torch.tensor([keys, 1, 0, keys // 4, keys - 3], device=DEVICE, dtype=torch.int32)
    skipped = torch.tensor([False, False, False, True, False], device=DEVICE)
    stored = tuple(random(options, rows, kv_heads, keys, WIDTH) for _ in range(2))
    doubles = [tensor.double() for tensor in stored]
    query = random(options, rows, heads, WIDTH)
    expected = naive_attention.decode(query.double(), *doubles, lengths, SCALING, skipped=skipped)
    return {
        f"decode, {splits} splits": relative_error(
            attention.decode(query, *stored, lengths, SCALING, skipped=skipped, splits=splits), expected
        )
        for splits in (1, 4)
    }


@torch.no_grad()
def gate_model(device: str) -> dict[str, Any]:
    """Compare the logits of a text at once, by a small model's attention, and in pieces, by the kernels on a GPU."""
    model = built(shaped("llama-3-8b", 16), device, torch.float32)
    ids = torch.randint(5, 1000, (3, 40), generator=torch.Generator().manual_seed(0)).to(device)

    def logits(pieces: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
        parts = []
        with TokenFilter(0.3, focus="uniform").applied_to(model):
            cache = DynamicCache(config=model.config)
            for piece in ids.split(pieces, dim=1):
                parts.append(model(piece, past_key_values=cache).logits)
            return torch.cat(parts, 1), [layer.lengths.tolist() for layer in cache.layers]

    expected, lengths = logits([40])
    stepwise, by_pieces = logits([32, *[1] * 8])
    return {
        "largest difference of logits": float((stepwise - expected).abs().max() / expected.abs().max()),
        "same tokens stored": lengths == by_pieces,
        "tokens stored": sum(map(sum, lengths)) / (ids.numel() * len(lengths)),
    }


def gate(options: argparse.Namespace) -> dict[str, Any]:
    errors: dict[str, Any] = {"model": gate_model("cpu" if options.cpu else DEVICE)}
    right = errors["model"]["same tokens stored"] and errors["model"]["largest difference of logits"] < 1e-3
    if not options.cpu:
        dispatch.DISPATCHED.clear()
        for name in options.models:
            errors[name] = gate_kernels(shaped(name, options.shrink), options)
            right &= all(error < 0.01 for error in errors[name].values())
        right &= not any(kernel.endswith("torch") for kernel in dispatch.DISPATCHED)
    if not right:
        sys.exit(f"not timed, for results are wrong: {json.dumps(errors, indent=2)}")
    return errors


# ---------------------------------------------------------------------- on a GPU


Clock = Callable[..., float]


def launched(function: Callable[..., Any], *args: Any, repeats: int = 20, **kwargs: Any) -> float:
    """Return the median milliseconds of a call, the second-level cache emptied before each.

    What Python takes to launch counts, beyond the tenth of a millisecond in which the device still empties the cache.
    """
    flushed = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    times = []
    for repeat in range(repeats + 3):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(*args, **kwargs)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def replayed(function: Callable[..., Any], *args: Any, repeats: int = 20, **kwargs: Any) -> float:
    """Return the same without what launching takes: calls in a CUDA graph, less a graph that only empties the cache."""
    flushed, calls = torch.empty(2**28, dtype=torch.int8, device=DEVICE), 10

    def graph(call: Callable[..., Any]) -> torch.cuda.CUDAGraph:
        captured = torch.cuda.CUDAGraph()
        function(*args, **kwargs)  # compiled and tuned before
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            for _ in range(calls):
                flushed.zero_()
                call()
        return captured

    graphs = [graph(lambda: function(*args, **kwargs)), graph(lambda: None)]
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for cuda_graph, milliseconds in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            cuda_graph.replay()
            end.record()
            torch.cuda.synchronize()
            milliseconds.append(begin.elapsed_time(end) / calls)
    with_call, without = map(statistics.median, times)
    return with_call - without


def bandwidth() -> float:
    """Return the bytes a millisecond that copying a large tensor reads and writes."""
    source = torch.empty(2**30, dtype=torch.int8, device=DEVICE)
    return 2 * source.numel() / launched(torch.empty_like(source).copy_, source)


def decode_kernels(
    config: LlamaConfig, options: argparse.Namespace, batch: int, measured: float, clock: Clock
) -> dict[str, float]:
    """Time a layer's decode step in milliseconds: attention, by the share of rows skipped; deciding and storing."""
    heads, kv_heads, keys = config.num_attention_heads, config.num_key_value_heads, options.context
    query, token = random(options, batch, heads, WIDTH), random(options, batch, kv_heads, 1, WIDTH)
    k, v = (random(options, batch, kv_heads, keys, WIDTH) for _ in range(2))
    lengths = torch.full((batch,), keys, device=DEVICE, dtype=torch.int32)
    results = {"attention, sdpa": clock(SDPA, query[:, :, None], k, v, enable_gqa=True)}
    for share in (0.0, 0.5):
        skipped = torch.arange(batch, device=DEVICE) < share * batch
        name = f"attention, {share:.0%} of rows skipped"
        results[name] = clock(attention.decode, query, k, v, lengths, SCALING, skipped=skipped)
    taken = results["attention, 0% of rows skipped"]
    results["attention, share of bandwidth"] = 2 * k.numel() * k.element_size() / taken / measured
    memory, valid = Memory.fresh(batch, token, token), torch.ones(batch, 1, dtype=torch.bool, device=DEVICE)
    memory.started.fill_(True)
    positions = torch.zeros(batch, keys, dtype=torch.long, device=DEVICE)
    totals = torch.zeros(2, dtype=torch.long, device=DEVICE)

    def decide() -> None:
        lengths.fill_(keys - 1)
        store = k, v, positions, lengths, totals
        token_filter.decide_and_store(
            token, token, valid, memory, NOTHING, store=store, position=keys, keep_skipped=False
        )

    results["decide and store"] = clock(decide)
    results["decide and store, layers that filter"] = results["decide and store"] * config.num_hidden_layers / 2
    return results


def random(options: argparse.Namespace, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=options.dtype)


@torch.no_grad()
def kernels(config: LlamaConfig, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    measured = bandwidth()
    results: dict[str, Any] = {"bandwidth, GB/s": measured / 1e6}
    for batch in options.batches:
        if 4 * batch * config.num_key_value_heads * options.context * WIDTH <= 2**34:  # bytes of keys and values
            results[f"decode, batch {batch}"] = decode_kernels(config, options, batch, measured, clock)
    return results


@torch.no_grad()
def generate(model: Any, batch: int, options: argparse.Namespace, settings: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds and the peak of memory in GB of prompts and new tokens."""
    ids = torch.randint(5, model.config.vocab_size, (batch, options.prompt), device=DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    model.generate(ids, max_new_tokens=options.new_tokens, do_sample=False, **settings)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000, torch.cuda.max_memory_allocated() / 1e9


def end_to_end(model: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[tuple[float, float]]] = {}
    results: dict[str, Any] = {}
    methods = variants(model, options)
    for repeat in range(options.repeats + 1):  # the first compiles and tunes, and does not count
        for name in list(methods)[:: 1 if repeat % 2 else -1]:
            if name in results:
                continue
            if time.perf_counter() - BEGIN > options.budget:
                results[name] = "not run: out of budget" if not runs.get(name) else results.get(name)
                continue
            apply, settings = methods[name]
            try:
                with apply():
                    run = generate(model, batch, options, settings)
            except torch.OutOfMemoryError:
                results[name] = "out of memory"
                continue
            if repeat:
                runs.setdefault(name, []).append(run)
    for name, several in runs.items():
        seconds, memory = (statistics.median(column) for column in zip(*several, strict=True))
        results[name] = {"seconds": seconds, "peak GB": memory, "runs": len(several)}
    base = results.get("stock, dynamic cache")
    for entry in results.values():
        if isinstance(entry, dict) and isinstance(base, dict):
            entry["latency against dynamic cache"] = entry["seconds"] / base["seconds"] - 1
            entry["memory against dynamic cache"] = entry["peak GB"] / base["peak GB"] - 1
    return {name: results.get(name) or "not run: out of budget" for name in methods}


def on_gpu(options: argparse.Namespace, results: dict[str, Any]) -> None:
    for name in options.models:
        config = shaped(name, options.shrink)
        model_results = results[name] = {
            "kernels, ms": kernels(config, options, launched),
            "kernels in CUDA graphs, ms": kernels(config, options, replayed),
        }
        write(options.out, results)
        model = built(config, DEVICE, options.dtype)
        for batch in options.batches:
            model_results[f"batch {batch}"] = end_to_end(model, batch, options)
            write(options.out, results)
        del model
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- on a CPU


def cache_bytes(cache: DynamicCache) -> dict[str, int]:
    """Return the bytes that are held, and those of them that hold tokens."""
    held = stored = 0
    for layer in cache.layers:
        if isinstance(layer, FilteredCacheLayer):
            both, tokens = (layer.keys, layer.values), int(layer.lengths.sum())
            stored += sum(tensor.shape[1] * tensor.shape[-1] * tensor.element_size() * tokens for tensor in both)
        else:
            both = (layer.keys, layer.values)
            stored += sum(tensor.nbytes for tensor in both)
        held += sum(tensor.nbytes for tensor in both)
    return {"held": held, "stored": stored}


@contextmanager
def timing_decisions(into: list[float]) -> Iterator[None]:
    decide = token_filter.decide

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        out = decide(*args)
        into.append(time.process_time() - begin)
        return out

    token_filter.decide = timed
    try:
        yield
    finally:
        token_filter.decide = decide


@torch.no_grad()
def cpu_steps(model: Any, ids: torch.Tensor, batches: list[int], steps: int) -> dict[int, dict[str, Any]]:
    """Time decode steps after a text in processor seconds; every row of a batch gets the text's cache."""
    results = {}
    for batch in batches:
        cache = DynamicCache(config=model.config)
        for begin in range(0, ids.shape[1], 512):
            model(ids[:, begin : begin + 512], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        token, times, decisions = ids[:, -1:].expand(batch, 1), [], []
        with timing_decisions(decisions):
            for step in range(steps + 1):
                begun = time.process_time()
                model(token, past_key_values=cache)
                times.append(time.process_time() - begun)
                if not step:  # the first makes room
                    decisions.clear()
        results[batch] = {
            "seconds": times[1:],
            "deciding": sum(decisions) / sum(times[1:]),
            "cache bytes": cache_bytes(cache),
        }
    return results


def on_cpu(options: argparse.Namespace, results: dict[str, Any]) -> None:
    models: dict[str, Any] = {}
    if options.pretrained:
        from lmeval_prune.checkpoints import embedded

        folder = embedded.resolve(options.pretrained)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
        models[options.pretrained] = model, ids[:, : options.context]
    else:
        for name in options.models:
            config = shaped(name, options.shrink)
            ids = torch.randint(5, config.vocab_size, (1, options.context), generator=torch.Generator().manual_seed(0))
            models[f"{name}, {options.shrink} times smaller"] = built(config, "cpu", torch.float32), ids
    for label, (model, ids) in models.items():
        rounds: dict[str, list[dict[int, dict[str, Any]]]] = {}
        methods = variants(model, options)
        for repeat in range(options.repeats):
            for name in list(methods)[:: -1 if repeat % 2 else 1]:
                with methods[name][0]():
                    rounds.setdefault(name, []).append(cpu_steps(model, ids, options.batches, options.steps))
        model_results: dict[str, Any] = results.setdefault(label, {"tokens of context": ids.shape[1]})
        for batch in options.batches:
            row = model_results[f"batch {batch}"] = {}
            for name, several in rounds.items():
                times = [second for result in several for second in result[batch]["seconds"]]
                row[name] = {
                    "ms a step": 1000 * statistics.median(times),
                    "share spent deciding": statistics.median(result[batch]["deciding"] for result in several),
                    "cache bytes": several[0][batch]["cache bytes"],
                }
            base = row["stock, dynamic cache"]
            for entry in row.values():
                entry["time against dense"] = entry["ms a step"] / base["ms a step"] - 1
                entry["cache against dense"] = entry["cache bytes"]["held"] / base["cache bytes"]["held"] - 1
        write(options.out, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="what a CPU can show")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--pretrained", help="on a CPU: a model's folder, or smollm2-135m, in place of --models")
    parser.add_argument("--shrink", type=int, default=1, help="so many times smaller in every direction")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.5])
    parser.add_argument("--focus", default="tail")
    parser.add_argument("--tail", type=float, default=0.5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens, before new ones (GPU)")
    parser.add_argument("--new-tokens", type=int, default=512, help="on a GPU")
    parser.add_argument("--context", type=int, default=2048, help="tokens before a decode step")
    parser.add_argument("--steps", type=int, default=8, help="on a CPU, a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gate-keys", type=int, default=300, help="of the check of the kernels (GPU)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing is begun (GPU)")
    parser.add_argument("--dtype", default="bfloat16", help="on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="name of the results file")
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    options.batches = options.batches or ([1, 8, 32] if options.cpu else [1, 8, 32, 128])
    options.out = options.out or ("token_filter_cpu" if options.cpu else "gpu_token_filter")
    torch.set_num_threads(options.threads)
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --cpu measures what a CPU can show")
    device = torch.cuda.get_device_name() if not options.cpu else processor()
    results: dict[str, Any] = {
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "device": device,
        "threads": options.threads,
        "load before": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "triton": _triton()},
        "focus": options.focus,
        "gate": gate(options),
    }
    (on_cpu if options.cpu else on_gpu)(options, results)


def _triton() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
