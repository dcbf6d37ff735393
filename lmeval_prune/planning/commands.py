"""Commands `lmeval-prune importance`, `prune` and `cut`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from lmeval_prune.errors import InputError, check_exists
from lmeval_prune.options import takes_tasks
from lmeval_prune.pruners.options import PruneOptions, PruneSettings, ScoringOptions, TextOptions, pick
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.settings import resolve_device

DEFAULT = "flap"  # of `prune`: unlike slimgpt it suits short texts, and reads them once


def with_method_names(command: Callable[..., int]) -> Callable[..., int]:
    """Replace METHODS in a command's help by the names of the pruners."""
    *names, last = PRUNERS
    command.__doc__ = (command.__doc__ or "").replace("METHODS", f"{', '.join(names)} or {last}")
    return command


@takes_tasks
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
            beside it. Scores that were made there with the same settings are replaced
        method: METHODS
        options: options of the method, e.g. alpha=0.5,entropy=raw
        channels: also score feed-forward channels
        revision: revision of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    text_options = ScoringOptions(**calibration_options)
    _check_paths(output, text_options)  # before torch is imported
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.planning.replacing import RECORD, check_scores_replaceable, scoring_settings
    from lmeval_prune.pruners.base import check_scores, make_pruner, per_member
    from lmeval_prune.pruners.estimate import Estimate
    from lmeval_prune.pruners.layer_store import Removal
    from lmeval_prune.pruners.parts import DEPTH_KINDS, HEADS, KINDS, depth_parts_of, parts_of
    from lmeval_prune.pruners.score_store import ScoreStore
    from lmeval_prune.reporting.maps import draw_scores

    pruner, torch_device = make_pruner(method, options or {}), resolve_device(device)
    kinds = DEPTH_KINDS if pruner.depth_only else KINDS if channels else (HEADS,)
    if pruner.depth_only and channels:
        raise InputError(f"{method} scores layers and blocks; leave out --channels")
    check_writable(output)
    pruner.check(kinds, text_options.has_text)
    skeleton = skeleton_of(pretrained, revision)
    pruner.check_model(map_model(skeleton))
    record = scoring_settings(text_options, pretrained, revision, pruner, channels)
    check_scores_replaceable(output, record)
    text = _calibration(skeleton, pretrained, revision, text_options, output, is_used=pruner.reads_text)
    model_map = _load(skeleton, pretrained, revision, torch_device)
    calibration = text.of(model_map.model) if text else None
    read = replace(calibration, report=Estimate("scoring", partial(print, flush=True))) if calibration else None
    if pruner.depth_only:
        identity = [record, model_map.weights, calibration.record()] if calibration else None
        sums = ScoreStore(_work_folder(output), identity).sums("scores") if identity else None
        depth = depth_parts_of(model_map)
        scores = check_scores(pruner, pruner.depth_scores(model_map, read, depth, Removal(), sums), depth).values
        (rows, columns), scored = _rows_of(scores), "layers and blocks"
        ranked = sorted((float(x), key.replace(".", " ", 1).replace("_", "-")) for key, x in scores.items())
    else:
        parts = parts_of(model_map, kinds)
        scores = check_scores(pruner, pruner.scores(model_map, read, parts, {}), parts).values
        head_scores = {layer.label: per_member(scores[f"{HEADS}.{layer.label}"]) for layer in model_map.attention}
        rows, columns, scored = {label: values.tolist() for label, values in head_scores.items()}, None, "heads"
        ranked = sorted((x, f"{label}H{n}") for label, values in rows.items() for n, x in enumerate(values))
    calibrated = {"calibration": calibration.record()} if calibration else {}
    provenance = {**pruner.identity, **calibrated, RECORD: record}
    Plan(scores=scores, provenance=provenance).save(output, model_map)
    rmtree(_work_folder(output), ignore_errors=True)
    draw_scores(rows, f"{method} of {model_map.name}", Path(output).with_suffix(""), columns)
    print(f"{output} and its picture: {len(ranked)} {scored} of {model_map.name} by {method}")
    print("lowest: " + ", ".join(f"{name} {score:.3f}" for score, name in ranked[:6]))
    print("highest: " + ", ".join(f"{name} {score:.3f}" for score, name in ranked[:-7:-1]))
    return 0


def _rows_of(scores: Mapping[str, Any]) -> tuple[dict[str, list[float]], list[str] | None]:
    """Return the scores of each layer and its blocks by layer, and their kinds; a block that a layer lacks has NaN."""
    from lmeval_prune.pruners.parts import DEPTH_KINDS

    labels = dict.fromkeys(key.partition(".")[2] for key in scores)
    kinds = [kind for kind in DEPTH_KINDS if any(key.startswith(f"{kind}.") for key in scores)]
    rows = {label: [float(scores.get(f"{kind}.{label}", float("nan"))) for kind in kinds] for label in labels}
    return rows, [kind.replace("_", "-") for kind in kinds]


