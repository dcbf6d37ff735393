"""`lmeval-prune importance`, `prune` and `cut`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.options import as_options
from lmeval_prune.pruners.options import PruneOptions, PruneSettings, TextOptions, pick
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.settings import resolve_device


def naming_methods(command: Callable[..., int]) -> Callable[..., int]:
    """Write the names of the pruners into a command's help, where it says METHODS."""
    *names, last = PRUNERS
    command.__doc__ = (command.__doc__ or "").replace("METHODS", f"{', '.join(names)} or {last}")
    return command


@naming_methods
def importance(
    pretrained: str,
    output: str,
    method: str = "norm_entropy",
    options: dict[str, Any] | None = None,
    channels: bool = False,
    revision: str | None = None,
    device: str | None = None,
    **text: Any,
) -> int:
    """Score the heads of a model, and draw the scores layer by layer.

    Args:
        pretrained: model, as for lm_eval, or one that was cut
        output: path of the artefact, a JSON file: a plan that removes nothing, and scores; its picture is beside it
        method: METHODS
        options: of the method, e.g. alpha=0.5,entropy=raw
        channels: score feed-forward channels, too
        revision: of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    reading = TextOptions(**text)
    _check_paths(output, reading)  # before torch is imported
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.pruners.base import by_member, make_pruner
    from lmeval_prune.pruners.parts import HEADS, KINDS, parts_of
    from lmeval_prune.reporting.maps import draw_head_scores

    pruner, target = make_pruner(method, options or {}), resolve_device(device)
    kinds = KINDS if channels else (HEADS,)
    check_writable(output)
    pruner.check(kinds, reading.is_named)
    bare = skeleton_of(pretrained, revision)
    pruner.check_model(map_model(bare))
    calibration = _calibration(bare, pretrained, revision, reading) if pruner.reads_text else None
    model_map = _loaded(bare, pretrained, revision, target)
    scores = pruner.scores(model_map, calibration, parts_of(model_map, kinds), {}).values
    made = {**pruner.identity, **({"calibration": calibration.about()} if calibration else {})}
    Plan(scores=scores, made=made).save(output, model_map)
    heads: dict[str, Any] = {layer.label: by_member(scores[f"{HEADS}.{layer.label}"]) for layer in model_map.attention}
    draw_head_scores(heads, f"{method} of {model_map.name}", Path(output).with_suffix(""))
    ranked = sorted((float(x), f"{label}H{n}") for label, values in heads.items() for n, x in enumerate(values))
    print(f"{output} and its picture: {len(ranked)} heads of {model_map.name} by {method}")
    print("lowest: " + ", ".join(f"{name} {score:.3f}" for score, name in ranked[:6]))
    print("highest: " + ", ".join(f"{name} {score:.3f}" for score, name in ranked[:-7:-1]))
    return 0


@naming_methods
def prune(
    pretrained: str,
    output: str,
    method: str | None = None,
    options: dict[str, Any] | None = None,
    ffn_method: str | None = None,
    ffn_options: dict[str, Any] | None = None,
    scores: str | None = None,
    cut: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    **settings: Any,
) -> int:
    """Make a plan of what a model loses for good; with `--cut`, the smaller checkpoint, too.

    Args:
        pretrained: model, as for lm_eval, or one that was cut
        output: path of the plan, a JSON file; what stands there is replaced
        method: METHODS; default: norm_entropy
        options: of the method, e.g. alpha=0.5,entropy=raw
        ffn_method: scores channels (default: the same)
        ffn_options: of that method, e.g. seed=1
        scores: an artefact of `importance`, instead of scoring again; method and options are its own, and no others
            are taken. Channels are scored by ffn_method all the same, if that is given
        cut: folder for the smaller checkpoint
        revision: of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    both = PruneSettings(**settings)  # a wrong one is refused before torch is imported
    reading, pruning = pick(TextOptions, both), pick(PruneOptions, both)
    _check_paths(output, reading)
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.pruners.schedule import check_methods, settled, stages
    from lmeval_prune.surgery.cut import cut_to

    target = resolve_device(device)
    artefact, pruner, channel_pruner = _methods(scores, pruning, method, options, ffn_method, ffn_options)
    known = dict(artefact.scores) if artefact else {}
    if ffn_method:  # it scores the channels
        known = {key: values for key, values in known.items() if key.startswith("heads.")}
    bare = skeleton_of(pretrained, revision)
    bare_map = map_model(bare)
    pruning = settled(pruning, pruner, bare_map, channel_pruner)
    if artefact and not ffn_method:
        _check_channels(str(scores), known, pruning)
    check_methods(pruner, channel_pruner, bare_map, pruning, reading.is_named, known)
    if cut:
        _check_cut(cut, output, pretrained, bare_map, pruning)
    check_writable(output)
    uses = _uses_of_text(pruning, pruner, channel_pruner, known)
    if scores and reading.is_named and not uses:
        raise InputError(f"the scores are those of {scores}, and no text is read; leave out --task and --text")
    calibration = _calibration(bare, pretrained, revision, reading) if uses else None
    model_map = _loaded(bare, pretrained, revision, target)
    if artefact:
        artefact.fit_to(model_map)
    work = Path(output).with_name(f".{Path(output).name}.layers")
    progress = partial(print, flush=True)
    *_, plan = stages(pruner, model_map, pruning, calibration, channel_pruner, known, progress, work)
    if artefact:
        plan = replace(plan, made=_made_by_both(plan.made, artefact.made, known, uses, calibration))
    plan.save(output, model_map)
    rmtree(work, ignore_errors=True)  # what was kept of layers while it was made
    _print_plan(output, plan, model_map, pruning, channel_pruner)
    if cut:
        _print_cut(cut, cut_to(cut, model_map.model, plan, tokenizer_of(pretrained, revision)))
    return 0


