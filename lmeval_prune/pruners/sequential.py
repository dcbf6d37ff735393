"""Goes through a model layer by layer: collect → select → update → next, on what is left of the layers before.

What comes out of a layer is kept and handed on, so that the text goes through each layer two or three times, and only
one layer's statistics are held at once. The model's own code runs throughout: the layers before are stubs that give
back what is kept.
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
from lmeval_prune.architectures.blocks import in_features
from lmeval_prune.architectures.model_map import layers_with_attention
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText, Reached, stopping_at
from lmeval_prune.pruners.compensation import bias_for, damped, least_squares_for
from lmeval_prune.pruners.layer_store import LayerStore, Removal
from lmeval_prune.pruners.moments import Moments
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import HEADS, KINDS, Part, Removed, Units, weight_of

logger = logging.getLogger(__name__)

# Selects the heads or channels that go, by the moments of their projection's inputs and the damped mean of x·xᵀ.
Select = Callable[[Part, Moments, Tensor | None], set[int]]


@dataclass(frozen=True)
class SequentialPruner(Pruner):
    """A way to select units of a projection's inputs when the layers before it have lost theirs.

    Attributes:
        pairs: (of the class) it needs products of pairs of inputs.
        afresh: (of the class) what the down projection reads is looked at again when the layer's heads have gone.
    """

    reads_text: ClassVar[bool] = True
    allocation: ClassVar[str] = "uniform"
    pairs: ClassVar[bool] = False
    afresh: ClassVar[bool] = False

    @abstractmethod
    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Score each unit of a projection's inputs, before any of them goes.

        Args:
            weight: (outputs, inputs), in float64.
            moments: of the inputs.
            second: with `pairs`, the mean of x·xᵀ, damped.
            units: the inputs of each.
        """

    def select(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units, count: int) -> list[int]:
        """Select so many units to go, by default those of the lowest scores; arguments as of `unit_scores`."""
        lowest: list[int] = self.unit_scores(weight, moments, second, units).argsort(stable=True)[:count].tolist()
        return lowest

    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: Sequence[Part], removed: Removed
    ) -> Scores:
        """Score by what the first selection would go by, if no layer had lost anything; see the base class."""
        values: dict[str, Tensor] = {}

        def score(part: Part, moments: Moments, second: Tensor | None) -> set[int]:
            values[part.key] = self.unit_scores(part.weight, moments, second, columns_of(part, part.units()))
            return set()

        LayerByLayer(model_map, self.required(text), score, pairs=self.pairs).run(parts)
        return Scores(values)

    def selection(self, unit: str, counts: Mapping[str, int]) -> Select:
        """Return what selects so many units of each part."""

        def select(part: Part, moments: Moments, second: Tensor | None) -> set[int]:
            units = part.units(unit)
            lowest = self.select(part.weight, moments, second, columns_of(part, units), counts[part.key])
            return {member for number in lowest for member in units[number]}

        return select

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse models of several stacks, and quantised ones; see the base class."""
        check_layer_by_layer(model_map, pruner_name(self))
        check_not_quantised(model_map, pruner_name(self))


def columns_of(part: Part, units: Units) -> Units:
    """Return the inputs of the projection that each unit fills."""
    return [tuple(part.columns(unit)) for unit in units]


@dataclass
class LayerByLayer:
    """Lets each layer lose what is selected, and makes up for it, before the next one is looked at.

    Attributes:
        model_map: of the model; it is as it was afterwards.
        text: calibration text.
        select: says what goes.
        pairs, afresh: as of `SequentialPruner`.
        options: of the plan; its compensation, damping and allow_empty_layer count.
        store: what layers lose is kept there, and not computed again.
        progress: is told what happens.
    """

    model_map: ModelMap
    text: CalibrationText
    select: Select
    pairs: bool = False
    afresh: bool = False
    options: PruneOptions = field(default_factory=lambda: PruneOptions(compensation="none"))
    store: LayerStore | None = None
    progress: Callable[[str], None] = lambda _: None
    replay: Replay = field(init=False)

    def __post_init__(self) -> None:
        check_layer_by_layer(self.model_map, "this")
        self.replay = Replay(self.model_map, self.text)

    @property
    def solves(self) -> bool:
        """True if least squares make up for the loss."""
        return self.options.compensation == "least_squares"

    def run(self, parts: Sequence[Part]) -> tuple[Removal, dict[str, Any]]:
        """Go through the model.

        Args:
            parts: the only ones that may lose something.

        Returns:
            What goes, and what a plan says of how well its least squares are determined.

        Raises:
            InputError: the model cannot be gone through.
        """
        total, notes = Removal(), dict[str, Any]()
        if self.pairs or self.solves:
            notes = _fewer_tokens_than_columns(parts, self.text.tokens)
        by_layer = [[part for part in parts if part.label == layer.label] for layer in self.model_map.attention]
        last = max((number for number, layer_parts in enumerate(by_layer) if layer_parts), default=-1)
        for number, layer in enumerate(self.model_map.attention[: last + 1]):
            removal = self.store.load(layer.label) if self.store else None
            if removal is None:
                removal = self._prune(number, by_layer[number])
                if self.store:
                    self.store.save(layer.label, removal)
                self._report(layer.label, removal)
            total.add(removal)
            if number < last:
                self._through(number, removal, {}, keep=True)
        return total, {**({"damping": total.damping} if total.damping else {}), **notes}

    def _prune(self, number: int, parts: Sequence[Part]) -> Removal:
        """Select what a layer loses, and make up for it by what each projection reads when it goes."""
        removal = Removal()
        for together in [[part] for part in parts] if self.afresh else [parts]:
            moments = self._measured(number, removal, together)
            selected = []
            for part in together:
                needs_second = self.pairs or (self.solves and part is together[0])
                second = self._damped(part, moments[part.key], removal) if needs_second else None
                selected.append((part, self.select(part, moments[part.key], second), second))
            for part, members, second in selected:
                reads_others = part is not together[0] and members and self.options.compensation != "none"
                if reads_others:  # what the first part lost has changed them
                    moments = self._measured(number, removal, [part])
                    second = self._damped(part, moments[part.key], removal) if self.solves or self.pairs else None
                if members:
                    self._remove(part, members, moments[part.key], second, removal)
        return removal

    def _measured(self, number: int, removal: Removal, parts: Sequence[Part]) -> dict[str, Moments]:
        """Return moments of what projections of a layer read once it has lost something."""
        moments = {part.key: Moments(in_features(part.projection), self.pairs or self.solves) for part in parts}
        self._through(number, removal, {part.projection: moments[part.key] for part in parts})
        for part in parts:
            moments[part.key].check(part.name)
        return moments

    def _through(self, number: int, removal: Removal, moments: Mapping[nn.Module, Moments], keep: bool = False) -> None:
        plan = plan_of(removal.removed, self.options.allow_empty_layer, compensation=dict(removal.compensation))
        with plan.applied_to(self.model_map.model, self.model_map):
            self.replay.through(number, moments, keep)

    def _damped(self, part: Part, moments: Moments, removal: Removal) -> Tensor:
        second, damping = damped(moments.second, self.options.damping)
        if damping != self.options.damping:
            removal.damping[part.name] = damping
        return second

    def _remove(self, part: Part, members: set[int], moments: Moments, second: Tensor | None, removal: Removal) -> None:
        """Take heads or channels away, and make up for them."""
        removal.removed[part.key] = members
        columns, dtype = part.columns(sorted(members)), weight_of(part.projection).dtype
        if self.options.compensation == "bias":
            removal.compensation[f"{part.name}.bias"] = bias_for(part.weight, moments.mean, columns).to(dtype)
        elif self.solves:
            assert second is not None
            removal.compensation[f"{part.name}.weight"] = least_squares_for(part.weight, second, columns).to(dtype)

    def _report(self, label: str, removal: Removal) -> None:
        raised = "".join(f"; damping of {name} raised to {share:g}" for name, share in removal.damping.items())
        heads, channels = count_removed(removal.removed).values()
        layers = len(self.model_map.attention)
        self.progress(f"layer {label} of {layers}: {heads} heads and {channels} channels go{raised}")


def plan_of(removed: Removed, allow_empty_layer: bool, **fields: Any) -> Plan:
    """Return a plan of what is removed, with other fields of it."""
    members = {tuple(key.split(".", 1)): sorted(numbers) for key, numbers in removed.items() if numbers}
    heads = tuple(f"{label}H{n}" for (kind, label), numbers in members.items() if kind == HEADS for n in numbers)
    channels = {label: numbers for (kind, label), numbers in members.items() if kind != HEADS}
    return Plan(heads, channels, allow_empty_layer=allow_empty_layer, **fields)


def count_removed(removed: Removed) -> dict[str, int]:
    """Count the heads and the channels that are removed."""
    return {kind: sum(len(m) for key, m in removed.items() if key.startswith(f"{kind}.")) for kind in KINDS}


def _fewer_tokens_than_columns(parts: Sequence[Part], tokens: int) -> dict[str, Any]:
    """Warn where so few tokens leave the widest projection's mean of x·xᵀ singular, and return a note for the plan."""
    widest = max(parts, key=lambda part: in_features(part.projection), default=None)
    if widest is None or (columns := in_features(widest.projection)) <= tokens:
        return {}
    logger.warning(
        "the calibration text has %d tokens, fewer than the %d columns of %s: the solution of least squares rests "
        "on its damping; give more --windows or --tokens",
        tokens, columns, widest.name,
    )  # fmt: skip
    return {"fewer_tokens_than_columns": {"tokens": tokens, "widest": widest.name, "columns": columns}}