@takes_tasks
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
        output: path of the plan, a JSON file; a plan that was made there with the same settings is replaced
        method: METHODS; default: flap, which needs --task or --text
        options: options of the method, e.g. alpha=0.5,entropy=raw
        ffn_method: method that scores channels; default: the same method
        ffn_options: options of that method, e.g. seed=1
        scores: output of `importance`: its scores are used, not computed again. Another method and other options than
            the stored ones are refused. With ffn_method, only the scores of heads are used
        cut: folder for the smaller checkpoint; replaced as the plan is
        revision: revision of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    all_options = PruneSettings(**settings)  # refuses mistakes before torch is imported
    text_options, pruning = pick(TextOptions, all_options), pick(PruneOptions, all_options)
    _check_paths(output, text_options)
    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.distance.effect import print_effect
    from lmeval_prune.distance.tokens import logits_under
    from lmeval_prune.planning.replacing import RECORD, check_replaceable, command_settings
    from lmeval_prune.pruners.schedule import check_methods, resolve_options, stages
    from lmeval_prune.surgery.cut import cut_to
    from lmeval_prune.surgery.writing import print_cut

    torch_device = resolve_device(device)
    is_default = not method and not scores
    if is_default and ffn_method and pruning.kinds == ("channels",):
        method, options, is_default = ffn_method, ffn_options, False
    method = DEFAULT if is_default else method
    scored_plan, pruner, channel_pruner = _make_pruners(scores, pruning, method, options, ffn_method, ffn_options)
    skeleton = skeleton_of(pretrained, revision)
    skeleton_map = map_model(skeleton)
    pruning = resolve_options(pruning, pruner, skeleton_map, channel_pruner)
    if ffn_method and "channels" not in pruning.kinds:
        raise InputError("ffn_method scores channels, and none are removed; leave it out, or give --parts both")
    stored = _stored_scores(scored_plan, scores, pruning, ffn_method)
    check_methods(pruner, channel_pruner, skeleton_map, pruning, text_options.has_text, stored)
    if is_default:
        print(f"scored by {DEFAULT}, as no --method is given", flush=True)
    _check_outputs(output, cut, pretrained, skeleton_map, pruning)
    record = command_settings(all_options, pretrained, revision, (pruner, channel_pruner), scores)
    check_replaceable(output, cut, record)
    uses = _uses_of_text(pruning, pruner, channel_pruner, stored)
    text = _calibration(skeleton, pretrained, revision, text_options, output, bool(uses), scores)
    model_map = _load(skeleton, pretrained, revision, torch_device)
    if scored_plan:
        scored_plan.fit_to(model_map)
    calibration = text.of(model_map.model) if text else None
    work = _work_folder(output)
    progress = partial(print, flush=True)
    renew = text.renewed(model_map.model) if text else None
    *_, plan = stages(pruner, model_map, pruning, calibration, channel_pruner, stored, progress, work, renew)
    plan = _with_provenance(plan, scored_plan, stored, uses, calibration, {RECORD: record})
    plan.save(output, model_map)
    _print_plan(output, plan, model_map, pruning, channel_pruner)
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
        output: folder for the checkpoint; one that was cut there from the same model by the same plan is replaced when
            the new one is complete
        revision: revision of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: accept a plan of another model, if it fits
    """
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.distance.effect import print_effect
    from lmeval_prune.distance.tokens import logits_of
    from lmeval_prune.interventions.plan import load_plan
    from lmeval_prune.surgery.writing import write_cut

    smaller = write_cut(pretrained, load_plan(plan, allow_other_model, allow_empty_layer), output, revision)
    print_effect(smaller.parent.model, logits_of(smaller.model), tokenizer_of(pretrained, revision))
    return 0


def _check_paths(output: str, text_options: TextOptions) -> None:
    if not output.endswith(".json"):
        raise InputError(f"--output {output} must end in .json, so that heads= and plan= tell it from names of heads")
    if text_options.text:
        check_exists(text_options.text)


def _work_folder(output: str) -> Path:
    """Return the folder of what is finished before an output is complete, so that a killed run resumes."""
    return Path(output).with_name(f".{Path(output).name}.scoring")


def _check_outputs(output: str, cut: str | None, pretrained: str, skeleton_map: Any, pruning: PruneOptions) -> None:
    """Check that the plan and the checkpoint can be written, the plan outside the checkpoint, and the model be cut."""
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.pruned import check_folder
    from lmeval_prune.checkpoints.skeleton import check_unquantised
    from lmeval_prune.surgery.cut import check_cuttable

    if cut:
        if Path(output).resolve().is_relative_to(Path(cut).resolve()):
            raise InputError(f"--output {output} is in --cut {cut}, which gets a copy of the plan; write it elsewhere")
        check_folder(cut, [pretrained])
        check_writable(cut, folder=True)
        check_cuttable(skeleton_map, "heads" in pruning.kinds)
        check_unquantised(skeleton_map.model, pretrained)
    check_writable(output)


def _calibration(
    skeleton: Any,
    pretrained: str,
    revision: str | None,
    text_options: TextOptions,
    output: str,
    is_used: bool,
    scores: str | None = None,
) -> Any:
    """Return the source of the calibration text if it is used; refuse a text that nothing would read."""
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.planning.texts import read_text, responses_folder

    if not is_used:
        if text_options.has_text:
            reason = f"the scores are those of {scores}" if scores else "the method needs none"
            raise InputError(f"{reason}, and no text is read; leave out --task and --text")
        return None
    tokenizer = tokenizer_of(pretrained, revision, text_options.add_bos_token)
    if tokenizer is None:
        raise InputError(f"{pretrained} has no tokenizer, which calibration text needs; add its files to the folder")
    if text_options.calibrate_on == "task":
        return read_text(skeleton, tokenizer, text_options)
    from lmeval_prune.planning.own_answers import OwnText

    return OwnText(skeleton, tokenizer, text_options, responses_folder(text_options.responses, Path(output)))


def _load(skeleton: Any, pretrained: str, revision: str | None, device: Any) -> Any:
    """Load a model's weights onto a device, and map the model."""
    import torch

    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import with_weights

    model = with_weights(skeleton, pretrained, revision)
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        raise InputError(f"{pretrained} does not fit into the memory of {device}; give --device cpu") from None
    return map_model(model)


