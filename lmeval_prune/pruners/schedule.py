"""Schedule of dynamic pruning (its eq. 5 and Algorithm 1): stages that remove more and more, each scored anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lmeval_prune.architectures import UNITS, ModelMap, check_unit, uncuttable, units_of
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import (
    REFERENCE,
    Budget,
    allocate,
    pots_of,
    removed_by,
    spent,
    standardised,
)
from lmeval_prune.pruners.base import Pruner, Scores, by_member, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.compensation import bias_for
from lmeval_prune.pruners.layer_store import LayerStore
from lmeval_prune.pruners.moments import input_moments
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, HEADS, Removed, parts_of, weight_of
from lmeval_prune.pruners.sequential import (
    LayerByLayer,
    SequentialPruner,
    check_layer_by_layer,
    check_not_quantised,
    count_removed,
    plan_of,
)

Progress = Callable[[str], None]
NO_SCORES: Mapping[str, Tensor] = {}


def stages(
    pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText | None = None,
    channel_pruner: Pruner | None = None,
    scores: Mapping[str, Tensor] = NO_SCORES,
    progress: Progress = lambda _: None,
    work: Path | None = None,
) -> Iterator[Plan]:
    """Make the plans of Algorithm 1, one a step, each with all that is removed so far.

    Args:
        pruner: scores heads, and channels unless there is another one for them.
        model_map: of the model; it is as it was whenever a plan is yielded.
        options: how much goes, and in which units.
        text: calibration text, for pruners that need one.
        channel_pruner: scores channels.
        scores: by part, for the first step, where they are at hand; those of a kind that has none are computed.
        progress: is told what happens.
        work: a folder for what is known of each layer of a method that goes layer by layer, so that a run that was
            killed goes on; for the caller to remove when the plan is safe.

    Raises:
        InputError: the options do not suit the model or the pruner, or nothing would be removed.
    """
    pruners = {HEADS: pruner, CHANNELS: channel_pruner or pruner}
    options = settled(options, pruner, model_map, channel_pruner)
    check_methods(pruner, pruners[CHANNELS], model_map, options, text is not None, scores)
    record = _record(pruner, pruners[CHANNELS], options, text)
    if isinstance(pruner, SequentialPruner):
        yield _layer_by_layer(pruner, model_map, options, pruner.required(text), record, progress, work)
        return
    removed, compensation, history = Removed(), dict[str, Tensor](), list[dict[str, Any]]()
    for step in range(1, options.steps + 1):
        so_far = plan_of(removed, options.allow_empty_layer, compensation=compensation)
        with so_far.applied_to(model_map.model, model_map):
            known = scores if step == 1 else NO_SCORES
            for kind in options.kinds:
                if not has_kind(known, kind):
                    progress(f"step {step} of {options.steps}: scoring {kind}")
            scored = _scored(pruners, model_map, options.kinds, text, removed, known)
        for budget in budgets(options, pruners, step):
            compared = standardised(scored.values, removed, budget.allocation)
            pots = pots_of(model_map, budget, compared, removed)
            counts = allocate(pots, budget)
            removed = removed_by(pots, counts, removed)
            record |= _note(pots, counts, budget)
        if step == options.steps and not any(removed.values()):
            raise _nothing_goes(pruners, model_map, options)
        added, notes = _made_up_for(model_map, removed, text, options, scored.means if step == 1 else None, progress)
        compensation = {**compensation, **added}
        shares = dict(zip(("ratio", "ffn_ratio"), options.shares(step), strict=True))
        history.append({"step": step, **shares, **count_removed(removed)})
        values = {key: by_member(columns) for key, columns in scored.values.items()}
        made = {**record, **notes, "stages": list(history)}
        yield plan_of(removed, options.allow_empty_layer, compensation=compensation, scores=values, provenance=made)


def _record(
    pruner: Pruner, channel_pruner: Pruner, options: PruneOptions, text: CalibrationText | None
) -> dict[str, Any]:
    """Return what a plan says of its methods, settled options and text."""
    record = {**pruner.identity, "removes": str(options), "options": asdict(options)}
    if options.ffn_ratio or channel_pruner is not pruner:
        record |= {"ffn_method": pruner_name(channel_pruner), "ffn_options": asdict(channel_pruner)}
    return record | ({"calibration": text.about()} if text is not None else {})


def budgets(options: PruneOptions, pruners: Mapping[str, Pruner], step: int | None = None) -> list[Budget]:
    """Return the budgets of a step, by default the last: of all parts together, or one of heads and one of channels."""
    shares = options.shares(options.steps if step is None else step)
    if options.budget == "parameters":
        return [Budget(options.kinds, shares[0], options.allocation or pruners[HEADS].allocation, options)]
    allocations = {kind: options.allocation or pruner.allocation for kind, pruner in pruners.items()}
    both = dict(zip((HEADS, CHANNELS), shares, strict=True))
    return [Budget((kind,), both[kind], allocations[kind], options) for kind in options.kinds]


def least_removed(model_map: ModelMap, options: PruneOptions, pruners: Mapping[str, Pruner]) -> Iterator[Removed]:
    """Return what is removed after each step by scores of which the smallest units and whole layers are the lowest.

    If nothing goes by these, nothing does by others.

    Raises:
        InputError: a share would empty a layer.
    """
    removed: Removed = {}
    for step in range(1, options.steps + 1):
        for budget in budgets(options, pruners, step):
            pots = pots_of(model_map, budget, None, removed)
            removed = removed_by(pots, allocate(pots, budget), removed)
        yield removed


def _note(pots: Any, counts: Any, budget: Budget) -> dict[str, Any]:
    """Return what a plan says of a budget."""
    if budget.options.budget == "parameters":
        return {"parameters": spent(pots, counts, budget)}
    return {f"{'head' if budget.kinds == (HEADS,) else 'ffn'}_allocation": budget.allocation}


def _scored(
    pruners: Mapping[str, Pruner],
    model_map: ModelMap,
    kinds: Collection[str],
    text: CalibrationText | None,
    removed: Removed,
    known: Mapping[str, Tensor],
) -> Scores:
    """Score the kinds of which no scores are at hand, both at once if they are one method's."""
    unknown = [kind for kind in kinds if not has_kind(known, kind)]
    values, means = dict(known), None
    same = pruners[HEADS] == pruners[CHANNELS]
    for together in [unknown] if same and unknown else [[kind] for kind in unknown]:
        scores = pruners[together[0]].scores(model_map, text, parts_of(model_map, together), removed)
        values |= scores.values
        means = scores.means if same else None
    return Scores(values, means)