class Replay:
    """Runs a text through one layer after another of a model.

    Args:
        model_map: of the model.
        text: calibration text.
    """

    def __init__(self, model_map: ModelMap, text: CalibrationText) -> None:
        self.model, self.text = model_map.model, text
        self.layers = layers_with_attention(model_map)
        self.kept: list[Any] = []  # of each batch, what the layer before gave out
        self.batch = 0

    def through(self, number: int, moments: Mapping[nn.Module, Moments], keep: bool = False) -> None:
        """Run the text through a layer, once the one before it has been run with `keep`.

        Args:
            number: of the layer.
            moments: of what these projections read; they take in the text.
            keep: keep what comes out for the next layer.
        """
        real = torch.ones(0)

        def collect(statistics: Moments, x: Tensor) -> Tensor:
            statistics.add_batch(x, real)
            return x

        with ExitStack() as stack, torch.no_grad():
            for module, statistics in moments.items():
                change_input(module, partial(collect, statistics), stack)
            for layer in self.layers[:number]:
                _replace_forward(layer, lambda *_, **__: self.kept[self.batch], stack)
            stack.enter_context(stopping_at(self.layers[number], after=True))
            batches = self.text.inputs(self.model)
            for batch, (_, real, inputs) in enumerate(batches):  # noqa: B007 - read by `collect`
                self.batch = batch
                try:
                    self.model(**inputs)
                except Reached as reached:
                    if keep:  # in the place of what the layer before gave
                        self.kept[batch : batch + 1] = [reached.output]
                else:
                    raise InputError(f"layer {number} of this {self.model.config.model_type} model was not run")


def _replace_forward(module: Any, forward: Callable[..., Any], stack: ExitStack) -> None:
    before = vars(module).get("forward")  # another library's, if any
    module.forward = forward
    stack.callback(setattr, module, "forward", before) if before else stack.callback(delattr, module, "forward")


def check_layer_by_layer(model_map: ModelMap, name: str) -> None:
    """Refuse a model that cannot be gone through layer by layer; of one without weights, too.

    Raises:
        InputError: it has several stacks.
    """
    if model_map.stacks != ("",):
        raise InputError(
            f"{name} goes through a model layer by layer, which encoder-decoders such as this {model_map.model_type} "
            f"model are not made for; use another method or compensation"
        )


def check_not_quantised(model_map: ModelMap, name: str) -> None:
    """Refuse a quantised model, whose weights do not stand there as numbers.

    Raises:
        InputError: it is one.
    """
    if getattr(model_map.model, "is_quantized", False):
        raise InputError(f"{name} reads weights, which a quantised model lacks; load it in float32 or bfloat16")
