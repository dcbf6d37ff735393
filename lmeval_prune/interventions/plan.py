"""Plans: heads, feed-forward channels and blocks to remove from a model for good, applied as hooks before a cut.

Heads are named as in a head mask. A key-value head is removed with the last of its query heads, so that consecutive
plans remove the same as their union. A feed-forward channel is an input of the block's down projection. A removed block
(the attention or the feed-forward block of a layer, or all blocks of a layer) adds nothing to the residual stream. A
plan can compensate for lost heads and channels: by a bias added to a projection's output, or by new weights.
`lmeval_prune.surgery` cuts a model by a plan.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NotRequired, Self

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap, head_names
from lmeval_prune.architectures.blocks import Sublayer
from lmeval_prune.architectures.names import block_names, named_sublayers
from lmeval_prune.artefacts import (
    NONFINITE_REMEDY,
    check_finite,
    file_name,
    read_tensors,
    write_bytes,
)
from lmeval_prune.config import FrozenMapping
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention, change_output, interventions_on
from lmeval_prune.interventions.head_mask import HeadMask, zero_columns
from lmeval_prune.interventions.table import ArtefactContents, load_intervention

_NUMBER = r"\d{1,7}"  # ranges are expanded before they are compared with the model's width
_RANGES = re.compile(rf"\s*{_NUMBER}(-{_NUMBER})?(\s*,\s*{_NUMBER}(-{_NUMBER})?)*\s*")


class Channels(str):
    """Sorted channels of a layer without duplicates, as text: `"3,5-9"`, with their `numbers`."""

    numbers: list[int]

    def __new__(cls, channels: Any, layer: str = "a layer") -> Channels:
        """Parse text or a list of numbers; `layer` names the layer in an `InputError`."""
        ranges = [range(0)]
        if isinstance(channels, str) and _RANGES.fullmatch(channels):
            ends = [part.split("-") for part in channels.split(",")]
            ranges = [range(int(end[0]), int(end[-1]) + 1) for end in ends]
        elif isinstance(channels, Iterable) and all(isinstance(n, int) and n >= 0 for n in channels):
            ranges = [range(number, number + 1) for number in channels]
        if not all(ranges):
            raise InputError(
                f'channels {str(channels)[:60]!r} of {layer} cannot be read; write them as {{"L0": "3,5-9"}}'
            )
        numbers = sorted({number for numbers in ranges for number in numbers})
        runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
        spans = [[number for _, number in run] for _, run in runs]
        text = ",".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans)
        parsed = super().__new__(cls, text)
        parsed.numbers = numbers
        return parsed

    def __or__(self, other: Channels) -> Channels:
        return Channels([*self.numbers, *other.numbers])


class TensorFile(TypedDict):
    """Name and hash of a plan's safetensors file."""

    file: str
    sha256: str


class PlanContents(ArtefactContents):
    """Fields of a plan's artefact."""

    made: NotRequired[dict[str, Any]]
    tensors: NotRequired[TensorFile]


