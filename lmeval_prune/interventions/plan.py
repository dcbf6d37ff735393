"""A plan: what is to be removed from a model for good, tried out before anything is cut.

Heads are named as in a head mask. A key-value head goes with the last of its query heads, so that plans made one after
another remove what their union removes. A feed-forward channel is an input of the block's down projection. What makes
up for the loss, biases and updated projections, goes with the plan: a projection's output gets a bias, or is computed
by other weights. Tried out, a plan is hooks; `lmeval_prune.surgery` executes it.

It stands among the interventions, not among the pruners that make it, because it is one: identity, artefact and checks
follow from its fields, and whoever makes or executes a plan may import what is below.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NotRequired, Self

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap, head_names
from lmeval_prune.architectures.blocks import in_features, out_features
from lmeval_prune.artefacts import (
    COMPUTED,
    alone,
    check_finite,
    file_name,
    read_artefact,
    read_tensors,
    write_bytes,
)
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import (
    SCHEMA_VERSION,
    Contents,
    Intervention,
    change_input,
    interventions_on,
    load_intervention,
)
from lmeval_prune.interventions.head_mask import Drop, HeadMask, dropped_columns
from lmeval_prune.settings import FrozenMapping

_NUMBER = r"\d{1,18}"  # a range is compared with the model's width before it is expanded
_RANGES = re.compile(rf"\s*{_NUMBER}(-{_NUMBER})?(\s*,\s*{_NUMBER}(-{_NUMBER})?)*\s*")
_HELP = 'write channels as {"L0": "3,5-9"}'


class Options(TypedDict, total=False):
    """What is read of the options that a plan was made with."""

    steps: int


class Made(TypedDict, total=False):
    """What is read of how a plan was made."""

    method: str
    options: Options


class File(TypedDict):
    """The file of a plan's tensors."""

    file: str
    sha256: str


class PlanContents(Contents):
    """Fields of a plan's artefact."""

    made: NotRequired[Made]
    tensors: NotRequired[File]


