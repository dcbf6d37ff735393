"""Prune a model layer by layer: measure, select and compensate in one layer, with earlier layers already pruned.

The hidden states of the whole text are stored once and overwritten layer by layer, so that the text runs through each
layer two or three times, and statistics of only one layer are in memory. The model's own code runs throughout: earlier
layers are replaced by stubs that return the stored hidden states.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features, weight_of
from lmeval_prune.artefacts import Work
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText, StopForward, stop_forward_at
from lmeval_prune.pruners.moments import Moments, bias_for, damped, least_squares_for
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, HEADS, Part, Removed, Units, count_removed, make_plan

logger = logging.getLogger(__name__)

# Selects heads or channels to remove by the moments of their projection's inputs and the damped mean of x·xᵀ.
Select = Callable[[Part, Moments, Tensor | None], set[int]]


@dataclass(frozen=True)
class SequentialPruner(Pruner):
    """Base class of methods that score a projection's units with earlier layers already pruned."""

    reads_text: ClassVar[bool] = True
    allocation: ClassVar[str] = "uniform"
    needs_second: ClassVar[bool] = False  # scores need the mean of x·xᵀ
    remeasure_down: ClassVar[bool] = False  # measure inputs of the down projection after the layer's heads are removed

    @abstractmethod
    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Score each unit of a projection, given by its input columns, before any of them is removed.

        `weight` is (outputs, inputs), in float64, and `second`, with `needs_second`, the damped mean of x·xᵀ over the
        inputs, whose moments are given, too.
        """

    def select(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units, count: int) -> list[int]:
        """Select `count` units to remove: by default those with the lowest scores; arguments as in `unit_scores`."""
        lowest: list[int] = self.unit_scores(weight, moments, second, units).argsort(stable=True)[:count].tolist()
        return lowest

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Score all layers of the unpruned model."""
        values: dict[str, Tensor] = {}

        def score(part: Part, moments: Moments, second: Tensor | None) -> set[int]:
            units = [tuple(part.columns(unit)) for unit in part.units()]
            values[part.key] = self.unit_scores(part.weight, moments, second, units)
            return set()

        LayerwisePruning(model_map, self.require_text(text), score, self.needs_second).run(parts)
        return Scores(values)

    def check(self, model_map: ModelMap, kinds: Collection[str], has_text: bool = True) -> None:
        super().check(model_map, kinds, has_text)
        check_layerwise(model_map, pruner_name(self))


@dataclass
class Removal:
    """What some layers lose, and the compensation for it."""

    removed: Removed = field(default_factory=dict)
    compensation: dict[str, Tensor] = field(default_factory=dict)  # named as in a plan
    damping: dict[str, float] = field(default_factory=dict)  # by projection, where it was raised

    def save(self, work: Work, label: str) -> None:
        tensors = {f"removed {key}": torch.tensor(sorted(members)) for key, members in self.removed.items()}
        damping = {f"damping {key}": torch.tensor(x, dtype=torch.float64) for key, x in self.damping.items()}
        compensation = {f"compensation {key}": x for key, x in self.compensation.items()}
        work.write_tensors(label, tensors | damping | compensation)

    @classmethod
    def load(cls, work: Work, label: str) -> Removal | None:
        """Return what a layer loses; None if its file is missing or damaged."""
        tensors = work.tensors(label)
        if tensors is None:
            return None
        removal = cls()
        for name, tensor in tensors.items():
            kind, _, key = name.partition(" ")
            if kind == "compensation":
                removal.compensation[key] = tensor
            elif kind == "removed":
                removal.removed[key] = set(tensor.tolist())
            else:
                removal.damping[key] = float(tensor)
        return removal


