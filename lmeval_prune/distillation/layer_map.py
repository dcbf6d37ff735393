"""Find the teacher's layer and heads for each layer of a student, and collect the hidden states of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.layers import layers_in
from lmeval_prune.checkpoints.pruned import first_labels, kept_layers
from lmeval_prune.errors import InputError, did_you_mean

Stage = Mapping[str, Any]  # a manifest's entry about one cut


@dataclass(frozen=True)
class LayerMap:
    """The teacher's layer of each layer of the student, and the teacher's head of each head of the student.

    Labels (`L5`) and numbers are each model's own.
    """

    layers: dict[str, str]
    heads: dict[str, list[int]]

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> LayerMap:
        """Follow the manifest's stages from the teacher, the model before the first of them, to the student."""
        heads: dict[str, list[int]] = {}
        for stage in stages:
            heads = {
                child: [heads[parent][head] if parent in heads else head for head in kept_heads]
                for child, parent in kept_layers(stage).items()
                if (kept_heads := stage["kept_heads"].get(parent)) is not None
            }
        return cls(first_labels(stages), heads)


def stages_since(stages: Sequence[Stage], signature: Mapping[str, Any]) -> Sequence[Stage] | None:
    """Return the stages from the first whose parent has a model's signature; None if there is none.

    Parents of equal signature have the same heads: no stage between them removed any.
    """
    for number, stage in enumerate(stages):
        if all(stage["parent"].get(name) == value for name, value in signature.items()):
            return stages[number:]
    return None


def layers_of(model_map: ModelMap) -> dict[str, nn.Module]:
    """Return the layers of a model by label, also those without attention."""
    return {layer.label: layer.module for layer in layers_in(model_map.model, model_map.attention[0].family)}


def checked_layers(layers: Mapping[str, str], student: ModelMap, teacher: ModelMap) -> dict[str, str]:
    """Return a map of a student's layers to a teacher's; `InputError` if one of them does not exist."""
    for side, labels, model_map in (("student", layers.keys(), student), ("teacher", layers.values(), teacher)):
        model_labels = layers_of(model_map)
        for label in labels:
            if label not in model_labels:
                names = f"{next(iter(model_labels))} to {list(model_labels)[-1]}"
                raise InputError(
                    f"layer_map: the {side} has no layer {label}{did_you_mean(label, model_labels)}; it has {names}"
                )
    return dict(layers)


@contextmanager
def collected_states(modules: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of layers in a forward pass inside the block, (texts, tokens, width) each, by number.

    The pass can be in two parts: the common prefix of all texts, as one text, and the rest.
    """
    states: dict[int, Tensor] = {}

    def collect(number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        before = states.get(number)
        states[number] = value if before is None else torch.cat([before.expand(len(value), -1, -1), value], dim=1)

    with ExitStack() as stack:
        for number, module in enumerate(modules):
            stack.callback(module.register_forward_hook(partial(collect, number)).remove)
        yield states
