"""Make plans by the schedule of dynamic pruning (its eq. 5 and Algorithm 1): each step removes more by new scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lmeval_prune.architectures import ModelMap, config_fingerprint, uncuttable
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.architectures.precision import fast_products
from lmeval_prune.artefacts import Work, digest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import allocate, parameter_counts, removed_by, standardised, unit_pools
from lmeval_prune.pruners.base import Pruner, Scores, per_member, pruner_name, score
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.moments import Moments, bias_for, input_moments
from lmeval_prune.pruners.options import PruneOptions, Unit
from lmeval_prune.pruners.parts import (
    CHANNELS,
    HEADS,
    KINDS,
    DepthPart,
    Part,
    Removed,
    count_removed,
    depth_parts_of,
    make_plan,
    parts_of,
)
from lmeval_prune.pruners.sequential import LayerwisePruning, SequentialPruner, check_layerwise

Progress = Callable[[str], None]
Renew = Callable[[int], CalibrationText | None]
NO_SCORES: Mapping[str, Tensor] = {}
NOTHING = "nothing would be removed; raise --ratio"


class EmptyPlanError(InputError):
    """No step removes a unit."""


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

    A step that removes no further unit has no plan.

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
        renew: called after each plan but the last, with the number of the next one and the plan applied; returns the
            text of the following steps, or None if the text stays.
    """
    channel_pruner = channel_pruner or pruner
    options = resolve_options(options, pruner, model_map, channel_pruner, text is not None, scores)
    record = {**pruner.identity, "removes": str(options), "options": asdict(options)}
    if options.ffn_ratio or channel_pruner is not pruner:
        record |= {"ffn_method": pruner_name(channel_pruner), "ffn_options": asdict(channel_pruner)}
    if text is not None:
        record["calibration"] = text.record()
    store = work_of(work, record, model_map) if work and text else None
    if isinstance(pruner, SequentialPruner) and text:
        with fast_products():
            plan = _layerwise_plan(pruner, model_map, options, text, record, progress, store)
        yield plan
        return
    pruners = {kind: channel_pruner if kind == CHANNELS else pruner for kind in options.kinds}
    solves = options.compensation == "least_squares"
    removed, scored, compensation, history = Removed(), Scores({}), dict[str, Tensor](), list[dict[str, Any]]()
    for step in range(1, options.steps + 1):
        earlier = make_plan(removed, options.allow_empty_layer, compensation=compensation)
        stored, renewed = NO_SCORES if history else scores, None
        if renew and history:
            with earlier.applied_to(model_map.model, model_map):
                renewed = renew(len(history) + 1)
            text = text if renewed is None else renewed
        missing = {kind: method for kind, method in pruners.items() if not has_scores_of(stored, kind)}
        for kind in missing:
            progress(f"step {step} of {options.steps}: scoring {kind.replace('_', '-')}")
        with fast_products():
            found = _score(missing, model_map, text, removed, earlier, store)
        found = replace(found, values={**stored, **found.values})
        shares = dict(zip(("ratio", "ffn_ratio"), options.shares(step), strict=True))
        budgets = [(options.kinds, shares["ratio"], str(options.allocation))]
        if options.budget == "heads":
            ratios = dict(zip(KINDS, shares.values(), strict=True))
            budgets = [((x,), ratios[x], options.allocation or pruners[x].allocation) for x in options.kinds]
        after, notes = removed, dict[str, Any]()
        for kinds, ratio, allocation in budgets:
            pools = unit_pools(model_map, options, kinds, standardised(found.values, after, allocation), after)
            counts = allocate(pools, options, ratio, allocation)
            after = removed_by(pools, counts, after)
            if options.budget == "parameters":
                notes["parameters"] = parameter_counts(pools, counts)
            else:
                notes["head_allocation" if kinds == (HEADS,) else "ffn_allocation"] = allocation
        is_last = step == options.steps
        if after != removed:
            removed, scored = after, found
            calibration = {} if renewed is None else {"calibration": renewed.record()}
            history.append({"step": step, **shares, **count_removed(removed), **calibration})
            record |= notes
        elif not (history and is_last and solves):
            continue
        # later steps score the original weights, so least squares replaces them after the last one
        notes = {}
        if options.compensation != "none" and text and (not solves or is_last):
            with fast_products():
                means = scored.means if len(history) == 1 else None
                added, notes = _compensation(model_map, removed, text, options, means, progress)
            compensation = {**compensation, **added}
        values = {key: per_member(columns) for key, columns in scored.values.items()}
        provenance = {**record, **notes, "stages": list(history)}
        yield make_plan(
            removed, options.allow_empty_layer, compensation=compensation, scores=values, provenance=provenance
        )
    if not history:
        raise EmptyPlanError(NOTHING)