def _make_pruners(
    scores: str | None,
    pruning: PruneOptions,
    method: str | None,
    options: dict[str, Any] | None,
    ffn_method: str | None,
    ffn_options: dict[str, Any] | None,
) -> tuple[Any, Any, Any]:
    """Return the plan with stored scores (or None), the pruner of heads and the pruner of channels."""
    from lmeval_prune.pruners.base import make_pruner

    if ffn_options and not ffn_method:
        raise InputError("ffn_options are those of a method for channels; give --ffn_method, too")
    if method:
        make_pruner(method, options or {})
    scored_plan = _load_scores(scores, pruning) if scores else None
    if scored_plan and (stored := scored_plan.provenance.get("method")):
        if stored not in PRUNERS:
            raise InputError(
                f"{scores} has scores by method={stored}, which is not known; install the package that has it"
            )
        method, options = _method_of(str(scores), scored_plan.provenance, method, options)
    pruner = make_pruner(method or "norm_entropy", options or {})
    return scored_plan, pruner, make_pruner(ffn_method, ffn_options or {}) if ffn_method else pruner


def _load_scores(path: str, pruning: PruneOptions) -> Any:
    """Read a plan with scores of an unpruned model."""
    from lmeval_prune.interventions.plan import Plan

    plan = Plan.load(path)
    if not plan.scores:
        raise InputError(f"{path} has no scores; make one with `lmeval-prune importance`")
    if plan.provenance.get("options", {}).get("steps", 1) > 1:
        raise InputError(
            f"{path} has scores of a model that earlier steps pruned; make one with `lmeval-prune importance`"
        )
    if pruning.steps > 1:
        raise InputError("scores=FILE serves a single step; leave it out, or --steps")
    return plan