@dataclass(frozen=True)
class Plan(Intervention):
    """Removes heads and feed-forward channels.

    Attributes:
        heads: as of `HeadMask`; empty: none.
        channels: feed-forward channels by layer, `{"L0": "3,5-9"}` or lists of numbers.
        tensors: hash of `compensation`; follows from it.
        allow_empty_layer: allow a layer to lose all its heads, or all its channels.
        compensation: by name, `L0.o_proj.bias`, `L0.down.bias`: added to the projection's output; `L0.o_proj.weight`,
            `L0.down.weight`: in its weight's place, (outputs, inputs of the model as it is).
        scores: by name, `heads.L0` or `channels.L0`: of each head (or of its columns) or channel, the higher the more
            important.
        made: what made it: method and its options, calibration text, ratio, unit, stages.

    Raises:
        InputError: a text is malformed.
    """

    contents: ClassVar[Any] = PlanContents
    tokenwise = True
    heads: Any = ()
    channels: Any = field(default_factory=dict)
    tensors: str = ""
    allow_empty_layer: bool = field(default=False, compare=False)
    compensation: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    scores: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    made: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        heads = head_names(self.heads) if self.heads not in ("", (), [], None) else ()
        object.__setattr__(self, "heads", heads)
        if not isinstance(self.channels, Mapping):
            raise InputError(f"channels={self.channels!r} cannot be read; {_HELP}")
        channels = {label: text_of(ranges_in(label, given)) for label, given in self.channels.items()}
        object.__setattr__(self, "channels", FrozenMapping({key: text for key, text in channels.items() if text}))
        check_finite({**self.compensation, **self.scores}, "the plan", COMPUTED)
        if self.compensation:
            object.__setattr__(self, "tensors", hash_of(self.compensation))
        super().__post_init__()
        if self.tensors and not self.compensation:
            raise InputError("a plan that says tensors=… needs the file with them; give it as plan=FILE")

    # ------------------------------------------------------------------ what is removed

    def mask(self) -> HeadMask | None:
        """Its heads as a head mask; None if it has none."""
        return HeadMask(self.heads, allow_empty_layer=self.allow_empty_layer) if self.heads else None

    def heads_by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Layers that lose heads, with the numbers of those heads."""
        mask = self.mask()
        return mask.by_layer(model_map) if mask else []

    def channels_by_layer(self, model_map: ModelMap) -> list[tuple[FeedForward, list[int]]]:
        """Feed-forward blocks that lose channels, with the numbers of those channels.

        Raises:
            InputError: a layer or channel does not exist, or a block would lose all of them.
        """
        blocks = {block.label: block for block in model_map.feed_forward}
        found = []
        for label, text in self.channels.items():
            if label not in blocks:
                has = f"those from {next(iter(blocks))} to {list(blocks)[-1]} have" if blocks else "none has"
                raise InputError(f"layer {label} has no dense feed-forward block; {has} one")
            block = blocks[label]
            if (highest := ranges_in(label, text)[-1][1]) >= block.channels:
                raise InputError(
                    f"channel {highest} of layer {label}: it has {block.channels}, 0 to {block.channels - 1}"
                )
            numbers = numbers_of(label, text)
            if len(numbers) == block.channels and not self.allow_empty_layer:
                raise InputError(
                    f"all {block.channels} channels of layer {label} would be removed; "
                    f"give allow_empty_layer=true if that is meant"
                )
            found.append((block, numbers))
        return sorted(found, key=lambda pair: list(blocks).index(pair[0].label))

    def kv_heads_by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Layers that lose key-value heads, those whose query heads all go, with their numbers."""
        found = []
        for layer, heads in self.heads_by_layer(model_map):
            share = layer.heads // layer.kv_heads
            lost = [g for g in range(layer.kv_heads) if {*range(g * share, (g + 1) * share)} <= {*heads}]
            if lost:
                found.append((layer, lost))
        return found

    # ------------------------------------------------------------------ the contract

    def resolve(self, model_map: ModelMap) -> Self:
        """Heads one by one, blocks in order; see the base class."""
        mask = self.mask()
        heads = tuple(map(str, mask.heads_of(model_map))) if mask else ()
        channels = {block.label: ranges_of(numbers) for block, numbers in self.channels_by_layer(model_map)}
        for name, tensor in self.compensation.items():
            _check_shape(name, tensor, projection_named(name, model_map))
        return replace(self, heads=heads, channels=channels)

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Install a hook on each projection that loses inputs or is compensated; see the base class."""
        for layer, heads in self.heads_by_layer(model_map):
            change_input(layer.o_proj, Drop(dropped_columns(layer, heads)), stack)
        for block, numbers in self.channels_by_layer(model_map):
            change_input(block.down, Drop(dropped_channels(block, numbers)), stack)
        earlier = [one.compensation for one in interventions_on(model_map.model) if isinstance(one, Plan)]
        for name in sorted(self.compensation, reverse=True):  # weights before biases
            tensor, bias = self.compensation[name], f"{name.removesuffix('.weight')}.bias"
            if name.endswith(".bias"):
                hook: _Added | _Computed = _Added(tensor)
            else:  # biases of plans before this one stay
                hook = _Computed(tensor, [_Added(one[bias]) for one in earlier if bias in one])
            stack.callback(projection_named(name, model_map).register_forward_hook(hook).remove)

    def joined(self, other: Intervention) -> Plan | None:
        """The union with a plan that was made after this one, or with a head mask."""
        if isinstance(other, HeadMask):
            other = plan_of(other)
        if not isinstance(other, Plan):
            return None
        layers = [*self.channels, *(label for label in other.channels if label not in self.channels)]
        both = {
            label: ",".join(one.channels[label] for one in (self, other) if label in one.channels) for label in layers
        }
        return replace(
            self,
            heads=(*self.heads, *other.heads),
            channels=both,
            allow_empty_layer=self.allow_empty_layer or other.allow_empty_layer,
            compensation=_one_after_the_other(self.compensation, other.compensation),
            origin=self.origin or other.origin,
        )

    def converted(self, kind: type[Intervention]) -> Intervention | None:
        """Itself, or the head mask that it is; None if it is more than that."""
        if kind is HeadMask and self.heads and not self.channels and not self.compensation:
            return HeadMask(self.heads, allow_empty_layer=self.allow_empty_layer, origin=self.origin)
        return super().converted(kind)

    def channel_numbers(self, label: str) -> list[int]:
        """Channels of a layer that it removes."""
        return numbers_of(label, self.channels.get(label, ()))

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """What goes, and how much of how much."""
        found = super().report(model_map)
        own = dict(found["plan"])
        own["heads_pruned"] = len(own["heads"])
        own["heads_total"] = model_map.total_heads
        own["kv_heads_pruned"] = sum(len(lost) for _, lost in self.kv_heads_by_layer(model_map))
        own["kv_heads_total"] = sum(layer.kv_heads for layer in model_map.attention)
        own["channels_pruned"] = sum(len(lost) for _, lost in self.channels_by_layer(model_map))
        own["channels_total"] = sum(model_map.channels().values())
        return {**found, "plan": own, "heads": own["heads"]}

    def summary(self, model_map: ModelMap) -> str:
        """What goes, of how much."""
        own = self.report(model_map)["plan"]
        return (
            f"a plan removes {own['heads_pruned']} of {own['heads_total']} heads and {own['channels_pruned']} of "
            f"{own['channels_total']} channels"
        )

    # ------------------------------------------------------------------ the artefact

    def save(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Write it as JSON, and its tensors and scores beside it as safetensors; see the base class.

        The tensors' file is named by its content and written first, so that a kill leaves the last plan whole. That of
        a plan that stood there goes at the end.
        """
        from safetensors.torch import save

        path = Path(path)
        tensors = {**self.compensation, **{f"scores.{name}": value for name, value in self.scores.items()}}
        content: dict[str, Any] = {"made": dict(self.made)}
        if tensors:
            data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
            sha256 = hashlib.sha256(data).hexdigest()
            content["tensors"] = {"file": f"{path.stem}.{sha256[:8]}.safetensors", "sha256": sha256}
        with alone(path):
            if tensors:
                write_bytes(path.with_name(content["tensors"]["file"]), data)
            stale = _tensors_file(path)
            self._write(path, model_map, content)
            if stale is not None and stale.name != content.get("tensors", {}).get("file"):
                stale.unlink(missing_ok=True)

    @classmethod
    def _attached(cls, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"made": content.get("made") or {}}
        named = content.get("tensors")
        if named:
            file = path.with_name(file_name(named["file"]))
            try:
                tensors = read_tensors(file, named["sha256"])
            except InputError as error:
                raise InputError(f"the file {file.name} beside it is needed: {error}") from None
            found["scores"] = {k.removeprefix("scores."): v for k, v in tensors.items() if k.startswith("scores.")}
            found["compensation"] = {k: v for k, v in tensors.items() if not k.startswith("scores.")}
        return found


