"""Choose the teacher of a stage, and find which of its layers and heads are those of the student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_prune.architectures import map_model
from lmeval_prune.distillation.features import LayerMap
from lmeval_prune.distillation.host import Host
from lmeval_prune.distillation.options import FIRST, PREVIOUS


def teacher_of(host: Host, parent: str) -> str:
    """Return the folder or name of a stage's teacher; `parent` is the model that the stage prunes."""
    return {PREVIOUS: parent, FIRST: host.options.pretrained}.get(host.options.teacher, host.options.teacher)


def compared_layers(host: Host, number: int, stages: Sequence[dict[str, Any]]) -> LayerMap:
    """Return which layers and heads of a stage's teacher are the student's; `stages` are those of its manifest."""
    if name := host.options.other_teacher:
        return LayerMap.of(stages_since(stages, map_model(host.skeleton(name)).signature()) or [])
    return LayerMap.of(stages[-number:] if host.options.teacher == FIRST else stages[-1:])


def stages_since(
    stages: Sequence[Mapping[str, Any]], signature: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]] | None:
    """Return the stages from the first whose parent has a model's signature; None if there is none.

    Parents of equal signature have the same heads: no stage between them removed any.
    """
    for number, stage in enumerate(stages):
        if all(stage["parent"].get(name) == value for name, value in signature.items()):
            return stages[number:]
    return None
