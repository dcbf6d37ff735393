"""The schedule of dynamic pruning (its eq. 5 and Algorithm 1): stages that remove more and more, each scored anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmeval_prune.architectures import UNITS, ModelMap, check_unit, uncuttable, units_of
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import (
    COMPARED,
    REFERENCE,
    Pot,
    counts_of,
    pots_of,
    removed_by,
    standardised_by_layer,
)
from lmeval_prune.pruners.base import Pruner, Scored, Scores, by_member, needed, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.compensation import bias_for
from lmeval_prune.pruners.layer_store import LayerStore
from lmeval_prune.pruners.moments import input_moments, weight_of
from lmeval_prune.pruners.options import ALLOCATIONS, PruneOptions
from lmeval_prune.pruners.selection import Removed, check_channels, select_channels, select_heads
from lmeval_prune.pruners.sequential import (
    Chooser,
    Found,
    Place,
    SequentialPruner,
    check_layer_by_layer,
    check_not_quantised,
    layer_by_layer,
)

logger = logging.getLogger(__name__)


def stages(
    pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText | None = None,
    channel_pruner: Pruner | None = None,
    scores: tuple[Scores, Scores] = ({}, {}),
    progress: Callable[[str], None] = lambda _: None,
    work: Path | None = None,
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
        work: a folder for what is known of each layer of a method that goes layer by layer, so that a run that was
            killed goes on; for the caller to remove when the plan is safe.

    Raises:
        InputError: the options do not suit the model or the pruner, or nothing would be removed.
    """
    channel_pruner = channel_pruner or pruner
    options = settled(options, pruner, model_map, channel_pruner)
    check_methods(pruner, channel_pruner, model_map, options, text is not None, scores)
    made = {**pruner.identity, "removes": str(options), "options": asdict(options)}
    if options.ffn_ratio or channel_pruner is not pruner:
        made |= {"ffn_method": pruner_name(channel_pruner), "ffn_options": asdict(channel_pruner)}
    made |= {"calibration": text.about()} if text is not None else {}
    if isinstance(pruner, SequentialPruner):
        yield _layer_by_layer(pruner, model_map, options, needed(pruner, text), made, progress, work)
        return
    heads: Removed = {}
    channels: Removed = {}
    of_heads, of_channels = options.schedules()
    compensation: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for step in range(1, options.steps + 1):
        so_far = _plan(heads, channels, options.allow_empty_layer, compensation=compensation)
        with so_far.applied_to(model_map.model, model_map):
            at_hand = scores if step == 1 else ({}, {})
            asked = (wants_heads(options) and not at_hand[0], wants_channels(options) and not at_hand[1])
            for what in (name for name, wanted in zip(("heads", "channels"), asked, strict=True) if wanted):
                progress(f"step {step} of {options.steps}: scoring {what}")
            scored = _scored(pruner, channel_pruner, model_map, text, asked, (heads, channels))
        head_scores, channel_scores = scored.heads or at_hand[0], scored.channels or at_hand[1]
        counted: dict[str, Any] = {}
        if options.budget == "parameters":
            ratio = of_heads.at(step)
            heads, channels, counted = _by_parameters(
                model_map, options, ratio, (head_scores, channel_scores), (heads, channels)
            )
        elif options.ratio:
            allocation = options.allocation or pruner.allocation
            heads = select_heads(
                model_map,
                _compared(head_scores, heads, allocation),
                of_heads.at(step),
                options.unit or "head",
                allocation,
                heads,
                options.allow_empty_layer,
            )
            made |= {"head_allocation": allocation}
        if options.ffn_ratio:
            allocation = options.allocation or channel_pruner.allocation
            channels = select_channels(
                model_map,
                _compared(channel_scores, channels, allocation),
                of_channels.at(step),
                options.ffn_multiple,
                allocation,
                channels,
            )
            made |= {"ffn_allocation": allocation}
        if step == options.steps and not any(heads.values()) and not any(channels.values()):
            raise _nothing_goes(pruner, channel_pruner, model_map, options)
        bare = _plan(heads, channels, options.allow_empty_layer)
        found = _made_up_for(model_map, bare, text, options, scored.means if step == 1 else None, progress)
        compensation = {**compensation, **found.compensation, **pruner.compensation(model_map, bare, text)}
        counts = {"heads": sum(map(len, heads.values())), "channels": sum(map(len, channels.values()))}
        history.append({"step": step, "ratio": of_heads.at(step), "ffn_ratio": of_channels.at(step), **counts})
        kept = {f"heads.{k}": by_member(v) for k, v in head_scores.items()}
        kept |= {f"channels.{k}": v for k, v in channel_scores.items()}
        yield _plan(
            heads,
            channels,
            options.allow_empty_layer,
            compensation=compensation,
            scores=kept,
            made={**made, **counted, **found.notes(), "stages": list(history)},
        )