def load_plan(path: str, allow_other_model: bool = False, allow_empty_layer: bool = False) -> Plan:
    """Read a plan, or a mask as one, that removes something.

    Raises:
        InputError: it is none, or removes nothing.
    """
    plan = load_intervention(path, allow_other_model).converted(Plan)
    if not isinstance(plan, Plan):
        raise InputError(f"{path} is no plan and no head mask")
    if not plan.heads and not plan.channels and not plan.compensation:
        raise InputError(f"{path} removes nothing; make a plan with `lmeval-prune prune --scores {path}`")
    return replace(plan, allow_empty_layer=plan.allow_empty_layer or allow_empty_layer)


def plan_of(mask: HeadMask) -> Plan:
    """A head mask as a plan."""
    return Plan(mask.heads, allow_empty_layer=mask.allow_empty_layer, origin=mask.origin)


def ranges_in(label: str, given: Any) -> list[tuple[int, int]]:
    """Read channels as a user writes them, `"3,5-9"` or a list of numbers, and return first and last of each run.

    Raises:
        InputError: they cannot be read.
    """
    if isinstance(given, str) and given.strip():
        if not _RANGES.fullmatch(given):
            raise InputError(f"channels {given[:60]!r} of {label} cannot be read; {_HELP}")
        ends = [[int(end) for end in part.split("-")] for part in given.split(",")]
        pairs = [(pair[0], pair[-1]) for pair in ends]
        if any(first > last for first, last in pairs):
            raise InputError(f"channels {given[:60]!r} of {label}: a range runs backwards; {_HELP}")
    else:
        if not isinstance(given, Iterable) or not all(isinstance(one, int) and one >= 0 for one in given):
            raise InputError(f"channels {str(given)[:60]!r} of {label} cannot be read; {_HELP}")
        pairs = [(number, number) for number in given]
    runs: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
        else:
            runs.append((first, last))
    return runs


