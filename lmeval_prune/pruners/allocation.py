"""A budget of parameters: what a unit costs, and how many units each layer loses.

Costs come from live shapes. What a layer can lose of one kind, its heads or its channels, is a *pot* of equal units.
The budget is a share of what is in all pots of the layers in play, and is hit within one unit, or refused;
`flap_reference`, which counts by costs of its own, may miss it, and then a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import attribute_of, in_features, out_features, projection_in
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.selection import Removed, units_in

HEADS, CHANNELS = "heads", "channels"
REFERENCE = "flap_reference"
REFERENCE_COSTS = {HEADS: int(512 / 3), CHANNELS: 1}  # of a head of 128 columns, in channels, as FLAP's code rounds it
COMPARED = ("standardised", REFERENCE)  # heads of all layers with all channels
_HALF = 0.5 + 1e-9  # of a unit: what rounding may leave


@dataclass(frozen=True)
class Pot:
    """Units of one layer and kind.

    Attributes:
        label: the layer.
        kind: `heads` or `channels`.
        units: members of each unit, lowest score first; those that are removed already are not among them.
        scores: of the units.
        cost: of a unit, in what the budget counts.
        removed: units that are removed already.
    """

    label: str
    kind: str
    units: Sequence[tuple[int, ...]]
    scores: Tensor
    cost: float
    removed: int = 0

    @property
    def size(self) -> int:
        """All units, also those that are removed."""
        return len(self.units) + self.removed


def head_cost(layer: AttentionLayer, unit: str) -> int:
    """Parameters that go with one unit of a layer's heads.

    Raises:
        InputError: the layer's projections are not known.
    """
    if projection_in(layer.module, layer.family.query) is None:
        raise InputError(
            f"a budget of parameters needs the query projection of {layer.name}, which is not known; give "
            f"--budget heads"
        )
    share = layer.heads // layer.kv_heads
    own = _rows_of(layer, "q") + layer.head_dim * out_features(layer.o_proj) + _further(layer, "q", layer.heads)
    shared = _rows_of(layer, "k") + _rows_of(layer, "v") + _further(layer, "k", layer.kv_heads)
    if unit == "group":
        return share * own + shared
    return layer.kv_heads * own if unit == "balanced" else own + (shared if share == 1 else 0)  # multi-query: its own


def _rows_of(layer: AttentionLayer, part: str) -> int:
    rows = layer.rows(part, 0)
    return (rows.stop - rows.start) * (in_features(rows.module) + _bias(rows.module))


def _further(layer: AttentionLayer, which: str, count: int) -> int:
    """Entries of further parameters that belong to one head."""
    found = (attribute_of(layer.module, path) for path, of in layer.family.head_parameters if of == which)
    return sum(one.numel() // count for one in found if isinstance(one, Tensor))


def _bias(module: torch.nn.Module) -> int:
    return int(getattr(module, "bias", None) is not None)


def channel_cost(block: FeedForward) -> int:
    """Parameters that go with one channel."""
    rows = sum(in_features(module) + _bias(module) for module in block.parts.values())
    return rows + out_features(block.down)


def pots_of(
    model_map: ModelMap,
    options: PruneOptions,
    head_scores: Mapping[str, Tensor] | None,
    channel_scores: Mapping[str, Tensor] | None,
    heads: Mapping[str, Collection[int]] | None = None,
    channels: Mapping[str, Collection[int]] | None = None,
) -> list[Pot]:
    """The pots of the layers in play, layer by layer, heads before channels.

    Args:
        model_map: of the model.
        options: with their unit settled.
        head_scores: of heads, (heads,) or (heads, columns) by layer; None if they stay.
        channel_scores: of channels; None if they stay.
        heads, channels: what is removed already.

    Raises:
        InputError: no layer is in play.
    """
    spared = _spared(model_map, options)
    unit = options.unit or "head"
    blocks = {block.label: block for block in model_map.feed_forward}
    found: list[Pot] = []

    def add(label: str, kind: str, units: Sequence[tuple[int, ...]], scores: Tensor, cost: float, gone: int) -> None:
        found.append(Pot(label, kind, units, scores, cost, gone))

    for layer in model_map.attention:
        if layer.label in spared:
            continue
        if head_scores is not None:
            gone = (heads or {}).get(layer.label, ())
            units = units_in(layer, head_scores[layer.label], unit, gone)
            members = {"head": 1, "balanced": layer.kv_heads}.get(unit, layer.heads // layer.kv_heads)
            scores = torch.tensor([one.score for one in units], dtype=torch.float64)
            add(layer.label, HEADS, [one.heads for one in units], scores, head_cost(layer, unit), len(gone) // members)
        if channel_scores is not None and (block := blocks.pop(layer.label, None)):
            gone = (channels or {}).get(block.label, ())
            values = channel_scores[block.label].double()
            order = [place for place in values.argsort(stable=True).tolist() if place not in gone]
            add(block.label, CHANNELS, [(place,) for place in order], values[order], channel_cost(block), len(gone))
    if not found:
        raise InputError(f"no layer is left: skip_first={options.skip_first} and skip_last={options.skip_last}")
    return found


def _spared(model_map: ModelMap, options: PruneOptions) -> set[str]:
    """Layers that are not in play."""
    found: set[str] = set()
    for stack in model_map.stacks:
        labels = [layer.label for layer in model_map.attention if layer.stack == stack]
        found |= {*labels[: options.skip_first], *labels[len(labels) - options.skip_last :]}
    return found


def counts_of(
    pots: Sequence[Pot], ratio: float, allocation: str, log_start: float = 0.0, allow_empty: bool = False
) -> list[int]:
    """How many units each pot loses in all.

    Args:
        pots: of the layers in play.
        ratio: share of all that is in them.
        allocation: `uniform` and `log`: each layer a share of its own, what rounding leaves is carried to the next one;
            `global`: heads of all layers are compared, and channels of all layers; `standardised`: all are compared
            (scores are then to be `standardised_by_layer`); `flap_reference`: the same, with that code's costs and
            threshold. It may miss the budget.
        log_start: as of the options.
        allow_empty: a pot may lose all.

    Raises:
        InputError: the ratio cannot be reached without emptying a layer.
    """
    if allocation in ("uniform", "log"):
        return _by_layer(pots, _shares(pots, ratio, allocation, log_start), ratio, allow_empty)
    if allocation == REFERENCE:
        return _below_threshold(pots, ratio, allow_empty)
    kinds = [{HEADS, CHANNELS}] if allocation == "standardised" else [{HEADS}, {CHANNELS}]
    counts = [0] * len(pots)
    for kind in kinds:
        pooled = [place for place, pot in enumerate(pots) if pot.kind in kind]
        for place, count in zip(pooled, _lowest([pots[p] for p in pooled], ratio, allow_empty), strict=True):
            counts[place] = count
    return counts


def removed_by(pots: Sequence[Pot], counts: Sequence[int], before: tuple[Removed, Removed]) -> tuple[Removed, Removed]:
    """The heads and channels that are removed in all when each pot loses so many units, its lowest."""
    found = {HEADS: {k: set(v) for k, v in before[0].items()}, CHANNELS: {k: set(v) for k, v in before[1].items()}}
    for pot, count in zip(pots, counts, strict=True):
        for unit in pot.units[: count - pot.removed]:
            found[pot.kind].setdefault(pot.label, set()).update(unit)
    return found[HEADS], found[CHANNELS]


def _by_layer(pots: Sequence[Pot], shares: Sequence[float], ratio: float, allow_empty: bool) -> list[int]:
    """What rounding leaves is carried to the next layer; what the last ones cannot give is taken from those before."""
    carried: dict[str, float] = {HEADS: 0.0, CHANNELS: 0.0}
    most = [pot.size if allow_empty else max(pot.size - 1, pot.removed) for pot in pots]
    counts = []
    for pot, share, at_most in zip(pots, shares, most, strict=True):
        due = carried[pot.kind] + share * pot.size * pot.cost
        count = min(max(math.floor(due / pot.cost + 0.5), pot.removed), at_most)
        carried[pot.kind] = due - count * pot.cost
        counts.append(count)
    for place in reversed(range(len(pots))):
        pot = pots[place]
        more = min(max(0, math.floor(carried[pot.kind] / pot.cost + 0.5)), most[place] - counts[place])
        counts[place] += more
        carried[pot.kind] -= more * pot.cost
    for kind, left in carried.items():
        if left > max((pot.cost for pot in pots if pot.kind == kind), default=0.0) * _HALF:
            raise _emptied(ratio, kind)
    return counts


def _shares(pots: Sequence[Pot], ratio: float, allocation: str, start: float) -> list[float]:
    """Each pot's share; of `log` r_i = r_0 + (r_last − r_0) · log(i + 1) / log L, whose mean is the ratio."""
    labels = list(dict.fromkeys(pot.label for pot in pots))
    if allocation == "uniform" or len(labels) == 1:
        return [ratio] * len(pots)
    places = [math.log(labels.index(pot.label) + 1) / math.log(len(labels)) for pot in pots]
    sizes = [pot.size * pot.cost for pot in pots]
    middle = sum(x * size for x, size in zip(places, sizes, strict=True)) / sum(sizes)
    first = start * ratio
    rise = (ratio - first) / middle
    if first + rise >= 1:
        raise InputError(
            f"a ratio of {ratio} by allocation=log would empty the last layer (its share is {first + rise:.2f}); give "
            f"a smaller ratio, or a larger --log_start"
        )
    return [first + rise * x for x in places]