def has_scores_of(scores: Mapping[str, Tensor], kind: str) -> bool:
    return any(key.startswith(f"{kind}.") for key in scores)


def work_of(folder: Path, record: Mapping[str, Any], model_map: ModelMap) -> Work:
    """Return the folder of what is finished of a plan; that of another plan or model is deleted."""
    model = [model_map.weights, config_fingerprint(model_map.model.config), model_map.signature()]
    work = Work(folder, {"record": record, "model": model}, restart=True)
    work.begin()
    return work


def _score(
    pruners: Mapping[str, Pruner],
    model_map: ModelMap,
    text: CalibrationText | None,
    removed: Removed,
    earlier: Plan,
    store: Work | None,
) -> Scores:
    """Score kinds by their pruners under the `earlier` steps, those of equal pruners in one call.

    `store` has the scores of a killed run, and gets those that are computed.
    """
    values, means = dict[str, Tensor](), dict[str, Tensor]()
    methods = [*pruners.values()]
    for number, pruner in enumerate(methods):
        if pruner in methods[:number]:
            continue
        kinds = [kind for kind, method in pruners.items() if method == pruner]
        name, tensors = "", None
        if store and text:
            read = [text.record(), *(list(batch.ids.shape) for batch in text.batches)]
            members = {key: sorted(numbers) for key, numbers in removed.items() if numbers}
            name = f"{'-'.join(kinds)}-{digest([pruner.identity, read, members])}"
            tensors, text = store.tensors(name), replace(text, work=Work(store.folder / name, {}, restart=True))
        if tensors is None:
            parts: list[Part | DepthPart] = [*parts_of(model_map, kinds), *depth_parts_of(model_map, kinds)]
            with nullcontext() if pruner.compares_with_unpruned else earlier.applied_to(model_map.model, model_map):
                found = score(pruner, model_map, text, parts, removed)
            tensors = {f"values.{key}": x for key, x in found.values.items()}
            tensors |= {f"means.{key}": x for key, x in (found.means or {}).items()}
            if store:
                store.write_tensors(name, tensors)
        for key, tensor in tensors.items():
            (values if key.startswith("values.") else means)[key.partition(".")[2]] = tensor
    return Scores(values, means or None)


