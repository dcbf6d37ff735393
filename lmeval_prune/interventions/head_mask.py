"""Head pruning as in SPRINT §3: a pruned head's output is zero before the output projection.

With `a_h` the output of head h of a layer and `W_O` the output projection, the layer computes
`W_O · concat(a_1, …, 0, …, a_H)` instead of `W_O · concat(a_1, …, a_h, …, a_H)`. Keys and values are
computed and cached as usual. With grouped-query attention a head is a query head.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from lmeval_prune.architectures import AttentionLayer, Head, ModelMap, head_names
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError, first_few
from lmeval_prune.interventions.base import Intervention, change_input
from lmeval_prune.interventions.table import method_name


@dataclass(frozen=True)
class HeadMask(Intervention):
    """Prunes a fixed set of heads.

    Attributes:
        heads: names such as `L5H3`, ranges `L5H0-3` and `L5H*`; given as `"L5H3+L15H0"`, or as a list of names or of
            `[layer, head]`.
        allow_empty_layer: allow a layer to lose all its heads.

    Raises:
        InputError: the text is malformed.
    """

    tokenwise = True
    heads: Any  # a tuple of names, once it is made
    allow_empty_layer: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", head_names(self.heads))
        super().__post_init__()

    def __str__(self) -> str:
        return "+".join(self.heads)

    def __or__(self, other: HeadMask) -> HeadMask:
        """Union of two masks; options are this one's."""
        return replace(self, heads=(*self.heads, *other.heads))

    def joined(self, other: Intervention) -> HeadMask | None:
        """The union: masks compose by it, and only all heads together can show that a layer loses its last."""
        if not isinstance(other, HeadMask):
            return None
        either = self.allow_empty_layer or other.allow_empty_layer
        return replace(self | other, allow_empty_layer=either, origin=self.origin or other.origin)

    def converted(self, kind: type[Intervention]) -> Intervention | None:
        """Itself, or a plan that removes these heads."""
        if isinstance(self, kind) or method_name(kind) != "plan":
            return super().converted(kind)
        made: Any = kind
        found: Intervention = made(self.heads, allow_empty_layer=self.allow_empty_layer, origin=self.origin)
        return found

    def heads_of(self, model_map: ModelMap) -> tuple[Head, ...]:
        """The pruned heads of a model, in order, each once.

        Raises:
            InputError: a head does not exist, a layer would lose all its heads, or the mask is another model's.
        """
        if self.origin:
            self.origin.check(model_map)
        heads = Head.parse(self.heads, model_map)
        for layer in model_map.attention:
            lost = sum((head.stack, head.layer) == (layer.stack, layer.index) for head in heads)
            if lost == layer.heads and not self.allow_empty_layer:
                raise InputError(
                    f"all {layer.heads} heads of layer {layer.label} would be pruned; "
                    f"give allow_empty_layer=true if that is meant"
                )
        return heads

    def by_layer(self, model_map: ModelMap) -> list[tuple[AttentionLayer, list[int]]]:
        """Layers that lose heads, with the numbers of those heads."""
        lost: dict[tuple[str, int], list[int]] = {}
        for head in self.heads_of(model_map):
            lost.setdefault((head.stack, head.layer), []).append(head.head)
        return [(model_map.by_key[key], numbers) for key, numbers in lost.items()]

    def resolve(self, model_map: ModelMap) -> Self:
        """Heads by their names, one by one; see the base class."""
        return replace(self, heads=tuple(map(str, self.heads_of(model_map))))

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Install a hook on each layer that loses heads; see the base class."""
        for layer, numbers in self.by_layer(model_map):
            change_input(layer.o_proj, Drop(dropped_columns(layer, numbers)), stack)

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """The heads, and how many of how many."""
        heads = self.heads_of(model_map)
        found: dict[str, Any] = {
            "heads": [str(head) for head in heads],
            "heads_pruned": len(heads),
            "heads_total": model_map.total_heads,
            "mask_fingerprint": self.fingerprint(model_map),
        }
        if self.origin:
            found |= {"mask_file": self.origin.path, "mask_file_sha256": self.origin.sha256}
        return found

    def summary(self, model_map: ModelMap) -> str:
        """Which heads, and how many of how many."""
        heads = self.heads_of(model_map)
        return f"{len(heads)} of {model_map.total_heads} heads masked: {first_few(heads)}"

    def fingerprint(self, model_map: ModelMap) -> str:
        """Digest of the resolved heads, modules and shapes; equal for equal masks, however written."""
        lost = [[layer.name, layer.heads, layer.head_dim, heads] for layer, heads in self.by_layer(model_map)]
        return digest({"heads": lost, "model": model_map.signature()})


def dropped_columns(layer: AttentionLayer, numbers: Iterable[int]) -> torch.Tensor:
    """Boolean vector over the output projection's inputs, true where a pruned head writes. Shape (H·d,)."""
    drop = torch.zeros(layer.heads * layer.head_dim, dtype=torch.bool)
    for number in numbers:
        drop[layer.columns(number)] = True
    return drop


class Drop:
    """Zeroes fixed columns of an activation (…, width); keeps one copy of the columns a device."""

    def __init__(self, drop: torch.Tensor) -> None:
        self.drop = {drop.device: drop}
        self.original = drop

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The activation without those columns."""
        drop = self.drop.get(x.device)
        if drop is None:
            drop = self.drop[x.device] = self.original.to(x.device)
        return x.masked_fill(drop, 0)
