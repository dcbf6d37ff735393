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

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import in_features
from lmeval_prune.architectures.model_map import layers_with_attention
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import change_input
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.base import ReadingPruner, Scored, Scores, needed, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText, Reached, stopping_after
from lmeval_prune.pruners.compensation import bias_for, damped, least_squares_for
from lmeval_prune.pruners.layer_store import Done, LayerStore
from lmeval_prune.pruners.moments import Moments, add_tokens, weight_of
from lmeval_prune.pruners.selection import Removed

logger = logging.getLogger(__name__)

Units = Sequence[tuple[int, ...]]  # of inputs of a projection, those that go together


@dataclass(frozen=True)
class SequentialPruner(ReadingPruner):
    """A way to select units of a projection's inputs when the layers before it have lost theirs.

    Attributes:
        pairs: (of the class) it needs products of pairs of inputs.
        afresh: (of the class) what the down projection reads is looked at again when the layer's heads have gone.
    """

    allocation: ClassVar[str] = "uniform"
    pairs: ClassVar[bool] = False
    afresh: ClassVar[bool] = False

    @abstractmethod
    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """The score of each unit of a projection's inputs, before any of them goes.

        Args:
            weight: (outputs, inputs), in float64.
            moments: of the inputs.
            second: with `pairs`, the mean of x·xᵀ, damped.
            units: the inputs of each.
        """

    def select(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units, count: int) -> list[int]:
        """Which units go, by default those of the lowest scores; as of `unit_scores`."""
        lowest: list[int] = self.unit_scores(weight, moments, second, units).argsort(stable=True)[:count].tolist()
        return lowest

    def scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        heads: bool,
        channels: bool,
        removed: tuple[Removed, Removed] = ({}, {}),
    ) -> Scored:
        """What the first selection would go by, if no layer had lost anything; see the base class."""
        scores: Scores = {}

        def nothing(place: Place, moments: Moments, second: Tensor | None) -> set[int]:
            scores[place.name] = self.unit_scores(place.weight, moments, second, place.units("head"))
            return set()

        layer_by_layer(
            model_map, needed(self, text), Chooser(nothing, heads, channels, pairs=self.pairs), progress=lambda _: None
        )
        return Scored(*({k.removesuffix(end): v for k, v in scores.items() if k.endswith(end)} for end in _ENDS))

    def chooser(self, unit: str, counts: Mapping[tuple[str, str], int]) -> Chooser:
        """What selects so many units of each layer, `(label, "heads" | "channels")`."""

        def choose(place: Place, moments: Moments, second: Tensor | None) -> set[int]:
            units = place.units(unit)
            chosen = self.select(place.weight, moments, second, units, counts[place.label, place.kind])
            return {place.member_of(column) for number in chosen for column in units[number]}

        kinds = {kind for _, kind in counts}
        return Chooser(choose, "heads" in kinds, "channels" in kinds, {*counts}, self.pairs, self.afresh)

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse models of several stacks, and quantised ones; see the base class."""
        check_layer_by_layer(model_map, pruner_name(self))
        check_not_quantised(model_map, pruner_name(self))


_ENDS = (".o_proj", ".down")


@dataclass(frozen=True)
class Place:
    """A projection whose inputs are chosen from.

    Attributes:
        block: attention or feed-forward block that it belongs to.
    """

    block: AttentionLayer | FeedForward

    @property
    def label(self) -> str:
        """The layer."""
        return self.block.label

    @property
    def kind(self) -> str:
        """`heads` or `channels`."""
        return "heads" if isinstance(self.block, AttentionLayer) else "channels"

    @property
    def name(self) -> str:
        """What a plan calls the projection."""
        return f"{self.label}{_ENDS[self.kind == 'channels']}"

    @property
    def projection(self) -> nn.Module:
        """The projection."""
        return self.block.o_proj if isinstance(self.block, AttentionLayer) else self.block.down

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs) in float64."""
        return weight_of(self.projection).double().cpu()

    def units(self, unit: str) -> Units:
        """The inputs of each unit: a channel, a query head or a group of them."""
        if not isinstance(self.block, AttentionLayer):
            return [(column,) for column in range(self.block.channels)]
        share = self.block.heads // self.block.kv_heads if unit == "group" else 1
        width = share * self.block.head_dim
        return [tuple(range(start, start + width)) for start in range(0, self.block.heads * self.block.head_dim, width)]

    def member_of(self, column: int) -> int:
        """The head or channel that an input belongs to."""
        return column // self.block.head_dim if isinstance(self.block, AttentionLayer) else column

    def columns_of(self, members: set[int]) -> list[int]:
        """The inputs of heads or channels."""
        return [column for member in sorted(members) for column in _range(self.block.columns(member))]


