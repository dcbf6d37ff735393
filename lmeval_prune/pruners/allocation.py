"""Shares out a budget of parameters, or of heads and channels, among the layers, each a pot of equal units.

What a layer can lose of one kind, its heads or its channels, is a *pot*. A budget is a share of what is in all pots of
the layers in play. One of parameters is hit within one unit, or refused; `flap_reference`, which counts by costs of its
own, may miss it, and then a warning says so. One of heads or channels takes as many whole units as fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.base import by_member
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, HEADS, Part, Removed, Units, parts_of

logger = logging.getLogger(__name__)

REFERENCE = "flap_reference"
REFERENCE_COSTS = {HEADS: int(512 / 3), CHANNELS: 1}  # of a head of 128 columns, in channels, as FLAP's code rounds it
STANDARDISED = ("standardised", REFERENCE)  # compare heads of all layers with all channels
_HALF = 0.5 + 1e-9  # of a unit: the most that rounding may leave


@dataclass(frozen=True)
class Budget:
    """A share that parts lose together.

    Attributes:
        kinds: of these parts, `heads`, `channels` or both.
        ratio: the share.
        allocation: `uniform` and `log`: each layer a share of its own; `global`: heads of all layers are compared, and
            channels of all layers; `standardised`: all are compared, by how far they are from their layer's mean;
            `flap_reference`: the same, with that code's costs and threshold.
        options: the others, with their unit settled.
    """

    kinds: tuple[str, ...]
    ratio: float
    allocation: str
    options: PruneOptions


@dataclass(frozen=True)
class Pot:
    """Equal units that a layer can lose.

    Attributes:
        key: the part, `heads.L0` or `channels.L0`.
        units: members of each unit, lowest score first; those that are removed already are not among them.
        scores: of the units.
        cost: of a unit, in what the budget counts.
        removed: units that are removed already.
    """

    key: str
    units: Units
    scores: Tensor
    cost: float
    removed: int = 0

    @property
    def kind(self) -> str:
        """`heads` or `channels`."""
        return self.key.partition(".")[0]

    @property
    def size(self) -> int:
        """Number of units, also of those that are removed."""
        return len(self.units) + self.removed

    @property
    def total(self) -> float:
        """Cost of all its units."""
        return self.size * self.cost

    def most(self, allow_empty: bool) -> int:
        """Return how many units it may lose in all; the last one only if that is allowed."""
        return self.size if allow_empty else max(self.size - 1, self.removed)


def pots_of(
    model_map: ModelMap, budget: Budget, scores: Mapping[str, Tensor] | None = None, removed: Removed | None = None
) -> list[Pot]:
    """Return the pots of a budget, layer by layer, heads before channels.

    Args:
        model_map: of the model.
        budget: the budget.
        scores: by part; None for scores by which the smallest units and whole layers go first.
        removed: by part, members that are removed already.

    Raises:
        InputError: no layer is in play.
    """
    options, pots, spared = budget.options, list[Pot](), _spared(model_map, budget.options)
    unit = options.unit or "head"
    for part in parts_of(model_map, budget.kinds):
        if part.label in spared:
            continue
        gone = (removed or {}).get(part.key, set())
        units, values = _ranked(part, torch.zeros(part.size) if scores is None else scores[part.key], unit, gone)
        cost = part.cost(unit) if options.budget == "parameters" else units.shape[1]
        values = torch.full_like(values, cost) if scores is None else values
        pots.append(Pot(part.key, [*map(tuple, units.tolist())], values, cost, len(gone) // units.shape[1]))
    if not pots:
        raise InputError(f"no layer is left: skip_first={options.skip_first} and skip_last={options.skip_last}")
    return pots


def _ranked(part: Part, scores: Tensor, unit: str, removed: set[int]) -> tuple[Tensor, Tensor]:
    """Return the units of a part that are left, (units, members), and their scores, the lowest first."""
    left = torch.tensor([member for member in range(part.size) if member not in removed], dtype=torch.long)
    if part.kind == HEADS and unit == "balanced":  # the n-th lowest head of each group
        groups = part.size // part.share
        members = left.view(groups, len(left) // groups)
        members = members.gather(1, by_member(scores)[members].argsort(dim=1, stable=True)).T
    else:
        members = left.view(-1, part.share if unit == "group" else 1)
    values = scores[members].flatten(1).mean(1).double()
    order = values.argsort(stable=True)
    return members[order], values[order]


def _spared(model_map: ModelMap, options: PruneOptions) -> set[str]:
    """Return the labels of layers that are not in play."""
    spared: set[str] = set()
    for stack in model_map.stacks:
        labels = [layer.label for layer in model_map.attention if layer.stack == stack]
        spared |= {*labels[: options.skip_first], *labels[len(labels) - options.skip_last :]}
    return spared


def standardised(scores: Mapping[str, Tensor], removed: Removed, allocation: str) -> Mapping[str, Tensor]:
    """Return scores as an allocation compares them.

    Those of `STANDARDISED` have mean 0 and deviation 1 over what is left of each part, columns counted one by one.
    """
    if allocation not in STANDARDISED:
        return scores
    correction, compared = int(allocation == REFERENCE), {}
    for key, values in scores.items():
        gone = removed.get(key, ())
        left = values[[member for member in range(len(values)) if member not in gone]].double()
        deviation = left.std(correction=correction) if left.numel() > correction else torch.zeros(())
        mean = left.mean() if left.numel() else 0.0
        compared[key] = (values.double() - mean) / (deviation if deviation > 0 else 1.0)
    return compared


def allocate(pots: Sequence[Pot], budget: Budget) -> list[int]:
    """Return how many units each pot loses in all.

    Raises:
        InputError: the ratio cannot be reached without emptying a layer.
    """
    options, allocation = budget.options, budget.allocation
    if options.budget == "heads":
        return _whole_units(pots, budget)
    if allocation in ("uniform", "log"):
        return _by_layer(pots, budget)
    if allocation == REFERENCE:
        return _below_threshold(pots, budget)
    counts = [0] * len(pots)
    for kinds in [(HEADS, CHANNELS)] if allocation == "standardised" else [(HEADS,), (CHANNELS,)]:
        pool = [index for index, pot in enumerate(pots) if pot.kind in kinds]
        for index, count in zip(pool, _nearest([pots[i] for i in pool], budget), strict=True):
            counts[index] = count
    return counts


def share_of(ratio: float, count: float) -> int:
    """Return `floor(ratio · count)`, where 0.3 of 270 is 81."""
    return math.floor(ratio * count + 1e-9)


def removed_by(pots: Sequence[Pot], counts: Sequence[int], before: Removed) -> Removed:
    """Return what is removed in all when each pot loses so many units, its lowest; pots in their order."""
    lost = {
        pot.key: before.get(pot.key, set()).union(*pot.units[: count - pot.removed])
        for pot, count in zip(pots, counts, strict=True)
    }
    others = {key: members for key, members in before.items() if key not in lost}
    return others | {key: members for key, members in lost.items() if members}


def spent(pots: Sequence[Pot], counts: Sequence[int], budget: Budget) -> dict[str, int]:
    """Return how many parameters of the pots can be removed and are, and warn of a budget that is missed."""
    removable = sum(pot.total for pot in pots)
    removed = sum(count * pot.cost for pot, count in zip(pots, counts, strict=True))
    if abs(removed - budget.ratio * removable) > max(pot.cost for pot in pots) * (1 + 1e-9):
        logger.warning(
            "allocation %s misses the budget by more than one unit: %.1f%% of the parameters in play go, %.1f%% were "
            "asked for", budget.allocation, 100 * removed / removable, 100 * budget.ratio
        )  # fmt: skip
    return {"removable": round(removable), "removed": round(removed)}


def _whole_units(pots: Sequence[Pot], budget: Budget) -> list[int]:
    """Take the lowest units that fit; of channels, as few as leave a multiple and the last one."""
    counts = [pot.removed for pot in pots]
    of_heads = budget.kinds == (HEADS,)
    allow_empty = budget.options.allow_empty_layer or not of_heads
    everywhere = range(len(pots))
    for pool in [[index] for index in everywhere] if budget.allocation == "uniform" else [[*everywhere]]:
        left = share_of(budget.ratio, sum(pots[i].total for i in pool)) - sum(counts[i] * pots[i].cost for i in pool)
        for owner in _lowest_first([pots[i] for i in pool], allow_empty).tolist():
            if pots[pool[owner]].cost <= left:
                counts[pool[owner]] += 1
                left -= pots[pool[owner]].cost
    if of_heads:
        return counts
    multiple = budget.options.ffn_multiple
    kept = [-(-max(1, pot.size - count) // multiple) * multiple for pot, count in zip(pots, counts, strict=True)]
    return [pot.size - min(pot.size - pot.removed, width) for pot, width in zip(pots, kept, strict=True)]


def _by_layer(pots: Sequence[Pot], budget: Budget) -> list[int]:
    """Carry what rounding leaves to the next layer, and take what the last ones cannot give from those before."""
    carried = {HEADS: 0.0, CHANNELS: 0.0}
    most = [pot.most(budget.options.allow_empty_layer) for pot in pots]
    counts = []
    for pot, share, limit in zip(pots, _shares(pots, budget), most, strict=True):
        due = carried[pot.kind] + share * pot.size * pot.cost
        count = min(max(math.floor(due / pot.cost + 0.5), pot.removed), limit)
        carried[pot.kind] = due - count * pot.cost
        counts.append(count)
    for index in reversed(range(len(pots))):
        pot = pots[index]
        more = min(max(0, math.floor(carried[pot.kind] / pot.cost + 0.5)), most[index] - counts[index])
        counts[index] += more
        carried[pot.kind] -= more * pot.cost
    for kind, left in carried.items():
        if left > max((pot.cost for pot in pots if pot.kind == kind), default=0.0) * _HALF:
            raise _emptied(budget.ratio, kind)
    return counts


def _shares(pots: Sequence[Pot], budget: Budget) -> list[float]:
    """Return each pot's share; of `log` r_i = r_0 + (r_last − r_0) · log(i + 1) / log L, whose mean is the ratio."""
    labels = list(dict.fromkeys(pot.key.partition(".")[2] for pot in pots))
    if budget.allocation == "uniform" or len(labels) == 1:
        return [budget.ratio] * len(pots)
    depths = [math.log(labels.index(pot.key.partition(".")[2]) + 1) / math.log(len(labels)) for pot in pots]
    sizes = [pot.total for pot in pots]
    middle = sum(depth * size for depth, size in zip(depths, sizes, strict=True)) / sum(sizes)
    first = budget.options.log_start * budget.ratio
    rise = (budget.ratio - first) / middle
    if first + rise >= 1:
        raise InputError(
            f"a ratio of {budget.ratio} by allocation=log would empty the last layer (its share is {first + rise:.2f});"
            f" give a smaller ratio, or a larger --log_start"
        )
    return [first + rise * depth for depth in depths]


