"""Choose the composition of a smaller model: what stays of each block, so that the kept score is largest in a budget.

A block is worth its depth score, what the model loses without it. Its heads or channels share the worth by their own
scores. So a block can lose some of its units, the lowest first, or go as a whole. The best choice for all blocks, one
level each, is a multiple-choice knapsack, solved by mixed-integer programming (`scipy.optimize.milp`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.allocation import COMPOSITION, Budget, UnitPool, removed_by, unit_pools
from lmeval_prune.pruners.cost_table import CostTable
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import ATTENTION, CHANNELS, FEED_FORWARD, HEADS, Removed

logger = logging.getLogger(__name__)

BLOCKS = {HEADS: ATTENTION, CHANNELS: FEED_FORWARD}  # kind of the block by kind of its units
_LEVELS = 32  # default number of levels of a feed-forward block
_SECONDS = 60  # limit of the solver


@dataclass(frozen=True)
class Choice:
    """Levels of one block: what stays of it, what that is worth, and what it costs."""

    unit_counts: tuple[int, ...]  # numbers of units, ascending; the first is 0
    values: tuple[float, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True)
class BlockCosts:
    """Costs of blocks with some of their units: parameters, or measured seconds."""

    of: Callable[[UnitPool, int], float | None]  # of the units of a pool that stay, by their number; None: unknown
    total: float  # of all blocks, with what earlier steps removed


def check_costs(model_map: ModelMap, options: PruneOptions, any_dtype: bool = False) -> None:
    """Refuse a table of costs that lacks blocks of a model, which may have no weights; see `block_costs`."""
    pools = unit_pools(model_map, Budget(options.kinds, options.ratio, COMPOSITION, options))
    block_costs(model_map, options, pools, any_dtype)


def block_costs(
    model_map: ModelMap, options: PruneOptions, pools: Sequence[UnitPool], any_dtype: bool = False
) -> tuple[BlockCosts, dict[str, Any]]:
    """Return what blocks cost in the budget of some options, and notes on a table of measured costs.

    `any_dtype` accepts costs in another dtype than that of a model without weights.

    Raises:
        InputError: the table is missing, is of other blocks, or lacks a block of the model.
    """
    if options.costs is None:
        return BlockCosts(lambda pool, count: count * pool.cost, sum(pool.total for pool in pools)), {}
    table = CostTable.load(options.costs)
    table.check(model_map, options.costs, any_dtype)
    layers = {layer.label: layer for layer in model_map.attention}

    def cost_of(pool: UnitPool, count: int) -> float | None:
        if not count:
            return 0.0
        if pool.kind == CHANNELS:
            return table.cost(FEED_FORWARD, str(count))
        layer, is_balanced = layers[pool.label], options.unit == "balanced"
        heads = count * {"group": layer.group_size, "balanced": layer.kv_heads}.get(options.unit or "head", 1)
        return table.cost(ATTENTION, f"{heads}/{layer.kv_heads if is_balanced or layer.kv_heads == 1 else count}")

    total_cost = 0.0
    for pool in pools:
        cost = cost_of(pool, pool.size)
        if cost is None:
            raise InputError(f"{options.costs} lacks the cost of {pool.key} with {pool.size} units; measure it again")
        total_cost += cost
    return BlockCosts(cost_of, total_cost), {"costs": table.record}


def choice_of(
    pool: UnitPool,
    block_score: float,
    lowest: float,
    multiple: int | None,
    cost_of: Callable[[UnitPool, int], float | None],
) -> Choice:
    """Return the levels of a block.

    Keeping the k best units of a block is worth S · Σ_k s / Σ s, with the block's score S and units' scores s.

    Args:
        pool: remaining units, lowest score first.
        block_score: S; a negative one counts as zero.
        lowest: subtracted from the units' scores, so that none is negative.
        multiple: of numbers of channels that stay; None: a 32nd of the block's.
        cost_of: returns the cost of the pool with some units; None if it is not known: then it is no level.
    """
    count = len(pool.units)
    scores = (pool.scores - lowest).clamp(min=0.0).flip(0)
    total = float(scores.sum())
    kept_score = np.concatenate([[0.0], scores.cumsum(0).numpy()]) if total > 0 else np.arange(count + 1.0)
    share = kept_score / max(kept_score[-1], 1e-300)
    step = 1 if pool.kind == HEADS else multiple or max(1, pool.size // _LEVELS)
    levels = [(k, cost) for k in (*range(0, count, step), count) if (cost := cost_of(pool, k)) is not None]
    unit_counts, costs = zip(*levels, strict=True)
    return Choice(unit_counts, tuple(max(0.0, block_score) * float(share[k]) for k in unit_counts), costs)


def best_levels(
    choices: Sequence[Choice], limit: float, required: Sequence[Sequence[int]] = ()
) -> tuple[list[int], float]:
    """Return the index of each block's level, so that the sum of values is largest and costs sum up to at most `limit`.

    Also return the solver's gap: by which share of its value a better choice may exceed this one. A warning says so if
    the solver's time is over before the gap is closed.

    Args:
        choices: levels of each block.
        limit: of the sum of costs.
        required: groups of blocks, by number, of each of which at least one must stay.

    Raises:
        InputError: no choice fits.
    """
    offsets = np.cumsum([0, *(len(choice.unit_counts) for choice in choices)])
    values = np.concatenate([choice.values for choice in choices])
    costs = np.concatenate([choice.costs for choice in choices])
    owners = np.repeat(np.arange(len(choices)), np.diff(offsets))
    membership = csr_array((np.ones(len(values)), (owners, np.arange(len(values)))), shape=(len(choices), len(values)))
    constraints = [LinearConstraint(membership, 1, 1), LinearConstraint(costs[None] / max(limit, 1e-300), 0, 1 + 1e-9)]
    for group in required:
        stays = [float(owner in group and number > offsets[owner]) for number, owner in enumerate(owners)]
        constraints.append(LinearConstraint(np.array([stays]), 1, np.inf))
    scale = max(values.max(), 1e-300)
    result = milp(
        -values / scale,
        integrality=np.ones(len(values)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        raise InputError("no composition fits into this budget; give a smaller ratio")
    gap = float(result.mip_gap)
    if result.status:
        logger.warning(
            "the solver stopped after %d seconds: the composition is the best that it found, and a better one may "
            "keep up to %.2g%% more score", _SECONDS, 100 * gap
        )  # fmt: skip
    return [int(result.x[first:end].argmax()) for first, end in pairwise(offsets)], gap


def compose(
    pools: Sequence[UnitPool],
    scores: Mapping[str, Tensor],
    limit: float,
    before: Removed,
    multiple: int | None,
    cost_of: Callable[[UnitPool, int], float | None],
) -> tuple[Removed, dict[str, Any]]:
    """Choose what stays of each block; return everything removed so far, and the composition for the plan.

    Args:
        pools: remaining units of each block; a block without units is gone already.
        scores: scores of blocks by part key, `attention.L0` and `feed_forward.L0`.
        limit: of the cost of what stays.
        before: what earlier steps removed.
        multiple, cost_of: as in `choice_of`.
    """
    pools = [pool for pool in pools if pool.units]
    lowest = {kind: min([0.0, *(float(p.scores.min()) for p in pools if p.kind == kind)]) for kind in BLOCKS}
    choices = [choice_of(pool, float(scores[_block(pool)]), lowest[pool.kind], multiple, cost_of) for pool in pools]
    stacks = {pool.label.rpartition(".")[0] for pool in pools if pool.kind == HEADS}
    required = [
        [n for n, pool in enumerate(pools) if pool.kind == HEADS and pool.label.rpartition(".")[0] == stack]
        for stack in sorted(stacks)
    ]
    levels, gap = best_levels(choices, limit, required)
    unit_counts = [choice.unit_counts[level] for choice, level in zip(choices, levels, strict=True)]
    removed = removed_by(pools, [pool.size - count for pool, count in zip(pools, unit_counts, strict=True)], before)
    removed |= {_block(pool): {0} for pool, count in zip(pools, unit_counts, strict=True) if not count}
    cost = sum(choice.costs[level] for choice, level in zip(choices, levels, strict=True))
    value = sum(choice.values[level] for choice, level in zip(choices, levels, strict=True))
    total_value = sum(choice.values[-1] for choice in choices)
    composition = {pool.key: [count, pool.size] for pool, count in zip(pools, unit_counts, strict=True)}
    kept_score = value / total_value if total_value else 1.0
    return removed, {"composition": composition, "kept_score": kept_score, "kept_cost": cost, "mip_gap": gap}


def _block(pool: UnitPool) -> str:
    """Return the part key of a pool's block."""
    return f"{BLOCKS[pool.kind]}.{pool.label}"