def has_kind(scores: Mapping[str, Tensor], kind: str) -> bool:
    """Return whether there are scores of heads, or of channels."""
    return any(key.startswith(f"{kind}.") for key in scores)


def settled(
    options: PruneOptions, pruner: Pruner, model_map: ModelMap, channel_pruner: Pruner | None = None
) -> PruneOptions:
    """Return options with what they leave open to the methods and the model; also of a model without weights.

    Raises:
        InputError: they do not suit these.
    """
    channel_pruner = channel_pruner or pruner
    usual: dict[str, Any] = {
        "unit": options.unit or _usual_unit(model_map, options.budget),
        "allocation": options.allocation or (pruner.allocation if options.budget == "parameters" else None),
        "compensation": options.compensation or pruner.compensates,
        "parts": _parts(options, pruner, channel_pruner, model_map),
    }
    options = replace(options, **usual)
    if options.budget == "parameters":
        _refuse(_of_parameters(options, model_map))
    else:
        _refuse(_of_heads(options, pruner, channel_pruner))
    if isinstance(pruner, SequentialPruner):
        _refuse(_of_sequential(options, pruner_name(pruner)))
    _refuse(
        {
            "a later step would score weights that least squares has replaced; give --steps 1, or --compensation bias":
                options.steps > 1 and options.compensation == "least_squares",
            "nothing is to be removed; give --ratio (of the parameters), or --budget heads with --ratio (heads), "
            "--ffn_ratio (channels) or both, e.g. 0.25":
                not options.ratio and not options.ffn_ratio,
        }
    )  # fmt: skip
    if options.ratio and options.parts != CHANNELS:
        check_unit(model_map, options.unit or "head")
    if CHANNELS in options.kinds and not model_map.channels():
        raise InputError(f"this {model_map.model_type} model has no dense feed-forward blocks; leave out ffn_ratio")
    return options


