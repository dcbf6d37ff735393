"""The schedule of dynamic pruning (its eq. 5 and Algorithm 1): stages that remove more and more, each scored anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan, ranges_of
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.selection import Removed, select_channels, select_heads


def stages(
    pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText | None = None,
    channel_pruner: Pruner | None = None,
    scores: tuple[Scores, Scores] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Plan]:
    """Plans of Algorithm 1, one a step, each with all that is removed so far.

    Args:
        pruner: scores heads, and channels unless there is another one for them.
        model_map: of the model; it is as it was whenever a plan is yielded.
        options: how much goes, and in which units.
        text: calibration text, for pruners that need one.
        channel_pruner: scores channels.
        scores: of heads and channels, where they are at hand for a single step.
        progress: is told what happens.

    Raises:
        InputError: the options do not suit the model or the pruner.
    """
    heads: Removed = {}
    channels: Removed = {}
    of_heads, of_channels = options.schedules()
    channel_pruner = channel_pruner or pruner
    if text is None and scores is None:
        for one, asked in ((pruner, (bool(options.ratio), False)), (channel_pruner, (False, bool(options.ffn_ratio)))):
            if any(asked) and one.needs_text(*asked):
                raise InputError(f"{pruner_name(one)} is measured on a text; give --task NAME or --text FILE")
    made = {"method": pruner_name(pruner), **asdict(pruner), "options": asdict(options)}
    made |= {"ffn_method": pruner_name(channel_pruner)} if options.ffn_ratio else {}
    made |= {"calibration": text.about()} if text is not None else {}
    compensation: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for step in range(1, options.steps + 1):
        so_far = _plan(heads, channels, options.allow_empty_layer, compensation=compensation)
        with so_far.applied_to(model_map.model, model_map):
            if scores is not None and step == 1:
                head_scores, channel_scores = scores
            else:
                progress(f"step {step} of {options.steps}: scoring heads")
                head_scores = pruner.head_scores(model_map, text) if options.ratio else {}
                progress(f"step {step} of {options.steps}: scoring channels" if options.ffn_ratio else "")
                channel_scores = channel_pruner.channel_scores(model_map, text) if options.ffn_ratio else {}
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
        history.append({"step": step, "ratio": of_heads.at(step), "heads": sum(map(len, heads.values()))})
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


def _plan(heads: Removed, channels: Removed, allow_empty_layer: bool, **more: Any) -> Plan:
    return Plan(
        tuple(f"{label}H{head}" for label, numbers in heads.items() for head in sorted(numbers)),
        {label: ranges_of(sorted(numbers)) for label, numbers in channels.items()},
        allow_empty_layer=allow_empty_layer,
        **more,
    )