def _lowest_first(pots: Sequence[Pot], allow_empty: bool) -> Tensor:
    """Return the pots that the units are of which may go, by their indices, the lowest score first."""
    spare = [pot.most(allow_empty) - pot.removed for pot in pots]
    owners = torch.cat([torch.full((count,), index) for index, count in enumerate(spare)])
    return owners[torch.cat([p.scores[:n] for p, n in zip(pots, spare, strict=True)]).argsort(stable=True)]


def _nearest(pots: Sequence[Pot], budget: Budget) -> list[int]:
    """Take the lowest units of all pots, as many as come nearest to the budget."""
    if not pots:
        return []
    due = sum(budget.ratio * pot.total - pot.removed * pot.cost for pot in pots)
    owners = _lowest_first(pots, budget.options.allow_empty_layer)
    costs = torch.tensor([pot.cost for pot in pots], dtype=torch.float64)[owners]
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), costs.cumsum(0)])
    chosen = int((sums - due).abs().argmin())
    if due - float(sums[chosen]) > max(pot.cost for pot in pots) * _HALF:
        raise _emptied(budget.ratio, " or ".join(dict.fromkeys(pot.kind for pot in pots)))
    lost = torch.bincount(owners[:chosen], minlength=len(pots)).tolist()
    return [pot.removed + count for pot, count in zip(pots, lost, strict=True)]


def _below_threshold(pots: Sequence[Pot], budget: Budget) -> list[int]:
    """Return how many units each pot loses by FLAP's released code.

    Units are kept from the highest score on until their costs are nearest to what is to stay; the score of the last of
    these is the threshold, and what is not above it goes.
    """
    costs = torch.tensor([float(REFERENCE_COSTS[pot.kind]) for pot in pots], dtype=torch.float64)
    scores = torch.cat([pot.scores for pot in pots])
    ranked, order = scores.sort(descending=True, stable=True)
    kept = costs.repeat_interleave(torch.tensor([len(pot.units) for pot in pots]))[order].cumsum(0)
    total = float((costs * torch.tensor([pot.size for pot in pots])).sum())
    threshold = ranked[(kept - (1 - budget.ratio) * total).abs().argmin()]
    lost = [pot.removed + int((pot.scores <= threshold).sum()) for pot in pots]
    return [min(pot.most(budget.options.allow_empty_layer), count) for pot, count in zip(pots, lost, strict=True)]


def _emptied(ratio: float, kind: str) -> InputError:
    return InputError(
        f"a ratio of {ratio} would take all {kind} of a layer; give a smaller ratio, --parts, or --allow_empty_layer"
    )
