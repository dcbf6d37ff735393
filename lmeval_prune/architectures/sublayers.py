"""Blocks as units of depth: the attention and feed-forward blocks of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.blocks import AttentionLayer, Block, FeedForward, has_absent, is_absent
from lmeval_prune.architectures.layers import layers_in, submodule_at
from lmeval_prune.architectures.table import Family

if TYPE_CHECKING:
    from torch import nn

ATTENTION, FEED_FORWARD = "attention", "feed_forward"
_EXPERTS = "mlp|block_sparse_moe|feed_forward|moe|ffn"  # usual names of feed-forward blocks, also of experts


@dataclass(frozen=True)
class Sublayer(Block):
    """Attention or feed-forward block of a layer; what it adds to the residual stream is computed from one output."""

    kind: str  # `attention` or `feed_forward`
    layer: str  # dotted name of the layer's module
    output: nn.Module  # output projection; of experts, the whole block
    block: AttentionLayer | FeedForward | None  # None: experts, or a block whose projections are unknown

    def __str__(self) -> str:
        """Return the name in a plan, `L5.attention`."""
        return f"{self.label}.{self.kind}"


def read_sublayers(
    model: nn.Module, family: Family, attention: Sequence[AttentionLayer], feed_forward: Sequence[FeedForward]
) -> Iterator[Sublayer]:
    """Yield the blocks of a model's layers in order; the arguments are those of its map."""
    dense = {(block.stack, block.index): block for block in feed_forward}
    own_path = family.feed_forward.block if family.feed_forward else ""
    paths = "|".join(filter(None, (own_path, _EXPERTS)))
    for layer in layers_in(model, family):
        attention_blocks = [block for block in attention if block.name.startswith(f"{layer.name}.")]
        blocks: list[tuple[Block, str, nn.Module, Any]] = [
            (block, ATTENTION, block.o_proj, block) for block in attention_blocks
        ]
        if block := dense.get((layer.stack, layer.index)):
            blocks.append((block, FEED_FORWARD, block.down, block))
        elif attention_blocks or has_absent(layer.module):
            experts = submodule_at(layer, paths)
            if experts and not is_absent(experts.module):
                blocks.append((experts, FEED_FORWARD, experts.module, None))
        for part, kind, output, dense_block in blocks:
            yield Sublayer(part.stack, part.index, part.name, part.module, kind, layer.name, output, dense_block)
