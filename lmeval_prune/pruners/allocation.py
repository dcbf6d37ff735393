"""Allocate a pruning budget to layers: decide how many units each layer loses.

The units that a layer can lose of one kind (heads or channels, or the layer itself or a block) form a `UnitPool`. A
ratio is a share of all units in the pools. One of parameters is met within one unit, or refused; only `flap_reference`,
which does not count parameters, may miss it. One of heads or channels removes as many whole units as fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.base import per_member
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import (
    ATTENTION,
    CHANNELS,
    DEPTH_KINDS,
    FEED_FORWARD,
    HEADS,
    LAYERS,
    DepthPart,
    Part,
    Removed,
    Units,
    depth_parts_of,
    parts_of,
)

REFERENCE = "flap_reference"
REFERENCE_COSTS = {HEADS: int(512 / 3), CHANNELS: 1}  # cost of a head of 128 columns in channels, as in FLAP's code
STANDARDISED = ("standardised", REFERENCE)  # allocations that compare heads with channels
_HALF = 0.5 + 1e-9  # largest rounding error, in units
_EMPTY_LAYER = "a ratio of {} would empty a layer; lower --ratio, or --allow_empty_layer"


@dataclass(frozen=True)
class UnitPool:
    """Equal units that one layer can lose."""

    key: str  # part key, e.g. heads.L0
    units: Units  # members of each remaining unit, lowest score first
    scores: Tensor  # of these units
    cost: float  # of one unit: parameters, or heads or channels
    removed: int = 0  # number of units that earlier steps removed
    stays: bool = False  # the last attention of its stack

    @property
    def kind(self) -> str:
        return self.key.partition(".")[0]

    @property
    def label(self) -> str:
        return self.key.partition(".")[2]

    @property
    def size(self) -> int:
        return len(self.units) + self.removed

    @property
    def total(self) -> float:
        return self.size * self.cost

    def limit(self, allow_empty: bool) -> int:
        """Return the maximum number of removed units; the last head or channel counts only with `allow_empty`."""
        if self.stays:
            return self.removed
        return self.size if allow_empty or self.kind in DEPTH_KINDS else max(self.size - 1, self.removed)


def unit_pools(
    model_map: ModelMap,
    options: PruneOptions,
    kinds: Sequence[str],
    scores: Mapping[str, Tensor] | None = None,
    removed: Removed | None = None,
) -> list[UnitPool]:
    """Return the pools of kinds of parts by resolved options, layer by layer, heads before channels.

    `removed` are members that earlier steps removed. Where a stack would lose all its attention, the layer or block
    with attention and the highest score stays.
    """
    pools, skipped = list[UnitPool](), set[str]()
    for stack in model_map.stacks:
        labels = list(dict.fromkeys(sublayer.label for sublayer in model_map.sublayers if sublayer.stack == stack))
        skipped |= {*labels[: options.skip_first], *labels[len(labels) - options.skip_last :]}
    unit = options.unit or "head"
    parts: list[Part | DepthPart] = [*parts_of(model_map, kinds), *depth_parts_of(model_map, kinds)]
    for part in parts:
        if part.label in skipped:
            continue
        already = (removed or {}).get(part.key, set())
        units, values = _ranked(part, torch.zeros(part.size) if scores is None else scores[part.key], unit, already)
        cost = units.shape[1] if options.budget == "heads" else part.cost(unit)
        pools.append(UnitPool(part.key, [*map(tuple, units.tolist())], values, cost, len(already) // units.shape[1]))
    for stack in model_map.stacks:
        attend = {x.label for x in model_map.sublayers if (x.stack, x.kind) == (stack, ATTENTION)}
        holders = [n for n, pool in enumerate(pools) if pool.kind in (LAYERS, ATTENTION) and pool.label in attend]
        left = [n for n in holders if pools[n].units]
        if left and len(holders) == len(attend):  # fewer: a skipped layer has attention
            last = max(left, key=lambda n: float(pools[n].scores[0]))
            pools[last] = replace(pools[last], stays=True)
    return pools


def _ranked(part: Part | DepthPart, scores: Tensor, unit: str, removed: set[int]) -> tuple[Tensor, Tensor]:
    """Return the remaining units of a part, (units, members), and their scores, lowest first."""
    remaining = torch.tensor([member for member in range(part.size) if member not in removed], dtype=torch.long)
    if part.kind == HEADS and unit == "balanced":  # unit n: the n-th lowest head of each group
        groups = part.size // part.group_size
        members = remaining.view(groups, len(remaining) // groups)
        members = members.gather(1, per_member(scores)[members].argsort(dim=1, stable=True)).T
    else:
        members = remaining.view(-1, part.group_size if unit == "group" else 1)
    values = scores[members].flatten(1).mean(1).double()
    order = values.argsort(stable=True)
    return members[order], values[order]


def standardised(scores: Mapping[str, Tensor], removed: Removed, allocation: str) -> Mapping[str, Tensor]:
    """Return scores that an allocation compares: of `STANDARDISED`, with mean 0 and deviation 1 by part."""
    if allocation not in STANDARDISED:
        return scores
    correction, result = int(allocation == REFERENCE), {}
    for key, values in scores.items():
        already = removed.get(key, ())
        remaining = values[[member for member in range(len(values)) if member not in already]].double()
        deviation = remaining.std(correction=correction) if remaining.numel() > correction else torch.zeros(())
        mean = remaining.mean() if remaining.numel() else 0.0
        result[key] = (values.double() - mean) / (deviation if deviation > 0 else 1.0)
    return result


def allocate(pools: Sequence[UnitPool], options: PruneOptions, ratio: float, allocation: str) -> list[int]:
    """Return how many units each pool loses, earlier steps included; refuse a ratio that would empty a layer."""
    if options.budget == "heads":
        return _whole_units(pools, options, ratio, allocation)
    if allocation in ("uniform", "log"):
        return _by_layer(pools, options, ratio, allocation)
    if allocation == REFERENCE:
        return _below_threshold(pools, ratio, options.allow_empty_layer)
    counts = [0] * len(pools)
    by_kind: list[tuple[str, ...]] = [(HEADS,), (CHANNELS,)]
    width = [(HEADS, CHANNELS)] if allocation in ("standardised", "joint") else by_kind
    for kinds in [*width, (LAYERS,), (ATTENTION, FEED_FORWARD)]:  # whose units are compared with each other
        indices = [index for index, pool in enumerate(pools) if pool.kind in kinds]
        nearest = _nearest([pools[i] for i in indices], ratio, options.allow_empty_layer)
        for index, count in zip(indices, nearest, strict=True):
            counts[index] = count
    return counts


def share_of(ratio: float, count: float) -> int:
    """Return `floor(ratio · count)` without floating-point error: 0.3 of 270 is 81."""
    return math.floor(ratio * count + 1e-9)


def removed_by(pools: Sequence[UnitPool], counts: Sequence[int], before: Removed) -> Removed:
    """Return the removed members by part key after each pool loses its `count` lowest units."""
    after = {
        pool.key: before.get(pool.key, set()).union(*pool.units[: count - pool.removed])
        for pool, count in zip(pools, counts, strict=True)
    }
    others = {key: members for key, members in before.items() if key not in after}
    return others | {key: members for key, members in after.items() if members}


def parameter_counts(pools: Sequence[UnitPool], counts: Sequence[int]) -> dict[str, int]:
    removed = sum(count * pool.cost for pool, count in zip(pools, counts, strict=True))
    return {"removable": round(sum(pool.total for pool in pools)), "removed": round(removed)}


def _whole_units(pools: Sequence[UnitPool], options: PruneOptions, ratio: float, allocation: str) -> list[int]:
    """Remove the lowest units that fit into the ratio; one channel of a layer stays."""
    counts = [pool.removed for pool in pools]
    removes_heads = all(pool.kind == HEADS for pool in pools)
    allow_empty = options.allow_empty_layer or not removes_heads
    indices = range(len(pools))
    for compared in [[index] for index in indices] if allocation == "uniform" else [[*indices]]:
        due = share_of(ratio, sum(pools[i].total for i in compared))
        left = due - sum(counts[i] * pools[i].cost for i in compared)
        for position in _lowest_first([pools[i] for i in compared], allow_empty).tolist():
            index = compared[position]
            if pools[index].cost <= left:
                counts[index] += 1
                left -= pools[index].cost
    if removes_heads:
        return counts
    return [max(pool.removed, min(count, pool.size - 1)) for pool, count in zip(pools, counts, strict=True)]


def _by_layer(pools: Sequence[UnitPool], options: PruneOptions, ratio: float, allocation: str) -> list[int]:
    """Round in each layer and add the remainder to the next; what the last layers cannot lose, earlier layers lose."""
    carried = {HEADS: 0.0, CHANNELS: 0.0}
    limits = [pool.limit(options.allow_empty_layer) for pool in pools]
    shares = _log_shares(pools, ratio, options.log_start * ratio) if allocation == "log" else [ratio] * len(pools)
    counts = []
    for pool, share, limit in zip(pools, shares, limits, strict=True):
        due = carried[pool.kind] + share * pool.size * pool.cost
        count = min(max(math.floor(due / pool.cost + 0.5), pool.removed), limit)
        carried[pool.kind] = due - count * pool.cost
        counts.append(count)
    for index in reversed(range(len(pools))):
        pool = pools[index]
        more = min(max(0, math.floor(carried[pool.kind] / pool.cost + 0.5)), limits[index] - counts[index])
        counts[index] += more
        carried[pool.kind] -= more * pool.cost
    for kind, left in carried.items():
        if left > max((pool.cost for pool in pools if pool.kind == kind), default=0.0) * _HALF:
            raise InputError(_EMPTY_LAYER.format(ratio))
    return counts


def _log_shares(pools: Sequence[UnitPool], ratio: float, first: float) -> list[float]:
    """Return each pool's share: r_i = r_0 + (r_last − r_0) · log(i + 1) / log L, with the ratio as mean."""
    labels = list(dict.fromkeys(pool.label for pool in pools))
    if len(labels) == 1:
        return [ratio] * len(pools)
    depths = [math.log(labels.index(pool.label) + 1) / math.log(len(labels)) for pool in pools]
    sizes = [pool.total for pool in pools]
    mean_depth = sum(depth * size for depth, size in zip(depths, sizes, strict=True)) / sum(sizes)
    rise = (ratio - first) / mean_depth
    return [first + rise * depth for depth in depths]