@dataclass(frozen=True)
class Plan(Intervention):
    """Remove heads, feed-forward channels and blocks.

    Attributes:
        heads: see `HeadMask`; may be empty.
        channels: feed-forward channels by layer, `{"L0": "3,5-9"}` or lists of numbers. Stored as `Channels`.
        blocks: names of blocks, `L5.attention+L7.feed_forward`, or `L5` for all blocks of a layer; text or list.
        tensors: hash of `compensation`, computed from it.
        allow_empty_layer: allow a layer to lose all its heads, or all its channels.
        compensation: by name: `L0.o_proj.bias` and `L0.down.bias` are added to the projection's output;
            `L0.o_proj.weight` and `L0.down.weight` replace its weight, (outputs, inputs before the cut).
        scores: importance by name, `heads.L0` or `channels.L0`, of each head (or of its columns) or channel.
        provenance: method and its options, calibration text, ratio, unit, stages.
    """

    contents: ClassVar[Any] = PlanContents
    tokenwise = True
    heads: Any = ()
    channels: Any = field(default_factory=dict)
    blocks: Any = ()
    tensors: str = ""
    allow_empty_layer: bool = field(default=False, compare=False)
    compensation: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    scores: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        heads = head_names(self.heads) if self.heads not in ("", (), [], None) else ()
        channels = {label: Channels(channels, label) for label, channels in self.channels.items()}
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "channels", FrozenMapping({key: text for key, text in channels.items() if text}))
        object.__setattr__(self, "blocks", block_names(self.blocks) if self.blocks not in ("", None) else ())
        check_finite({**self.compensation, **self.scores}, "the plan", NONFINITE_REMEDY)
        if self.compensation:
            object.__setattr__(self, "tensors", tensors_digest(self.compensation))
        super().__post_init__()
        if self.tensors and not self.compensation:
            raise InputError("a plan that says tensors=… needs the file with them; give it as plan=FILE")

    # ------------------------------------------------------------------ what is removed

    def sublayers(self, model_map: ModelMap) -> list[Sublayer]:
        """Return the removed blocks, in order."""
        if not self.blocks:
            return []
        if reason := model_map.why_no_depth:
            raise InputError(f"blocks cannot be left out of this {model_map.model_type} model: {reason}")
        return model_map.once(("blocks", self.blocks), lambda: named_sublayers(self.blocks, model_map))

    @cached_property
    def mask(self) -> HeadMask | None:
        return HeadMask(self.heads, allow_empty_layer=self.allow_empty_layer) if self.heads else None

    def heads_by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        return self.mask.by_layer(model_map) if self.mask else []

    def channels_by_layer(self, model_map: ModelMap) -> list[tuple[FeedForward, list[int]]]:
        """Return the feed-forward blocks that lose channels, in order, and the numbers of these channels."""
        blocks = {block.label: block for block in model_map.feed_forward}
        for label, channels in self.channels.items():
            if label not in blocks:
                raise InputError(f"layer {label} has no dense feed-forward block")
            width, last = blocks[label].channels, channels.numbers[-1]
            if last >= width:
                raise InputError(f"channel {last} of layer {label}: it has {width}, 0 to {width - 1}")
            if len(channels.numbers) == width and not self.allow_empty_layer:
                raise InputError(
                    f"all {width} channels of layer {label} would be removed; "
                    f"give allow_empty_layer=true if that is meant"
                )
        return [(block, self.channels[label].numbers) for label, block in blocks.items() if label in self.channels]

    def kv_heads_by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Return the layers that lose key-value heads, those without query heads left, and their numbers."""
        lost = []
        for layer, heads in self.heads_by_layer(model_map):
            staying = {layer.kv_head_of(head) for head in range(layer.heads) if head not in heads}
            if numbers := [number for number in range(layer.kv_heads) if number not in staying]:
                lost.append((layer, numbers))
        return lost

    # ------------------------------------------------------------------ methods of an intervention

    def resolve(self, model_map: ModelMap) -> Self:
        """Expand ranges, sort layers and blocks, and leave out what is in removed blocks."""
        removed = self.sublayers(model_map)
        blocks, outputs = tuple(map(str, removed)), {sublayer.output for sublayer in removed}
        heads = tuple(
            f"{layer.label}H{head}"
            for layer, numbers in self.heads_by_layer(model_map)
            if f"{layer.label}.attention" not in blocks
            for head in numbers
        )
        channels = {
            block.label: self.channels[block.label]
            for block, _ in self.channels_by_layer(model_map)
            if f"{block.label}.feed_forward" not in blocks
        }
        compensation = {
            name: tensor
            for name, tensor in self.compensation.items()
            if find_projection(name, model_map) not in outputs
        }
        same = (heads, blocks) == (self.heads, self.blocks) and list(channels) == list(self.channels)
        if same and len(compensation) == len(self.compensation):
            return self
        return replace(self, heads=heads, channels=channels, blocks=blocks, compensation=compensation, tensors="")

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        for layer, heads in self.heads_by_layer(model_map):
            zero_columns(layer, heads, stack)
        for block, channels in self.channels_by_layer(model_map):
            zero_columns(block, channels, stack)
        for sublayer in self.sublayers(model_map):
            change_output(sublayer.output, torch.zeros_like, stack)
        plans = [plan for plan in interventions_on(model_map.model) if isinstance(plan, Plan)]
        removed = {sublayer.output for plan in plans for sublayer in plan.sublayers(model_map)}
        for name, tensor in self.compensation.items():
            projection: Any = find_projection(name, model_map)
            if projection in removed:
                continue
            if name.endswith(".bias"):
                handle = projection.register_forward_hook(_add_bias(tensor))
            else:  # first, so that adapters and biases are added to its output; of PEFT's module, the one that it wraps
                handle = getattr(projection, "base_layer", projection).register_forward_hook(
                    _ReplaceWeight(tensor), prepend=True
                )
            stack.callback(handle.remove)

    @classmethod
    def from_mask(cls, mask: HeadMask) -> Plan:
        return cls(mask.heads, allow_empty_layer=mask.allow_empty_layer, origin=mask.origin)

    def merged_with(self, other: Intervention) -> Plan | None:
        """Return the union with a later plan, or with a head mask."""
        plan = Plan.from_mask(other) if isinstance(other, HeadMask) else other
        if not isinstance(plan, Plan):
            return None
        channels = dict(self.channels)
        for label, later in plan.channels.items():
            channels[label] = channels[label] | later if label in channels else later
        compensation = {**self.compensation, **plan.compensation}  # the later plan's weights win
        for name in self.compensation.keys() & plan.compensation.keys():
            if name.endswith(".bias"):
                compensation[name] = self.compensation[name] + plan.compensation[name]
        return replace(
            self,
            heads=(*self.heads, *plan.heads),
            channels=channels,
            blocks=(*self.blocks, *plan.blocks),
            allow_empty_layer=self.allow_empty_layer or plan.allow_empty_layer,
            compensation=compensation,
            origin=self.origin or plan.origin,
        )

    def converted(self, kind: type[Intervention]) -> Intervention | None:
        """Return the plan itself, or its head mask if it removes heads alone."""
        if kind is HeadMask and self.mask and not (self.channels or self.blocks or self.compensation):
            return replace(self.mask, origin=self.origin)
        return super().converted(kind)

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if name != "blocks" or value}

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        report = super().report(model_map)
        plan = report["plan"] | {
            "heads_pruned": len(report["plan"]["heads"]),
            "heads_total": model_map.total_heads,
            "kv_heads_pruned": sum(len(lost) for _, lost in self.kv_heads_by_layer(model_map)),
            "kv_heads_total": sum(layer.kv_heads for layer in model_map.attention),
            "channels_pruned": sum(len(lost) for _, lost in self.channels_by_layer(model_map)),
            "channels_total": sum(model_map.channels().values()),
        }
        if removed := self.sublayers(model_map):
            plan |= {"blocks_pruned": len(removed), "blocks_total": len(model_map.sublayers)}
        return {**report, "plan": plan, "heads": plan["heads"]}

    def summary(self, model_map: ModelMap) -> str:
        plan = self.report(model_map)["plan"]
        kinds = ("heads", "channels", *(("blocks",) if self.blocks else ()))
        counts = [f"{plan[f'{kind}_pruned']} of {plan[f'{kind}_total']} {kind}" for kind in kinds]
        return f"a plan removes {', '.join(counts[:-1])} and {counts[-1]}"

    # ------------------------------------------------------------------ the artefact

    def save(self, path: str | os.PathLike[str], model_map: ModelMap, **extra: Any) -> None:
        """Write JSON, and tensors and scores as safetensors next to it; errors as in the base class.

        The safetensors file is named by its content and written first, so that an interrupted write leaves the previous
        plan intact.
        """
        from safetensors.torch import save

        path, entry = Path(path), {}
        if tensors := {**self.compensation, **{f"scores.{name}": value for name, value in self.scores.items()}}:
            data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
            sha256 = hashlib.sha256(data).hexdigest()
            entry = {"tensors": {"file": f"{path.stem}.{sha256[:8]}.safetensors", "sha256": sha256}}
            write_bytes(path.with_name(entry["tensors"]["file"]), data)
        super().save(path, model_map, made=dict(self.provenance), **entry, **extra)

    @classmethod
    def fields_of(cls, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {"provenance": content.get("made") or {}}
        if entry := content.get("tensors"):
            tensors = read_tensors(path.with_name(file_name(entry["file"])), entry["sha256"])
            extra["scores"] = {k.removeprefix("scores."): v for k, v in tensors.items() if k.startswith("scores.")}
            extra["compensation"] = {k: v for k, v in tensors.items() if not k.startswith("scores.")}
        return extra


def load_plan(path: str, allow_other_model: bool = False, allow_empty_layer: bool = False) -> Plan:
    plan: Any = load_intervention(path, allow_other_model).converted(Plan)
    if not (plan.heads or plan.channels or plan.blocks or plan.compensation):  # of `importance`
        raise InputError(f"{path} removes nothing; make a plan with `lmeval-prune prune --scores {path}`")
    return replace(plan, allow_empty_layer=plan.allow_empty_layer or allow_empty_layer)


# ---------------------------------------------------------------------- compensation


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of named tensors."""
    from safetensors.torch import save

    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    return hashlib.sha256(save(ordered)).hexdigest()[:16]


def find_projection(name: str, model_map: ModelMap) -> nn.Module:
    """Return the projection of a compensation, named as in `Plan.compensation`."""
    projections: dict[str, nn.Module] = {f"{layer.label}.o_proj": layer.o_proj for layer in model_map.attention}
    projections |= {f"{block.label}.down": block.down for block in model_map.feed_forward}
    return projections[name.rpartition(".")[0]]


def copies_of(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to the device and dtype of another one, once for each."""
    copy = cache(lambda device, dtype: tensor.to(device, dtype))
    return lambda other: copy(other.device, other.dtype)


def _add_bias(bias: Tensor) -> Callable[..., Tensor]:
    like = copies_of(bias)
    return lambda _module, _inputs, output: output + like(output)


class _ReplaceWeight:
    """Hook that computes a projection's output with another weight; of several, the latest counts."""

    def __init__(self, weight: Tensor) -> None:
        self.like = copies_of(weight)

    def __call__(self, module: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        latest = next(hook for hook in module._forward_hooks.values() if isinstance(hook, _ReplaceWeight))
        x = inputs[0]
        return nn.functional.linear(x, self.like(x), module.bias) if latest is self else output