@dataclass
class LayerwisePruning:
    """Prunes and compensates one layer after another; the model itself does not change."""

    model_map: ModelMap
    text: CalibrationText
    select: Select
    needs_second: bool = False  # as in SequentialPruner
    remeasure_down: bool = False
    options: PruneOptions = field(default_factory=lambda: PruneOptions(compensation="none"))
    store: Work | None = None  # stores finished layers, so that a killed run resumes
    progress: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.solves = self.options.compensation == "least_squares"
        self.outputs: list[Any] = []  # of each batch: what the previous layer returned

    def run(self, parts: Sequence[Part]) -> tuple[Removal, dict[str, Any]]:
        """Prune these parts of the model; return what is removed, and notes on least squares for the plan."""
        total, labels, notes = Removal(), list(self.model_map.layers), dict[str, Any]()
        if parts and (self.needs_second or self.solves):
            widest, tokens = max(parts, key=lambda part: in_features(part.projection)), self.text.tokens
            if (columns := in_features(widest.projection)) > tokens:
                name = widest.projection_name
                logger.warning(
                    "the calibration text has %d tokens, fewer than the %d columns of %s: the solution of least "
                    "squares depends on the damping; give more --windows or --tokens",
                    *(tokens, columns, name),
                )
                notes["fewer_tokens_than_columns"] = {"tokens": tokens, "widest": name, "columns": columns}
        by_layer = [[part for part in parts if part.label == label] for label in labels]
        last = max((number for number, layer_parts in enumerate(by_layer) if layer_parts), default=-1)
        for number, label in enumerate(labels[: last + 1]):
            removal = Removal.load(self.store, label) if self.store else None
            if removal is None:
                removal = self._prune_layer(number, by_layer[number])
                if self.store:
                    removal.save(self.store, label)
                raised = "".join(f"; damping of {x} raised to {share:g}" for x, share in removal.damping.items())
                counts = count_removed(removal.removed)
                removed = f"{counts[HEADS]} heads and {counts[CHANNELS]} channels removed"
                self.progress(f"layer {label} of {len(labels)}: {removed}{raised}")
            total.removed |= removal.removed
            total.compensation |= removal.compensation
            total.damping |= removal.damping
            if number < last:
                self.run_layer(number, removal, {}, keep_output=True)
        return total, {**({"damping": total.damping} if total.damping else {}), **notes}

    def _prune_layer(self, number: int, parts: Sequence[Part]) -> Removal:
        """Select what a layer loses, and compensate for it; inputs are measured after the layer's earlier removals."""
        removal, has_second = Removal(), self.needs_second or self.solves

        def measure(measured: Sequence[Part]) -> dict[str, Moments]:
            moments = {part.key: Moments(in_features(part.projection), has_second) for part in measured}
            self.run_layer(number, removal, {part.projection: moments[part.key] for part in measured})
            for part in measured:
                moments[part.key].check(part.projection_name)
            return moments

        def damped_second(part: Part, moments: Moments) -> Tensor:
            second, damping = damped(moments.second, self.options.damping)
            if damping != self.options.damping:
                removal.damping[part.projection_name] = damping
            return second

        for measured in [[part] for part in parts] if self.remeasure_down else [parts]:
            moments, selected = measure(measured), []
            for part in measured:
                needs_second = self.needs_second or (self.solves and part is measured[0])
                second = damped_second(part, moments[part.key]) if needs_second else None
                selected.append((part, self.select(part, moments[part.key], second), second))
            for part, members, second in selected:
                if not members:
                    continue
                if part is not measured[0] and self.options.compensation != "none":
                    # pruning the first part has changed the inputs of this one
                    moments = measure([part])
                    second = damped_second(part, moments[part.key]) if has_second else None
                removal.removed[part.key] = members
                columns, dtype = part.columns(sorted(members)), weight_of(part.projection).dtype
                if self.options.compensation == "bias":
                    bias = bias_for(part.weight, moments[part.key].mean, columns)
                    removal.compensation[f"{part.projection_name}.bias"] = bias.to(dtype)
                elif self.solves:
                    assert second is not None
                    weight = least_squares_for(part.weight, second, columns)
                    removal.compensation[f"{part.projection_name}.weight"] = weight.to(dtype)
        return removal

    def run_layer(
        self, number: int, removal: Removal, moments: Mapping[nn.Module, Moments], keep_output: bool = False
    ) -> None:
        """Run the text through a layer without its removed units, and add the inputs of projections to their moments.

        `keep_output` stores the layer's output, which the next layer needs.
        """
        model, layers = self.model_map.model, list(self.model_map.layers.values())
        counted, position = torch.ones(0), 0

        def collect(statistics: Moments, x: Tensor) -> Tensor:
            statistics.add_batch(x, counted)
            return x

        plan = make_plan(removal.removed, self.options.allow_empty_layer, compensation=dict(removal.compensation))
        with plan.applied_to(model, self.model_map), ExitStack() as stack, torch.no_grad():
            for module, statistics in moments.items():
                change_input(module, partial(collect, statistics), stack)
            for layer in layers[:number]:
                stack.enter_context(replaced(layer, forward=lambda *_, **__: self.outputs[position]))
            stack.enter_context(stop_forward_at(layers[number], after=True))
            for position, (batch, inputs) in enumerate(self.text.inputs(model)):
                counted = batch.counted
                try:
                    model(**inputs)
                except StopForward as stop:
                    if keep_output:  # replaces the output of the previous layer
                        self.outputs[position : position + 1] = [stop.output]
                else:
                    raise InputError(f"layer {number} of this {self.model_map.model_type} model did not run")


def check_layerwise(model_map: ModelMap, name: str) -> None:
    """Raise `InputError` for a model with several stacks; it may have no weights."""
    if model_map.stacks != ("",):
        raise InputError(f"{name} prunes layer by layer, which this {model_map.model_type} model of two stacks cannot")
