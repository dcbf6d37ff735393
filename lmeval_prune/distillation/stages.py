"""Prune a stage: its scheduled share of heads and channels, with scores of the previous stage's model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.distillation.host import Host, TrainingExamples
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import share_of
from lmeval_prune.pruners.base import Pruner, make_pruner, pruner_name
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import check_methods, resolve_options, smallest_removal, stages
from lmeval_prune.pruners.sequential import SequentialPruner, count_removed
from lmeval_prune.surgery.cut import Cut, check_cuttable, cut


def check_pruning(options: DistillOptions, model_map: ModelMap) -> None:
    """Raise an `InputError` if methods or schedule do not suit the model; no weights are read."""
    pruning = options.pruning()
    if not pruning.ratio and not pruning.ffn_ratio:
        return
    head_pruner, channel_pruner = make_pruners(options, 0)
    for pruner in (head_pruner, channel_pruner):
        if isinstance(pruner, SequentialPruner):
            raise InputError(
                f"{pruner_name(pruner)} scores layer by layer, and a stage needs scores of all layers at once; use "
                f"another method"
            )
    pruning = resolve_options(pruning, head_pruner, model_map, channel_pruner)
    check_methods(head_pruner, channel_pruner, model_map, pruning, True)
    check_cuttable(model_map, bool(pruning.ratio))
    if pruning.ratio and pruning.unit == "head" and any(1 < x.kv_heads < x.heads for x in model_map.attention):
        raise InputError(
            "unit=head keeps zeroed heads in groups with a shared key-value head, and training would change them; use "
            "group or balanced"
        )
    before = {"heads": 0, "channels": 0}
    pruners = {"heads": head_pruner, "channels": channel_pruner}
    for stage, removed in enumerate(smallest_removal(model_map, pruning, pruners), start=1):
        after = count_removed(removed)
        if after["heads"] <= before["heads"] and after["channels"] <= before["channels"]:
            raise InputError(
                f"stage {stage} of {pruning.steps} has nothing left to remove: {after['heads']} of "
                f"{model_map.total_heads} heads and {after['channels']} of {sum(model_map.channels().values())} "
                f"channels are already removed; give fewer stages, a larger ratio, another unit, allocation global "
                f"or a smaller ffn_multiple"
            )
        before = after


def make_pruners(options: DistillOptions, stage: int) -> tuple[Pruner, Pruner]:
    """Make the pruners of heads and channels; random pruners draw again in each stage."""
    heads = make_pruner(options.method, options.options)
    channels = make_pruner(options.ffn_method, options.ffn_options) if options.ffn_method else heads
    return _reseeded(heads, stage), _reseeded(channels, stage)


def _reseeded(pruner: Any, stage: int) -> Pruner:
    seeded: Pruner = replace(pruner, seed=1000 * stage + pruner.seed) if hasattr(pruner, "seed") else pruner
    return seeded


def cut_stage(host: Host, model: Any, stage: int, examples: TrainingExamples) -> Cut:
    """Score a model and cut the scheduled share of a stage; `InputError` if nothing is left to remove."""
    options, backbone = host.options, host.backbone(model)
    model_map, pruning = map_model(backbone), options.pruning()
    if not pruning.ratio and not pruning.ffn_ratio:
        return cut(backbone, Plan())
    heads, channels = make_pruners(options, stage)
    unpruned = map_model(host.skeleton(options.pretrained))
    step = stage_pruning(pruning, stage, unpruned, model_map, pruning.allocation or heads.allocation)
    plan = Plan()
    if step.ratio or step.ffn_ratio:
        *_, plan = stages(heads, model_map, step, host.calibration(examples), channels)
    if not plan.heads and not plan.channels:
        raise InputError(f"stage {stage} of {options.stages} has nothing left to remove; give fewer stages")
    return cut(backbone, plan)


def stage_pruning(
    pruning: PruneOptions, stage: int, unpruned: ModelMap, model_map: ModelMap, allocation: str
) -> PruneOptions:
    """Convert shares of the unpruned model into shares of a stage's model; stages count from 1."""
    head_share, channel_share = pruning.shares(stage)
    ratios = []
    for share, sizes, remaining in (
        (head_share, [layer.heads for layer in unpruned.attention], model_map.total_heads),
        (channel_share, list(unpruned.channels().values()), sum(model_map.channels().values())),
    ):
        totals = sizes if allocation == "uniform" else [sum(sizes)]
        removed = sum(sizes) - remaining
        ratios.append(max(0, sum(share_of(share, size) for size in totals) - removed) / max(1, remaining))
    return replace(pruning, ratio=ratios[0], ffn_ratio=ratios[1], p_min=0.0, steps=1, growth=1.0)
