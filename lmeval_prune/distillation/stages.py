"""Prune a stage: its scheduled share of heads and channels, with scores of the previous stage's model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.distillation.host import Host, TrainingExamples
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import Budget, share_of, unit_pools
from lmeval_prune.pruners.base import Pruner, make_pruner
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import HEADS
from lmeval_prune.pruners.schedule import EmptyPlanError, cuttable_unit, resolve_options, stages
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import import_path
from lmeval_prune.surgery.cut import Cut, check_cuttable, cut


def check_pruning(options: DistillOptions, model_map: ModelMap) -> None:
    """Raise an `InputError` if the method does not suit the model or the schedule; no weights are read."""
    removal = options.removal()
    if not removal.ratio and not removal.ffn_ratio:
        return
    pruners = stage_pruners(options, 0)
    removal = _resolved(removal, options, model_map, *pruners)
    check_cuttable(model_map, HEADS in removal.kinds)
    if HEADS in removal.kinds and removal.unit == "head" and any(1 < x.kv_heads < x.heads for x in model_map.attention):
        raise InputError("unit=head keeps zeroed heads in groups, which training would change; use group or balanced")


def foreign_methods(options: DistillOptions) -> dict[str, str]:
    """Return import path and version of each pruner from another package, which its name does not determine."""
    kinds = {name: PRUNERS.load(name) for name in options.methods if name not in PRUNERS.own}
    return {f"{name}_class": f"{import_path(kind)}, version {kind.version}" for name, kind in kinds.items()}


def stage_pruners(options: DistillOptions, stage: int) -> tuple[Pruner, Pruner]:
    """Make the pruners of heads and of channels in a stage; random ones draw again in each."""
    pruners: list[Any] = [make_pruner(*method) for method in options.methods.items()]
    seeded = [replace(x, seed=(1000 * stage + x.seed) % 2**31) if hasattr(x, "seed") else x for x in pruners]
    return seeded[0], seeded[-1]


def cut_stage(host: Host, model: Any, stage: int, examples: TrainingExamples, work: Path | None = None) -> Cut:
    """Score a model and cut the scheduled share of a stage, which is nothing if earlier stages removed enough.

    `model` is that of the previous stage. In `work` is what is finished, so that a killed run resumes.
    """
    options, backbone = host.options, host.backbone(model)
    model_map, removal = map_model(backbone), options.removal()
    if not removal.ratio and not removal.ffn_ratio:
        return cut(backbone, Plan())
    (heads, channels), unpruned = stage_pruners(options, stage), map_model(host.skeleton(options.pretrained))
    # units and parts are those that suit the unpruned model
    within = _resolved(removal, options, unpruned, heads, channels)
    schedule = replace(within, p_min=removal.p_min, growth=removal.growth, steps=removal.steps)
    step = stage_pruning(schedule, stage, unpruned, model_map, within.allocation or heads.allocation)
    step = replace(step, steps=options.steps)
    text, progress = host.calibration(examples, model), partial(print, flush=True)
    try:
        *_, plan = stages(heads, model_map, step, text, channels, progress=progress, work=work)
    except EmptyPlanError:
        print(f"stage {stage} of {options.stages} removes nothing, as the earlier ones removed enough", flush=True)
        plan = Plan()
    return cut(backbone, plan)


def _resolved(
    removal: PruneOptions, options: DistillOptions, model_map: ModelMap, heads: Pruner, channels: Pruner
) -> PruneOptions:
    """Return the options of the steps of one stage, which go evenly from its beginning to its end."""
    if removal.budget == "heads" and HEADS in removal.kinds:  # fillers would be trained again
        removal = replace(removal, unit=removal.unit or cuttable_unit(model_map, heads))
    within = replace(removal, p_min=0.0, growth=1.0, steps=options.steps)
    return resolve_options(within, heads, model_map, channels)


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
    """Return the parameters that the budget counts in a model."""
    return sum(pool.total for pool in unit_pools(model_map, Budget(pruning.kinds, pruning.ratio, allocation, pruning)))
