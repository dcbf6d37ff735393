"""`lmeval-prune importance`, `prune` and `cut`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.settings import device_named

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm"),
)

EXTENSION = " (scores of channels by {} are an extension of ours, not the paper's)"


@contextmanager
def as_options() -> Iterator[None]:
    """A block whose refusals name options as the command line has them."""
    try:
        yield
    except InputError as error:
        raise InputError(re.sub(r"\b(allow_other_model|allow_empty_layer)=true", r"--\1", str(error))) from None


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
    task: str | None = None,
    text: str | None = None,
    windows: int = 64,
    tokens: int = 128,
    batch: int = 8,
    seed: int = 0,
    apply_chat_template: bool = False,
    add_bos_token: bool | None = None,
    channels: bool = False,
    revision: str | None = None,
    device: str | None = None,
) -> int:
    """Score the heads of a model, and draw the scores layer by layer.

    Args:
        pretrained: model, as for lm_eval, or one that was cut
        output: path of the artefact, a JSON file: a plan that removes nothing, and scores; its picture is beside it
        method: METHODS
        options: of the method, e.g. alpha=0.5,entropy=raw
        task: calibration text: training split of this task, e.g. prune_gsm8k
        text: calibration text: this file
        windows: windows of the calibration text
        tokens: tokens of a window, special tokens included
        batch: windows a forward pass
        seed: of the order in which the text is read
        apply_chat_template: write calibration problems as the user's turns and their answers as the assistant's, as
            lm_eval asks with this option
        add_bos_token: as of lm_eval's model_args; default: what the tokenizer does by itself
        channels: score feed-forward channels, too
        revision: of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    _check_paths(output, text)  # before torch is imported
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.interventions.plan import Plan
    from lmeval_prune.pruners.base import by_member, make_pruner
    from lmeval_prune.reporting.maps import draw_head_scores

    pruner, where = make_pruner(method, options or {}), device_named(device)
    check_writable(output)
    pruner.check(True, channels, bool(task or text))
    pruner.check_model(map_model(skeleton_of(pretrained, revision)))
    needed = pruner.needs_text(True, channels)
    reading = (windows, tokens, batch, seed, apply_chat_template, add_bos_token)
    model_map, calibration = _loaded(where, pretrained, revision, needed, task, text, *reading)
    scored = pruner.scores(model_map, calibration, True, channels)
    scores = {f"heads.{label}": one for label, one in scored.heads.items()}
    scores |= {f"channels.{label}": one for label, one in scored.channels.items()}
    made: dict[str, Any] = pruner.identity
    made |= {"calibration": calibration.about()} if calibration else {}
    Plan(scores=scores, made=made).save(output, model_map)
    heads: dict[str, Any] = {label: by_member(one) for label, one in scored.heads.items()}
    draw_head_scores(heads, f"{method} of {model_map.name}", Path(output).with_suffix(""))
    ranked = sorted((float(x), f"{label}H{head}") for label, one in heads.items() for head, x in enumerate(one))
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
    task: str | None = None,
    text: str | None = None,
    windows: int = 64,
    tokens: int = 128,
    batch: int = 8,
    seed: int = 0,
    apply_chat_template: bool = False,
    add_bos_token: bool | None = None,
    cut: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    **wanted: Any,
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
        task: calibration text: training split of this task, e.g. prune_gsm8k
        text: calibration text: this file
        windows: windows of the calibration text
        tokens: tokens of a window, special tokens included
        batch: windows a forward pass
        seed: of the order in which the text is read
        apply_chat_template: write calibration problems as the user's turns and their answers as the assistant's, as
            lm_eval asks with this option
        add_bos_token: as of lm_eval's model_args; default: what the tokenizer does by itself
        cut: folder for the smaller checkpoint
        revision: of the model
        device: cpu or cuda; default: a GPU if there is one
    """
    asked = PruneOptions(**wanted)  # a wrong one is refused before torch is imported
    _check_paths(output, text)
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.pruned import check_folder
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.pruners.base import make_pruner, pruner_name
    from lmeval_prune.pruners.schedule import check_methods, settled, stages, wants_channels, wants_heads
    from lmeval_prune.surgery.cut import check_cuttable, cut_to

    where = device_named(device)
    known, at_hand = _scores_of(scores) if scores else (None, ({}, {}))
    if method:
        make_pruner(method, options or {})
    if known:
        if known.made.get("method") in PRUNERS:
            method, options = _method_of(str(scores), known.made, method, options)
        if asked.steps > 1:
            raise InputError("scores=FILE serves a single step; leave it out, or --steps")
        if ffn_method:
            at_hand = (at_hand[0], {})
    if ffn_options and not ffn_method:
        raise InputError("ffn_options are those of a method for channels; give --ffn_method, too")
    pruner = make_pruner(method or "norm_entropy", options or {})
    of_channels = make_pruner(ffn_method, ffn_options or {}) if ffn_method else pruner
    bare = map_model(skeleton_of(pretrained, revision))
    asked = settled(asked, pruner, bare, of_channels)
    wanted_parts = wants_heads(asked), wants_channels(asked)
    if known and wanted_parts[1] and not at_hand[1] and not ffn_method:
        raise InputError(
            f"{scores} has no scores of channels; give --parts heads, --ffn_method, which then scores them, or those "
            f"of `lmeval-prune importance --channels`"
        )
    check_methods(pruner, of_channels, bare, asked, bool(task or text), at_hand)
    if cut:
        _check_apart(output, cut)
        check_folder(cut, [pretrained])
        check_writable(cut, folder=True)
        check_cuttable(bare, wanted_parts[0])
        check_plain(bare.model, pretrained)
    check_writable(output)
    uses = {
        "calibration": wanted_parts[0] and not at_hand[0] and pruner.needs_text(True, False),
        "ffn_calibration": wanted_parts[1] and not at_hand[1] and of_channels.needs_text(False, True),
        "compensation_calibration": asked.compensation != "none",
    }
    needs = any(uses.values())
    if known and (task or text) and not needs:
        raise InputError(f"the scores are those of {scores}, and no text is read; leave out --task and --text")
    reading = (windows, tokens, batch, seed, apply_chat_template, add_bos_token)
    model_map, calibration = _loaded(where, pretrained, revision, needs, task, text, *reading)
    if known:
        known.fit_to(model_map)
    work = Path(output).with_name(f".{Path(output).name}.layers")
    say = partial(print, flush=True)
    *_, plan = stages(pruner, model_map, asked, calibration, of_channels, at_hand, say, work)
    if known:  # each text by what it was read for
        made = {name: one for name, one in plan.made.items() if name != "calibration"}
        of_artefact = {"calibration": at_hand[0], "ffn_calibration": at_hand[1] and not at_hand[0]}
        made |= {
            name: known.made["calibration"] for name, one in of_artefact.items() if one and "calibration" in known.made
        }
        made |= {name: calibration.about() for name, used in uses.items() if used}
        plan = replace(plan, made=made)
    plan.save(output, model_map)
    rmtree(work, ignore_errors=True)  # what was kept of layers while it was made
    extension = "" if of_channels.parts == "both" or not wanted_parts[1] else EXTENSION.format(pruner_name(of_channels))
    print(f"{output}: {_said(plan, model_map)}{extension}")
    for line in _short_of(plan, model_map, asked):
        print(f"  {line}")
    if cut:
        done = cut_to(cut, model_map.model, plan, tokenizer_of(pretrained, revision))
        _report(cut, done)
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
    with as_options():
        write_cut(pretrained, load_plan(plan, allow_other_model, allow_empty_layer), output, revision)
        return 0


def load_plan(path: str, allow_other_model: bool = False, allow_empty_layer: bool = False) -> Any:
    """Read a plan, or a mask as one, that removes something.

    Raises:
        InputError: it is none, or removes nothing.
    """
    from lmeval_prune.interventions import load_intervention
    from lmeval_prune.interventions.plan import Plan

    wanted = load_intervention(path, allow_other_model).converted(Plan)
    if not isinstance(wanted, Plan):
        raise InputError(f"{path} is no plan and no head mask")
    if not wanted.heads and not wanted.channels and not wanted.compensation:
        raise InputError(f"{path} removes nothing; make a plan with `lmeval-prune prune --scores {path}`")
    return replace(wanted, allow_empty_layer=wanted.allow_empty_layer or allow_empty_layer)


def write_cut(pretrained: str, plan: Any, output: str, revision: str | None = None, keep_shapes: bool = False) -> Any:
    """Cut a model by a plan, write its checkpoint, and say what was done.

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
    from lmeval_prune.surgery.cut import cut_to

    check_folder(output, [pretrained])
    check_writable(output, folder=True)
    model = loaded_for(pretrained, plan, revision, keep_shapes)
    done = cut_to(output, model, plan, tokenizer_of(pretrained, revision), keep_shapes)
    _report(output, done)
    return done


