"""Compare a student's layers with its teacher's: attention maps and hidden states, the feature terms of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.distillation.attention_maps import check_maps, turn_off_map_dropout
from lmeval_prune.distillation.layer_map import LayerMap, checked_layers, collected_states, layers_of
from lmeval_prune.distillation.losses import attention_distance, hidden_distance
from lmeval_prune.distillation.options import DistillOptions


class Features:
    """Attention maps and hidden states of a student, compared with those of its teacher.

    Args:
        options: which are compared, and whether they are divided by the teacher's mean squares.
        layers: the teacher's layers and heads of the student's.
        student, teacher: both models' layers.
    """

    def __init__(self, options: DistillOptions, layers: LayerMap, student: ModelMap, teacher: ModelMap) -> None:
        self.options, self.student, self.relative = options, student, options.normalize == "teacher"
        self.inputs: dict[str, Any] = {}  # further inputs of both models
        self.pairs = dict[str, str]()
        if options.feature:
            self.inputs = {"output_attentions": True}
            self.heads = [layers.heads[layer.label] for layer in student.attention]
            numbers = {layer.label: number for number, layer in enumerate(teacher.attention)}
            self.teacher_numbers = [numbers[layers.layers[layer.label]] for layer in student.attention]
            turn_off_map_dropout(student)
        if options.hidden:
            self.pairs = checked_layers(options.layer_map or layers.layers, student, teacher)
        self.modules = (
            [layers_of(student)[label] for label in self.pairs],
            [layers_of(teacher)[label] for label in self.pairs.values()],
        )

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the hidden states of both models inside the block."""
        student, teacher = self.modules
        with collected_states(student) as self._student, collected_states(teacher) as self._teacher:
            yield

    def terms(self, target: Any, outputs: Any, real: Tensor) -> dict[str, Tensor]:
        """Return the feature terms, summed over real positions, from the outputs of teacher and student."""
        terms: dict[str, Tensor] = {}
        if self.options.feature:
            check_maps(outputs.attentions, self.student.model_type, [layer.heads for layer in self.student.attention])
            expected = [target.attentions[number] for number in self.teacher_numbers]
            terms["feature"] = attention_distance(expected, outputs.attentions, self.heads, real, self.relative)
        if self.options.hidden:
            expected, actual = (
                [states[number] for number in range(len(self.pairs))] for states in (self._teacher, self._student)
            )
            terms["hidden"] = hidden_distance(expected, actual, real, self.relative)
        return terms
