"""Low-rank updates of output projections, and the check that they prune their heads exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer
from lmeval_prune.architectures.blocks import columns_of
from lmeval_prune.errors import InputError

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


@dataclass(frozen=True)
class Update:
    """A low-rank update of an output projection: `lora_b @ lora_a` is added to its weight."""

    module: str  # full name of the projection
    index: int  # of its layer
    heads: tuple[int, ...]  # pruned heads
    lora_a: Tensor  # (rank, inputs), rows of the identity
    lora_b: Tensor  # (outputs, rank), the negated weight columns of these inputs
    columns: int  # used columns of `lora_b` and rows of `lora_a`; the others are zero

    @classmethod
    def of(cls, module: str, layer: AttentionLayer, heads: Sequence[int], weight: Tensor, rank: int) -> Update:
        """Return the update that prunes heads of a layer; `weight` has shape (outputs, inputs)."""
        columns = columns_of(layer, heads)
        lora_a = weight.new_zeros(rank, weight.shape[1])
        lora_a[range(len(columns)), columns] = 1
        lora_b = weight.new_zeros(weight.shape[0], rank)
        lora_b[:, : len(columns)] = -weight[:, columns]
        update = cls(module, layer.index, tuple(heads), lora_a, lora_b, len(columns))
        update.check(weight, columns)
        return update

    def check(self, weight: Tensor, columns: Sequence[int]) -> None:
        """Check that merging the update into the weight zeroes these columns and changes no others."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        merged = weight + (self.lora_b.to(dtype) @ self.lora_a.to(dtype)).to(weight.dtype)
        expected = weight.clone()
        expected[:, columns] = 0
        if not torch.equal(merged, expected):
            raise InputError(f"merged into {self.module}, the adapter is not exact; give another --dtype")
