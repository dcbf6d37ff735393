"""Prune a model layer by layer: measure, select and compensate in one layer, with earlier layers already pruned.

The hidden states of the whole text are stored once and overwritten layer by layer, so that the text runs through each
layer two or three times, and statistics of only one layer are in memory. The model's own code runs throughout: earlier
layers are replaced by stubs that return the stored hidden states.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features, weight_of
from lmeval_prune.artefacts import Work
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText, StopForward, stop_forward_at
from lmeval_prune.pruners.compensation import bias_for, damped, least_squares_for
from lmeval_prune.pruners.estimate import Estimate
from lmeval_prune.pruners.moments import Moments
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, DEPTH_KINDS, HEADS, KINDS, LAYERS, Part, Removal, Removed, Units
from lmeval_prune.pruners.stores import load_layer, save_layer

logger = logging.getLogger(__name__)

# Selects heads or channels to remove by the moments of their projection's inputs and the damped mean of x·xᵀ.
Select = Callable[[Part, Moments, Tensor | None], set[int]]


@dataclass(frozen=True)
class SequentialPruner(Pruner):
    """Base class of methods that score a projection's units with earlier layers already pruned.

    Attributes:
        needs_second: (class) scores need the mean of x·xᵀ.
        remeasure_down: (class) measure the inputs of the down projection again after the layer's heads are removed.
    """

    reads_text: ClassVar[bool] = True
    allocation: ClassVar[str] = "uniform"
    needs_second: ClassVar[bool] = False
    remeasure_down: ClassVar[bool] = False

    @abstractmethod
    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Score each unit of a projection before any of them is removed.

        Args:
            weight: (outputs, inputs), in float64.
            moments: moments of the inputs.
            second: with `needs_second`, the damped mean of x·xᵀ, (inputs, inputs).
            units: input columns of each unit.
        """

    def select(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units, count: int) -> list[int]:
        """Select `count` units to remove: by default those with the lowest scores; arguments as in `unit_scores`."""
        lowest: list[int] = self.unit_scores(weight, moments, second, units).argsort(stable=True)[:count].tolist()
        return lowest

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Score all layers of the unpruned model; see `Pruner.scores`."""
        values: dict[str, Tensor] = {}

        def score(part: Part, moments: Moments, second: Tensor | None) -> set[int]:
            values[part.key] = self.unit_scores(part.weight, moments, second, _unit_columns(part, part.units()))
            return set()

        LayerwisePruning(model_map, self.require_text(text), score, self.needs_second).run(parts)
        return Scores(values)

    def selection(self, unit: str, counts: Mapping[str, int]) -> Select:
        """Return a function that selects `counts[part.key]` units of a part."""

        def select(part: Part, moments: Moments, second: Tensor | None) -> set[int]:
            units = part.units(unit)
            selected = self.select(part.weight, moments, second, _unit_columns(part, units), counts[part.key])
            return {member for number in selected for member in units[number]}

        return select

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse encoder-decoders; see `Pruner.check_model`."""
        check_layerwise(model_map, pruner_name(self))


def _unit_columns(part: Part, units: Units) -> Units:
    return [tuple(part.columns(unit)) for unit in units]


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
        self.replay = LayerReplay(self.model_map, self.text)
        self.solves = self.options.compensation == "least_squares"

    def run(self, parts: Sequence[Part]) -> tuple[Removal, dict[str, Any]]:
        """Prune these parts of the model; return what is removed, and notes on least squares for the plan."""
        total, notes, estimate = Removal(), dict[str, Any](), Estimate()
        if self.needs_second or self.solves:
            notes = _note_of_few_tokens(parts, self.text.tokens)
        labels = list(self.model_map.layers)
        by_layer = [[part for part in parts if part.label == label] for label in labels]
        last = max((number for number, layer_parts in enumerate(by_layer) if layer_parts), default=-1)
        for number, label in enumerate(labels[: last + 1]):
            removal = load_layer(self.store, label) if self.store else None
            if removal is None:
                estimate.minutes(number / (last + 1))
                removal = self._prune_layer(number, by_layer[number])
                if self.store:
                    save_layer(self.store, label, removal)
                self._report(label, removal, estimate.minutes((number + 1) / (last + 1)))
            total.add(removal)
            if number < last:
                self._run_layer(number, removal, {}, keep_output=True)
        return total, {**({"damping": total.damping} if total.damping else {}), **notes}

    def _prune_layer(self, number: int, parts: Sequence[Part]) -> Removal:
        """Select what a layer loses, and compensate for it; inputs are measured after the layer's earlier removals."""
        removal = Removal()
        for measured in [[part] for part in parts] if self.remeasure_down else [parts]:
            moments = self._measure(number, removal, measured)
            selected = []
            for part in measured:
                needs_second = self.needs_second or (self.solves and part is measured[0])
                second = self._damped(part, moments[part.key], removal) if needs_second else None
                selected.append((part, self.select(part, moments[part.key], second), second))
            for part, members, second in selected:
                if not members:
                    continue
                if part is not measured[0] and self.options.compensation != "none":
                    # pruning the first part has changed the inputs of this one
                    moments = self._measure(number, removal, [part])
                    has_second = self.needs_second or self.solves
                    second = self._damped(part, moments[part.key], removal) if has_second else None
                self._remove(part, members, moments[part.key], second, removal)
        return removal

    def _measure(self, number: int, removal: Removal, parts: Sequence[Part]) -> dict[str, Moments]:
        has_second = self.needs_second or self.solves
        moments = {part.key: Moments(in_features(part.projection), has_second) for part in parts}
        self._run_layer(number, removal, {part.projection: moments[part.key] for part in parts})
        for part in parts:
            moments[part.key].check(part.projection_name)
        return moments

    def _run_layer(
        self, number: int, removal: Removal, moments: Mapping[nn.Module, Moments], keep_output: bool = False
    ) -> None:
        plan = make_plan(removal.removed, self.options.allow_empty_layer, compensation=dict(removal.compensation))
        with plan.applied_to(self.model_map.model, self.model_map):
            self.replay.run_layer(number, moments, keep_output)

    def _damped(self, part: Part, moments: Moments, removal: Removal) -> Tensor:
        second, damping = damped(moments.second, self.options.damping)
        if damping != self.options.damping:
            removal.damping[part.projection_name] = damping
        return second

    def _remove(self, part: Part, members: set[int], moments: Moments, second: Tensor | None, removal: Removal) -> None:
        removal.removed[part.key] = members
        columns, dtype = part.columns(sorted(members)), weight_of(part.projection).dtype
        name = part.projection_name
        if self.options.compensation == "bias":
            removal.compensation[f"{name}.bias"] = bias_for(part.weight, moments.mean, columns).to(dtype)
        elif self.solves:
            assert second is not None
            removal.compensation[f"{name}.weight"] = least_squares_for(part.weight, second, columns).to(dtype)

    def _report(self, label: str, removal: Removal, minutes: float | None) -> None:
        raised = "".join(f"; damping of {name} raised to {share:g}" for name, share in removal.damping.items())
        counts = count_removed(removal.removed)
        layers = len(self.model_map.layers)
        removed = f"{counts[HEADS]} heads and {counts[CHANNELS]} channels removed"
        left = f"; about {minutes:.1f} min left" if minutes else ""
        self.progress(f"layer {label} of {layers}: {removed}{raised}{left}")


