"""What a variant costs: parameters, arithmetic, speed and memory, measured on the live model with one fixed text."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lmeval_prune.profiling.costs import parameters

# Everyday prose of about 250 tokens: what a variant skips depends on the text, so the text is fixed.
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


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of scores and of the weighted sum, from shapes; what a causal mask leaves out is counted."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[-2] * (width + value[-1]))


# which torch's counter does not know
_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def measure(lm: Any) -> dict[str, Any]:
    """Measure the model with what is applied to it.

    Args:
        lm: the loaded `PrunedHFLM`; a causal model.

    Returns:
        `parameters`, `parameters_without_embeddings`; `flops_per_token` of reading the text (torch's counter);
        `prefill_tokens_per_second`, `decode_tokens_per_second` at batch 1 (the median of `REPEATS` runs, other work
        on the machine included) and, of both, `ranges`: the slowest and the fastest run; `weights_bytes`,
        `cache_bytes_per_token` after the text; on a GPU `peak_bytes`; and on what it was measured.
    """
    model = lm.model
    ids = torch.tensor([lm.tok_encode(TEXT)[:PREFILL]], device=lm.device)
    length = ids.shape[1]
    weights = list(model.parameters())
    everything, without_embeddings = parameters(model)
    with torch.inference_mode():
        with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
            model(ids, use_cache=False)
        if lm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(lm.device)
        cache = model(ids, use_cache=True).past_key_values
        prefill = [length / seconds for seconds in _seconds(lambda: model(ids, use_cache=True))]
        settings = {"do_sample": False, "use_cache": True, "pad_token_id": lm.tokenizer.pad_token_id or 0}
        one = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "min_new_tokens": 1, **settings}
        many = {**one, "max_new_tokens": DECODED + 1, "min_new_tokens": DECODED + 1}
        first = _seconds(lambda: model.generate(ids, **one))
        whole = _seconds(lambda: model.generate(ids, **many))
    decode = [decoding_rate(*seconds) for seconds in zip(first, whole, strict=True)]
    speeds = {"prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode}
    on_gpu = lm.device.type == "cuda"
    return {
        "parameters": everything,
        "parameters_without_embeddings": without_embeddings,
        "flops_per_token": counter.get_total_flops() / length,
        **{name: median(rates) for name, rates in speeds.items()},
        "ranges": {name: [min(rates), max(rates)] for name, rates in speeds.items()},
        "weights_bytes": sum(one.numel() * one.element_size() for one in weights),
        "cache_bytes_per_token": _cache_bytes(cache) / length,
        **({"peak_bytes": torch.cuda.max_memory_allocated(lm.device)} if on_gpu else {}),
        "text_tokens": length,
        "device": torch.cuda.get_device_name(lm.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
    }


def decoding_rate(first: float, whole: float) -> float:
    """Tokens a second.

    Args:
        first: seconds for reading the text and one token.
        whole: seconds for that and `DECODED` more. Where other work on the machine swamps the difference, it counts as
            a quarter of the whole: a figure that is somewhat off, not orders of magnitude too high.
    """
    return DECODED / max(whole - first, whole / 4)


def _seconds(run: Callable[[], Any]) -> list[float]:
    """Of each of the repeats, after one to warm up."""
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times[1:]


def _cache_bytes(cache: Any) -> int:
    """Bytes of all keys and values."""
    layers = getattr(cache, "layers", None) or []
    holders = [getattr(layer, "sequences", None) or layer for layer in layers]  # a filtered layer's own, or its layer
    tensors = [getattr(holder, name, None) for holder in holders for name in ("keys", "values")]
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
