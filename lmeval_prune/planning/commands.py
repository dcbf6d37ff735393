"""Commands `lmeval-prune importance`, `prune` and `cut`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from lmeval_prune.config import command, resolve_device
from lmeval_prune.errors import InputError, check_exists
from lmeval_prune.pruners.options import PruneOptions, PruneSettings, TextOptions, pick
from lmeval_prune.pruners.table import PRUNERS

DEFAULT = "flap"  # of `prune`: unlike slimgpt it suits short texts, and reads them once


def with_method_names(command: Callable[..., int]) -> Callable[..., int]:
    """Replace METHODS in a command's help by the names of the pruners."""
    *names, last = PRUNERS
    command.__doc__ = (command.__doc__ or "").replace("METHODS", f"{', '.join(names)} or {last}")
    return command


@command(takes_tasks=True)
@with_method_names
def importance(
    pretrained: str,
    output: str,
    method: str = "norm_entropy",
    options: dict[str, Any] | None = None,
    channels: bool = False,
    revision: str | None = None,
    device: str | None = None,
    **calibration_options: Any,
) -> int:
    """Score the heads, or the layers and blocks, of a model, and draw the scores layer by layer.

    Args:
        pretrained: model, as for lm_eval, or a cut checkpoint
        output: JSON file for the scores: a plan that removes nothing and stores the scores; a picture is written
            beside it
        method: METHODS
        options: options of the method, e.g. alpha=0.5,entropy=raw
        channels: also score feed-forward channels
        revision: revision of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    text_options = TextOptions(**calibration_options)  # refuses mistakes before torch is imported
    if text_options.text:
        check_exists(text_options.text)
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.skeleton import skeleton_of, with_weights
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.pruners.base import check_scores, make_pruner, per_member
    from lmeval_prune.pruners.estimate import Estimate
    from lmeval_prune.pruners.parts import DEPTH_KINDS, HEADS, KINDS, Removal, depth_parts_of, parts_of
    from lmeval_prune.pruners.schedule import work_of
    from lmeval_prune.pruners.stores import sums
    from lmeval_prune.reporting.plot_style import draw_scores

    pruner, torch_device = make_pruner(method, options or {}), resolve_device(device)
    kinds = DEPTH_KINDS if pruner.depth_only else KINDS if channels else (HEADS,)
    check_writable(output)
    pruner.check(kinds, text_options.has_text)
    skeleton = skeleton_of(pretrained, revision)
    pruner.check_model(map_model(skeleton))
    text = _calibration(skeleton, pretrained, revision, text_options, output) if pruner.reads_text else None
    model_map = map_model(with_weights(skeleton, pretrained, revision).to(torch_device))
    calibration = text.of(model_map.model) if text else None
    read = replace(calibration, report=Estimate("scoring", partial(print, flush=True))) if calibration else None
    rows: dict[str, list[float]]
    if pruner.depth_only:
        depth, known = depth_parts_of(model_map), None
        if calibration:
            record = {**pruner.identity, "calibration": calibration.record()}
            known = sums(work_of(_work_folder(output), record, model_map), "scores")
        scores = check_scores(pruner, pruner.depth_scores(model_map, read, depth, Removal(), known), depth).values
        shown = [kind for kind in DEPTH_KINDS if any(key.startswith(f"{kind}.") for key in scores)]
        labels = dict.fromkeys(key.partition(".")[2] for key in scores)
        rows = {x: [float(scores.get(f"{kind}.{x}", float("nan"))) for kind in shown] for x in labels}
        columns, scored = [kind.replace("_", "-") for kind in shown], "layers and blocks"
        ranked = sorted((float(x), key.replace(".", " ", 1).replace("_", "-")) for key, x in scores.items())
    else:
        parts = parts_of(model_map, kinds)
        scores = check_scores(pruner, pruner.scores(model_map, read, parts, {}), parts).values
        rows = {layer.label: per_member(scores[f"{HEADS}.{layer.label}"]).tolist() for layer in model_map.attention}
        columns, scored = None, "heads"
        ranked = sorted((x, f"{label}H{n}") for label, values in rows.items() for n, x in enumerate(values))
    calibrated = {"calibration": calibration.record()} if calibration else {}
    Plan(scores=scores, provenance={**pruner.identity, **calibrated}).save(output, model_map)
    rmtree(_work_folder(output), ignore_errors=True)
    draw_scores(rows, f"{method} of {model_map.name}", Path(output).with_suffix(""), columns)
    print(f"{output} and its picture: {len(ranked)} {scored} of {model_map.name} by {method}")
    print("lowest: " + ", ".join(f"{name} {score:.3f}" for score, name in ranked[:6]))
    print("highest: " + ", ".join(f"{name} {score:.3f}" for score, name in ranked[:-7:-1]))
    return 0


@command(takes_tasks=True)
@with_method_names
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
    """Plan what a model loses permanently; with `--cut`, also write the smaller checkpoint.

    Args:
        pretrained: model, as for lm_eval, or a cut checkpoint
        output: path of the plan, a JSON file
        method: METHODS; default: flap, which needs --task or --text
        options: options of the method, e.g. alpha=0.5,entropy=raw
        ffn_method: method that scores channels; default: the same method
        ffn_options: options of that method, e.g. seed=1
        scores: output of `importance`: its scores are used, not computed again. Another method and other options than
            the stored ones are refused. With ffn_method, only the scores of heads are used
        cut: folder for the smaller checkpoint
        revision: revision of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    all_options = PruneSettings(**settings)  # refuses mistakes before torch is imported
    text_options, pruning = pick(TextOptions, all_options), pick(PruneOptions, all_options)
    if text_options.text:
        check_exists(text_options.text)
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.pruned import check_folder
    from lmeval_prune.checkpoints.skeleton import skeleton_of, with_weights
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.comparison.tokens import logits_under, print_effect
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.pruners.base import make_pruner
    from lmeval_prune.pruners.schedule import check_methods, resolve_options, stages
    from lmeval_prune.pruners.scoring import kinds_read_for
    from lmeval_prune.surgery.cut import check_cuttable, cut_to, print_cut

    torch_device, scored = resolve_device(device), None
    if scores:
        scored = Plan.load(scores)
        if pruning.steps > 1 or scored.provenance.get("options", {}).get("steps", 1) > 1:
            raise InputError("--scores are those of the unpruned model, for a single step")
        if "method" in scored.provenance:
            method, options = _stored_method(scores, scored.provenance, method, options)
    elif not method and ffn_method and pruning.kinds == ("channels",):
        method, options = ffn_method, ffn_options
    elif not method:
        method = DEFAULT
        print(f"scored by {DEFAULT}, as no --method is given", flush=True)
    pruner = make_pruner(method or "norm_entropy", options or {})
    has_own = ffn_method or ffn_options
    channel_pruner = make_pruner(ffn_method or method or "norm_entropy", ffn_options or {}) if has_own else pruner
    stored = {key: x for key, x in scored.scores.items() if not ffn_method or key[:6] == "heads."} if scored else {}

    skeleton = skeleton_of(pretrained, revision)
    skeleton_map = map_model(skeleton)
    pruning = resolve_options(pruning, pruner, skeleton_map, channel_pruner)
    check_methods(pruner, channel_pruner, skeleton_map, pruning, text_options.has_text, stored)
    check_writable(output)
    if cut:
        check_folder(cut, [pretrained])
        check_writable(cut, folder=True)
        check_cuttable(skeleton_map, "heads" in pruning.kinds)

    reading = kinds_read_for(pruning, pruner, channel_pruner, stored)
    is_read = reading or pruning.compensation != "none"
    text = _calibration(skeleton, pretrained, revision, text_options, output) if is_read else None
    model_map = map_model(with_weights(skeleton, pretrained, revision).to(torch_device))
    if scored:
        scored.fit_to(model_map)
    calibration = text.of(model_map.model) if text else None
    renew, work = text.renewed(model_map.model) if text else None, _work_folder(output)
    progress = partial(print, flush=True)
    *_, plan = stages(pruner, model_map, pruning, calibration, channel_pruner, stored, progress, work, renew)
    if scored and stored and "calibration" in scored.provenance:  # of the scores; what else was read stands beside it
        texts = {"calibration": scored.provenance["calibration"], "beside_scores": plan.provenance.get("calibration")}
        plan = replace(plan, provenance={**plan.provenance, **texts})
    plan.save(output, model_map)
    counted = plan.provenance.get("parameters")
    share = f", {counted['removed'] / counted['removable']:.2%} of the removable parameters" if counted else ""
    print(f"{output}: {plan.summary(model_map)}{share}; requested: {plan.provenance['removes']}")
    tokenizer = tokenizer_of(pretrained, revision)
    print_effect(model_map.model, logits_under([plan], model_map), tokenizer, calibration.unread if calibration else ())
    if cut:
        print_cut(cut, cut_to(cut, model_map.model, plan, tokenizer))
    rmtree(work, ignore_errors=True)
    return 0


