"""Algorithm 2: what matters least is removed, the rest is trained under the model before, and so on, stage by stage.

The unpruned model teaches the first stage, each student the next. A stage is a folder that appears when it is complete,
so that whoever goes on reads what there is and does the rest.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from lmeval_prune.architectures import ModelMap, loadable_fingerprints, map_model, weights_fingerprint
from lmeval_prune.artefacts import alone, write_artefact, write_text
from lmeval_prune.athena.checkpoint import SETTINGS
from lmeval_prune.athena.training import begun_with, last_whole, refuse_other, room_in
from lmeval_prune.checkpoints.embedded import check_name
from lmeval_prune.checkpoints.pruned import read_manifest
from lmeval_prune.distillation.curves import draw
from lmeval_prune.distillation.host import NOTE, SCHEMA, VERSION, Host, Material, check_maps, note_of
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.trainer import check_arguments, train
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import share_of
from lmeval_prune.pruners.base import Pruner, make_pruner, pruner_name
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import check_methods, least_removed, settled, stages
from lmeval_prune.pruners.sequential import SequentialPruner, count_removed
from lmeval_prune.surgery.cut import Cut, check_cuttable, cut

_OF_THE_FILE = ("schema", "schema_version", "created_by", "files")


def distill(options: DistillOptions) -> dict[str, Any]:
    """Prune and distil a model and write it; what was interrupted goes on.

    What is not yet complete stands beside the output until it is there. A model that was made with the same options is
    left as it is.

    Returns:
        What `distillation.json` says.

    Raises:
        InputError: something cannot be used, before any weights are read wherever that can be known; or `output` was
            begun with other options.
    """
    target = Path(options.output)
    work = target.with_name(f"{target.name}.distilling")
    host = host_of(options)
    settings = _settings(host)
    if (target / NOTE).is_file():
        refuse_other(settings, note_of(target)["options"], target)
    else:
        if target.exists() and (target.is_file() or any(target.iterdir())):
            raise InputError(f"{target} exists and is no distilled model; name another output")
        check(host)
        with ExitStack() as stack:
            if this_process().is_main_process:
                stack.enter_context(alone(target))
            _go_on(host, settings, target, work)
    if this_process().is_main_process:
        shutil.rmtree(work, ignore_errors=True)
    return note_of(target)


def this_process() -> Any:
    """Which of several processes this one is, and what lets them wait for each other."""
    return PartialState(cpu=not torch.accelerator.is_available())


def host_of(options: DistillOptions) -> Host:
    """What knows the kind of the model.

    Raises:
        InputError: options do not suit it.
    """
    folder = Path(options.pretrained)
    if (folder / SETTINGS).is_file():
        from lmeval_prune.distillation.athena_host import AthenaHost

        return AthenaHost(options)
    check_name(options.pretrained)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(
            f"pretrained={folder}: there is no model in this folder, neither an ATHENA nor a language model"
        )
    from lmeval_prune.distillation.language_host import LanguageHost

    return LanguageHost(options)


def check(host: Host) -> None:
    """Refuse what cannot be done; no weights are read.

    Raises:
        InputError: saying why.
    """
    options, wanted = host.options, host.options.pruning()
    bare = host.skeleton(options.pretrained)
    model_map = map_model(bare)
    host.check_layers()
    if wanted.ratio or wanted.ffn_ratio:
        pruner, of_channels = _pruners(options, 0)
        for one in (pruner, of_channels):
            if isinstance(one, SequentialPruner):
                raise InputError(
                    f"{pruner_name(one)} scores each layer when those before are pruned, and a stage needs scores of "
                    "all layers at once; use another method"
                )
        wanted = settled(wanted, pruner, model_map, of_channels)
        check_methods(pruner, of_channels, model_map, wanted, True)
        check_cuttable(model_map, bool(wanted.ratio))
        _check_stages(model_map, wanted, {"heads": pruner, "channels": of_channels})
    check_arguments(options)
    if options.teacher:
        host.check_teacher(options.teacher)
    if options.looks_at_maps:
        check_maps(bare)
        if options.teacher and map_model(host.skeleton(options.teacher)).signature() != model_map.signature():
            raise InputError(
                f"feature compares head by head, and the teacher {options.teacher} has others; give --feature false"
            )


def _check_stages(model_map: ModelMap, wanted: PruneOptions, pruners: Mapping[str, Pruner]) -> None:
    """Refuse a schedule with a stage that removes nothing.

    Raises:
        InputError: there is one, or what is removed would stay as fillers that are trained again.
    """
    if wanted.ratio and wanted.unit == "head" and any(1 < one.kv_heads < one.heads for one in model_map.attention):
        raise InputError(
            "unit=head leaves heads in the groups that key-value heads are shared by, and training would fill them "
            "again; use group or balanced"
        )
    before = (0, 0)
    for stage, removed in enumerate(least_removed(model_map, wanted, pruners), start=1):
        counts = count_removed(removed)
        after = (counts["heads"], counts["channels"])
        if after[0] <= before[0] and after[1] <= before[1]:
            raise InputError(
                f"stage {stage} of {wanted.steps} has nothing left to remove: {after[0]} of {model_map.total_heads} "
                f"heads and {after[1]} of {sum(model_map.channels().values())} channels are gone by then; give fewer "
                f"stages, a larger ratio, another unit, allocation global or a smaller ffn_multiple"
            )
        before = after


def _pruners(options: DistillOptions, stage: int) -> tuple[Pruner, Pruner]:
    """What scores heads, and channels; what draws, draws anew in each stage."""
    heads = make_pruner(options.method, options.options)
    channels = make_pruner(options.ffn_method, options.ffn_options) if options.ffn_method else heads
    return _of_stage(heads, stage), _of_stage(channels, stage)


def _of_stage(pruner: Any, stage: int) -> Pruner:
    found: Pruner = replace(pruner, seed=1000 * stage + pruner.seed) if hasattr(pruner, "seed") else pruner
    return found


def _settings(host: Host) -> dict[str, Any]:
    """What the result depends on: options, and the models by their weights."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(host.options)))
    for name in ("output", "data_dir"):  # where things are changes nothing
        del found[name]
    for name in ("pretrained", "teacher"):
        found[name] = host.identity(found[name]) if found[name] else None
    return found


