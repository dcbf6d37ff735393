"""The schedule of dynamic pruning (its eq. 5 and Algorithm 1): stages that remove more and more, each scored anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lmeval_prune.architectures import ModelMap, check_unit
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan, ranges_of
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.selection import Removed, check_channels, select_channels, select_heads


def stages(
    pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText | None = None,
    channel_pruner: Pruner | None = None,
    scores: tuple[Scores, Scores] = ({}, {}),
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Plan]:
    """Plans of Algorithm 1, one a step, each with all that is removed so far.

    Args:
        pruner: scores heads, and channels unless there is another one for them.
        model_map: of the model; it is as it was whenever a plan is yielded.
        options: how much goes, and in which units.
        text: calibration text, for pruners that need one.
        channel_pruner: scores channels.
        scores: of heads and of channels for the first step, where they are at hand; what is empty is computed.
        progress: is told what happens.

    Raises:
        InputError: the options do not suit the model or the pruner.
    """
    heads: Removed = {}
    channels: Removed = {}
    of_heads, of_channels = options.schedules()
    channel_pruner = channel_pruner or pruner
    check_prunable(model_map, options)
    later = options.steps > 1
    pruner.check(bool(options.ratio) and (later or not scores[0]), False, text is not None)
    channel_pruner.check(False, bool(options.ffn_ratio) and (later or not scores[1]), text is not None)
    made = {"method": pruner_name(pruner), **asdict(pruner), "options": asdict(options)}
    if options.ffn_ratio:
        made |= {"ffn_method": pruner_name(channel_pruner), "ffn_options": asdict(channel_pruner)}
    made |= {"calibration": text.about()} if text is not None else {}
    compensation: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for step in range(1, options.steps + 1):
        so_far = _plan(heads, channels, options.allow_empty_layer, compensation=compensation)
        with so_far.applied_to(model_map.model, model_map):
            head_scores, channel_scores = scores if step == 1 else ({}, {})
            if options.ratio and not head_scores:
                progress(f"step {step} of {options.steps}: scoring heads")
                head_scores = pruner.head_scores(model_map, text, heads)
            if options.ffn_ratio and not channel_scores:
                progress(f"step {step} of {options.steps}: scoring channels")
                channel_scores = channel_pruner.channel_scores(model_map, text, channels)
        if options.ratio:
            allocation = options.allocation or pruner.allocation
            heads = select_heads(
                model_map, head_scores, of_heads.at(step), options.unit, allocation, heads, options.allow_empty_layer
            )
        if options.ffn_ratio:
            allocation = options.allocation or channel_pruner.allocation
            channels = select_channels(
                model_map, channel_scores, of_channels.at(step), options.ffn_multiple, allocation, channels
            )
        bare = _plan(heads, channels, options.allow_empty_layer)
        compensation = {**compensation, **pruner.compensation(model_map, bare, text)}
        counts = {"heads": sum(map(len, heads.values())), "channels": sum(map(len, channels.values()))}
        history.append({"step": step, "ratio": of_heads.at(step), "ffn_ratio": of_channels.at(step), **counts})
        kept = {f"heads.{k}": v for k, v in head_scores.items()} | {
            f"channels.{k}": v for k, v in channel_scores.items()
        }
        yield _plan(
            heads,
            channels,
            options.allow_empty_layer,
            compensation=compensation,
            scores=kept,
            made={**made, "stages": list(history)},
        )


def check_prunable(model_map: ModelMap, options: PruneOptions) -> None:
    """Refuse options that do not suit a model; on one without weights, too.

    Raises:
        InputError: nothing is asked for, or the model has no such unit, or no channels.
    """
    if not options.ratio and not options.ffn_ratio:
        raise InputError("nothing is to be removed; give --ratio (heads), --ffn_ratio (channels) or both, e.g. 0.25")
    if options.ratio:
        check_unit(model_map, options.unit)
    if options.ffn_ratio:
        check_channels(model_map)


def _plan(heads: Removed, channels: Removed, allow_empty_layer: bool, **more: Any) -> Plan:
    return Plan(
        tuple(f"{label}H{head}" for label, numbers in heads.items() for head in sorted(numbers)),
        {label: ranges_of(sorted(numbers)) for label, numbers in channels.items()},
        allow_empty_layer=allow_empty_layer,
        **more,
    )
