"""Low-rank updates of output projections, and the check that they prune exactly their heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer
from lmeval_prune.errors import InputError


@dataclass(frozen=True)
class Update:
    """A low-rank update of an output projection: `lora_b @ lora_a` is added to its weight.

    Attributes:
        module: full name of the projection.
        index: number of its layer.
        heads: the pruned ones.
        lora_a: (rank, inputs), rows of the identity.
        lora_b: (outputs, rank), the columns of those inputs, negated.
        columns: how many rows of `lora_a` and columns of `lora_b` are used; the others are zero.
    """

    module: str
    index: int
    heads: tuple[int, ...]
    lora_a: Tensor
    lora_b: Tensor
    columns: int

    @classmethod
    def of(cls, module: str, layer: AttentionLayer, heads: Sequence[int], weight: Tensor, rank: int) -> Update:
        """Return the update that prunes heads of a layer.

        Args:
            module: full name of its output projection.
            layer, heads: the layer, and numbers of its heads.
            weight: of the projection, (outputs, inputs), in the type of the adapter.
            rank: of the adapter.

        Raises:
            InputError: the weights have values that are no numbers in that type, or merged, a column is not zero.
        """
        columns = [c for head in heads for c in range(layer.columns(head).start, layer.columns(head).stop)]
        if not weight.isfinite().all():
            kind = str(weight.dtype).removeprefix("torch.")
            raise InputError(f"{module} has weights that {kind} cannot hold; give another --dtype")
        lora_a = weight.new_zeros(rank, weight.shape[1])
        lora_a[range(len(columns)), columns] = 1
        lora_b = weight.new_zeros(weight.shape[0], rank)
        lora_b[:, : len(columns)] = -weight[:, columns]
        update = cls(module, layer.index, tuple(heads), lora_a, lora_b, len(columns))
        update.check(weight, columns)
        return update

    def check(self, weight: Tensor, columns: Sequence[int]) -> None:
        """Refuse an update that merged into a weight does not zero just these columns.

        Raises:
            InputError: it does not.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        merged = weight + (self.lora_b.to(wide) @ self.lora_a.to(wide)).to(weight.dtype)
        expected = weight.clone()
        expected[:, columns] = 0
        if not torch.equal(merged, expected):
            raise InputError(f"merged into {self.module}, the adapter does not prune its heads exactly; report this")
