"""Commands `lmeval-prune importance`, `prune` and `cut`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from lmeval_prune.config import command, resolve_device
from lmeval_prune.errors import InputError
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
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.loading import skeleton_of, with_weights
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.pruners.base import make_pruner, per_member, score
    from lmeval_prune.pruners.parts import DEPTH_KINDS, HEADS, KINDS, depth_parts_of, parts_of
    from lmeval_prune.pruners.schedule import work_of
    from lmeval_prune.reporting.plot_style import draw_scores

    pruner, torch_device, work = make_pruner(method, options or {}), resolve_device(device), _work_folder(output)
    has_width = HEADS in pruner.kinds
    kinds = DEPTH_KINDS if not has_width else KINDS if channels else (HEADS,)
    check_writable(output)
    skeleton = skeleton_of(pretrained, revision)
    pruner.check(map_model(skeleton), kinds, text_options.has_text)
    source = _text_source(skeleton, pretrained, revision, text_options, output) if pruner.reads_text else None
    model_map = map_model(with_weights(skeleton, pretrained, revision).to(torch_device))
    text, provenance = None, pruner.identity
    if source:
        text, _ = source(model_map.model)
        provenance["calibration"] = text.record()
        record = {**provenance, "batches": [list(x.ids.shape) for x in text.batches]}  # sums are kept by batch
        text = replace(text, work=work_of(work, record, model_map))
    scores = score(pruner, model_map, text, [*parts_of(model_map, kinds), *depth_parts_of(model_map, kinds)]).values
    columns, scored = None, "heads"
    if has_width:
        rows = {layer.label: per_member(scores[f"{HEADS}.{layer.label}"]).tolist() for layer in model_map.attention}
        ranked = sorted((x, f"{label}H{n}") for label, values in rows.items() for n, x in enumerate(values))
    else:
        shown = [kind for kind in DEPTH_KINDS if any(key.startswith(f"{kind}.") for key in scores)]
        labels = dict.fromkeys(key.partition(".")[2] for key in scores)
        rows = {x: [float(scores.get(f"{kind}.{x}", float("nan"))) for kind in shown] for x in labels}
        columns, scored = [kind.replace("_", "-") for kind in shown], "layers and blocks"
        ranked = sorted((float(x), key.replace(".", " ", 1).replace("_", "-")) for key, x in scores.items())
    Plan(scores=scores, provenance=provenance).save(output, model_map)
    rmtree(work, ignore_errors=True)
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
        scores: output of `importance`: its scores are used, not computed again, with its method and options. With
            ffn_method, only the scores of heads are used
        cut: folder for the smaller checkpoint
        revision: revision of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    text_options = PruneSettings(**settings)  # refuses mistakes before torch is imported
    pruning = pick(PruneOptions, text_options)
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.loading import check_folder, skeleton_of, tokenizer_of, with_weights
    from lmeval_prune.comparison.tokens import logits_under, print_effect
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.pruners.base import make_pruner
    from lmeval_prune.pruners.schedule import has_scores_of, resolve_options, stages
    from lmeval_prune.surgery.cut import check_cuttable, cut_to

    torch_device, scored = resolve_device(device), Plan.load(scores) if scores else None
    if scored:
        about = scored.provenance
        if pruning.steps > 1 or about.get("options", {}).get("steps", 1) > 1:
            raise InputError("--scores are those of the unpruned model, for a single step")
        if "method" in about:
            names = {field.name for field in fields(PRUNERS.load(about["method"]))}
            stored_options = {name: value for name, value in about.items() if name in names}
            identity = make_pruner(about["method"], stored_options).identity
            if method or options or any(identity.get(key) != about.get(key) for key in ("class", "version")):
                raise InputError(f"{scores} has scores of another method or version; leave out --method or score again")
            method, options = about["method"], stored_options
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
    pruning = resolve_options(pruning, pruner, skeleton_map, channel_pruner, text_options.has_text, stored)
    check_writable(output)
    if cut:
        check_folder(cut, pretrained)
        check_writable(cut, folder=True)
        check_cuttable(skeleton_map, "heads" in pruning.kinds)

    scorers = [
        channel_pruner if kind == "channels" else pruner for kind in pruning.kinds if not has_scores_of(stored, kind)
    ]
    is_read = pruning.compensation != "none" or any(scorer.reads_text for scorer in scorers)
    source = _text_source(skeleton, pretrained, revision, text_options, output) if is_read else None
    model_map, work = map_model(with_weights(skeleton, pretrained, revision).to(torch_device)), _work_folder(output)
    if scored:
        scored.fit_to(model_map)
    text, renew = source(model_map.model) if source else (None, None)
    progress = partial(print, flush=True)
    *_, plan = stages(pruner, model_map, pruning, text, channel_pruner, stored, progress, work, renew)
    if scored and stored and "calibration" in scored.provenance:  # of the scores; what else was read stands beside it
        texts = {"calibration": scored.provenance["calibration"], "beside_scores": plan.provenance.get("calibration")}
        plan = replace(plan, provenance={**plan.provenance, **texts})
    plan.save(output, model_map)
    counted = plan.provenance.get("parameters")
    share = f", {counted['removed'] / counted['removable']:.2%} of the removable parameters" if counted else ""
    print(f"{output}: {plan.summary(model_map)}{share}; requested: {plan.provenance['removes']}")
    tokenizer = tokenizer_of(pretrained, revision)
    print_effect(model_map.model, logits_under([plan], model_map), tokenizer, text.unread if text else ())
    if cut:
        cut_to(cut, model_map.model, plan, tokenizer).report(cut)
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
    from lmeval_prune.checkpoints.loading import tokenizer_of
    from lmeval_prune.comparison.tokens import logits_of, print_effect
    from lmeval_prune.interventions.plan import load_plan
    from lmeval_prune.surgery.cut import write_cut

    smaller = write_cut(pretrained, load_plan(plan, allow_other_model, allow_empty_layer), output, revision)
    print_effect(smaller.parent.model, logits_of(smaller.model), tokenizer_of(pretrained, revision))
    return 0


def _work_folder(output: str) -> Path:
    return Path(output).with_name(f".{Path(output).name}.scoring")


def _text_source(skeleton: Any, pretrained: str, revision: str | None, options: TextOptions, output: str) -> Any:
    from lmeval_prune.checkpoints.loading import tokenizer_of
    from lmeval_prune.planning.own_answers import responses_folder, text_source

    tokenizer = tokenizer_of(pretrained, revision, options.add_bos_token)
    return text_source(skeleton, tokenizer, options, responses_folder(options.responses, Path(output)))