def numbers_of(label: str, given: Any) -> list[int]:
    """Return the channels that a user wrote, in order and each once; as of `ranges_in`."""
    return [number for first, last in ranges_in(label, given) for number in range(first, last + 1)]


def text_of(runs: Iterable[tuple[int, int]]) -> str:
    """Return runs of channels as text, `"3,5-9"`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranges_of(numbers: Iterable[int]) -> str:
    """Return numbers as text, `"3,5-9"`."""
    return text_of(ranges_in("", list(numbers)))


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of named tensors."""
    from safetensors.torch import save

    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    return hashlib.sha256(save(ordered)).hexdigest()[:16]


def dropped_channels(block: FeedForward, numbers: Iterable[int]) -> Tensor:
    """Boolean vector over the down projection's inputs, true where a removed channel stands."""
    drop = torch.zeros(block.channels, dtype=torch.bool)
    for number in numbers:
        drop[block.columns(number)] = True
    return drop


def projection_named(name: str, model_map: ModelMap) -> nn.Module:
    """The projection that a tensor of a plan is for.

    Raises:
        InputError: there is none.
    """
    label, _, part = name.removesuffix(".bias").removesuffix(".weight").rpartition(".")
    blocks: dict[str, nn.Module] = {f"{layer.label}.o_proj": layer.o_proj for layer in model_map.attention}
    blocks |= {f"{block.label}.down": block.down for block in model_map.feed_forward}
    if not name.endswith((".bias", ".weight")) or f"{label}.{part}" not in blocks:
        raise InputError(f"the plan has a tensor {name}, and the model has no such projection")
    return blocks[f"{label}.{part}"]


def _one_after_the_other(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What makes up for the loss after both, nested, joined or cut one after the other: biases add up, the later
    weights count."""
    found = {**first, **second}
    for name in first.keys() & second.keys():
        if name.endswith(".bias"):
            found[name] = first[name] + second[name]
    return found


def _check_shape(name: str, tensor: Tensor, projection: nn.Module) -> None:
    outputs, inputs = out_features(projection), in_features(projection)
    expected = (outputs,) if name.endswith(".bias") else (outputs, inputs)
    if tuple(tensor.shape) != expected:
        raise InputError(f"the plan's tensor {name} is {tuple(tensor.shape)}, the projection needs {expected}")


def _tensors_file(path: Path) -> Path | None:
    """The tensors' file of the plan at a path, by the name that we gave it; None if there is no such plan."""
    try:
        named = read_artefact(path, Plan.schema(), SCHEMA_VERSION, PlanContents)[0]["tensors"]
        own = f"{path.stem}.{named['sha256'][:8]}.safetensors"
        return path.with_name(own) if own == named["file"] else None
    except (InputError, KeyError):
        return None


class _Moved:
    """A tensor, with one copy on each device and of each type that asks for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.original = tensor
        self.copies: dict[Any, Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        key = (other.device, other.dtype)
        if key not in self.copies:
            self.copies[key] = self.original.to(other)
        return self.copies[key]


class _Added(_Moved):
    """Adds a bias to a projection's output."""

    def __call__(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output + self.like(output)


class _Computed(_Moved):
    """Computes a projection's output by other weights, and by its own bias and those that were added to it before."""

    def __init__(self, tensor: Tensor, biases: list[_Added]) -> None:
        super().__init__(tensor)
        self.biases = biases

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        bias: Any = module.bias
        found = nn.functional.linear(inputs[0], self.like(inputs[0]), bias)
        for added in self.biases:
            found = added(module, inputs, found)
        return found
