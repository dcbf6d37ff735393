"""Measure the costs of attention and feed-forward blocks by size, on small models of a model's class."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from lmeval_prune.architectures import ModelMap, map_model, uncuttable
from lmeval_prune.architectures.layers import layers_in
from lmeval_prune.architectures.sublayers import ATTENTION, FEED_FORWARD
from lmeval_prune.checkpoints.loading import stock_class
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.profiling.costs import random_inputs
from lmeval_prune.profiling.speed import Workload, decoding_rates, environment
from lmeval_prune.pruners.cost_table import CostTable, Measured, Seconds, block_shapes
from lmeval_prune.surgery.bases import changed_config, has_setting, settings_of_layers, uncut_config
from lmeval_prune.surgery.cut import cut

LAYERS = 4  # with the measured block; one more is as it was
_VOCABULARY = 1024  # of the small models: the output head is not measured


def measure_costs(
    path: Path, skeleton: Any, work: Workload, levels: int, threads: int, device: torch.device
) -> CostTable:
    """Measure sizes of blocks in rounds, and write the table after each measurement; go on with an unfinished table.

    Args:
        path: file of the table.
        skeleton: the model without weights.
        work: workload, with a single batch size.
        levels: number of sizes of each kind of block.
        threads: number of CPU threads, for the record.
        device: of the measured models.
    """
    model_map = map_model(skeleton)
    layers = min(LAYERS, len(model_map.attention) - 1)
    if layers < 1:
        raise InputError("a model with a single layer has no block that could go")
    plans = dict(_plans(model_map, levels, layers))
    measured = Measured(
        batch=work.batches[0],
        prompt=work.prompt,
        new=work.new,
        clock=work.clock,
        layers=layers,
        rounds=work.rounds,
    )
    machine: Any = environment(device, threads)
    table = CostTable(block_shapes(model_map), measured, machine, _earlier_times(path, plans))
    _check_same(path, table)
    parent = _small_model(skeleton, layers + 1, device)
    for number in range(work.rounds):
        for (kind, size), plan in plans.items():
            times = table.sizes(kind)[size]
            if len(times) > number:
                continue
            print(f"\rround {number + 1} of {work.rounds}: {kind} {size:20}", end="", file=sys.stderr, flush=True)
            model = cut(parent, plan).model if plan else parent
            times.append(_seconds(model, work))
            table.save(path)
    print(f"\r{'':70}\r", end="", file=sys.stderr, flush=True)
    return table


def _plans(model_map: ModelMap, levels: int, layers: int) -> Iterator[tuple[tuple[str, str], Plan | None]]:
    """Yield kind and size of each block, and the plan that gives it to the layers after the first."""
    attention, block = model_map.attention[0], model_map.feed_forward[0]
    heads, kv_heads, group = attention.heads, attention.kv_heads, attention.group_size
    last = f"L1-{layers}"
    yield (ATTENTION, "0"), Plan(blocks=f"{last}.{ATTENTION}")
    counts = _spread(kv_heads, levels) if not uncuttable(model_map) else [kv_heads]
    for count in counts if kv_heads > 1 else _spread(heads, levels):
        head_count = count * group if kv_heads > 1 else count
        plan = Plan(f"{last}H{head_count}-{heads - 1}") if head_count < heads else None
        yield (ATTENTION, f"{head_count}/{count if kv_heads > 1 else 1}"), plan
    yield (FEED_FORWARD, "0"), Plan(blocks=f"{last}.{FEED_FORWARD}")
    for count in _spread(block.channels, levels):
        lost = {f"L{index}": f"{count}-{block.channels - 1}" for index in range(1, layers + 1)}
        yield (FEED_FORWARD, str(count)), Plan((), lost) if count < block.channels else None


def _spread(largest: int, levels: int) -> list[int]:
    """Return at most `levels` numbers up to the largest one, equally far apart."""
    step = max(1, largest // levels)
    return [*range(step, largest, step), largest]


def _earlier_times(path: Path, plans: Iterable[tuple[str, str]]) -> Seconds:
    """Return the times that a file has of some sizes, which may be none."""
    earlier = CostTable.load(path) if path.is_file() else None
    times = Seconds(attention={}, feed_forward={})
    for kind, size in plans:
        sizes = times["attention"] if kind == ATTENTION else times["feed_forward"]
        sizes[size] = list(earlier.sizes(kind).get(size, ())) if earlier else []
    return times


def _check_same(path: Path, table: CostTable) -> None:
    """Refuse to go on with measurements of other blocks, another workload or on another machine."""
    if not path.is_file():
        return
    earlier = CostTable.load(path)
    for name in ("shapes", "workload", "environment"):
        current, before = dict(getattr(table, name)), dict(getattr(earlier, name))
        for key in current.keys() | before.keys():
            if key != "rounds" and current.get(key) != before.get(key):
                raise InputError(
                    f"{path} has measurements with {key}={before.get(key)}, these have {current.get(key)}; name "
                    f"another --output, or remove the file"
                )


def _small_model(skeleton: Any, layers: int, device: torch.device) -> Any:
    """Build a model of the same class and sizes with few layers, a small vocabulary and random weights."""
    config, stock = uncut_config(skeleton.config), stock_class(skeleton)
    depth = len(list(layers_in(skeleton, map_model(skeleton).attention[0].family)))
    changes: dict[str, Any] = {"num_hidden_layers": layers, **settings_of_layers(config, depth, [*range(layers)])}
    if has_setting(config, "vocab_size") and config.get_text_config().vocab_size > _VOCABULARY:
        changes |= {"vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    changed = changed_config(config, changes)
    if changed is None:
        raise InputError(f"{stock.__name__} cannot be built with {layers} layers, to measure its blocks")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = stock._from_config(changed, dtype=getattr(config, "dtype", None) or skeleton.dtype)  # type: ignore[attr-defined]
    return model.eval().to(device)


def _seconds(model: Any, work: Workload) -> float:
    """Return the seconds that a model takes to read prompts and to decode, after a short pass to warm up."""
    (batch,) = work.batches
    ids = random_inputs(model, batch, work.prompt)["input_ids"]
    decoding_rates(model, ids, 2, work.clock, logits_to_keep=1)
    rates = decoding_rates(model, ids, work.new, work.clock, logits_to_keep=1)
    return batch * (work.prompt / rates["prefill"] + work.new / rates["decode"])