def cut_model(
    pretrained: str,
    plan: str,
    output: str,
    revision: str | None = None,
    allow_empty_layer: bool = False,
    allow_other_model: bool = False,
) -> int:
    """Cut a model by a plan: write the smaller checkpoint.

    Args:
        pretrained: model of the plan
        plan: file of the plan, or of a head mask
        output: folder for the checkpoint; one that was cut there is replaced when the new one is complete
        revision: revision of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: accept a plan of another model, if it fits
    """
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.comparison.tokens import logits_of, print_effect
    from lmeval_prune.interventions.plan import load_plan
    from lmeval_prune.surgery.cut import write_cut

    smaller = write_cut(pretrained, load_plan(plan, allow_other_model, allow_empty_layer), output, revision)
    print_effect(smaller.parent.model, logits_of(smaller.model), tokenizer_of(pretrained, revision))
    return 0


def _work_folder(output: str) -> Path:
    return Path(output).with_name(f".{Path(output).name}.scoring")


def _calibration(skeleton: Any, pretrained: str, revision: str | None, text_options: TextOptions, output: str) -> Any:
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.planning.texts import read_text, responses_folder

    tokenizer = tokenizer_of(pretrained, revision, text_options.add_bos_token)
    if text_options.calibrate_on == "task":
        return read_text(skeleton, tokenizer, text_options)
    from lmeval_prune.planning.own_answers import OwnText

    return OwnText(skeleton, tokenizer, text_options, responses_folder(text_options.responses, Path(output)))


def _stored_method(
    path: str, provenance: Mapping[str, Any], method: str | None, options: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Return the method and options of stored scores; refuse others, and scores of another version."""
    from lmeval_prune.pruners.base import make_pruner

    stored_method = provenance["method"]
    names = {field.name for field in fields(PRUNERS.load(stored_method))}
    stored = {name: value for name, value in provenance.items() if name in names}
    pruner = make_pruner(stored_method, stored)
    is_same = method in (None, stored_method) and make_pruner(stored_method, {**stored, **(options or {})}) == pruner
    if not is_same or any(pruner.identity.get(key) != provenance.get(key) for key in ("class", "version")):
        raise InputError(
            f"{path} has scores of {stored_method} with its own options and version; leave out --method and --options, "
            f"or score again"
        )
    return stored_method, stored
