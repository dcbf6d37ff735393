"""Choose the teacher of a stage, and find which of its layers and heads are those of the student."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.architectures import ModelMap, map_model, text_config
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.pruned import read_manifest
from lmeval_prune.distillation.attention_maps import check_returns_maps
from lmeval_prune.distillation.host import Host
from lmeval_prune.distillation.layer_map import LayerMap, checked_layers, stages_since
from lmeval_prune.errors import InputError


def check_teachers(host: Host, student: ModelMap) -> None:
    """Raise an `InputError` if the first teacher, or its layers, do not suit the model; no weights are read."""
    options, name = host.options, host.options.teacher
    if name:
        host.check_teacher(name)
    if options.uses_attention_maps:
        check_returns_maps(student.model)
    if not (options.uses_attention_maps or options.uses_hidden_states):
        return
    teacher = map_model(host.skeleton(name)) if name else student
    stages = [*_stages_of(host, options.pretrained), {"parent": student.signature()}]
    is_related = stages_since(stages, teacher.signature()) is not None
    if options.uses_attention_maps and not is_related:
        raise InputError(f"feature compares heads, and the teacher {name} has other heads; give --feature false")
    if options.uses_hidden_states:
        _check_hidden_states(host, student, teacher, is_related)


def _check_hidden_states(host: Host, student: ModelMap, teacher: ModelMap, is_related: bool) -> None:
    options, name = host.options, host.options.teacher
    checked_layers(options.layer_map, student, teacher)
    if not (is_related or options.layer_map):
        raise InputError(
            f"hidden compares layers, and the teacher {name} has others than {options.pretrained}; name them in "
            f"layer_map, e.g. L0=L0,L5=L11, or give --hidden false"
        )
    widths = [getattr(text_config(model_map.model), "hidden_size", None) for model_map in (student, teacher)]
    if widths[0] != widths[1]:
        raise InputError(
            f"hidden compares hidden states, and those of the teacher {name} are {widths[1]} wide, not {widths[0]}; "
            f"give --hidden false"
        )


def teacher_of(host: Host, number: int, parent: str) -> str:
    """Return the folder or name of a stage's teacher; `parent` is the model that the stage prunes."""
    options = host.options
    return (options.teacher or options.pretrained) if _is_first(host, number) else parent


def compared_layers(host: Host, number: int, stages: Sequence[dict[str, Any]]) -> LayerMap:
    """Return which layers and heads of a stage's teacher are the student's; `stages` are those of its manifest."""
    if not _is_first(host, number):
        return LayerMap.of(stages[-1:])
    if host.options.teacher:
        signature = map_model(host.skeleton(host.options.teacher)).signature()
        return LayerMap.of(stages_since(stages, signature) or [])
    return LayerMap.of(stages[-number:])


def _is_first(host: Host, number: int) -> bool:
    return number == 1 or host.options.teachers == "first"


def _stages_of(host: Host, folder: str) -> list[dict[str, Any]]:
    """Return the cuts that a model has had, by its manifest."""
    manifest = read_manifest(host.backbone_folder(Path(embedded.resolve(folder)))) or {}
    stages: list[dict[str, Any]] = manifest.get("stages", [])
    return stages
