"""Compute statistics of attention weights over calibration text without storing whole attention matrices.

Weights are recomputed from queries and keys, one block of queries at a time, before the model's own attention runs.
Families that do not call attention functions through transformers' interface return their weights instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, ModelMap, input_device
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import (
    Attend,
    Attended,
    AttentionCall,
    check_attention_calls,
    eager_attention,
    intercept_attention,
)
from lmeval_prune.pruners.calibration import Batch, CalibrationText, StopForward, stop_forward_at

BLOCK = 2**22  # maximum number of attention weights in memory


@dataclass(frozen=True)
class AttentionRows:
    """Attention weights of a block of queries."""

    weights: Tensor  # (batch, heads, queries, keys)
    visible: Tensor  # mask of keys that a query may attend to, broadcastable to `weights`
    first: Tensor  # mask of queries that are the first token of their text, (batch, queries)
    first_keys: Tensor  # mask of keys that are the first token of their text, (batch, keys)


# returns values, (batch, heads, queries), and a mask of the queries to average over, (batch, queries)
Measure = Callable[[AttentionRows], tuple[Tensor, Tensor]]


def attention_statistic(model_map: ModelMap, text: CalibrationText, measure: Measure) -> dict[str, Tensor]:
    """Return the mean of a measure over the queries of a text that count, by part key (`heads.L0`), (heads,)."""
    sums = {layer.label: torch.zeros(layer.heads, dtype=torch.float64) for layer in model_map.attention}
    counts = dict.fromkeys(sums, 0)
    batch = Batch(*[torch.ones(0)] * 3)

    def add(label: str, rows: AttentionRows, counted_rows: Tensor) -> None:
        values, counted = measure(rows)
        counted = counted & counted_rows
        sums[label] += torch.where(counted[:, None], values, 0.0).sum((0, 2)).double().cpu()
        counts[label] += int(counted.sum())

    def handler(call: AttentionCall, attend: Attend) -> Attended:
        for rows, queries in rows_of(call, batch.real):
            add(call.layer.label, rows, batch.counted[:, queries].bool())
        return attend(call)

    try:
        check_attention_calls(model_map)
    except InputError:
        if model_map.stacks != ("",):
            raise
        _read_output_attentions(model_map, text, add)
    else:
        with ExitStack() as stack:
            intercept_attention(model_map, handler, stack)
            for batch in text.run(model_map.model):  # noqa: B007 - read by the handler
                pass
    empty = [label for label, count in counts.items() if not count]
    if empty:
        raise InputError(f"no query of layer {empty[0]} counts on the calibration text; give longer windows")
    return {f"heads.{label}": total / counts[label] for label, total in sums.items()}


def rows_of(call: AttentionCall, real: Tensor) -> Iterator[tuple[AttentionRows, slice]]:
    """Compute the attention weights of a call in blocks of queries; yield each block with its query range."""
    query, key, options = call.query, call.key, call.options
    batch, heads, length, width = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaling = options.get("scaling")
    scaling = 1 / math.sqrt(width) if scaling is None else scaling
    keys = key.to(dtype).repeat_interleave(heads // key.shape[1], dim=1).transpose(2, 3)
    count = keys.shape[-1]
    option = options.get("is_causal")
    is_causal = bool(getattr(call.module, "is_causal", True) if option is None else option)
    causal = call.mask is None and length > 1 and is_causal
    first = (real.cumsum(1) == 1) & real.bool()
    size = max(1, BLOCK // (batch * heads * count))
    for start in range(0, length, size):
        queries = slice(start, min(length, start + size))
        logits = query[:, :, queries].to(dtype) @ keys * scaling
        if options.get("softcap") is not None:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        if options.get("position_bias") is not None:
            logits = logits + options["position_bias"][:, :, queries, :count].to(dtype)
        visible = torch.ones(1, 1, 1, count, dtype=torch.bool, device=query.device)
        if call.mask is not None:
            mask = call.mask[:, :, queries if call.mask.shape[2] > 1 else slice(None), :count]
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            logits = logits if mask.dtype == torch.bool else logits + mask.to(dtype)
        elif causal:
            positions = torch.arange(queries.start, queries.stop, device=query.device)[:, None] + count - length
            visible = (torch.arange(count, device=query.device) <= positions)[None, None]
        logits = logits.masked_fill(~visible, -torch.inf)
        if options.get("s_aux") is not None:  # attention sinks
            sink = options["s_aux"].to(dtype).reshape(1, -1, 1, 1).expand(batch, -1, logits.shape[2], 1)
            weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        yield AttentionRows(weights, visible, first[:, queries], first), queries


def _read_output_attentions(
    model_map: ModelMap, text: CalibrationText, add: Callable[[str, AttentionRows, Tensor], None]
) -> None:
    """Add the attention weights that the model returns itself; those of all layers and one batch are in memory."""
    model: Any = model_map.model
    device = input_device(model)
    base = getattr(model, "get_base_model", lambda: model)().base_model  # without PEFT and the output head
    with eager_attention(model), torch.no_grad(), stop_forward_at(base, after=True):  # only eager returns weights
        for ids, real, counted in ((tensor.to(device) for tensor in batch) for batch in text.batches):
            try:
                layers = model(ids, attention_mask=real, output_attentions=True).attentions
            except StopForward as stop:
                layers = getattr(stop.output, "attentions", None)
            assert layers
            first = (real.cumsum(1) == 1) & real.bool()
            for layer, weights in zip(model_map.attention, layers, strict=True):
                weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
                visible = _visible(layer, real) | (weights > 0)
                add(layer.label, AttentionRows(weights, visible, first, first), counted.bool())


def _visible(layer: AttentionLayer, real: Tensor) -> Tensor:
    """Return the mask of visible keys, (batch, 1, queries, keys); a weight of 0 does not show that a key is hidden."""
    module: Any = layer.module
    positions = torch.arange(real.shape[1], device=real.device)
    distance = positions[:, None] - positions
    visible = torch.ones_like(distance, dtype=torch.bool)
    if getattr(module, "is_causal", True):
        visible = distance >= 0
    local = getattr(module, "attention_type", None) == "local"  # GPT-Neo
    window = module.config.window_size if local else getattr(module, "sliding_window", None)
    if window:
        visible = visible & (distance < window)
    return visible & real.bool()[:, None, None]