def _go_on(host: Host, settings: dict[str, Any], target: Path, work: Path) -> None:
    options, process = host.options, this_process()
    begun = work / "options.json"
    if begun.is_file():
        refuse_other(settings, begun_with(begun), work)
    material = host.material()
    if options.patience and not material.validation:
        raise InputError("patience needs a validation split, and the model was trained without one; give validation")
    process.wait_for_everyone()
    if process.is_main_process:
        write_text(begun, json.dumps(settings, indent=1) + "\n")
        shown = {name: value for name, value in material.about.items() if isinstance(value, int)}
        print(f"problems: {', '.join(f'{name} {value}' for name, value in shown.items())}", flush=True)
    parent, note = (
        options.pretrained,
        {"model": options.pretrained, "options": settings, "material": material.about, "stages": []},
    )
    for stage in range(1, options.stages + 1):
        folder = target if stage == options.stages else work / f"stage{stage}"
        if not (folder / NOTE).is_file():
            with room_in(work):
                _run_stage(host, material, stage, parent, work, folder, note)
        parent, note = str(folder), note_of(folder)


def _run_stage(
    host: Host, material: Material, stage: int, parent: str, work: Path, folder: Path, note: dict[str, Any]
) -> None:
    """Remove, train, and write what came of it; what of this is done already is read."""
    options, process, begun = host.options, this_process(), time.monotonic()
    smaller, training = work / f"stage{stage}.cut", work / f"stage{stage}.training"
    if process.is_main_process and not smaller.is_dir():
        print(f"stage {stage} of {options.stages}: scoring and cutting", flush=True)
        model: Any = host.read(parent).to(process.device)
        found = _cut(host, model, stage, material)
        host.write(host.with_part(model, found.model.cpu()), found.manifest, smaller)
        del model, found
    process.wait_for_everyone()
    manifest = read_manifest(host.part_folder(smaller)) or {}
    own = manifest["stages"][-1]
    student: Any = host.read(str(smaller))
    layers = map_model(host.part(student)).attention
    kept = [own["kept_heads"][layer.label] for layer in layers]
    learned: dict[str, Any] = {"best_epoch": 0, "log": []}
    if options.epochs:
        taught_by = options.teacher if stage == 1 and options.teacher else parent
        teacher = host.read(taught_by) if options.taught else None
        learned = train(host, student, teacher, kept, material, training, stage, time.monotonic() - begun, last_whole)
    process.wait_for_everyone()
    if process.is_main_process:
        before = note["stages"][-1]["heads"] if note["stages"] else {}
        ratio, ffn_ratio = options.pruning().shares(stage)
        about = {
            "stage": stage,
            "ratio": ratio,
            "ffn_ratio": ffn_ratio,
            "removed": own["removed"],
            "heads": {x.label: _originals(one, before.get(x.label)) for x, one in zip(layers, kept, strict=True)},
            "parameters": sum(parameter.numel() for parameter in student.parameters()),
            **learned,
        }
        content = {**{k: v for k, v in note.items() if k not in _OF_THE_FILE}, "stages": [*note["stages"], about]}
        student = student.cpu().eval()
        part = host.part(student)
        manifest = {name: value for name, value in manifest.items() if name not in _OF_THE_FILE}
        manifest["weights"] = loadable_fingerprints(part, weights_fingerprint(part))
        manifest |= {name: material.about[name] for name in ("trained_on", "validated_on")}

        def beside(half: Path) -> None:
            write_artefact(half / NOTE, SCHEMA, VERSION, content)
            if stage == options.stages:
                draw(content["stages"], half / "distillation")

        host.write(student, manifest, folder, beside)
        shutil.rmtree(smaller, ignore_errors=True)
        shutil.rmtree(training, ignore_errors=True)
    process.wait_for_everyone()


