"""What the parts of gpu_engine.py share: models, requests, clocks, the report, and the check of the static step."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from _record import RESULTS, environment, write
from transformers import AutoModelForCausalLM, LlamaConfig

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner
from lmeval_prune.decoding.static_step import ALIVE, COLUMNS, LEFT, LENGTH, MASK, SLOT, TOKEN, StaticStep
from lmeval_prune.interventions import HeadMask
from lmeval_prune.kernels import dispatch

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
        "initializer_range": 0.06,  # with smaller random weights each text repeats one token
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
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "initializer_range": 0.15,
}
ENDLESS = 1 << 30  # tokens that a row may still decode


class WrongResultsError(Exception):
    """Results differ from the model's own, so nothing is timed."""


def causal_model(shape: str, dtype: str, device: str, tiny: bool = False, layers: int | None = None) -> Any:
    """Create a random model of a shape on the device."""
    settings = {**SHAPES[shape], **(TINY if tiny else {}), **({"num_hidden_layers": layers} if layers else {})}
    config = LlamaConfig(**settings, max_position_embeddings=16384, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def head_masks(model_map: ModelMap, count: int) -> list[HeadMask | None]:
    """Return no mask, and `count - 1` masks of one head each in layers from the first to the last."""
    masks: list[HeadMask | None] = [None]
    layers = model_map.attention
    for number in range(count - 1):
        layer = layers[number * (len(layers) - 1) // max(1, count - 2)]
        masks.append(HeadMask(f"{layer.label}H{number % layer.heads}"))
    return masks


def random_prompts(count: int, vocabulary: int, mean: float, seed: int = 0) -> list[tuple[int, ...]]:
    """Draw prompts whose lengths are spread like GSM8K's questions: a standard deviation of 0.42 of the mean."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(2, rng.gamma(5.7, mean / 5.7, count)).astype(int)
    return [tuple(rng.integers(3, vocabulary, length).tolist()) for length in lengths]


class NumberTokenizer:
    """Tokenizer whose texts are numbers, for stop texts that no answer contains."""

    clean_up_tokenization_spaces = False

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [0] * len(text)


# ---------------------------------------------------------------------- report


@dataclass
class Report:
    """A results file that is complete after each row."""

    name: str
    device: str
    budget: float  # seconds
    results: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin = time.perf_counter()
        self._longest: dict[str, float] = {}  # seconds of the longest row of a kind
        self.results = {**environment(), "device_type": self.device, "rows": [], **self.results}
        self.write()

    @property
    def has_failed(self) -> bool:
        """Return whether a row has failed."""
        return any("failed" in row for row in self.results["rows"])

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    def write(self) -> None:
        """Write the file."""
        self.results |= {"seconds": self.seconds, "operations": dict(dispatch.DISPATCHED)}
        write(self.name, self.results, quiet=True)

    def row(self, kind: str, case: dict[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Measure a case and write it, or the reason why it was skipped; return the row.

        A case is skipped if a case of its kind that has taken longest would not end within the budget.
        """
        row: dict[str, Any] = {"kind": kind, **case}
        self.results["rows"].append(row)
        begin = self.seconds
        if begin + self._longest.get(kind, 0) > self.budget:
            row["skipped"] = f"budget of {self.budget:g} s"
        else:
            try:
                row |= measure()
            except torch.OutOfMemoryError as error:
                row["skipped"] = f"out of memory: {str(error).splitlines()[0]}"
            except WrongResultsError as error:
                row["failed"] = str(error)
            except Exception as error:  # time on a GPU is short: other cases go on, and the program fails at its end
                row["failed"] = f"{type(error).__name__}: {error}"
                row["traceback"] = traceback.format_exc()[-3000:].replace(f"{RESULTS.parents[1]}/", "")
                traceback.print_exc()
        row["row_seconds"] = self.seconds - begin
        self._longest[kind] = max(self._longest.get(kind, 0), row["row_seconds"])
        if self.device == "cuda":
            torch.cuda.empty_cache()
        self.write()
        print(f"{self.seconds:6.1f} s", _short(row), flush=True)
        return row

    def check(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Record a check; end the program if it fails."""
        try:
            self.results.setdefault("checks", {})[name] = dict(measure())
        except WrongResultsError as error:
            self.results["failed"] = f"{name}: {error}"
            self.write()
            sys.exit(f"nothing is timed, for results are wrong: {name}: {error}")
        self.write()
        print(f"{self.seconds:6.1f} s check {name}: {_short(self.results['checks'][name])}", flush=True)


def _short(row: Mapping[str, Any]) -> str:
    values = ((key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in row.items())
    return " ".join(f"{key}={value}" for key, value in values if not isinstance(value, dict | list))


def results_path(name: str) -> Any:
    """Return the path of a results file: a name in benchmarks/results, or a path without its suffix."""
    return RESULTS / f"{name}.json"


# ---------------------------------------------------------------------- clocks


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(device: str, function: Callable[[], Any], repeats: int = 1) -> float:
    """Return the time of a call, by CUDA events around `repeats` of them."""
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        return 1000 * (time.perf_counter() - begin) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(repeats):
        function()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / repeats


def alternating_medians(
    device: str, functions: Mapping[str, Callable[[], Any]], rounds: int, repeats: int, between: Callable[[str], Any]
) -> dict[str, dict[str, float]]:
    """Time functions in turn; return median, smallest and largest milliseconds of a call.

    `between` is called with the name before each round of `repeats` calls.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds):
        for name in list(functions)[:: 1 if number % 2 else -1]:
            between(name)
            times[name].append(milliseconds(device, functions[name], repeats))
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in times.items()
    }


def clocks(device: str) -> dict[str, str] | None:
    """Return the GPU's clocks, temperature and power now."""
    if device != "cuda":
        return None
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(zip(names, map(str.strip, done.stdout.split(",")), strict=False))


def in_graph(device: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays a CUDA graph of `function`; on a CPU, `function`."""
    if device != "cuda":
        return function
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


# ---------------------------------------------------------------------- the static step


@contextmanager
def filled_cache(
    model_map: ModelMap, rows: int, capacity: int, masks: Sequence[HeadMask | None]
) -> Iterator[tuple[KVCache, ModelRunner]]:
    """Attach a model to a cache of `rows` slots, and one for padding, that are full of random keys and values."""
    cache = KVCache(rows + 1, capacity)
    with torch.inference_mode(), ModelRunner.attached(model_map, cache, masks) as runner:
        runner.forward([Chunk(0, 0, 0, [1])])  # allocates the storage
        for storage in (*cache.keys.values(), *cache.values.values()):
            storage.normal_()
        yield cache, runner


def new_step(model_map: ModelMap, cache: KVCache, runner: ModelRunner, kind: str) -> StaticStep:
    """Create a step: `eager` without CUDA graphs, `graph`, or `compiled` with both."""
    step = StaticStep(model_map, cache, runner.masks, end_tokens=1, compiled=kind == "compiled")
    if kind == "eager":
        step.capturing_devices = ()  # type: ignore[misc]
    return step


def set_step_rows(
    step: StaticStep, tokens: Sequence[int], lengths: Sequence[int], slots: Sequence[int], masks: Sequence[int]
) -> None:
    """Set rows that never end."""
    columns = np.zeros((COLUMNS, len(tokens)), np.int64)
    columns[TOKEN], columns[LENGTH], columns[SLOT], columns[MASK] = tokens, lengths, slots, masks
    columns[LEFT], columns[ALIVE] = ENDLESS, 1
    synchronize(step.cache.keys[0].device.type)
    step.set_rows(columns, np.full((len(tokens), 1), -1))


def check_static_step(model: Any, model_map: ModelMap, device: str, kind: str = "graph") -> dict[str, Any]:
    """Compare a static step's logits with the model's own: one sequence at a time, each under its mask.

    The rows of the steps differ in number, order, slots, lengths and masks, and graphs captured for some are replayed
    for others.
    """
    rng = np.random.default_rng(1)
    masks = head_masks(model_map, 3)
    prompts = [int(length) for length in rng.integers(3, 40, 5)]
    texts = rng.integers(3, model.config.vocab_size, (5, max(prompts) + 16))
    numbers = [row % len(masks) for row in range(5)]
    expected = []
    with torch.inference_mode():
        for text, number in zip(texts, numbers, strict=True):
            mask = masks[number]
            with mask.applied_to(model, model_map) if mask else nullcontext():
                expected.append(model(torch.tensor(text[None], device=device), use_cache=False).logits[0].float())
    largest, differences = float(torch.cat(expected).abs().max()), list[torch.Tensor]()
    slots, lengths = [4, 0, 12, 2, 1], list(prompts)
    with filled_cache(model_map, 13, texts.shape[1], masks) as (cache, runner):
        for row in np.argsort(slots).tolist():
            runner.forward([Chunk(slots[row], 0, numbers[row], texts[row][: prompts[row]].tolist())])
        step = new_step(model_map, cache, runner, kind)
        step.admit(slots)
        orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 3, 1], [1, 3], [4, 0], [2, 3], [0, 1, 2, 3, 4]]
        for order in orders:
            rows = [(texts[i][lengths[i]], lengths[i], slots[i], numbers[i]) for i in order]
            set_step_rows(step, *zip(*rows, strict=True))
            result = step.start(len(order))
            result.read()
            for logits, i in zip(result.logits.float(), order, strict=False):
                differences.append((logits - expected[i][lengths[i]]).abs().max())
                lengths[i] += 1
    difference = float(torch.stack(differences).max())  # NaN if one is: Python's max can lose it
    tolerance = 0.05 if model.dtype.itemsize < 4 else 1e-3
    if not difference <= tolerance * largest:  # true for NaN, too
        raise WrongResultsError(f"logits of up to {largest:.3g} differ by {difference:.3g}")
    return {"kind": kind, "steps": len(orders), "largest_logit": largest, "largest_difference": difference}


def refuse_torch_kernels(device: str) -> dict[str, Any]:
    """Refuse to go on if an operation has run in PyTorch where a Triton kernel was expected."""
    fallbacks = [name for name in dispatch.DISPATCHED if name.endswith("torch")]
    if device == "cuda" and fallbacks:
        raise WrongResultsError(f"not run by their kernels: {', '.join(fallbacks)}")
    return {"operations": dict(dispatch.DISPATCHED)}