def loaded_for(pretrained: str, plan: Any, revision: str | None, keep_shapes: bool = False) -> Any:
    """A model with its weights, after a look at whether it can be cut by a plan.

    Raises:
        InputError: it cannot.
    """
    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of, with_weights
    from lmeval_prune.surgery.cut import check_cuttable

    bare = skeleton_of(pretrained, revision)
    check_plain(bare, pretrained)
    check_cuttable(map_model(bare), bool(plan.heads) and not keep_shapes)
    plan.fit_to(map_model(bare))
    return with_weights(bare, pretrained, revision)


def check_plain(bare: Any, pretrained: str) -> None:
    """Refuse a quantised model, before its weights are loaded.

    Raises:
        InputError: it is one.
    """
    from lmeval_prune.surgery.cut import is_quantised

    if is_quantised(bare):
        raise InputError(f"{pretrained} is quantised, and cannot be cut or written anew; give its dequantised weights")


def _check_paths(output: str, text: str | None) -> None:
    if not output.endswith(".json"):
        raise InputError(f"--output {output} must end in .json, so that heads= and plan= tell it from names of heads")
    if text and not Path(text).exists():
        raise InputError(f"no such file: {text}")


def _check_apart(output: str, cut: str) -> None:
    """Refuse a plan's path inside the folder of a checkpoint, which is replaced as a whole."""
    if Path(output).resolve().is_relative_to(Path(cut).resolve()):
        raise InputError(f"--output {output} is in --cut {cut}, which gets a copy of the plan; write it elsewhere")