def _compensation(
    model_map: ModelMap,
    removed: Removed,
    text: CalibrationText,
    options: PruneOptions,
    means: Mapping[str, Tensor] | None,
    progress: Progress,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the compensation for removed units, and notes on it for the plan; `means`: mean inputs, if known."""
    parts = [part for part in parts_of(model_map) if removed.get(part.key)]
    if options.compensation == "least_squares":
        progress("computing the least-squares compensation, layer by layer")
        pruning = LayerwisePruning(
            model_map, text, lambda part, *_: removed[part.key], True, True, options, progress=progress
        )
        removal, notes = pruning.run(parts)
        return removal.compensation, notes
    if means is None or not {part.key for part in parts} <= means.keys():
        progress("measuring the mean inputs of projections")
        moments = input_moments(model_map, text, parts_of(model_map, {part.kind for part in parts}))
        means = {key: statistics.mean for key, statistics in moments.items()}
    biases = {}
    for part in parts:
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
    store: Work | None,
) -> Plan:
    pools = unit_pools(model_map, options, options.kinds)
    counts = allocate(pools, options, options.shares(1)[0], str(options.allocation))
    if not any(counts):
        raise EmptyPlanError(NOTHING)
    by_part = {pool.key: count for pool, count in zip(pools, counts, strict=True)}

    def select(part: Part, moments: Moments, second: Tensor | None) -> set[int]:
        units = part.units(options.unit or "head")
        columns = [tuple(part.columns(members)) for members in units]
        selected = pruner.select(part.weight, moments, second, columns, by_part[part.key])
        return {member for number in selected for member in units[number]}

    pruning = LayerwisePruning(
        model_map, text, select, pruner.needs_second, pruner.remeasure_down, options, store, progress
    )
    removal, notes = pruning.run([part for part in parts_of(model_map) if part.key in by_part])
    stage = {"step": 1, "ratio": options.ratio, **count_removed(removal.removed)}
    provenance = {**record, "parameters": parameter_counts(pools, counts), **notes, "stages": [stage]}
    return make_plan(
        removal.removed, options.allow_empty_layer, compensation=removal.compensation, provenance=provenance
    )


def resolve_options(
    options: PruneOptions,
    pruner: Pruner,
    model_map: ModelMap,
    channel_pruner: Pruner | None = None,
    has_text: bool = True,
    scores: Mapping[str, Tensor] = NO_SCORES,
) -> PruneOptions:
    """Fill in options that depend on the methods and the model, which may have no weights.

    Raises:
        InputError: the options remove nothing, or ask the methods or the model for what they lack.
    """
    if not options.ratio and not options.ffn_ratio:
        raise EmptyPlanError(NOTHING)
    channel_pruner, counts_parameters = channel_pruner or pruner, options.budget != "heads"
    has_groups = any(1 < x.kv_heads < x.heads for x in model_map.attention) and not uncuttable(model_map)
    if counts_parameters:
        parts: Any = options.parts or (pruner.parts if channel_pruner is pruner else "both")
        parts = HEADS if parts == "both" and not model_map.channels() else parts
        options = replace(options, parts=parts)
    has_width, unit = {*options.kinds} <= {*KINDS}, options.unit
    if unit is None and HEADS in options.kinds:
        unit = cuttable_unit(model_map, pruner) if counts_parameters else "head"
    allocation: Any = (pruner.allocation if has_width else "global") if counts_parameters else None
    compensation: Any = options.compensation or (pruner.compensates if has_width else "none")
    options = replace(options, unit=unit, allocation=options.allocation or allocation, compensation=compensation)

    if any(isinstance(method, SequentialPruner) for method in (pruner, channel_pruner)) and (
        pruner is not channel_pruner
        or scores
        or options.steps > 1
        or not counts_parameters
        or unit == "balanced"
        or options.allocation not in ("uniform", "log")
    ):
        others = "--steps, --scores, --ffn_method, --budget heads, balanced units or global allocation"
        raise InputError(f"a method that prunes layer by layer takes no {others}")
    if counts_parameters and unit == "head" and HEADS in options.kinds and has_groups:
        raise InputError("a single head of a group has no share of the parameters; give --unit group or --budget heads")
    for kind in options.kinds:
        if options.steps > 1 or not has_scores_of(scores, kind):
            (channel_pruner if kind == CHANNELS else pruner).check(model_map, [kind], has_text)
    if compensation == "least_squares":
        check_layerwise(model_map, "compensation=least_squares")
    if compensation != "none" and not has_text:
        raise InputError(f"compensation={compensation} needs a text; give --task NAME or --text FILE")
    return options


def cuttable_unit(model_map: ModelMap, pruner: Pruner) -> Unit:
    """Return the unit in which heads have a share of the parameters and can be cut."""
    if uncuttable(model_map):
        return "head"
    have_groups = [layer.kv_heads > 1 or layer.heads == 1 for layer in model_map.attention]
    if all(have_groups) or (any(have_groups) and isinstance(pruner, SequentialPruner)):  # which has no balanced heads
        return "group"
    # some layers of a cut model may have a single group
    return "balanced" if any(1 < x.kv_heads < x.heads for x in model_map.attention) else "head"
