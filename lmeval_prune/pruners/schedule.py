"""Make plans by the schedule of dynamic pruning (its eq. 5 and Algorithm 1): each step removes more by new scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lmeval_prune.architectures import UNITS, ModelMap, check_unit, config_fingerprint, uncuttable, units_of
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.architectures.precision import fast_products
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import (
    COMPOSITION,
    REFERENCE,
    Budget,
    allocate,
    follows_costs,
    is_count_fixed,
    parameter_counts,
    removed_by,
    standardised,
    unit_pools,
)
from lmeval_prune.pruners.base import Pruner, Scores, per_member, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.compensation import bias_for
from lmeval_prune.pruners.composition import BLOCKS, block_costs, check_costs, compose
from lmeval_prune.pruners.estimate import Estimate
from lmeval_prune.pruners.layer_store import LayerStore
from lmeval_prune.pruners.moments import input_moments
from lmeval_prune.pruners.options import PruneOptions, Unit
from lmeval_prune.pruners.parts import CHANNELS, DEPTH_KINDS, HEADS, KINDS, Removed, parts_of
from lmeval_prune.pruners.score_store import ScoreStore
from lmeval_prune.pruners.scoring import has_scores_of, pruners_by_kind, score, scored_kinds
from lmeval_prune.pruners.sequential import (
    LayerwisePruning,
    SequentialPruner,
    check_layerwise,
    check_not_quantised,
    count_removed,
    make_plan,
)
from lmeval_prune.settings import Use, check_used

Progress = Callable[[str], None]
Renew = Callable[[int], CalibrationText | None]
NO_SCORES: Mapping[str, Tensor] = {}

# --------------------------------------------------------------------------- plans


def stages(
    pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText | None = None,
    channel_pruner: Pruner | None = None,
    scores: Mapping[str, Tensor] = NO_SCORES,
    progress: Progress = lambda _: None,
    work: Path | None = None,
    renew: Renew | None = None,
) -> Iterator[Plan]:
    """Yield the plan of each step of Algorithm 1; a plan removes everything up to its step.

    A step that can remove no unit, whatever the scores, is not scored and has no plan.

    Args:
        pruner: scores heads, and channels unless there is a `channel_pruner`.
        model_map: map of the model; the model is unchanged whenever a plan is yielded.
        options: how much is removed, and in which units.
        text: calibration text, for pruners that need one.
        channel_pruner: scores channels.
        scores: stored scores by part key, for the first step; missing kinds are computed.
        progress: receives progress messages.
        work: folder for what is finished, so that a killed run resumes: scores, or the layers of a method that prunes
            layer by layer. The caller deletes it after the plan is saved.
        renew: called at each scored step after the first, with its number among them and the earlier steps' plan
            applied; returns the text of this and the following steps, or None if the text stays.

    Raises:
        InputError: the options do not suit the model or the pruner, or nothing would be removed.
    """
    options = resolve_options(options, pruner, model_map, channel_pruner)
    pruners = pruners_by_kind(pruner, channel_pruner or pruner, options)
    check_methods(pruner, pruners[CHANNELS], model_map, options, text is not None, scores)
    record = _record(pruner, pruners[CHANNELS], options, text)
    if isinstance(pruner, SequentialPruner):
        with fast_products():
            plan = _layerwise_plan(pruner, model_map, options, pruner.require_text(text), record, progress, work)
        yield plan
        return
    store = ScoreStore(work, _identity(record, model_map)) if work and text else None
    solves = options.compensation == "least_squares"
    removed, scored, compensation, history = Removed(), Scores({}), dict[str, Tensor](), list[dict[str, Any]]()
    for step in range(1, options.steps + 1):
        budgets = _budgets(options, pruners, step)
        earlier = make_plan(removed, options.allow_empty_layer, compensation=compensation)
        if removes := _can_remove(model_map, budgets, removed):
            stored, renewed = NO_SCORES if history else scores, None
            if renew and history:
                with earlier.applied_to(model_map.model, model_map):
                    renewed = renew(len(history) + 1)
                text = text if renewed is None else renewed
            task = f"step {step} of {options.steps}: scoring"
            for kind in scored_kinds(options):
                if not has_scores_of(stored, kind):
                    progress(f"{task} {kind.replace('_', '-')}")
            read = replace(text, report=Estimate(task, progress, options.steps - step)) if text else None
            with fast_products():
                scored = score(pruners, model_map, scored_kinds(options), read, removed, stored, earlier, store)
            removed, notes = _remove_lowest(model_map, budgets, scored, removed)
            record |= notes
            shares = dict(zip(("ratio", "ffn_ratio"), options.shares(step), strict=True))
            calibration = {} if renewed is None else {"calibration": renewed.record()}
            history.append({"step": step, **shares, **count_removed(removed), **calibration})
        else:
            progress(f"step {step} of {options.steps} can remove no unit and is skipped")
        is_last = step == options.steps
        if is_last and not any(removed.values()):
            raise _nothing_removed(pruners, model_map, options)
        if not removes and not (is_last and solves):
            continue
        means = scored.means if len(history) == 1 else None
        # later steps score the original weights, so least squares replaces them after the last one
        added, notes = dict[str, Tensor](), dict[str, Any]()
        if not solves or is_last:
            with fast_products():
                added, notes = _compensation(model_map, removed, text, options, means, progress)
        compensation = {**compensation, **added}
        values = {key: per_member(columns) for key, columns in scored.values.items()}
        provenance = {**record, **notes, "stages": list(history)}
        fields = {"compensation": compensation, "scores": values, "provenance": provenance}
        yield make_plan(removed, options.allow_empty_layer, **fields)


def _can_remove(model_map: ModelMap, budgets: Sequence[Budget], removed: Removed) -> bool:
    """Return whether a step can remove a unit beyond those of earlier steps; True if only the scores can tell."""
    for budget in budgets:
        pools = unit_pools(model_map, budget, None, removed)
        if budget.allocation == COMPOSITION:
            costs, _ = block_costs(model_map, budget.options, pools)
            left = [costs.of(pool, len(pool.units)) for pool in pools]
            if any(cost is None for cost in left) or sum(filter(None, left)) > (1 - budget.ratio) * costs.total:
                return True
        elif not follows_costs(budget):
            return True
        else:
            try:
                counts = allocate(pools, budget)
            except InputError:  # of the smallest units alone
                return True
            if counts != [pool.removed for pool in pools]:
                return True
    return False


def _remove_lowest(
    model_map: ModelMap, budgets: Sequence[Budget], scores: Scores, removed: Removed
) -> tuple[Removed, dict[str, Any]]:
    """Remove the units with the lowest scores; return everything removed so far, and notes for the plan."""
    notes: dict[str, Any] = {}
    for budget in budgets:
        if budget.allocation == COMPOSITION:
            return _composed(model_map, budget, scores, removed)
        pools = unit_pools(model_map, budget, standardised(scores.values, removed, budget.allocation), removed)
        counts = allocate(pools, budget)
        removed = removed_by(pools, counts, removed)
        if budget.options.budget == "parameters":
            notes["parameters"] = parameter_counts(pools, counts, budget)
        else:
            notes["head_allocation" if budget.kinds == (HEADS,) else "ffn_allocation"] = budget.allocation
    return removed, notes


def _composed(model_map: ModelMap, budget: Budget, scores: Scores, removed: Removed) -> tuple[Removed, dict[str, Any]]:
    """Choose what stays of each block; return everything removed so far, and notes for the plan."""
    pools, options = unit_pools(model_map, budget, scores.values, removed), budget.options
    costs, notes = block_costs(model_map, options, pools)
    limit = (1 - budget.ratio) * costs.total
    # of a cut block, a 32nd is not among the sizes of a table: all of its sizes are levels
    multiple = options.ffn_multiple if options.ffn_multiple > 1 or options.costs else None
    after, composition = compose(pools, scores.values, limit, removed, multiple, costs.of)
    gone = {key: len(after.get(key, ())) for key in (pool.key for pool in pools)}
    # members of a unit; a block without units is gone already
    members = {pool.key: len(pool.units[0]) if pool.units else gone[pool.key] // pool.size for pool in pools}
    parameters = sum(pool.cost * gone[pool.key] / members[pool.key] for pool in pools)
    notes["parameters"] = {"removable": round(sum(pool.total for pool in pools)), "removed": round(parameters)}
    return after, {**notes, **composition, "whole_cost": costs.total}


def _record(
    pruner: Pruner, channel_pruner: Pruner, options: PruneOptions, text: CalibrationText | None
) -> dict[str, Any]:
    """Return what a plan stores about its methods, options and text."""
    record = {**pruner.identity, "removes": str(options), "options": asdict(options)}
    if options.ffn_ratio or channel_pruner is not pruner:
        record |= {"ffn_method": pruner_name(channel_pruner), "ffn_options": asdict(channel_pruner)}
    return record | ({"calibration": text.record()} if text is not None else {})


def _identity(record: Mapping[str, Any], model_map: ModelMap) -> list[Any]:
    """Return what stored scores and layers depend on, given the plan's record."""
    return [record, model_map.weights, config_fingerprint(model_map.model.config), model_map.signature()]