def _loaded(
    device: Any,
    pretrained: str,
    revision: str | None,
    needs_text: bool,
    task: str | None,
    text: str | None,
    *reading: Any,
) -> tuple[Any, Any]:
    """Return the model's map, and calibration text if there is to be one.

    Args:
        device: for the model.
        pretrained, revision: the model.
        needs_text: whether there is to be a calibration text.
        task, text: its source.
        reading: how it is read: the further arguments of `read_calibration`.

    Raises:
        InputError: something cannot be read, or does not suit.
    """
    import torch

    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of, with_weights
    from lmeval_prune.pruners.calibration import check_length, read_calibration

    if task and text:
        raise InputError("give the calibration text by --task or by --text, not both")
    bare = skeleton_of(pretrained, revision)
    map_model(bare)
    calibration = None
    if needs_text:
        check_length(bare, reading[1])
        tokenizer = tokenizer_of(pretrained, revision, reading[-1])
        if tokenizer is None:
            raise InputError(f"{pretrained} has no tokenizer, which calibration text needs")
        calibration = read_calibration(tokenizer, text, task, *reading)
    model = with_weights(bare, pretrained, revision)
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        raise InputError(f"{pretrained} does not fit into the memory of {device}; give --device cpu") from None
    return map_model(model), calibration


