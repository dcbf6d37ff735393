"""Recursive distillation (Algorithm 2): prune the least important parts and train the student, stage by stage.

The unpruned model teaches the first stage; each student teaches the next one. Folders of stages are written atomically,
so an interrupted distillation resumes with the first incomplete stage.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from lmeval_prune.architectures import ModelMap, loadable_fingerprints, map_model, weights_fingerprint
from lmeval_prune.artefacts import ENVELOPE, Work, check_same, content_digest, output_lock, write_artefact
from lmeval_prune.athena.checkpoint import SETTINGS
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import read_manifest, removed_blocks
from lmeval_prune.comparison.distance import summarize_texts
from lmeval_prune.comparison.tokens import logits_of, pass_distances
from lmeval_prune.distillation.host import NOTE, SCHEMA, VERSION, Host, TrainingExamples, read_note
from lmeval_prune.distillation.losses import LayerMap
from lmeval_prune.distillation.options import FIRST, PREVIOUS, DistillOptions
from lmeval_prune.distillation.trainer import DistillTrainer, distillation_arguments
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import share_of, unit_pools
from lmeval_prune.pruners.base import Pruner, make_pruner
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import HEADS
from lmeval_prune.pruners.schedule import EmptyPlanError, cuttable_unit, resolve_options, stages
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import import_path
from lmeval_prune.reporting.plot_style import COLOURS
from lmeval_prune.surgery.cut import Cut, check_cuttable, cut
from lmeval_prune.training.trainer import draw, result_settings

TITLE = "Recursive distillation, stage by stage"
LINES = {
    "loss": ("all (λ₁·distillation + λ₂·task)", COLOURS[7], "-"),
    "response": ("response", COLOURS[0], "-"),
    "feature": ("feature", COLOURS[2], "-"),
    "task": ("task", COLOURS[1], "-"),
    "eval_loss": ("all, validation", COLOURS[6], "--"),
}
LONGEST_WAIT = timedelta(days=7)  # of processes for each other


def distill(options: DistillOptions) -> dict[str, Any]:
    """Prune and distil a model and write it; resume an interrupted distillation.

    Stages are in `OUTPUT.distilling` until the output is complete. A complete output stays as it is. `InputError` if an
    option is invalid (before any weights are read, if possible), or `output` is of other options or data.
    """
    process = this_process()  # before transformers makes the group of processes, with a shorter wait
    host, target = make_host(options), Path(options.output)
    options = host.options
    settings = result_settings(options)
    for name, model in (("pretrained", options.pretrained), ("teacher", options.other_teacher)):
        if model:
            settings |= {name: host.identity(model), f"{name}_files": host.configuration(model)}
    settings |= foreign_methods(options)
    if options.prompts:
        settings |= {"prompts": "", "prompts_file": content_digest(options.prompts)}
    work = target.with_name(f"{target.name}.distilling")
    if (target / NOTE).is_file():
        check_same(read_note(target)["options"], settings | host.contents(), target)
    elif target.exists() and (target.is_file() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not a distilled model; name another output")
    else:
        progress = Work(work, settings | host.contents())
        check(host)
        with output_lock(target) if process.is_main_process else nullcontext():
            _run_stages(host, progress, target)
    if process.is_main_process:
        shutil.rmtree(work, ignore_errors=True)
    return read_note(target)


def this_process() -> Any:
    """Return accelerate's state of this process, for synchronisation.

    The first call sets how long processes wait for each other: one of them scores heads or asks the teacher alone,
    often for longer than the half hour after which PyTorch would give up.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)


def make_host(options: DistillOptions) -> Host:
    """Make the host for the model; `InputError` if the options do not suit it."""
    if (Path(options.pretrained) / SETTINGS).is_file():
        from lmeval_prune.distillation.athena_host import AthenaHost

        return AthenaHost(options)
    embedded.check_name(options.pretrained)
    from lmeval_prune.distillation.language_host import LanguageHost

    return LanguageHost(options)


def check(host: Host) -> None:
    """Check options, model and teacher without reading weights; `InputError` if they do not fit."""
    options, removal = host.options, host.options.removal()
    model_map = map_model(host.skeleton(options.pretrained))
    host.check()
    if removal.ratio or removal.ffn_ratio:
        *_, removal = stage_method(options, 0, model_map)
        has_heads = HEADS in removal.kinds
        check_cuttable(model_map, has_heads)
        if has_heads and removal.unit == "head" and any(1 < x.kv_heads < x.heads for x in model_map.attention):
            raise InputError(
                "unit=head keeps zeroed heads in groups, which training would change; use group or balanced"
            )
    distillation_arguments(options, Path(options.output))
    if options.other_teacher:
        host.check_teacher(options.other_teacher)