@dataclass(frozen=True)
class Chooser:
    """Says which heads and channels of a layer go.

    Attributes:
        choose: of a projection, by the moments of its inputs and the damped mean of x·xᵀ.
        heads, channels: whether any of these may go.
        places: the only layers and kinds that may lose something; None for all.
        pairs: products of pairs of inputs are needed.
        afresh: as of `SequentialPruner`.
    """

    choose: Callable[[Place, Moments, Tensor | None], set[int]]
    heads: bool
    channels: bool
    places: set[tuple[str, str]] | None = None
    pairs: bool = False
    afresh: bool = False

    def asks(self, place: Place) -> bool:
        """Whether a projection may lose inputs."""
        wanted = self.heads if place.kind == "heads" else self.channels
        return wanted and (self.places is None or (place.label, place.kind) in self.places)


@dataclass
class Found:
    """What came of going through a model.

    Attributes:
        heads, channels: that go.
        compensation: as of a plan.
        damping: where it was raised, by how much.
        short: tokens of the text, and columns of the widest projection, where these are more.
    """

    heads: Removed = field(default_factory=dict)
    channels: Removed = field(default_factory=dict)
    compensation: dict[str, Tensor] = field(default_factory=dict)
    damping: dict[str, float] = field(default_factory=dict)
    short: dict[str, Any] = field(default_factory=dict)

    def notes(self) -> dict[str, Any]:
        """Return what a plan says of how well its least squares are determined."""
        return {
            **({"damping": self.damping} if self.damping else {}),
            **({"fewer_tokens_than_columns": self.short} if self.short else {}),
        }

    def add(self, label: str, done: Done) -> None:
        """Take in what became of a layer."""
        self.heads |= {label: done.heads} if done.heads else {}
        self.channels |= {label: done.channels} if done.channels else {}
        self.compensation |= done.tensors
        self.damping |= done.damping


