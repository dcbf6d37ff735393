"""Head pruning as in SPRINT §3: a pruned head's output is zero before the output projection.

With `a_h` the output of head h of a layer and `W_O` the output projection, the layer computes
`W_O · concat(a_1, …, 0, …, a_H)` instead of `W_O · concat(a_1, …, a_h, …, a_H)`. Keys and values are
computed and cached as usual. With grouped-query attention a head is a query head.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lmeval_prune.architectures import AttentionLayer, AttentionMap
from lmeval_prune.architectures.attention import is_transposed
from lmeval_prune.artefacts import digest, read_artefact, write_artefact
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention, add_input_hook
from lmeval_prune.interventions.heads import Head, Selector, parse_selectors

SCHEMA = "lmeval-prune/head-mask"
SCHEMA_VERSION = 1
Method = Literal["hook", "weights"]


@dataclass(frozen=True)
class Origin:
    """The model a mask artefact was made for."""

    name: str
    revision: str
    signature: dict[str, Any]

    def check(self, attention: AttentionMap, path: str) -> None:
        """Refuse another model.

        Raises:
            InputError: naming what differs.
        """
        fix = "make a mask for this model, or give allow_other_model=true if you know that it fits"
        family = self.signature.get("model_type")
        if family != attention.model_type:
            raise InputError(f"{path} was made for a {family} model, this one is {attention.model_type}; {fix}")
        if self.signature != attention.signature():
            raise InputError(f"{path} was made for {self.name}, whose layers or heads differ from this model's; {fix}")
        if self.name and attention.name and self.name.lower() != attention.name.lower():
            raise InputError(f"{path} was made for {self.name}, this model is {attention.name}; {fix}")
        if self.revision and attention.revision and self.revision != attention.revision:
            raise InputError(
                f"{path} was made for revision {self.revision[:12]}, this one is {attention.revision[:12]}; {fix}"
            )


@dataclass(frozen=True)
class HeadMask(Intervention):
    """Prunes a fixed set of heads.

    Attributes:
        selectors: the heads; ranges and `*` are resolved against the model they are applied to.
        method: `"hook"` zeroes the heads' slices of the output projection's input; `"weights"` zeroes the
            columns that read them (no cost at run time) and puts them back at the end.
        allow_empty_layer: allow a layer to lose all its heads.
        origin: the model a loaded mask was made for; another one is refused.
        source, source_sha256: the file it was loaded from, and the hash of what was read.
    """

    selectors: tuple[Selector, ...] = ()
    method: Method = "hook"
    allow_empty_layer: bool = False
    origin: Origin | None = None
    source: str = "mask"
    source_sha256: str = ""

    def __post_init__(self) -> None:
        if self.method not in ("hook", "weights"):
            raise InputError(f"mask_method={self.method!r} is not known; use hook or weights")

    @classmethod
    def parse(cls, heads: Any, method: Method = "hook", allow_empty_layer: bool = False) -> HeadMask:
        """Make a mask from `"L5H3+L15H0"`, `"L5H*"`, `"L5H0-3"`, or a list of these or of `[layer, head]`.

        Raises:
            InputError: the text is malformed.
        """
        return cls(parse_selectors(heads), method, allow_empty_layer)

    @classmethod
    def of(cls, heads: Iterable[Head], **options: Any) -> HeadMask:
        """Make a mask of given heads."""
        return cls(tuple(Selector(h.stack, (h.layer, h.layer), (h.head, h.head)) for h in heads), **options)

    def __or__(self, other: HeadMask) -> HeadMask:
        """Union of two masks; options are this one's."""
        return replace(self, selectors=tuple(dict.fromkeys(self.selectors + other.selectors)))

    def __str__(self) -> str:
        return "+".join(map(str, self.selectors))

    def heads(self, attention: AttentionMap) -> tuple[Head, ...]:
        """The pruned heads of this model, in order, each once.

        Raises:
            InputError: a head does not exist, a layer would lose all its heads, or the mask is another
                model's.
        """
        if self.origin:
            self.origin.check(attention, self.source)
        heads = {head for selector in self.selectors for head in selector.expand(attention)}
        position = {key: i for i, key in enumerate(attention.by_key)}
        ordered = tuple(sorted(heads, key=lambda h: (position[h.stack, h.layer], h.head)))
        for layer in attention:
            pruned = sum((h.stack, h.layer) == (layer.stack, layer.index) for h in ordered)
            if pruned == layer.heads and not self.allow_empty_layer:
                raise InputError(
                    f"all {layer.heads} heads of layer {layer.label} would be pruned; "
                    f"give allow_empty_layer=true if that is meant"
                )
        return ordered

    def by_layer(self, attention: AttentionMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Layers that lose heads, with the numbers of those heads."""
        lost: dict[tuple[str, int], list[int]] = {}
        for head in self.heads(attention):
            lost.setdefault((head.stack, head.layer), []).append(head.head)
        return [(attention.by_key[key], numbers) for key, numbers in lost.items()]

    def attach(self, attention: AttentionMap, stack: ExitStack) -> None:
        """Install a hook, or zero the columns, on each layer that loses heads; see the base class."""
        for layer, numbers in self.by_layer(attention):
            if self.method == "weights":
                _zero_columns(layer, numbers, stack)
            else:
                add_input_hook(layer.output, _Drop(dropped_columns(layer, numbers)), stack)

    def save(self, path: str | os.PathLike[str], attention: AttentionMap) -> None:
        """Write the mask as an artefact for this model: JSON, atomically.

        Raises:
            InputError: the mask does not fit the model.
        """
        write_artefact(
            path,
            SCHEMA,
            SCHEMA_VERSION,
            {
                "heads": [str(head) for head in self.heads(attention)],
                "model": {"name": attention.name, "revision": attention.revision, **attention.signature()},
            },
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        method: Method = "hook",
        allow_empty_layer: bool = False,
        allow_other_model: bool = False,
    ) -> HeadMask:
        """Read a mask artefact. It is refused on another model, unless `allow_other_model`.

        Raises:
            InputError: the file is missing, broken, a pickle, or not a mask.
        """
        content, sha256 = read_artefact(path, SCHEMA, SCHEMA_VERSION)
        model = content.get("model")
        fields = {"name": str, "revision": str, "model_type": str, "heads": dict}
        if (
            not isinstance(content.get("heads"), list)
            or not isinstance(model, dict)
            or not all(isinstance(model.get(key), kind) for key, kind in fields.items())
        ):
            raise InputError(f"{path} lacks the fields of a {SCHEMA} artefact, or they are of another type")
        selectors = parse_selectors(content["heads"])
        signature = {key: model.get(key) for key in ("model_type", "heads")}
        origin = None if allow_other_model else Origin(model["name"], model["revision"], signature)
        return cls(selectors, method, allow_empty_layer, origin, str(path), sha256)

    def fingerprint(self, attention: AttentionMap) -> str:
        """Digest of the resolved heads, modules and shapes; equal for equal masks, however written."""
        lost = [[layer.name, layer.heads, layer.head_dim, heads] for layer, heads in self.by_layer(attention)]
        return digest({"heads": lost, "model": attention.signature()})


def dropped_columns(layer: AttentionLayer, numbers: Iterable[int]) -> torch.Tensor:
    """Boolean vector over the output projection's inputs, true where a pruned head writes. Shape (H·d,)."""
    drop = torch.zeros(layer.heads * layer.head_dim, dtype=torch.bool)
    for number in numbers:
        drop[layer.columns(number)] = True
    return drop


class _Drop:
    """Zeroes fixed columns of an activation (…, width); keeps one copy of the columns a device."""

    def __init__(self, drop: torch.Tensor) -> None:
        self.drop = {drop.device: drop}
        self.original = drop

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        drop = self.drop.get(x.device)
        if drop is None:
            drop = self.drop[x.device] = self.original.to(x.device)
        return x.masked_fill(drop, 0)


# Heads that masks have zeroed in a projection's weights: how many masks, and the columns as they were. Masks on
# one model may end in any order; the last one that holds a head puts it back.
_ZEROED: WeakKeyDictionary[nn.Module, dict[int, tuple[int, torch.Tensor]]] = WeakKeyDictionary()


def _zero_columns(layer: AttentionLayer, numbers: list[int], stack: ExitStack) -> None:
    module, weight = layer.output, layer.output.weight
    plain = isinstance(module, nn.Linear) or is_transposed(module)
    if not plain or not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.is_meta:
        raise InputError(
            f"the weights of {layer.name} ({type(module).__name__}) are quantised, wrapped or offloaded and "
            f"cannot be zeroed; use mask_method=hook"
        )

    def columns(head: int) -> torch.Tensor:  # a view, (head_dim, outputs)
        data = weight.data
        return (data if is_transposed(module) else data.T)[layer.columns(head)]

    def restore() -> None:
        for head in numbers:
            masks, kept = zeroed.pop(head)
            if masks > 1:
                zeroed[head] = (masks - 1, kept)
            else:
                columns(head).copy_(kept)

    zeroed = _ZEROED.setdefault(module, {})
    for head in numbers:
        masks, kept = zeroed.get(head) or (0, columns(head).clone())
        zeroed[head] = (masks + 1, kept)
        columns(head).zero_()
    stack.callback(restore)