def _run_stages(host: Host, progress: Work, target: Path) -> None:
    options, process = host.options, this_process()
    examples = host.examples()
    if not examples.validation and options.best_by == "loss":  # an ATHENA's is that of its own training
        raise InputError("best_by needs a validation split, and the model was trained without one; give validation")
    process.wait_for_everyone()
    if process.is_main_process:
        progress.begin()
        counts = {name: value for name, value in examples.note.items() if isinstance(value, int) or name == "prompts"}
        print(f"texts: {counts}", flush=True)
    if options.asks_teacher and (options.epochs or not examples.questions):  # scores read answers to prompts alone
        examples = host.taught(examples, progress.folder)
        if process.is_main_process:
            print(f"teacher: {examples.note['lessons']}", flush=True)
    note = {"model": options.pretrained, "options": progress.settings, "material": examples.note, "stages": []}
    parent = options.pretrained
    for number in range(1, options.stages + 1):
        folder = target if number == options.stages else progress.folder / f"stage{number}"
        if not (folder / NOTE).is_file():
            _run_stage(host, examples, number, parent, note, progress.folder / f"stage{number}", folder)
        parent, note = str(folder), read_note(folder)


# ---------------------------------------------------------------------- a stage


def _run_stage(
    host: Host, examples: TrainingExamples, number: int, parent: str, note: Mapping[str, Any], work: Path, folder: Path
) -> None:
    """Cut, train and write; an interrupted stage resumes from the cut model or its last checkpoint.

    `parent` is the folder or name of the model to prune, `note` has the fields of `distillation.json` after the
    previous stage, and `work` is the path of incomplete files, without an ending.
    """
    options, process = host.options, this_process()
    smaller, checkpoints, scoring = (work.with_suffix(f".{name}") for name in ("cut", "training", "scoring"))
    if process.is_main_process and not smaller.is_dir():
        print(f"stage {number} of {options.stages}: scoring and cutting", flush=True)
        model: Any = host.read(parent).to(process.device)
        result = cut_stage(host, model, number, examples, scoring)
        host.write(host.with_backbone(model, result.model.cpu()), result.manifest, smaller, lambda _: None)
        shutil.rmtree(scoring, ignore_errors=True)
        del model, result
    process.wait_for_everyone()
    manifest = read_manifest(host.backbone_folder(smaller)) or {}
    cuts, student = manifest["stages"], host.read(str(smaller))
    training: dict[str, Any] = {"best_epoch": 0, "log": []}
    if options.epochs:
        if process.is_main_process:
            print(f"stage {number} of {options.stages}: training", flush=True)
        name = {PREVIOUS: parent, FIRST: options.pretrained}.get(options.teacher, options.teacher)
        teacher = host.read(name) if options.uses_teacher else None
        if options.other_teacher:
            signature = map_model(host.skeleton(name)).signature().items()
            # parents of equal signature have the same heads: no stage between them removed any
            since = (
                n for n, cut in enumerate(cuts) if all(cut["parent"].get(key) == value for key, value in signature)
            )
            layers = LayerMap.of(cuts[next(since, len(cuts)) :])
        else:
            layers = LayerMap.of(cuts[-number:] if options.teacher == FIRST else cuts[-1:])
        training = DistillTrainer(host, student, teacher, layers, examples, checkpoints, number).run()
        del teacher
    process.wait_for_everyone()
    if process.is_main_process:
        if texts := host.compared_texts(examples):  # distance of the student's answers from the unpruned model's
            dense, cut_model = (model.to(process.device) for model in (host.read(options.pretrained), student.eval()))
            distances = pass_distances(logits_of(dense), {"": logits_of(cut_model)}, texts)
            training["distance"] = summarize_texts(distances[""])
            del dense
        student, unpruned = student.cpu(), LayerMap.of(cuts[-number:])
        head_share, channel_share = options.removal().shares(number)
        stage = {
            "stage": number,
            "ratio": head_share,
            "ffn_ratio": channel_share,
            "removed": cuts[-1]["removed"],
            # labels, head numbers and names of blocks of the unpruned model
            "heads": {unpruned.layers[label]: heads for label, heads in unpruned.heads.items()},
            "removed_blocks": removed_blocks(cuts[-number:])[-1],
            "parameters": sum(parameter.numel() for parameter in student.parameters()),
            **training,
        }
        written = {**_content(note), "stages": [*note["stages"], stage]}
        backbone = host.backbone(student)
        manifest = {
            **_content(manifest),
            "weights": loadable_fingerprints(backbone, weights_fingerprint(backbone)),
            **{name: examples.note[name] for name in ("trained_on", "validated_on")},
        }

        def add_files(temporary: Path) -> None:
            write_artefact(temporary / NOTE, SCHEMA, VERSION, written)
            if number == options.stages:  # also loss curves and card
                if options.epochs:
                    draw(written["stages"], LINES, TITLE, temporary / "distillation")
                host.write_card(student, manifest, written, temporary)

        host.write(student, manifest, folder, add_files)
        shutil.rmtree(smaller, ignore_errors=True)
        shutil.rmtree(checkpoints, ignore_errors=True)
    process.wait_for_everyone()