def _budgets(options: PruneOptions, pruners: Mapping[str, Pruner], step: int) -> list[Budget]:
    """Return the budgets of a step: one of all parameters, or one of heads and one of channels."""
    shares = dict(zip((HEADS, CHANNELS), options.shares(step), strict=True))
    if options.budget != "heads":
        return [Budget(options.kinds, shares[HEADS], options.allocation or pruners[HEADS].allocation, options)]
    return [
        Budget((kind,), shares[kind], options.allocation or pruners[kind].allocation, options) for kind in options.kinds
    ]


class SmallestRemoval(NamedTuple):
    """Units that are removed after a step if the smallest have the lowest scores, and bounds for other scores.

    Attributes:
        removed: the units.
        most: largest number of units that any scores remove up to this step; estimated where scores have a threshold.
        fewest: smallest number: the same, or 0 if the scores decide on it.
    """

    removed: Removed
    most: int
    fewest: int


def smallest_removal(
    model_map: ModelMap, options: PruneOptions, pruners: Mapping[str, Pruner]
) -> Iterator[SmallestRemoval]:
    """Yield what is removed after each step if the smallest units have the lowest scores.

    Raises `InputError` if a share would empty a layer.
    """
    removed: Removed = {}
    for step in range(1, options.steps + 1):
        most = fewest = 0
        for budget in _budgets(options, pruners, step):
            pools = unit_pools(model_map, budget, None, removed)
            counts = allocate(pools, budget)
            removed, most = removed_by(pools, counts, removed), most + sum(counts)
            fewest += sum(counts) if is_count_fixed(pools, budget) else 0
        yield SmallestRemoval(removed, most, fewest)