def layer_by_layer(
    model_map: ModelMap,
    text: CalibrationText,
    chooser: Chooser,
    compensation: str = "none",
    damping: float = 0.01,
    allow_empty_layer: bool = False,
    store: LayerStore | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Let each layer lose what a chooser says, and make up for it, before the next one is looked at.

    Args:
        model_map: of the model; it is as it was afterwards.
        text: calibration text.
        chooser: says what goes.
        compensation, damping, allow_empty_layer: as of the options.
        store: what became of layers is kept there, and not computed again.
        progress: is told what happens.

    Raises:
        InputError: the model cannot be gone through.
    """
    check_layer_by_layer(model_map, "this")
    blocks = {block.label: block for block in model_map.feed_forward}
    replay, found = Replay(model_map, text), Found()
    pairs = chooser.pairs or compensation == "least_squares"
    asked_of = [_asked(chooser, layer, blocks) for layer in model_map.attention]
    if pairs:
        found.short = _fewer_tokens_than_columns([place for places in asked_of for place in places], text.tokens)
    last = max((number for number, places in enumerate(asked_of) if places), default=-1)
    for number, layer in enumerate(model_map.attention[: last + 1]):
        places = asked_of[number]
        done = store.load(layer.label) if store else None
        if done is None:
            done = Done()
            waiting = list(places)
            while waiting:
                taken = waiting[:1] if chooser.afresh else waiting
                moments = {x.projection: Moments(in_features(x.projection), pairs) for x in taken}
                with _plan_of(layer.label, done, allow_empty_layer).applied_to(model_map.model, model_map):
                    replay.through(number, moments)
                choices = []
                for place in taken:
                    own = moments.pop(place.projection)
                    own.check(place.name)
                    asked = pairs and (chooser.pairs or place is taken[0])
                    second = _second(place, own, damping, done) if asked else None
                    choices.append((place, chooser.choose(place, own, second), own, second))
                for place, gone, own, second in choices:
                    if place is not taken[0] and gone and compensation != "none":  # it reads something else by now
                        own = Moments(own.columns, pairs)
                        with _plan_of(layer.label, done, allow_empty_layer).applied_to(model_map.model, model_map):
                            replay.through(number, {place.projection: own})
                        second = _second(place, own, damping, done) if pairs else None
                    _lose(place, gone, own, second, compensation, done)
                waiting = waiting[len(taken) :]
            if store:
                store.save(layer.label, done)
            raised = "".join(f"; damping of {name} raised to {by:g}" for name, by in done.damping.items())
            said = f"{len(done.heads)} heads and {len(done.channels)} channels go{raised}"
            progress(f"layer {layer.label} of {len(model_map.attention)}: {said}")
        found.add(layer.label, done)
        if number < last:
            with _plan_of(layer.label, done, allow_empty_layer).applied_to(model_map.model, model_map):
                replay.through(number, {}, keep=True)
    return found


def _asked(chooser: Chooser, layer: AttentionLayer, blocks: Mapping[str, FeedForward]) -> list[Place]:
    """Return the projections of a layer that may lose inputs."""
    own = [Place(layer), *([Place(blocks[layer.label])] if layer.label in blocks else [])]
    return [place for place in own if chooser.asks(place)]


def _fewer_tokens_than_columns(places: Sequence[Place], tokens: int) -> dict[str, Any]:
    """Warn where so few tokens leave the widest projection's mean of x·xᵀ singular, and return both numbers."""
    widest = max(places, key=lambda place: in_features(place.projection), default=None)
    if widest is None or (columns := in_features(widest.projection)) <= tokens:
        return {}
    logger.warning(
        "the calibration text has %d tokens, fewer than the %d columns of %s: the solution of least squares rests "
        "on its damping; give more --windows or --tokens",
        tokens, columns, widest.name,
    )  # fmt: skip
    return {"tokens": tokens, "widest": widest.name, "columns": columns}


def _second(place: Place, moments: Moments, damping: float, done: Done) -> Tensor:
    """The damped mean of x·xᵀ."""
    second, taken = damped(moments.second, damping)
    if taken != damping:
        done.damping[place.name] = taken
    return second


def _lose(
    place: Place, chosen: set[int], moments: Moments, second: Tensor | None, compensation: str, done: Done
) -> None:
    """Take heads or channels away, and make up for them by what the projection reads now."""
    (done.heads if place.kind == "heads" else done.channels).update(chosen)
    if not chosen:
        return
    columns, like = place.columns_of(chosen), weight_of(place.projection)
    if compensation == "bias":
        done.tensors[f"{place.name}.bias"] = bias_for(place.weight, moments.mean, columns).to(like.dtype)
    elif compensation == "least_squares":
        assert second is not None
        done.tensors[f"{place.name}.weight"] = least_squares_for(place.weight, second, columns).to(like.dtype)


def _plan_of(label: str, done: Done, allow_empty_layer: bool) -> Plan:
    return Plan(
        tuple(f"{label}H{head}" for head in sorted(done.heads)),
        {label: sorted(done.channels)} if done.channels else {},
        allow_empty_layer=allow_empty_layer,
        compensation=dict(done.tensors),
    )


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
        self.batch, self.real = 0, torch.ones(0)

    def through(self, number: int, moments: Mapping[nn.Module, Moments], keep: bool = False) -> None:
        """Run the text through a layer, once the one before it has been run with `keep`.

        Args:
            number: of the layer.
            moments: of what these projections read; they take in the text.
            keep: keep what comes out for the next layer.
        """
        kept = self.kept
        with ExitStack() as stack, torch.no_grad():
            for module, own in moments.items():
                change_input(module, partial(self._collect, own), stack)
            for layer in self.layers[:number]:
                _replace_forward(layer, lambda *_, **__: self.kept[self.batch], stack)
            stack.enter_context(stopping_after(self.layers[number]))
            for batch, (_, real, inputs) in enumerate(self.text.inputs(self.model)):
                self.batch, self.real = batch, real
                try:
                    self.model(**inputs)
                except Reached as reached:
                    if keep:  # in the place of what the layer before gave
                        kept[batch : batch + 1] = [reached.output]
                else:
                    raise InputError(f"layer {number} of this {self.model.config.model_type} model was not run")

    def _collect(self, moments: Moments, x: Tensor) -> Tensor:
        add_tokens(moments, x, self.real)
        return x


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


def _range(columns: slice) -> range:
    return range(columns.start, columns.stop)