def execute(
    pretrained: str,
    plan: str,
    output: str,
    revision: str | None = None,
    allow_empty_layer: bool = False,
    allow_other_model: bool = False,
) -> int:
    """Execute a plan: write the smaller checkpoint.

    Args:
        pretrained: the model that the plan was made for
        plan: the plan, or a mask
        output: folder for the checkpoint; an earlier one of ours there is replaced when the new one is whole
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a plan of another model, if it fits
    """
    from lmeval_prune.interventions.plan import load_plan

    with as_options():
        write_cut(pretrained, load_plan(plan, allow_other_model, allow_empty_layer), output, revision)
        return 0


def write_cut(pretrained: str, plan: Any, output: str, revision: str | None = None, keep_shapes: bool = False) -> Any:
    """Cut a model by a plan, write its checkpoint, and print what was done.

    Args:
        pretrained, revision: the model, as for lm_eval.
        plan: the plan.
        output: folder for the checkpoint.
        keep_shapes: as of `cut`.

    Raises:
        InputError: as of `cut_to`; before weights are loaded, where it can be.
    """
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.pruned import check_folder
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.surgery.cut import cut_checkpoint

    check_folder(output, [pretrained])
    check_writable(output, folder=True)
    smaller = cut_checkpoint(pretrained, plan, revision, keep_shapes)
    smaller.save(output, tokenizer_of(pretrained, revision))
    _print_cut(output, smaller)
    return smaller


def _check_paths(output: str, reading: TextOptions) -> None:
    if not output.endswith(".json"):
        raise InputError(f"--output {output} must end in .json, so that heads= and plan= tell it from names of heads")
    if reading.text and not Path(reading.text).exists():
        raise InputError(f"no such file: {reading.text}")


def _check_cut(cut: str, output: str, pretrained: str, bare_map: Any, pruning: PruneOptions) -> None:
    """Refuse a folder or a model that cannot be cut, and a plan's path in that folder, which is replaced as a whole."""
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.pruned import check_folder
    from lmeval_prune.checkpoints.skeleton import check_plain
    from lmeval_prune.surgery.cut import check_cuttable

    if Path(output).resolve().is_relative_to(Path(cut).resolve()):
        raise InputError(f"--output {output} is in --cut {cut}, which gets a copy of the plan; write it elsewhere")
    check_folder(cut, [pretrained])
    check_writable(cut, folder=True)
    check_cuttable(bare_map, "heads" in pruning.kinds)
    check_plain(bare_map.model, pretrained)


def _calibration(bare: Any, pretrained: str, revision: str | None, reading: TextOptions) -> Any:
    """Read the calibration text of a model."""
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.pruners.calibration import check_length, read_calibration

    check_length(bare, reading.tokens)
    tokenizer = tokenizer_of(pretrained, revision, reading.add_bos_token)
    if tokenizer is None:
        raise InputError(f"{pretrained} has no tokenizer, which calibration text needs")
    return read_calibration(tokenizer, **vars(reading))


def _loaded(bare: Any, pretrained: str, revision: str | None, device: Any) -> Any:
    """Load a model's weights onto a device, and map it."""
    import torch

    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import with_weights

    model = with_weights(bare, pretrained, revision)
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        raise InputError(f"{pretrained} does not fit into the memory of {device}; give --device cpu") from None
    return map_model(model)


def _methods(
    scores: str | None,
    pruning: PruneOptions,
    method: str | None,
    options: dict[str, Any] | None,
    ffn_method: str | None,
    ffn_options: dict[str, Any] | None,
) -> tuple[Any, Any, Any]:
    """Return the artefact with scores, if there is one, and the pruners of heads and of channels."""
    from lmeval_prune.pruners.base import make_pruner

    if ffn_options and not ffn_method:
        raise InputError("ffn_options are those of a method for channels; give --ffn_method, too")
    if method:
        make_pruner(method, options or {})
    artefact = _scored_plan(scores, pruning) if scores else None
    if artefact and artefact.made.get("method") in PRUNERS:
        method, options = _method_of(str(scores), artefact.made, method, options)
    pruner = make_pruner(method or "norm_entropy", options or {})
    return artefact, pruner, make_pruner(ffn_method, ffn_options or {}) if ffn_method else pruner


