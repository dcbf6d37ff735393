"""The feature term: attention maps of a student, each beside that of its teacher's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.checkpoints.pruned import first_labels, kept_layers
from lmeval_prune.distillation.losses import attention_distance

_OTHER_DROPOUT = ("resid", "hidden", "output")  # dropout in attention modules that is not applied to the maps


@dataclass(frozen=True)
class LayerMap:
    """The teacher's layer of each layer of the student, and the teacher's head of each head of the student.

    Labels (`L5`) and numbers are each model's own.
    """

    layers: dict[str, str]
    heads: dict[str, list[int]]

    @classmethod
    def of(cls, stages: Sequence[Mapping[str, Any]]) -> LayerMap:
        """Follow the manifest's stages from the teacher, the model before the first of them, to the student."""
        heads: dict[str, list[int]] = {}
        for stage in stages:
            heads = {
                child: [heads[parent][head] if parent in heads else head for head in kept_heads]
                for child, parent in kept_layers(stage).items()
                if (kept_heads := stage["kept_heads"].get(parent)) is not None
            }
        return cls(first_labels(stages), heads)


class Features:
    """Compares the attention maps of a student with those of its teacher.

    Args:
        layers: the teacher's layers and heads of the student's.
        student, teacher: both models' layers.
        relative: whether the difference is divided by the teacher's squares.
    """

    def __init__(self, layers: LayerMap, student: ModelMap, teacher: ModelMap, relative: bool) -> None:
        self.relative = relative
        self.heads = [layers.heads[layer.label] for layer in student.attention]
        numbers = {layer.label: number for number, layer in enumerate(teacher.attention)}
        self.teacher_numbers = [numbers[layers.layers[layer.label]] for layer in student.attention]
        turn_off_map_dropout(student)

    def term(self, target: Any, outputs: Any, real: Tensor) -> Tensor:
        """Return the feature term, summed over real positions, from the outputs of teacher and student."""
        expected = [target.attentions[number] for number in self.teacher_numbers]
        return attention_distance(expected, outputs.attentions, self.heads, real, self.relative)


def turn_off_map_dropout(model_map: ModelMap) -> None:
    """Turn off the dropout of attention maps, but not of residual streams.

    Models return their maps after dropout, so the feature term would compare random draws.
    """
    for layer in model_map.attention:
        for path, module in layer.module.named_modules():
            if _is_other(path):
                continue
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float) and not _is_other(name):
                    setattr(module, name, 0.0)


def _is_other(name: str) -> bool:
    return any(other in name for other in _OTHER_DROPOUT)
