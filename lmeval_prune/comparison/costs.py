"""Costs of variants and their Pareto fronts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.reporting.statistics import pareto


class Cost(NamedTuple):
    """A measured quantity."""

    label: str
    less_is_better: bool = True
    timed: bool = False  # varies from run to run


COSTS = {
    "parameters": Cost("parameters"),
    "flops_per_token": Cost("FLOPs per token"),
    "decode_tokens_per_second": Cost("tokens per second, decoding", less_is_better=False, timed=True),
    "prefill_tokens_per_second": Cost("tokens per second, prefill", less_is_better=False, timed=True),
    "cache_bytes_per_token": Cost("bytes of cache per token"),
    "weights_bytes": Cost("bytes of weights"),
}


def cost_range(costs: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return the lowest and the highest measured value of a cost; NaN if unknown."""
    if COSTS[key].timed:
        low, high = costs.get("ranges", {}).get(key, (np.nan, np.nan))
        return low, high
    value = costs.get(key)
    return (np.nan if value is None else value,) * 2


def pareto_fronts(costs: Mapping[str, Mapping[str, Any]], gains: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the variants on the Pareto front of each cost in which variants differ, by key of `COSTS`.

    Speeds of several devices, or numbers of threads, have no front. Gains are means by variant; larger is better.
    """
    fronts = {}
    for key, cost in COSTS.items():
        ranges = np.array([cost_range(costs[name], key) for name in gains], dtype=float)
        has_range = ~np.isnan(ranges).any(1)
        machines = {
            (variant_costs.get("device"), variant_costs.get("threads"))
            for variant_costs in (costs[name] for name in gains)
            if key in variant_costs
        }
        if not (cost.timed and len(machines) > 1) and (ranges[has_range] != ranges[has_range][:1]).any():
            front = pareto(ranges if cost.less_is_better else -ranges[:, ::-1], np.array(list(gains.values())))
            fronts[key] = [name for name, is_on in zip(gains, front, strict=True) if is_on]
    return fronts