def _compensation(
    model_map: ModelMap,
    removed: Removed,
    text: CalibrationText | None,
    options: PruneOptions,
    means: Mapping[str, Tensor] | None,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the compensation for removed units, and notes on it for the plan; `means`: mean inputs, if known."""
    if options.compensation == "none":
        return {}, {}
    assert text is not None
    parts = [part for part in parts_of(model_map) if removed.get(part.key)]
    pruned_parts = [part for part in parts if not removed.get(f"{BLOCKS[part.kind]}.{part.label}")]
    if options.compensation == "least_squares":
        progress("computing the least-squares compensation, layer by layer")
        blocks = {key: members for key, members in removed.items() if key.partition(".")[0] in DEPTH_KINDS}
        pruning = LayerwisePruning(
            model_map, text, lambda part, *_: removed[part.key], True, True, options, progress=progress, blocks=blocks
        )
        removal, notes = pruning.run(pruned_parts)
        return removal.compensation, notes
    if means is None or not {part.key for part in pruned_parts} <= means.keys():
        progress("measuring the mean inputs of projections")
        kinds = {part.kind for part in pruned_parts}
        moments = input_moments(model_map, text, parts_of(model_map, kinds))
        means = {key: statistics.mean for key, statistics in moments.items()}
    biases = {}
    for part in pruned_parts:
        bias = bias_for(part.weight, means[part.key], part.columns(sorted(removed[part.key])))
        biases[f"{part.projection_name}.bias"] = bias.to(weight_of(part.projection).dtype)
    return biases, {}


def _layerwise_plan(
    pruner: SequentialPruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText,
    record: dict[str, Any],
    progress: Progress,
    work: Path | None,
) -> Plan:
    """Make the plan of a method that prunes layer by layer."""
    (budget,) = _budgets(options, {HEADS: pruner, CHANNELS: pruner}, options.steps)
    pools = unit_pools(model_map, budget)
    counts = allocate(pools, budget)
    by_part = {pool.key: count for pool, count in zip(pools, counts, strict=True)}
    store = LayerStore(work, _identity(record, model_map)) if work else None
    select = pruner.selection(options.unit or "head", by_part)
    pruning = LayerwisePruning(
        model_map, text, select, pruner.needs_second, pruner.remeasure_down, options, store, progress
    )
    removal, notes = pruning.run([part for part in parts_of(model_map) if part.key in by_part])
    stage = {"step": 1, "ratio": options.ratio, **count_removed(removal.removed)}
    provenance = {**record, "parameters": parameter_counts(pools, counts, budget), **notes, "stages": [stage]}
    fields = {"compensation": removal.compensation, "provenance": provenance}
    return make_plan(removal.removed, options.allow_empty_layer, **fields)


# --------------------------------------------------------------------------- options and checks


def resolve_options(
    options: PruneOptions, pruner: Pruner, model_map: ModelMap, channel_pruner: Pruner | None = None
) -> PruneOptions:
    """Fill in options that depend on the methods and the model, which may have no weights; refuse unsuitable ones."""
    channel_pruner, original = channel_pruner or pruner, options
    counts_parameters = options.budget != "heads"
    parts: Any = _default_parts(options, pruner, channel_pruner, model_map) if counts_parameters else options.parts
    options = replace(options, parts=parts)
    has_depth = not {*options.kinds} <= {*KINDS}
    defaults: dict[str, Any] = {
        "unit": options.unit or (_default_unit(model_map, options.budget, pruner) if HEADS in options.kinds else None),
        "allocation": options.allocation or (pruner.allocation if counts_parameters else None),
        "compensation": options.compensation or pruner.compensates,
    }
    if has_depth:
        defaults |= {"allocation": options.allocation or "global", "compensation": options.compensation or "none"}
    options = replace(options, **defaults)
    _check_options(options, pruner, channel_pruner, model_map)
    check_used(original, _USES, (options, pruner))
    return options


# conditions on resolved options and the pruner of heads
_USES = (
    Use("heads", lambda resolved: HEADS in resolved[0].kinds, ("unit",)),
    Use(
        "heads, or channels within --budget parameters",
        lambda resolved: _may_empty(resolved[0]),
        ("allow_empty_layer",),
    ),
    Use("--allocation log", lambda resolved: resolved[0].allocation == "log", ("log_start",)),
    Use("--compensation least_squares", lambda resolved: _is_damped(*resolved), ("damping",)),
)


def _may_empty(options: PruneOptions) -> bool:
    """Return whether a layer may lose all heads or channels, if that is allowed."""
    kinds = {HEADS} if options.budget == "heads" else {*KINDS}
    return bool(kinds & {*options.kinds}) and options.allocation != COMPOSITION


def _is_damped(options: PruneOptions, pruner: Pruner) -> bool:
    return options.compensation == "least_squares" or (isinstance(pruner, SequentialPruner) and pruner.needs_second)


def _check_options(options: PruneOptions, pruner: Pruner, channel_pruner: Pruner, model_map: ModelMap) -> None:
    """Raise `InputError` for resolved options that do not suit each other, the methods or the model."""
    if options.budget != "heads":
        _check_budget_of_parameters(options, model_map)
    else:
        _check_budget_of_heads(options, pruner, channel_pruner)
    if isinstance(pruner, SequentialPruner):
        _check_sequential(options, pruner)
    if not options.ratio and not options.ffn_ratio:
        raise InputError(
            "the options remove nothing; give --ratio (of the parameters), or --budget heads with --ratio (heads), "
            "--ffn_ratio (channels) or both, e.g. 0.25"
        )
    if options.ratio and HEADS in options.kinds:
        check_unit(model_map, options.unit or "head")
    if CHANNELS in options.kinds and not model_map.channels():
        raise InputError(f"this {model_map.model_type} model has no dense feed-forward blocks; leave out ffn_ratio")
    if options.allocation == COMPOSITION:
        _check_composition(options, model_map)
    elif set(options.kinds) & {*DEPTH_KINDS}:
        _check_depth(options, model_map)


def _check_budget_of_heads(options: PruneOptions, *pruners: Pruner) -> None:
    if isinstance(pruners[0], SequentialPruner):
        raise InputError(
            f"{pruner_name(pruners[0])} counts parameters; give --budget parameters, or leave out --budget"
        )
    if REFERENCE in {options.allocation or pruner.allocation for pruner in pruners}:
        raise InputError(
            f"flap with reference=true allocates by {REFERENCE}, which counts parameters; leave out --budget heads, "
            f"or give --allocation global or uniform"
        )


def _check_budget_of_parameters(options: PruneOptions, model_map: ModelMap) -> None:
    if options.ffn_ratio or (options.ffn_multiple != 1 and options.allocation != COMPOSITION):
        raise InputError(
            "--ratio is one share of the parameters of heads and channels together; leave out ffn_ratio and "
            "ffn_multiple, or give --budget heads, with which ratio counts heads and ffn_ratio channels"
        )
    if options.unit == "head" and HEADS in options.kinds and _has_groups(model_map):
        raise InputError(
            "a single head of a group has no share of the parameters, because its keys and values are removed with "
            "the last head of the group; give --unit group, or --budget heads"
        )


def _check_composition(options: PruneOptions, model_map: ModelMap) -> None:
    if reason := model_map.why_no_depth:
        raise InputError(f"blocks cannot be left out of this {model_map.model_type} model: {reason}")
    if not {*options.kinds} <= {*KINDS}:
        raise InputError("a composition chooses heads, channels and blocks; give --parts both, heads or channels")
    if options.costs:
        check_costs(model_map, options)


def _check_depth(options: PruneOptions, model_map: ModelMap) -> None:
    if reason := model_map.why_no_depth:
        raise InputError(f"blocks cannot be left out of this {model_map.model_type} model: {reason}")
    if options.allocation != "global":
        raise InputError(
            f"whole layers and blocks are compared over the model; leave out allocation={options.allocation}"
        )
    if options.compensation != "none":
        raise InputError(f"compensation={options.compensation} is for heads and channels; leave it out, or --parts")


def _check_sequential(options: PruneOptions, pruner: SequentialPruner) -> None:
    pruner.check([kind for kind in options.kinds if kind in DEPTH_KINDS], has_text=True)
    name = pruner_name(pruner)
    if options.steps > 1:
        raise InputError(f"{name} goes through the layers once; leave out --steps")
    if options.allocation not in ("uniform", "log"):
        raise InputError(f"{name} has scores of one layer at a time; use allocation uniform or log")
    if options.unit == "balanced":
        raise InputError(f"{name} removes heads or groups; use unit head or group")


def _default_parts(options: PruneOptions, pruner: Pruner, channel_pruner: Pruner, model_map: ModelMap) -> str:
    """Return the parts that a budget of parameters removes from."""
    default = "both" if channel_pruner is not pruner else HEADS if pruner.heads_only else pruner.parts
    parts = options.parts or default
    return HEADS if parts == "both" and not model_map.channels() else parts


def _default_unit(model_map: ModelMap, budget: str, pruner: Pruner) -> Unit:
    """Return `head`, or for a budget of parameters the unit that can be cut."""
    return "head" if budget == "heads" else cuttable_unit(model_map, pruner)


def cuttable_unit(model_map: ModelMap, pruner: Pruner) -> Unit:
    """Return the unit in which heads can be cut without fillers; `head` if they cannot be cut."""
    if uncuttable(model_map):
        return "head"
    have_groups = ["group" in units_of(layer) for layer in model_map.attention]
    if all(have_groups) or (any(have_groups) and isinstance(pruner, SequentialPruner)):  # which has no balanced heads
        return "group"
    return "balanced" if _has_groups(model_map) else "head"  # some layers of a cut model may have a single group


def _has_groups(model_map: ModelMap) -> bool:
    """Return whether query heads share key-value heads (but not all of them a single one) and can be cut with them."""
    return any(1 < layer.kv_heads < layer.heads for layer in model_map.attention) and not uncuttable(model_map)


def check_methods(
    pruner: Pruner,
    channel_pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    has_text: bool,
    scores: Mapping[str, Tensor] = NO_SCORES,
) -> None:
    """Raise `InputError` if the methods cannot make a plan with resolved options; the model may have no weights."""
    pruners = pruners_by_kind(pruner, channel_pruner, options)
    if any(isinstance(method, SequentialPruner) for method in (pruner, channel_pruner)):
        if channel_pruner is not pruner:
            raise InputError("a method that prunes layer by layer scores heads and channels; leave out ffn_method")
        if scores:
            raise InputError(f"{pruner_name(pruner)} scores a layer after earlier ones are pruned; leave out --scores")
    for kind in scored_kinds(options):
        if options.steps > 1 or not has_scores_of(scores, kind):
            scorer = pruners.get(kind, pruner)
            try:
                scorer.check([kind], has_text)
                scorer.check_model(model_map)
            except InputError as error:
                if options.allocation == COMPOSITION and kind in DEPTH_KINDS:
                    raise InputError(f"depth_method={options.depth_method}: {error}") from None
                raise
    if options.compensation != "none":
        name = f"compensation={options.compensation}"
        check_not_quantised(model_map, name)
        if options.compensation == "least_squares":
            check_layerwise(model_map, name)
        if not has_text:
            raise InputError(f"{name} needs a text; give --task NAME or --text FILE")
    if options.allocation == COMPOSITION:  # removes any share
        return
    count = most_units(pruners, model_map, options)
    if not count:
        raise _nothing_removed(pruners, model_map, options)
    if count < options.steps:
        parts = " or ".join(options.kinds).replace("_", "-")
        raise InputError(
            f"steps={options.steps} are more than the units ({parts}) that the ratio removes, at most {count}; give "
            f"--steps {count} or fewer"
        )


def most_units(pruners: Mapping[str, Pruner], model_map: ModelMap, options: PruneOptions) -> int:
    """Return how many units all steps remove at most; 0: no scores remove a unit."""
    at_once = replace(options, steps=1, p_min=0.0, growth=1.0)
    return next(smallest_removal(model_map, at_once, pruners)).most


def _nothing_removed(pruners: Mapping[str, Pruner], model_map: ModelMap, options: PruneOptions) -> InputError:
    """Return the error for a plan that removes nothing, with the settings that would help."""

    def helps(**changes: Any) -> bool:
        try:
            changed = resolve_options(replace(options, **changes), pruners[HEADS], model_map, pruners[CHANNELS])
            return changed.allocation == COMPOSITION or most_units(pruners, model_map, changed) > 0
        except InputError:
            return False

    units = [unit for unit in UNITS if HEADS in options.kinds and unit != options.unit]
    by_layer = {options.allocation or pruner.allocation for pruner in pruners.values()} != {"global"}
    remedies = {
        "a larger --ratio": bool(options.ratio),
        **{f"--unit {unit}": helps(unit=unit) for unit in units},
        "a larger --ffn_ratio": bool(options.ffn_ratio),
        "a smaller --ffn_multiple": options.ffn_multiple > 1 and helps(ffn_multiple=1),
        "--allocation global": by_layer and helps(allocation="global"),
    }
    advice = " or ".join(remedy for remedy, works in remedies.items() if works)
    return InputError(
        f"nothing would be removed: the share is less than one unit of a layer or the model; give {advice}"
    )
