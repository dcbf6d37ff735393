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
from lmeval_prune.pruners.schedule import EmptyPlanError, check_methods, cuttable_unit, resolve_options, stages
from lmeval_prune.pruners.scoring import kinds_read_for
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


def foreign_methods(options: DistillOptions) -> dict[str, str]:
    """Return import path and version of each pruner from another package, which its name does not determine."""
    names = {name: getattr(options, name) for name in ("method", "ffn_method")}
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
    text, progress = host.calibration(examples, model, answering), partial(print, flush=True)
    try:
        *_, plan = stages(
            heads, model_map, replace(step, steps=options.steps), text, channels, progress=progress, work=work
        )
    except EmptyPlanError:
        print(f"stage {stage} of {options.stages} removes nothing, as the earlier ones removed enough", flush=True)
        plan = Plan()
    return cut(backbone, plan)


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
    """Return the parameters that the budget counts in a model."""
    return sum(pool.total for pool in unit_pools(model_map, Budget(pruning.kinds, pruning.ratio, allocation, pruning)))
