"""Measure the costs of a variant on the loaded model with one fixed text: parameters, FLOPs, speed and memory."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from lmeval_prune.architectures import cache_argument
from lmeval_prune.profiling.costs import flops_of, parameters
from lmeval_prune.profiling.speed import decoding_rates

# Everyday prose of about 250 tokens. The text is fixed because the tokens that a variant skips depend on it.
TEXT = """The ferry to the island leaves at seven, but on windy days the captain waits until the harbour master has
read the gauges twice. Mara carried two crates of apples, a roll of canvas and the clock that her brother had repaired.
She counted the passengers as they came aboard: nine farmers, four pupils on their way home, a doctor with a folded
map, and an old man who asked, as he did every week, whether the lighthouse was still painted white. The crossing takes
fifty minutes when the sea is calm. Halfway, the engine slowed down, and everybody looked up from their newspapers. A
whale, somebody said; a sandbank, said another. In truth a rope had caught the propeller, and it cost them half an hour
and a good knife to cut it loose. When they arrived, the baker had already closed his shop, so Mara sold eleven apples
on the quay for three coins each and gave the rest to the pupils. On the way back she wrote down what she had spent and
what she had earned, added the price of the knife, and found that the day had cost her exactly as much as it had
brought. She laughed, wound the clock, and set it by the bell of the church, which was, as always, four minutes late."""
PREFILL, DECODED, REPEATS = 192, 32, 5


def measure(lm: Any) -> dict[str, Any]:
    """Measure the model with its interventions.

    Args:
        lm: a loaded causal `PrunedHFLM`.

    Returns:
        `parameters`, `parameters_without_embeddings`; `flops_per_token` of the prefill (torch's counter);
        `prefill_tokens_per_second`, `decode_tokens_per_second` at batch 1 (the median of `REPEATS` runs) and their
        `ranges` (slowest, fastest); `weights_bytes`, `cache_bytes_per_token` after the text; on a GPU `peak_bytes`;
        `text_tokens`, `device`, `threads`.
    """
    model, on_gpu = lm.model, lm.device.type == "cuda"
    ids = torch.tensor([lm.tok_encode(TEXT)[:PREFILL]], device=lm.device)
    length = ids.shape[1]
    total, without_embeddings = parameters(model)
    flops = flops_of(lambda: model(ids, use_cache=False))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(lm.device)
    with torch.no_grad():
        (cache,) = cache_argument(model(ids, use_cache=True)).values()
    _, *runs = [decoding_rates(model, ids, DECODED) for _ in range(1 + REPEATS)]  # the first warms up
    speeds = {f"{name}_tokens_per_second": [run[name] for run in runs] for name in ("prefill", "decode")}
    return {
        "parameters": total,
        "parameters_without_embeddings": without_embeddings,
        "flops_per_token": flops / length,
        **{name: median(rates) for name, rates in speeds.items()},
        "ranges": {name: [min(rates), max(rates)] for name, rates in speeds.items()},
        "weights_bytes": sum(weight.nbytes for weight in model.parameters()),
        "cache_bytes_per_token": _cache_bytes(cache) / length,
        **({"peak_bytes": torch.cuda.max_memory_allocated(lm.device)} if on_gpu else {}),
        "text_tokens": length,
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
    }


def _cache_bytes(cache: Any) -> int:
    layers = getattr(cache, "layers", None) or []
    holders = [getattr(layer, "sequences", None) or layer for layer in layers]
    tensors = [getattr(holder, name, None) for holder in holders for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