def _content(artefact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an artefact without those that it gets when it is written."""
    return {name: value for name, value in artefact.items() if name not in (*ENVELOPE, "files")}


# ---------------------------------------------------------------------- what a stage removes


def foreign_methods(options: DistillOptions) -> dict[str, str]:
    """Return import path and version of each pruner from another package, which its name does not determine."""
    kinds = {name: PRUNERS.load(name) for name in options.methods if name not in PRUNERS.own}
    return {f"{name}_class": f"{import_path(kind)}, version {kind.version}" for name, kind in kinds.items()}


def stage_method(options: DistillOptions, stage: int, unpruned: ModelMap) -> tuple[Pruner, Pruner, PruneOptions]:
    """Make the pruners of heads and of channels in a stage, and the options of its steps from its beginning to its end.

    Random pruners draw again in each stage. Units and parts are those that suit the unpruned model.
    """
    made: list[Any] = [make_pruner(*method) for method in options.methods.items()]
    pruners = [replace(x, seed=(1000 * stage + x.seed) % 2**31) if hasattr(x, "seed") else x for x in made]
    heads, channels, removal = pruners[0], pruners[-1], options.removal()
    if removal.budget == "heads" and HEADS in removal.kinds:  # fillers would be trained again
        removal = replace(removal, unit=removal.unit or cuttable_unit(unpruned, heads))
    steps = PruneOptions(steps=options.pruning.get("steps", 1)).steps
    within = replace(removal, p_min=0.0, growth=1.0, steps=steps)
    return heads, channels, resolve_options(within, heads, unpruned, channels)


def cut_stage(host: Host, model: Any, stage: int, examples: TrainingExamples, work: Path) -> Cut:
    """Score the previous stage's model and cut the scheduled share, which may be nothing; a killed run resumes."""
    options, backbone = host.options, host.backbone(model)
    model_map, removal = map_model(backbone), options.removal()
    if not removal.ratio and not removal.ffn_ratio:
        return cut(backbone, Plan())
    unpruned = map_model(host.skeleton(options.pretrained))
    heads, channels, within = stage_method(options, stage, unpruned)
    step = stage_pruning(within, removal.shares(stage), unpruned, model_map, within.allocation or heads.allocation)
    text, progress = host.calibration(examples, model), partial(print, flush=True)
    try:
        *_, plan = stages(heads, model_map, step, text, channels, progress=progress, work=work)
    except EmptyPlanError:
        print(f"stage {stage} of {options.stages} removes nothing, as the earlier ones removed enough", flush=True)
        plan = Plan()
    return cut(backbone, plan)


def stage_pruning(
    within: PruneOptions, shares: tuple[float, float], unpruned: ModelMap, model_map: ModelMap, allocation: str
) -> PruneOptions:
    """Return the options of a stage, which removes from its model what `shares` of the unpruned model leave to do."""
    if within.budget != "heads":
        pools = (unit_pools(each, within, within.kinds) for each in (unpruned, model_map))
        before, left = (sum(pool.total for pool in each) for each in pools)
        due = shares[0] * before - (before - left)
        return replace(within, ratio=max(0.0, due) / left if left else 0.0)
    ratios = []
    for share, sizes, remaining in (
        (shares[0], [layer.heads for layer in unpruned.attention], model_map.total_heads),
        (shares[1], list(unpruned.channels().values()), sum(model_map.channels().values())),
    ):
        totals = sizes if allocation == "uniform" else [sum(sizes)]
        removed = sum(sizes) - remaining
        ratios.append(max(0, sum(share_of(share, size) for size in totals) - removed) / max(1, remaining))
    return replace(within, ratio=ratios[0], ffn_ratio=ratios[1])