def make_plan(removed: Removed, allow_empty_layer: bool, **fields: Any) -> Plan:
    """Return a plan that removes these members of parts; `fields` are other fields of the plan."""
    members = {tuple(key.split(".", 1)): sorted(numbers) for key, numbers in removed.items() if numbers}
    blocks = tuple(label if kind == LAYERS else f"{label}.{kind}" for kind, label in members if kind in DEPTH_KINDS)
    heads = tuple(f"{label}H{n}" for (kind, label), numbers in members.items() if kind == HEADS for n in numbers)
    channels = {label: numbers for (kind, label), numbers in members.items() if kind == CHANNELS}
    return Plan(heads, channels, blocks, allow_empty_layer=allow_empty_layer, **fields)


def count_removed(removed: Removed) -> dict[str, int]:
    """Return the numbers of removed members by kind: `{"heads": 2, "channels": 24}`; layers and blocks if there are."""
    kinds = {key.partition(".")[0] for key, members in removed.items() if members} | {*KINDS}
    return {
        kind: sum(len(m) for key, m in removed.items() if key.startswith(f"{kind}."))
        for kind in (*KINDS, *DEPTH_KINDS)
        if kind in kinds
    }


def _note_of_few_tokens(parts: Sequence[Part], tokens: int) -> dict[str, Any]:
    """Warn if too few tokens make the widest projection's mean of x·xᵀ singular, and return a note for the plan."""
    widest = max(parts, key=lambda part: in_features(part.projection), default=None)
    if widest is None or (columns := in_features(widest.projection)) <= tokens:
        return {}
    name = widest.projection_name
    logger.warning(
        "the calibration text has %d tokens, fewer than the %d columns of %s: the solution of least squares depends "
        "on the damping; give more --windows or --tokens",
        tokens, columns, name,
    )  # fmt: skip
    return {"fewer_tokens_than_columns": {"tokens": tokens, "widest": name, "columns": columns}}


class LayerReplay:
    """Runs a text through a model one layer at a time; `outputs` holds the previous layer's output of each batch."""

    def __init__(self, model_map: ModelMap, text: CalibrationText) -> None:
        self.model, self.text = model_map.model, text
        self.layers = list(model_map.layers.values())
        self.outputs: list[Any] = []
        self.batch = 0

    def run_layer(self, number: int, moments: Mapping[nn.Module, Moments], keep_output: bool = False) -> None:
        """Run the text through a layer and add the inputs of projections to their moments.

        `keep_output` stores the layer's output, which the next layer needs.
        """
        counted = torch.ones(0)

        def collect(statistics: Moments, x: Tensor) -> Tensor:
            statistics.add_batch(x, counted)
            return x

        with ExitStack() as stack, torch.no_grad():
            for module, statistics in moments.items():
                change_input(module, partial(collect, statistics), stack)
            for layer in self.layers[:number]:
                replace_forward(layer, lambda *_, **__: self.outputs[self.batch], stack)
            stack.enter_context(stop_forward_at(self.layers[number], after=True))
            for number_of_batch, (batch, inputs) in enumerate(self.text.inputs(self.model)):
                self.batch, counted = number_of_batch, batch.counted
                try:
                    self.model(**inputs)
                except StopForward as stop:
                    if keep_output:  # replaces the output of the previous layer
                        self.outputs[self.batch : self.batch + 1] = [stop.output]
                else:
                    raise InputError(f"layer {number} of this {self.model.config.model_type} model did not run")


def replace_forward(module: Any, forward: Callable[..., Any], stack: ExitStack) -> None:
    """Replace a module's `forward` until `stack` closes."""
    before = vars(module).get("forward")  # set by another library, e.g. accelerate
    module.forward = forward
    stack.callback(setattr, module, "forward", before) if before else stack.callback(delattr, module, "forward")


def check_layerwise(model_map: ModelMap, name: str) -> None:
    """Raise `InputError` for a model with several stacks; it may have no weights."""
    if model_map.stacks != ("",):
        raise InputError(f"{name} prunes layer by layer, which this {model_map.model_type} model of two stacks cannot")