def _scored(
    pruner: Pruner,
    channel_pruner: Pruner,
    model_map: ModelMap,
    text: CalibrationText | None,
    asked: tuple[bool, bool],
    removed: tuple[Removed, Removed],
) -> Scored:
    """Scores of heads and of channels, as far as they are asked for; of one method both at once."""
    if pruner is channel_pruner:
        return pruner.scores(model_map, text, *asked, removed) if any(asked) else Scored({}, {})
    own = pruner.scores(model_map, text, True, False, removed).heads if asked[0] else {}
    return Scored(own, channel_pruner.scores(model_map, text, False, True, removed).channels if asked[1] else {})


def settled(
    options: PruneOptions, pruner: Pruner, model_map: ModelMap, channel_pruner: Pruner | None = None
) -> PruneOptions:
    """Return options with what they leave open to the methods and the model; also of a model without weights.

    Raises:
        InputError: they do not suit these.
    """
    budget, sequential = options.budget, isinstance(pruner, SequentialPruner)
    channel_pruner = channel_pruner or pruner
    options = replace(
        options,
        unit=options.unit or _usual_unit(model_map, budget),
        allocation=options.allocation or (pruner.allocation if budget == "parameters" else None),
        compensation=options.compensation or pruner.compensates,
        parts=_parts(options, pruner, channel_pruner, model_map),
    )
    name = pruner_name(pruner)
    if budget == "heads":
        ours = {one.name: one.default for one in fields(options) if one.name in _OF_PARAMETERS}
        for one, usual in ours.items():
            if getattr(options, one) != usual:
                raise InputError(f"{one} is for --budget parameters; give that, or leave it out")
        if sequential:
            raise InputError(f"{name} counts parameters; give --budget parameters, or leave it out")
        if REFERENCE in {options.allocation or each.allocation for each in (pruner, channel_pruner)}:
            raise InputError(
                f"flap with reference=true allocates by {REFERENCE}, which counts parameters; leave out --budget "
                f"heads, or give --allocation global or uniform"
            )
    elif options.ffn_ratio or options.ffn_multiple != 1:
        raise InputError(
            "--ratio is one share of the parameters of heads and channels together; leave out ffn_ratio and "
            "ffn_multiple, or give --budget heads, by which ratio counts heads and ffn_ratio channels"
        )
    elif options.unit == "head" and options.parts != "channels" and _has_groups(model_map):
        raise InputError(
            "what one head of a group takes along depends on the others, so that single heads have no share of the "
            "parameters; give --unit group, or --budget heads"
        )
    if sequential:
        allocations = [one for one in ALLOCATIONS["parameters"] if one in ("uniform", "log")]
        if options.steps > 1:
            raise InputError(f"{name} goes through the layers once; leave out --steps")
        if options.allocation not in allocations:
            raise InputError(f"{name} knows scores of one layer at a time; use allocation {' or '.join(allocations)}")
        if options.unit == "balanced":
            raise InputError(f"{name} removes heads or groups; use unit head or group")
    if options.steps > 1 and options.compensation == "least_squares":
        raise InputError(
            "a later step would score weights that least squares has replaced; give --steps 1, or --compensation bias"
        )
    check_prunable(model_map, options)
    return options


_OF_PARAMETERS = ("parts", "skip_first", "skip_last")