def tokenizer_of(pretrained: str, revision: str | None, add_bos_token: bool | None = None) -> Any:
    """Return the model's tokenizer; None if it has no files of one (transformers would make one up).

    Args:
        pretrained, revision: the model.
        add_bos_token: as of lm-eval's `hf`, which gives it to the tokenizer; None leaves it alone.

    Raises:
        InputError: it has, and they cannot be read.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    from lmeval_prune.checkpoints import embedded
    from lmeval_prune.checkpoints.loading import refused_as

    source = embedded.resolve(pretrained)
    optional: dict[str, Any] = {
        "revision": revision,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if not any(cached_file(source, name, **optional) for name in TOKENIZER_FILES):
        return None
    own = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    with refused_as(f"the tokenizer of {pretrained} cannot be read; mend its files, or remove them"):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False, **own)


def _scores_of(path: str) -> tuple[Any, tuple[dict[str, Any], dict[str, Any]]]:
    """An artefact, and its scores of heads and of channels."""
    from lmeval_prune.interventions.plan import Plan

    plan = Plan.load(path)
    if not plan.scores:
        raise InputError(f"{path} has no scores; make one with `lmeval-prune importance`")
    if plan.made.get("options", {}).get("steps", 1) > 1:
        raise InputError(f"{path} has scores of what several steps left; make one with `lmeval-prune importance`")
    heads, channels = (
        {label.removeprefix(kind): one for label, one in plan.scores.items() if label.startswith(kind)}
        for kind in ("heads.", "channels.")
    )
    return plan, (heads, channels)


def _method_of(
    path: str, made: dict[str, Any], method: str | None, options: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The method that an artefact was made by, and its options.

    Raises:
        InputError: another method is asked for, or other options.
    """
    from lmeval_prune.pruners.base import make_pruner, pruner_class

    own = {one.name: made[one.name] for one in fields(pruner_class(made["method"])) if one.name in made}
    known = make_pruner(made["method"], own)
    if method not in (None, made["method"]) or (options and make_pruner(made["method"], {**own, **options}) != known):
        raise InputError(
            f"{path} has scores of {made['method']} with its own options; leave out --method and --options, or --scores"
        )
    return made["method"], own


def _said(plan: Any, model_map: Any) -> str:
    found = plan.report(model_map)["plan"]
    parts = [f"{found['heads_pruned']} of {found['heads_total']} heads"]
    if found["kv_heads_pruned"]:
        parts.append(f"{found['kv_heads_pruned']} of {found['kv_heads_total']} key-value heads")
    if found["channels_pruned"]:
        parts.append(f"{found['channels_pruned']} of {found['channels_total']} channels")
    counted = plan.made.get("parameters")
    share = f", {counted['removed'] / counted['removable']:.2%} of what can be removed" if counted else ""
    return f"{', '.join(parts)} of {model_map.name} go{share}; asked for: {plan.made['removes']}"


def _short_of(plan: Any, model_map: Any, asked: PruneOptions) -> list[str]:
    """Where whole units leave less than was asked for of heads or channels."""
    found = plan.report(model_map)["plan"]
    by_count = asked.budget == "heads"
    lines = []
    for name, kind, ratio in (("ratio", "heads", asked.ratio), ("ffn_ratio", "channels", asked.ffn_ratio)):
        share = found[f"{kind}_pruned"] / max(1, found[f"{kind}_total"])
        if by_count and f"{share:.1%}" != f"{ratio:.1%}":
            lines.append(f"{share:.1%} of the {kind}: whole units leave less than --{name} {ratio:g}")
    return lines


def _report(folder: str, done: Any) -> None:
    from lmeval_prune.profiling.costs import parameters

    (all_, without), (before, before_without) = parameters(done.model), parameters(done.parent.model)
    print(f"{folder}: {type(done.model).__name__}, {all_ / 1e6:.2f} of {before / 1e6:.2f} million parameters")
    print(f"  {1 - all_ / before:.2%} fewer in all, {1 - without / before_without:.2%} fewer without embeddings")
    for note in done.manifest["notes"]:
        print(f"  {note}")