def _refuse(refusals: Mapping[str, bool]) -> None:
    for message, applies in refusals.items():
        if applies:
            raise InputError(message)


def _of_heads(options: PruneOptions, *pruners: Pruner) -> dict[str, bool]:
    """Return what is refused of a budget of heads and channels."""
    refusals = {
        f"{name} is for --budget parameters; give that, or leave it out": getattr(options, name) != usual
        for name, usual in (("parts", None), ("skip_first", 0), ("skip_last", 0))
    }
    return refusals | {
        f"{pruner_name(pruners[0])} counts parameters; give --budget parameters, or leave it out":
            isinstance(pruners[0], SequentialPruner),
        f"flap with reference=true allocates by {REFERENCE}, which counts parameters; leave out --budget heads, or "
        f"give --allocation global or uniform":
            REFERENCE in {options.allocation or pruner.allocation for pruner in pruners},
    }  # fmt: skip


def _of_parameters(options: PruneOptions, model_map: ModelMap) -> dict[str, bool]:
    """Return what is refused of a budget of parameters."""
    return {
        "--ratio is one share of the parameters of heads and channels together; leave out ffn_ratio and ffn_multiple, "
        "or give --budget heads, by which ratio counts heads and ffn_ratio channels":
            bool(options.ffn_ratio) or options.ffn_multiple != 1,
        "what one head of a group takes along depends on the others, so that single heads have no share of the "
        "parameters; give --unit group, or --budget heads":
            options.unit == "head" and options.parts != CHANNELS and _has_groups(model_map),
    }  # fmt: skip


def _of_sequential(options: PruneOptions, name: str) -> dict[str, bool]:
    """Return what is refused of a method that goes layer by layer."""
    return {
        f"{name} goes through the layers once; leave out --steps": options.steps > 1,
        f"{name} knows scores of one layer at a time; use allocation uniform or log":
            options.allocation not in ("uniform", "log"),
        f"{name} removes heads or groups; use unit head or group": options.unit == "balanced",
    }  # fmt: skip


def _parts(options: PruneOptions, pruner: Pruner, channel_pruner: Pruner, model_map: ModelMap) -> str | None:
    """Return which parts go of a budget of parameters: those of the options, else of the methods."""
    if options.budget != "parameters":
        return options.parts
    usual = "both" if channel_pruner is not pruner else HEADS if pruner.heads_only else pruner.parts
    parts = options.parts or usual
    return HEADS if parts == "both" and not model_map.channels() else parts


def _usual_unit(model_map: ModelMap, budget: str) -> str:
    """Return `head`; where parameters count, what can be cut as it is."""
    if budget == "heads" or uncuttable(model_map):
        return "head"
    if all("group" in units_of(layer) for layer in model_map.attention):
        return "group"
    return "balanced" if _has_groups(model_map) else "head"  # of a cut model, some layers may have one group left


def _has_groups(model_map: ModelMap) -> bool:
    """Return whether some query heads, but not all, share a key-value head, and can be cut with it."""
    return any(1 < layer.kv_heads < layer.heads for layer in model_map.attention) and not uncuttable(model_map)


def check_methods(
    pruner: Pruner,
    channel_pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    has_text: bool,
    scores: Mapping[str, Tensor] = NO_SCORES,
) -> None:
    """Refuse methods that cannot make such a plan, before anything is computed.

    Args:
        pruner, channel_pruner: the methods.
        model_map: of the model, with weights or without.
        options: settled.
        has_text: whether there is calibration text.
        scores: those that are at hand.

    Raises:
        InputError: saying why.
    """
    pruners = {HEADS: pruner, CHANNELS: channel_pruner}
    sequential = [method for method in pruners.values() if isinstance(method, SequentialPruner)]
    if sequential and channel_pruner is not pruner:
        raise InputError("a method that goes layer by layer takes heads and channels itself; leave out ffn_method")
    if sequential and scores:
        raise InputError(f"{pruner_name(pruner)} scores each layer when those before have gone; leave out --scores")
    for kind in options.kinds:
        if options.steps > 1 or not has_kind(scores, kind):
            pruners[kind].check([kind], has_text)
            pruners[kind].check_model(model_map)
    if options.compensation != "none":
        name = f"compensation={options.compensation}"
        check_not_quantised(model_map, name)
        if options.compensation == "least_squares":
            check_layer_by_layer(model_map, name)
        if not has_text:
            raise InputError(f"{name} needs a text; give --task NAME or --text FILE")
    if not _reaches_a_unit(pruners, model_map, options):
        raise _nothing_goes(pruners, model_map, options)