def _scored_plan(path: str, pruning: PruneOptions) -> Any:
    """Read an artefact with scores of a whole model."""
    from lmeval_prune.interventions.plan import Plan

    plan = Plan.load(path)
    if not plan.scores:
        raise InputError(f"{path} has no scores; make one with `lmeval-prune importance`")
    if plan.made.get("options", {}).get("steps", 1) > 1:
        raise InputError(f"{path} has scores of what several steps left; make one with `lmeval-prune importance`")
    if pruning.steps > 1:
        raise InputError("scores=FILE serves a single step; leave it out, or --steps")
    return plan


def _check_channels(path: str, known: Mapping[str, Any], pruning: PruneOptions) -> None:
    from lmeval_prune.pruners.schedule import has_kind

    if "channels" in pruning.kinds and not has_kind(known, "channels"):
        raise InputError(
            f"{path} has no scores of channels; give --parts heads, --ffn_method, which then scores them, or those "
            f"of `lmeval-prune importance --channels`"
        )


def _method_of(
    path: str, made: Mapping[str, Any], method: str | None, options: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Return the method that an artefact was made by, and its options; refuse another method or other options."""
    from lmeval_prune.pruners.base import make_pruner, pruner_class

    known = {each.name: made[each.name] for each in fields(pruner_class(made["method"])) if each.name in made}
    same = make_pruner(made["method"], {**known, **(options or {})}) == make_pruner(made["method"], known)
    if method not in (None, made["method"]) or not same:
        raise InputError(
            f"{path} has scores of {made['method']} with its own options; leave out --method and --options, or --scores"
        )
    return made["method"], known


def _uses_of_text(pruning: PruneOptions, pruner: Any, channel_pruner: Any, known: Mapping[str, Any]) -> list[str]:
    """Return for what a calibration text is read, by what a plan calls it."""
    from lmeval_prune.pruners.schedule import has_kind

    scored = {"calibration": ("heads", pruner), "ffn_calibration": ("channels", channel_pruner)}
    uses = [
        name
        for name, (kind, method) in scored.items()
        if method.reads_text and kind in pruning.kinds and not has_kind(known, kind)
    ]
    return [*uses, "compensation_calibration"] if pruning.compensation != "none" else uses


def _made_by_both(
    made: Mapping[str, Any],
    earlier: Mapping[str, Any],
    known: Mapping[str, Any],
    uses: Sequence[str],
    calibration: Any,
) -> dict[str, Any]:
    """Return what made a plan by scores at hand: each text by what it was read for."""
    from lmeval_prune.pruners.schedule import has_kind

    made = {name: value for name, value in made.items() if name != "calibration"}
    if "calibration" in earlier:
        if has_kind(known, "heads"):
            made["calibration"] = earlier["calibration"]
        elif has_kind(known, "channels"):
            made["ffn_calibration"] = earlier["calibration"]
    return made | {name: calibration.about() for name in uses}


def _print_plan(output: str, plan: Any, model_map: Any, pruning: PruneOptions, channel_pruner: Any) -> None:
    """Print the removed units, and where whole units are less than the requested share."""
    from lmeval_prune.pruners.base import pruner_name

    report = plan.report(model_map)["plan"]
    counts = [f"{report['heads_pruned']} of {report['heads_total']} heads"]
    if report["kv_heads_pruned"]:
        counts.append(f"{report['kv_heads_pruned']} of {report['kv_heads_total']} key-value heads")
    if report["channels_pruned"]:
        counts.append(f"{report['channels_pruned']} of {report['channels_total']} channels")
    spent = plan.made.get("parameters")
    share = f", {spent['removed'] / spent['removable']:.2%} of what can be removed" if spent else ""
    extension = ""
    if channel_pruner.parts != "both" and "channels" in pruning.kinds:
        extension = f" (scores of channels by {pruner_name(channel_pruner)} are an extension of ours, not the paper's)"
    gone = f"{', '.join(counts)} of {model_map.name} go{share}; asked for: {plan.made['removes']}"
    print(f"{output}: {gone}{extension}")
    for name, kind, ratio in (("ratio", "heads", pruning.ratio), ("ffn_ratio", "channels", pruning.ffn_ratio)):
        share = f"{report[f'{kind}_pruned'] / max(1, report[f'{kind}_total']):.1%}"
        if pruning.budget == "heads" and share != f"{ratio:.1%}":
            print(f"  {share} of the {kind}: less than --{name} {ratio:g}, as only whole units are removed")


def _print_cut(folder: str, cut: Any) -> None:
    from lmeval_prune.profiling.costs import parameters

    (after, after_without), (before, before_without) = parameters(cut.model), parameters(cut.parent.model)
    print(f"{folder}: {type(cut.model).__name__}, {after / 1e6:.2f} of {before / 1e6:.2f} million parameters")
    print(f"  {1 - after / before:.2%} fewer in all, {1 - after_without / before_without:.2%} fewer without embeddings")
    for note in cut.manifest["notes"]:
        print(f"  {note}")