def _parts(options: PruneOptions, pruner: Pruner, channel_pruner: Pruner, model_map: ModelMap) -> str | None:
    """Return which parts go of a budget of parameters: those of the options, else of the methods."""
    if options.budget != "parameters":
        return options.parts
    usual = "both" if channel_pruner is not pruner else pruner.parts if pruner.scores_channels else "heads"
    parts = options.parts or usual
    return "heads" if parts == "both" and not model_map.channels() else parts


def _usual_unit(model_map: ModelMap, budget: str) -> str:
    """Return `head`; where parameters count, what can be cut as it is."""
    if budget == "heads" or uncuttable(model_map):
        return "head"
    if all("group" in units_of(layer) for layer in model_map.attention):
        return "group"
    return "balanced" if _has_groups(model_map) else "head"  # of a cut model, some layers may have one group left


def _has_groups(model_map: ModelMap) -> bool:
    """Whether some query heads, but not all, share a key-value head, and can be cut with it."""
    return any(1 < layer.kv_heads < layer.heads for layer in model_map.attention) and not uncuttable(model_map)


def wants_heads(options: PruneOptions) -> bool:
    """Whether heads are to go; of options that are settled."""
    return options.parts != "channels" if options.budget == "parameters" else bool(options.ratio)


def wants_channels(options: PruneOptions) -> bool:
    """Whether channels are to go; of options that are settled."""
    if options.budget == "parameters":
        return options.parts != "heads"
    return bool(options.ffn_ratio)


def check_methods(
    pruner: Pruner,
    channel_pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: bool,
    scores: tuple[Scores, Scores] = ({}, {}),
) -> None:
    """Refuse methods that cannot make such a plan, before anything is computed.

    Args:
        pruner, channel_pruner: the methods.
        model_map: of the model, with weights or without.
        options: settled.
        text: whether there is calibration text.
        scores: those that are at hand.

    Raises:
        InputError: saying why.
    """
    later = options.steps > 1
    for_heads = wants_heads(options) and (later or not scores[0])
    for_channels = wants_channels(options) and (later or not scores[1])
    if channel_pruner is not pruner and any(isinstance(one, SequentialPruner) for one in (pruner, channel_pruner)):
        raise InputError("a method that goes layer by layer takes heads and channels itself; leave out ffn_method")
    if isinstance(pruner, SequentialPruner) and any(scores):
        raise InputError(f"{pruner_name(pruner)} scores each layer when those before have gone; leave out --scores")
    if for_channels and not channel_pruner.scores_channels:
        fix = "leave out --ffn_ratio" if options.budget == "heads" else "give --parts heads"
        raise InputError(f"{pruner_name(channel_pruner)} scores heads only; {fix}, or score channels by --ffn_method")
    pruner.check(for_heads, False, text)
    channel_pruner.check(False, for_channels, text)
    for one, wanted in ((pruner, for_heads), (channel_pruner, for_channels)):
        if wanted:
            one.check_model(model_map)
    if options.compensation != "none":
        check_not_quantised(model_map, f"compensation={options.compensation}")
        if options.compensation == "least_squares":
            check_layer_by_layer(model_map, "compensation=least_squares")
        if not text:
            raise InputError(f"compensation={options.compensation} needs a text; give --task NAME or --text FILE")
    if not _reaches_a_unit(pruner, channel_pruner, model_map, options):
        raise _nothing_goes(pruner, channel_pruner, model_map, options)


def _reaches_a_unit(pruner: Pruner, channel_pruner: Pruner, model_map: ModelMap, options: PruneOptions) -> bool:
    """Return whether the shares come to one unit at least, whatever the scores.

    Whole layers, and the smallest units, have the lowest scores here: if then nothing goes, nothing ever does.

    Raises:
        InputError: a share would empty a layer.
    """
    if options.budget == "parameters":
        alike = _alike(model_map, options)
        pots = [
            replace(pot, scores=torch.full_like(pot.scores, pot.cost)) for pot in pots_of(model_map, options, *alike)
        ]
        allocation, empty = options.allocation or pruner.allocation, options.allow_empty_layer
        return any(counts_of(pots, options.ratio, allocation, options.log_start, empty))
    of_heads, of_channels = (options.allocation or one.allocation for one in (pruner, channel_pruner))
    equal = {layer.label: torch.zeros(layer.heads) for layer in model_map.attention}
    layer_after_layer = {label: torch.full((n,), float(i)) for i, (label, n) in enumerate(model_map.channels().items())}
    unit, empty, multiple = options.unit or "head", options.allow_empty_layer, options.ffn_multiple
    return bool(
        (options.ratio and select_heads(model_map, equal, options.ratio, unit, of_heads, None, empty))
        or (
            options.ffn_ratio
            and select_channels(model_map, layer_after_layer, options.ffn_ratio, multiple, of_channels)
        )
    )


