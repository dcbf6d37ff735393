"""Texts, perplexity and closed formulas that several results share; not a benchmark."""

from __future__ import annotations

from typing import Any

import torch

from lmeval_prune import Plan
from lmeval_prune.architectures import ModelMap
from lmeval_prune.profiling.costs import formula_flops, parameters
from lmeval_prune.surgery.kept import KeptHeads
from lmeval_prune.tasks import data

WINDOW = 512


def texts(tokenizer: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Return windows of token ids, (windows, WINDOW), by data set."""

    def joined(name: str, answer: str) -> str:
        rows = list(data.load(name, "test"))[: tokens // 40]
        return "\n\n".join(f"Question: {row['question']}\nAnswer: {row[answer]}" for row in rows)

    corpora = {"GSM8K": joined("gsm8k", "answer"), "MATH": joined("math500", "solution")}
    ids = {name: torch.tensor(tokenizer(text)["input_ids"][:tokens]) for name, text in corpora.items()}
    return {name: sequence[: len(sequence) // WINDOW * WINDOW].reshape(-1, WINDOW) for name, sequence in ids.items()}


def perplexity(model: Any, windows: torch.Tensor) -> float:
    """Return the perplexity by token, each window by itself, its first token not scored."""
    with torch.no_grad():
        losses = [model(window[None], labels=window[None], use_cache=False).loss for window in windows]
    return float(torch.stack(losses).mean().exp())


def arithmetic(model_map: Any, context: int) -> dict[str, float]:
    """Count the multiplications of a token, in a model and in what can be left out, with so many tokens before it."""
    layer, config = model_map.attention[0], model_map.model.config
    hidden, width = config.hidden_size, layer.head_dim
    head = 2 * hidden * width + 2 * width * context  # its query and output projections, scores and sums of values
    keys_and_values = 2 * hidden * width * layer.kv_heads
    feed_forward = 3 * hidden * next(iter(model_map.channels().values()))
    attention = layer.heads * head + keys_and_values
    layers = len(model_map.attention)
    return {
        "model": layers * (attention + feed_forward) + hidden * config.vocab_size,
        "all_attention": layers * attention,
        "attention_of_a_skipped_token": layer.heads * head,  # in a layer; its keys and values are computed all the same
        "keys_and_values": keys_and_values,
        "head": head,
    }


def expected(model_map: ModelMap, plan: Plan, tokens: int) -> dict[str, Any]:
    """Return parameters and arithmetic of what is left, by closed formulas; fillers count as there."""
    hidden = model_map.model.config.hidden_size
    pruned = {layer.label: heads for layer, heads in plan.heads_by_layer(model_map)}
    layers = [KeptHeads.of(layer, pruned.get(layer.label, ())) for layer in model_map.attention]
    heads = sum(remaining.layer.heads - len(remaining.heads) for remaining in layers)
    kv_heads = sum(remaining.layer.kv_heads - len(remaining.kv_heads) for remaining in layers)
    channels = sum(len(lost) for _, lost in plan.channels_by_layer(model_map))
    width = model_map.attention[0].head_dim
    fewer = hidden * (2 * width * (heads + kv_heads) + 3 * channels)
    all_, without = parameters(model_map.model)
    flops = formula_flops(model_map, tokens) - 2 * tokens * fewer - 4 * tokens**2 * heads * width
    removed = {"heads": heads, "kv_heads": kv_heads, "channels": channels}
    return {"parameters": all_ - fewer, "without_embeddings": without - fewer, "flops": flops, "removed": removed}