def _lowest(pots: Sequence[Pot], ratio: float, allow_empty: bool) -> list[int]:
    """How many units each pot loses when the lowest of all go, as many as come nearest to the budget."""
    if not pots:
        return []
    budget = sum(ratio * pot.size * pot.cost - pot.removed * pot.cost for pot in pots)
    spare = [len(pot.units) if allow_empty else max(0, len(pot.units) - 1) for pot in pots]
    owners = torch.cat([torch.full((count,), place) for place, count in enumerate(spare)])
    order = torch.cat([pot.scores[:count] for pot, count in zip(pots, spare, strict=True)]).argsort(stable=True)
    costs = torch.tensor([pot.cost for pot in pots], dtype=torch.float64)[owners[order]]
    spent = torch.cat([torch.zeros(1, dtype=torch.float64), costs.cumsum(0)])
    chosen = int((spent - budget).abs().argmin())
    if budget - float(spent[chosen]) > max(pot.cost for pot in pots) * _HALF:
        raise _emptied(ratio, pots[0].kind if len({pot.kind for pot in pots}) == 1 else "heads or channels")
    lost = torch.bincount(owners[order[:chosen]], minlength=len(pots)).tolist()
    return [pot.removed + count for pot, count in zip(pots, lost, strict=True)]


def _below_threshold(pots: Sequence[Pot], ratio: float, allow_empty: bool) -> list[int]:
    """Return how many units each pot loses by FLAP's released code.

    Units are kept from the highest score on until their costs are nearest to what is to stay; the score of the last of
    these is the threshold, and what is not above it goes.
    """
    costs = torch.tensor([float(REFERENCE_COSTS[pot.kind]) for pot in pots], dtype=torch.float64)
    scores = torch.cat([pot.scores for pot in pots])
    ranked, order = scores.sort(descending=True, stable=True)
    kept = costs.repeat_interleave(torch.tensor([len(pot.units) for pot in pots]))[order].cumsum(0)
    total = float((costs * torch.tensor([pot.size for pot in pots])).sum())
    threshold = ranked[(kept - (1 - ratio) * total).abs().argmin()]
    counts = []
    for pot in pots:
        most = len(pot.units) if allow_empty else max(0, len(pot.units) - 1)
        counts.append(pot.removed + min(most, int((pot.scores <= threshold).sum())))
    return counts


def _emptied(ratio: float, kind: str) -> InputError:
    return InputError(
        f"a ratio of {ratio} would take all {kind} of a layer; give a smaller ratio, --parts, or --allow_empty_layer"
    )


def standardised_by_layer(
    scores: Mapping[str, Tensor], removed: Mapping[str, Iterable[int]] | None = None, correction: int = 0
) -> dict[str, Tensor]:
    """Return scores with mean 0 and deviation 1 over what is still there of each layer, columns counted one by one.

    Args:
        scores: by layer.
        removed: what is not there any more.
        correction: of the deviation, as of `torch.std`.
    """
    found = {}
    for label, one in scores.items():
        gone = set((removed or {}).get(label, ()))
        alive = one[[place for place in range(len(one)) if place not in gone]].double()
        deviation = alive.std(correction=correction) if alive.numel() > correction else torch.zeros(())
        mean = alive.mean() if alive.numel() else 0.0
        found[label] = (one.double() - mean) / (deviation if deviation > 0 else 1.0)
    return found