def _alike(model_map: ModelMap, options: PruneOptions) -> tuple[Scores | None, Scores | None]:
    """Return equal scores of the heads and of the channels that may go; None of what stays."""
    heads = {layer.label: torch.zeros(layer.heads) for layer in model_map.attention}
    channels = {label: torch.zeros(width) for label, width in model_map.channels().items()}
    return heads if wants_heads(options) else None, channels if wants_channels(options) else None


def _compared(scores: Scores, removed: Removed, allocation: str) -> Scores:
    """Scores as an allocation compares them."""
    return standardised_by_layer(scores, removed, int(allocation == REFERENCE)) if allocation in COMPARED else scores


def _by_parameters(
    model_map: ModelMap,
    options: PruneOptions,
    ratio: float,
    scores: tuple[Scores, Scores],
    before: tuple[Removed, Removed],
) -> tuple[Removed, Removed, dict[str, Any]]:
    """What goes in all, and what a plan says of the budget."""
    allocation, empty = options.allocation or "global", options.allow_empty_layer
    compared = [_compared(one, gone, allocation) for one, gone in zip(scores, before, strict=True)]
    given = (compared[0] if wants_heads(options) else None, compared[1] if wants_channels(options) else None)
    pots = pots_of(model_map, options, *given, *before)
    counts = counts_of(pots, ratio, allocation, options.log_start, empty)
    return *removed_by(pots, counts, before), {"parameters": _spent(pots, counts, ratio, allocation)}


def _spent(pots: Sequence[Pot], counts: Sequence[int], ratio: float, allocation: str) -> dict[str, int]:
    """Return how many parameters of the layers in play can be removed and are, and warn of a budget that is missed."""
    removable = sum(pot.size * pot.cost for pot in pots)
    removed = sum(count * pot.cost for pot, count in zip(pots, counts, strict=True))
    if abs(removed - ratio * removable) > max(pot.cost for pot in pots) * (1 + 1e-9):
        logger.warning(
            "allocation %s misses the budget by more than one unit: %.1f%% of the parameters in play go, %.1f%% were "
            "asked for", allocation, 100 * removed / removable, 100 * ratio
        )  # fmt: skip
    return {"removable": round(removable), "removed": round(removed)}


def _made_up_for(
    model_map: ModelMap,
    plan: Plan,
    text: CalibrationText | None,
    options: PruneOptions,
    means: Mapping[str, Tensor] | None,
    progress: Callable[[str], None],
) -> Found:
    """What makes up for a plan's loss on the model as it is: `Found` with a compensation, and nothing else."""
    found = Found()
    if options.compensation in (None, "none"):
        return found
    assert text is not None
    heads = {layer.label: set(numbers) for layer, numbers in plan.heads_by_layer(model_map)}
    channels = {block.label: set(numbers) for block, numbers in plan.channels_by_layer(model_map)}
    if options.compensation == "least_squares":
        progress("making up for the loss by least squares, layer by layer")

        def choose(place: Place, *_: Any) -> set[int]:
            return (heads if place.kind == "heads" else channels)[place.label]

        places = {(label, "heads") for label in heads} | {(label, "channels") for label in channels}
        chooser = Chooser(choose, True, True, places, pairs=True, afresh=True)
        empty = options.allow_empty_layer
        return layer_by_layer(model_map, text, chooser, "least_squares", options.damping, empty, progress=progress)
    lossy = [Place(layer) for layer in model_map.attention if layer.label in heads]
    lossy += [Place(block) for block in model_map.feed_forward if block.label in channels]
    if means is None or not {place.name for place in lossy} <= means.keys():  # of scores at hand nothing is known
        progress("measuring what is lost on average")
        moments = input_moments(model_map, text, bool(heads), bool(channels))
        means = {name: one.mean for name, one in moments.items()}
    for place in lossy:
        columns = place.columns_of((heads if place.kind == "heads" else channels)[place.label])
        like = weight_of(place.projection)
        bias = bias_for(place.weight, means[place.name], columns)
        found.compensation[f"{place.name}.bias"] = bias.to(like.dtype)
    return found