def _method_of(
    path: str, provenance: Mapping[str, Any], method: str | None, options: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Return the method and options of stored scores; refuse another method or other options."""
    from lmeval_prune.pruners.base import make_pruner

    stored_method = provenance["method"]
    stored = {
        field.name: provenance[field.name] for field in fields(PRUNERS.load(stored_method)) if field.name in provenance
    }
    try:
        pruner = make_pruner(stored_method, stored)
    except InputError as error:
        raise InputError(f"{path} has scores by settings that cannot be read: {error}; score again") from None
    changed = [key for key in ("class", "version") if pruner.identity.get(key) != provenance.get(key)]
    if changed and "version" in provenance:
        raise InputError(
            f"{path} has scores of another {stored_method} ({changed[0]}: {provenance.get(changed[0])}); score again"
        )
    same = make_pruner(stored_method, {**stored, **(options or {})}) == pruner
    if method not in (None, stored_method) or not same:
        raise InputError(
            f"{path} has scores of {stored_method} with its own options; leave out --method and --options, or --scores"
        )
    return stored_method, stored


def _stored_scores(scored_plan: Any, path: str | None, pruning: PruneOptions, ffn_method: str | None) -> dict[str, Any]:
    """Return the stored scores that are used: with an ffn_method, those of heads only."""
    from lmeval_prune.pruners.schedule import has_scores_of

    if not scored_plan:
        return {}
    if ffn_method:
        return {key: values for key, values in scored_plan.scores.items() if key.startswith("heads.")}
    if "channels" in pruning.kinds and not has_scores_of(scored_plan.scores, "channels"):
        raise InputError(
            f"{path} has no scores of channels; give --parts heads, --ffn_method to compute them, or an artefact of "
            f"`lmeval-prune importance --channels`"
        )
    return dict(scored_plan.scores)


def _uses_of_text(pruning: PruneOptions, pruner: Any, channel_pruner: Any, stored: Mapping[str, Any]) -> list[str]:
    """Return what the calibration text is read for, as keys of the plan's provenance."""
    from lmeval_prune.pruners.scoring import kinds_read_for

    reading = kinds_read_for(pruning, pruner, channel_pruner, stored)
    names = {"heads": "calibration", "channels": "ffn_calibration"}
    uses = list(dict.fromkeys(names.get(kind, "depth_calibration") for kind in reading))
    return [*uses, "compensation_calibration"] if pruning.compensation != "none" else uses


def _with_provenance(
    plan: Any,
    scored_plan: Any,
    stored: Mapping[str, Any],
    uses: Sequence[str],
    calibration: Any,
    record: Mapping[str, Any],
) -> Any:
    """Add a record, and if stored scores were used the calibration texts, each under the key of its purpose."""
    from lmeval_prune.pruners.schedule import has_scores_of

    plan = replace(plan, provenance={**plan.provenance, **record})
    if not scored_plan:
        return plan
    provenance = {name: value for name, value in plan.provenance.items() if name != "calibration"}
    if "calibration" in scored_plan.provenance:
        is_of_channels = has_scores_of(stored, "channels") and not has_scores_of(stored, "heads")
        if stored:
            name = "ffn_calibration" if is_of_channels else "calibration"
            provenance[name] = scored_plan.provenance["calibration"]
    return replace(plan, provenance=provenance | {name: calibration.record() for name in uses})


def _print_plan(output: str, plan: Any, model_map: Any, pruning: PruneOptions, channel_pruner: Any) -> None:
    """Print the removed units, and say if rounding to whole units removes less than requested."""
    from lmeval_prune.architectures.sublayer_names import compact_names
    from lmeval_prune.pruners.base import pruner_name
    from lmeval_prune.registry import is_own

    report = plan.report(model_map)["plan"]
    counts = [f"{report['heads_pruned']} of {report['heads_total']} heads"]
    if report["kv_heads_pruned"]:
        counts.append(f"{report['kv_heads_pruned']} of {report['kv_heads_total']} key-value heads")
    if report["channels_pruned"]:
        counts.append(f"{report['channels_pruned']} of {report['channels_total']} channels")
    if "blocks_pruned" in report:
        counts.append(f"{report['blocks_pruned']} of {report['blocks_total']} blocks ({compact_names(plan.blocks)})")
        counts = [count for count in counts if not count.startswith("0 ")]
    parameters = plan.provenance.get("parameters")
    share = ""
    if parameters:
        share = f", {parameters['removed'] / parameters['removable']:.2%} of the removable parameters"
    extension = ""
    if is_own(type(channel_pruner)) and channel_pruner.parts != "both" and "channels" in pruning.kinds:
        extension = f" (scores of channels by {pruner_name(channel_pruner)} are an extension of ours, not the paper's)"
    removed = f"removes {', '.join(counts)} of {model_map.name}{share}; requested: {plan.provenance['removes']}"
    print(f"{output}: {removed}{extension}")
    if "composition" in plan.provenance:
        cost = plan.provenance["kept_cost"] / plan.provenance["whole_cost"]
        print(f"  keeps {plan.provenance['kept_score']:.1%} of the score at {cost:.1%} of the {pruning.budget}")
    for name, kind, ratio in (("ratio", "heads", pruning.ratio), ("ffn_ratio", "channels", pruning.ffn_ratio)):
        share = f"{report[f'{kind}_pruned'] / max(1, report[f'{kind}_total']):.1%}"
        if pruning.budget == "heads" and share != f"{ratio:.1%}":
            print(f"  {share} of the {kind}: less than --{name} {ratio:g}, as only whole units are removed")