def _lowest_first(pools: Sequence[UnitPool], allow_empty: bool) -> Tensor:
    removable = [pool.limit(allow_empty) - pool.removed for pool in pools]
    owners = torch.cat([torch.full((count,), index) for index, count in enumerate(removable)])
    return owners[torch.cat([p.scores[:n] for p, n in zip(pools, removable, strict=True)]).argsort(stable=True)]


def _nearest(pools: Sequence[UnitPool], ratio: float, allow_empty: bool) -> list[int]:
    """Remove the lowest units of all pools whose total cost is nearest to the ratio."""
    if not pools:
        return []
    due = sum(ratio * pool.total - pool.removed * pool.cost for pool in pools)
    owners = _lowest_first(pools, allow_empty)
    costs = torch.tensor([pool.cost for pool in pools], dtype=torch.float64)[owners]
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), costs.cumsum(0)])
    number = int((sums - due).abs().argmin())
    if due - float(sums[number]) > max(pool.cost for pool in pools) * _HALF:
        raise InputError(_EMPTY_LAYER.format(ratio))
    removed = torch.bincount(owners[:number], minlength=len(pools)).tolist()
    return [pool.removed + count for pool, count in zip(pools, removed, strict=True)]


def _below_threshold(pools: Sequence[UnitPool], ratio: float, allow_empty: bool) -> list[int]:
    """Return how many units each pool loses by FLAP's released code.

    From the highest score down, units stay until their cost is nearest to the target; those at or below the last one's
    score go.
    """
    costs = torch.tensor([float(REFERENCE_COSTS[pool.kind]) for pool in pools], dtype=torch.float64)
    scores = torch.cat([pool.scores for pool in pools])
    ranked, order = scores.sort(descending=True, stable=True)
    cumulative_costs = costs.repeat_interleave(torch.tensor([len(pool.units) for pool in pools]))[order].cumsum(0)
    total = float((costs * torch.tensor([pool.size for pool in pools])).sum())
    target = (1 - ratio) * total
    if not len(cumulative_costs) or cumulative_costs[-1] <= target:
        return [pool.removed for pool in pools]
    threshold = ranked[(cumulative_costs - target).abs().argmin()]
    counts = [pool.removed + int((pool.scores <= threshold).sum()) for pool in pools]
    return [min(pool.limit(allow_empty), count) for pool, count in zip(pools, counts, strict=True)]