def _layer_by_layer(
    pruner: SequentialPruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText,
    made: dict[str, Any],
    progress: Callable[[str], None],
    work: Path | None,
) -> Plan:
    """The plan of a method that goes layer by layer."""
    pots = pots_of(model_map, options, *_alike(model_map, options))
    allocation = options.allocation or "uniform"
    counts = counts_of(pots, options.ratio, allocation, options.log_start, options.allow_empty_layer)
    by_place = {(pot.label, pot.kind): count for pot, count in zip(pots, counts, strict=True)}
    chooser = pruner.chooser(options.unit or "head", by_place)
    store = LayerStore(work, [made, model_map.weights, model_map.signature()]) if work else None
    found = layer_by_layer(
        model_map,
        text,
        chooser,
        options.compensation or "none",
        options.damping,
        options.allow_empty_layer,
        store,
        progress,
    )
    numbers = {
        name: sum(map(len, one.values())) for name, one in (("heads", found.heads), ("channels", found.channels))
    }
    more = {"parameters": _spent(pots, counts, options.ratio, allocation), **found.notes()}
    return _plan(
        found.heads,
        found.channels,
        options.allow_empty_layer,
        compensation=found.compensation,
        made={**made, **more, "stages": [{"step": 1, "ratio": options.ratio, **numbers}]},
    )


def check_prunable(model_map: ModelMap, options: PruneOptions) -> None:
    """Refuse options that do not suit a model; on one without weights, too.

    Raises:
        InputError: nothing is asked for, or the model has no such unit, or no channels.
    """
    if not options.ratio and not options.ffn_ratio:
        raise InputError(
            "nothing is to be removed; give --ratio (of the parameters), or --budget heads with --ratio (heads), "
            "--ffn_ratio (channels) or both, e.g. 0.25"
        )
    if options.ratio and options.parts != "channels":
        check_unit(model_map, options.unit or "head")
    if options.ffn_ratio or options.parts == "channels":
        check_channels(model_map)


def _nothing_goes(pruner: Pruner, channel_pruner: Pruner, model_map: ModelMap, options: PruneOptions) -> InputError:
    """Return the refusal of a plan that removes nothing; of other settings it names those by which something goes."""

    def helps(**other: Any) -> bool:
        try:
            changed = settled(replace(options, **other), pruner, model_map, channel_pruner)
            return _reaches_a_unit(pruner, channel_pruner, model_map, changed)
        except InputError:
            return False

    fixes = ["a larger --ratio"] if options.ratio else []
    fixes += [f"--unit {unit}" for unit in UNITS if options.ratio and unit != options.unit and helps(unit=unit)]
    fixes += ["a larger --ffn_ratio"] if options.ffn_ratio else []
    fixes += ["a smaller --ffn_multiple"] if options.ffn_multiple > 1 and helps(ffn_multiple=1) else []
    by_layer = {options.allocation or each.allocation for each in (pruner, channel_pruner)} != {"global"}
    fixes += ["--allocation global"] if by_layer and helps(allocation="global") else []
    return InputError(
        f"nothing would be removed: the share is less than one unit of a layer or the model; give {' or '.join(fixes)}"
    )


def _plan(heads: Removed, channels: Removed, allow_empty_layer: bool, **more: Any) -> Plan:
    return Plan(
        tuple(f"{label}H{head}" for label, numbers in heads.items() for head in sorted(numbers)),
        {label: sorted(numbers) for label, numbers in channels.items()},
        allow_empty_layer=allow_empty_layer,
        **more,
    )