def _originals(kept: list[int], before: list[int] | None) -> list[int]:
    """By which numbers the unpruned model knew these heads."""
    return [before[head] for head in kept] if before is not None else kept


def _cut(host: Host, model: Any, stage: int, material: Material) -> Cut:
    """The model without what the schedule removes at a stage.

    Raises:
        InputError: nothing is left to be removed.
    """
    options, part = host.options, host.part(model)
    model_map, wanted = map_model(part), options.pruning()
    if not wanted.ratio and not wanted.ffn_ratio:
        return cut(part, Plan())
    heads, channels = _pruners(options, stage)
    step = due(
        wanted, stage, map_model(host.skeleton(options.pretrained)), model_map, wanted.allocation or heads.allocation
    )
    plan = Plan()
    if step.ratio or step.ffn_ratio:
        *_, plan = stages(heads, model_map, step, host.calibration(material), channels)
    if not plan.heads and not plan.channels:
        raise InputError(f"stage {stage} of {options.stages} has nothing left to remove; give fewer stages")
    return cut(part, plan)


def due(wanted: PruneOptions, stage: int, base: ModelMap, model_map: ModelMap, allocation: str) -> PruneOptions:
    """What a stage removes of the model that earlier stages have left, as shares of that model.

    Args:
        wanted: shares of the unpruned model.
        stage: from 1.
        base: the unpruned model.
        model_map: what is left of it.
        allocation: `global` or `uniform`.
    """
    of_heads, of_channels = wanted.shares(stage)
    heads = [layer.heads for layer in base.attention]
    channels = list(base.channels().values())
    ratios = []
    for share, sizes, left in (
        (of_heads, heads, model_map.total_heads),
        (of_channels, channels, sum(model_map.channels().values())),
    ):
        pots = sizes if allocation == "uniform" else [sum(sizes)]
        gone = sum(sizes) - left
        ratios.append(max(0, sum(share_of(share, size) for size in pots) - gone) / max(1, left))
    return replace(wanted, ratio=ratios[0], ffn_ratio=ratios[1], p_min=0.0, steps=1, growth=1.0)