def _reaches_a_unit(pruners: Mapping[str, Pruner], model_map: ModelMap, options: PruneOptions) -> bool:
    """Return whether the shares come to one unit at least, whatever the scores."""
    return any(next(least_removed(model_map, replace(options, steps=1, p_min=0.0), pruners)).values())


def _nothing_goes(pruners: Mapping[str, Pruner], model_map: ModelMap, options: PruneOptions) -> InputError:
    """Return the refusal of a plan that removes nothing; of other settings it names those by which something goes."""

    def helps(**other: Any) -> bool:
        try:
            changed = settled(replace(options, **other), pruners[HEADS], model_map, pruners[CHANNELS])
            return _reaches_a_unit(pruners, model_map, changed)
        except InputError:
            return False

    units = [unit for unit in UNITS if options.ratio and unit != options.unit]
    by_layer = {options.allocation or pruner.allocation for pruner in pruners.values()} != {"global"}
    fixes = {
        "a larger --ratio": bool(options.ratio),
        **{f"--unit {unit}": helps(unit=unit) for unit in units},
        "a larger --ffn_ratio": bool(options.ffn_ratio),
        "a smaller --ffn_multiple": options.ffn_multiple > 1 and helps(ffn_multiple=1),
        "--allocation global": by_layer and helps(allocation="global"),
    }
    helping = " or ".join(fix for fix, is_one in fixes.items() if is_one)
    return InputError(
        f"nothing would be removed: the share is less than one unit of a layer or the model; give {helping}"
    )


def _made_up_for(
    model_map: ModelMap,
    removed: Removed,
    text: CalibrationText | None,
    options: PruneOptions,
    means: Mapping[str, Tensor] | None,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what makes up for a loss on the model as it is, and what a plan says of that."""
    if options.compensation == "none":
        return {}, {}
    assert text is not None
    lossy = [part for part in parts_of(model_map) if removed.get(part.key)]
    if options.compensation == "least_squares":
        progress("making up for the loss by least squares, layer by layer")
        walk = LayerByLayer(model_map, text, lambda part, *_: removed[part.key], True, True, options, progress=progress)
        removal, notes = walk.run(lossy)
        return removal.compensation, notes
    if means is None or not {part.key for part in lossy} <= means.keys():  # of scores at hand nothing is known
        progress("measuring what is lost on average")
        kinds = {part.kind for part in lossy}
        means = {
            key: moments.mean for key, moments in input_moments(model_map, text, parts_of(model_map, kinds)).items()
        }
    biases = {}
    for part in lossy:
        bias = bias_for(part.weight, means[part.key], part.columns(sorted(removed[part.key])))
        biases[f"{part.name}.bias"] = bias.to(weight_of(part.projection).dtype)
    return biases, {}


def _layer_by_layer(
    pruner: SequentialPruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText,
    record: dict[str, Any],
    progress: Progress,
    work: Path | None,
) -> Plan:
    """Make the plan of a method that goes layer by layer."""
    (budget,) = budgets(options, {HEADS: pruner, CHANNELS: pruner})
    pots = pots_of(model_map, budget)
    counts = allocate(pots, budget)
    by_part = {pot.key: count for pot, count in zip(pots, counts, strict=True)}
    store = LayerStore(work, [record, model_map.weights, model_map.signature()]) if work else None
    select = pruner.selection(options.unit or "head", by_part)
    walk = LayerByLayer(model_map, text, select, pruner.pairs, pruner.afresh, options, store, progress)
    removal, notes = walk.run([part for part in parts_of(model_map) if part.key in by_part])
    stage = {"step": 1, "ratio": options.ratio, **count_removed(removal.removed)}
    notes = {"parameters": spent(pots, counts, budget), **notes, "stages": [stage]}
    made = {**record, **notes}
    return plan_of(removal.removed, options.allow_empty_layer, compensation=removal.compensation, provenance=made)
