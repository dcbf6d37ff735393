"""Prune a stage: its scheduled share of heads and channels, with scores of the previous stage's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.distillation.host import Host, TrainingExamples
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import COMPOSITION, Budget, share_of, unit_pools
from lmeval_prune.pruners.base import Pruner, make_pruner
from lmeval_prune.pruners.composition import block_costs
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, HEADS
from lmeval_prune.pruners.schedule import (
    check_methods,
    cuttable_unit,
    most_units,
    resolve_options,
    smallest_removal,
    stages,
)
from lmeval_prune.pruners.scoring import kinds_read_for
from lmeval_prune.pruners.sequential import count_removed
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import import_path
from lmeval_prune.settings import Use, check_used
from lmeval_prune.surgery.cut import Cut, check_cuttable, cut


def check_pruning(options: DistillOptions, model_map: ModelMap) -> None:
    """Raise an `InputError` if methods or schedule do not suit the model; no weights are read."""
    pruning = options.pruning()
    if not pruning.ratio and not pruning.ffn_ratio:
        return
    head_pruner, channel_pruner = make_pruners(options, 0)
    stage_options = _resolved(pruning, options, model_map, (head_pruner, channel_pruner))
    check_methods(head_pruner, channel_pruner, model_map, replace(stage_options, steps=1), True)
    reads_text = (
        bool(kinds_read_for(stage_options, head_pruner, channel_pruner, {})) or stage_options.compensation != "none"
    )
    reading = Use("a method or compensation that reads text", lambda _: reads_text, ("calibration", "calibrate_on"))
    check_used(options, [reading])
    pruning = replace(stage_options, steps=pruning.steps, p_min=pruning.p_min, growth=pruning.growth)
    check_cuttable(model_map, HEADS in pruning.kinds)
    if HEADS in pruning.kinds and pruning.unit == "head" and any(1 < x.kv_heads < x.heads for x in model_map.attention):
        raise InputError(
            "unit=head keeps zeroed heads in groups with a shared key-value head, and training would change them; use "
            "group or balanced"
        )
    if pruning.allocation == COMPOSITION:  # removes any share
        if pruning.costs:
            _check_costs(model_map)
        return
    before, pruners = 0, {HEADS: head_pruner, CHANNELS: channel_pruner}
    for stage, removal in enumerate(smallest_removal(model_map, pruning, pruners), start=1):
        if removal.most == before:
            counts = count_removed(removal.removed)
            raise InputError(
                f"stage {stage} of {pruning.steps} has nothing left to remove: {counts['heads']} of "
                f"{model_map.total_heads} heads and {counts['channels']} of {sum(model_map.channels().values())} "
                f"channels are already removed; give fewer stages, a larger ratio, another unit, allocation global "
                f"or a smaller ffn_multiple"
            )
        if removal.most - before < options.steps:
            raise InputError(
                f"stage {stage} of {pruning.steps} may remove only {removal.most - before} units, fewer than its "
                f"{options.steps} steps; give --steps {removal.most - before} or fewer"
            )
        before = removal.fewest


def foreign_methods(options: DistillOptions) -> dict[str, str]:
    """Return import path and version of each pruner from another package, which its name does not determine."""
    names = {name: getattr(options, name) for name in ("method", "ffn_method", "depth_method")}
    kinds = {name: PRUNERS.load(method) for name, method in names.items() if method and method not in PRUNERS.own}
    return {f"{name}_class": f"{import_path(kind)}, version {kind.version}" for name, kind in kinds.items()}


def make_pruners(options: DistillOptions, stage: int) -> tuple[Pruner, Pruner]:
    """Make the pruners of heads and channels; random pruners draw again in each stage."""
    heads = make_pruner(options.method, options.options)
    channels = make_pruner(options.ffn_method, options.ffn_options) if options.ffn_method else heads
    return _reseeded(heads, stage), _reseeded(channels, stage)


def _reseeded(pruner: Any, stage: int) -> Pruner:
    seeded: Pruner = replace(pruner, seed=(1000 * stage + pruner.seed) % 2**31) if hasattr(pruner, "seed") else pruner
    return seeded


def cut_stage(
    host: Host,
    model: Any,
    stage: int,
    examples: TrainingExamples,
    answering: str | None = None,
    work: Path | None = None,
) -> Cut:
    """Score a model and cut the scheduled share of a stage, which is nothing if earlier stages removed enough.

    Args:
        host: host of the model.
        model: model of the previous stage.
        stage: number of the stage, from 1.
        examples: training problems.
        answering: folder of the model that answers for own calibration text; None: `model`.
        work: folder for finished scores and layers, so that a killed run resumes.
    """
    options, backbone = host.options, host.backbone(model)
    model_map, pruning = map_model(backbone), options.pruning()
    if not pruning.ratio and not pruning.ffn_ratio:
        return cut(backbone, Plan())
    heads, channels = make_pruners(options, stage)
    unpruned = map_model(host.skeleton(options.pretrained))
    # units and parts are those that suit the unpruned model
    stage_options = _resolved(pruning, options, unpruned, (heads, channels))
    step = stage_pruning(
        replace(stage_options, **_schedule(pruning)), stage, unpruned, model_map, _allocation(stage_options, heads)
    )
    pruners = {HEADS: heads, CHANNELS: channels}
    plan = Plan()
    if possible := _with_fewer_steps(
        replace(step, steps=options.steps), pruners, model_map, f"stage {stage} of {options.stages}"
    ):
        text = host.calibration(examples, model, answering)
        progress = partial(print, flush=True)
        *_, plan = stages(heads, model_map, possible, text, channels, progress=progress, work=work)
    return cut(backbone, plan)


def _with_fewer_steps(
    pruning: PruneOptions, pruners: Mapping[str, Pruner], model_map: ModelMap, stage: str
) -> PruneOptions | None:
    """Return the options of a stage with no more steps than units that it can remove, and say so if those are fewer.

    How many they are depends on what the earlier stages have removed. None: they have removed enough for this one.
    """
    if pruning.allocation == COMPOSITION and pruning.ratio:  # removes any share
        return pruning
    units = most_units(pruners, model_map, pruning) if pruning.ratio or pruning.ffn_ratio else 0
    if not units:
        print(f"{stage} removes nothing, as the earlier ones removed enough", flush=True)
        return None
    if units < pruning.steps:
        print(f"{stage} has {units} of its {pruning.steps} steps, as each removes at least one unit", flush=True)
    return replace(pruning, steps=min(pruning.steps, units))


def _resolved(
    pruning: PruneOptions, options: DistillOptions, model_map: ModelMap, pruners: tuple[Pruner, Pruner]
) -> PruneOptions:
    """Return the options of the steps of one stage, which go evenly from its beginning to its end."""
    heads, channels = pruners
    if pruning.budget == "heads" and HEADS in pruning.kinds:  # fillers would be trained again
        pruning = replace(pruning, unit=pruning.unit or cuttable_unit(model_map, heads))
    return resolve_options(replace(pruning, p_min=0.0, growth=1.0, steps=options.steps), heads, model_map, channels)


def _schedule(pruning: PruneOptions) -> dict[str, Any]:
    """Return the options of the schedule over stages."""
    return {"p_min": pruning.p_min, "growth": pruning.growth, "steps": pruning.steps}


def _allocation(pruning: PruneOptions, pruner: Pruner) -> str:
    return pruning.allocation or pruner.allocation


def stage_pruning(
    pruning: PruneOptions, stage: int, unpruned: ModelMap, model_map: ModelMap, allocation: str
) -> PruneOptions:
    """Convert shares of the unpruned model into shares of a stage's model; stages count from 1."""
    single_step: dict[str, Any] = {"p_min": 0.0, "steps": 1, "growth": 1.0}
    if pruning.budget != "heads":
        before, left = _counted(unpruned, pruning, allocation), _counted(model_map, pruning, allocation)
        due = pruning.shares(stage)[0] * before - (before - left)
        return replace(pruning, ratio=max(0.0, due) / left if left else 0.0, **single_step)
    head_share, channel_share = pruning.shares(stage)
    ratios = []
    for share, sizes, remaining in (
        (head_share, [layer.heads for layer in unpruned.attention], model_map.total_heads),
        (channel_share, list(unpruned.channels().values()), sum(model_map.channels().values())),
    ):
        totals = sizes if allocation == "uniform" else [sum(sizes)]
        removed = sum(sizes) - remaining
        ratios.append(max(0, sum(share_of(share, size) for size in totals) - removed) / max(1, remaining))
    return replace(pruning, ratio=ratios[0], ffn_ratio=ratios[1], **single_step)


def _counted(model_map: ModelMap, pruning: PruneOptions, allocation: str) -> float:
    """Return what the budget counts in a model: parameters, or the measured seconds of its blocks."""
    pools = unit_pools(model_map, Budget(pruning.kinds, pruning.ratio, allocation, pruning))
    costs, _ = block_costs(model_map, pruning, pools)
    return costs.total


def _check_costs(model_map: ModelMap) -> None:
    """Raise an `InputError` if a table of costs is of other weights than are distilled."""
    dtype = model_map.model.dtype
    if torch.promote_types(dtype, torch.float32) != dtype:
        raise InputError(
            f"weights are distilled and written in float32, and the costs of this model would be those of {dtype}; "
            f"save the model in float32 and measure that by `lmeval-prune costs`, or leave out --budget latency"
        )
