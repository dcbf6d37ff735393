"""Layers of a model as llama.cpp's `deci` can have them.

`deci` computes a layer with no heads without attention, but in a layer with no channels it drops the attention, too;
and it takes the width of heads from the first layer. So a layer without a feed-forward block is written with one
channel of zeros, and a first layer without attention with one head of zeros. A layer without any block is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import is_absent
from lmeval_prune.architectures.layers import layers_in


@dataclass(frozen=True)
class GGUFLayer:
    """One layer of a GGUF file."""

    number: int  # in the file
    name: str  # dotted name of the layer's module
    attention: AttentionLayer | None
    feed_forward: FeedForward | None

    @property
    def heads(self) -> int:
        """Number of query heads in the file."""
        return self.attention.heads if self.attention else int(self.number == 0)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads in the file."""
        return self.attention.kv_heads if self.attention else int(self.number == 0)

    @property
    def channels(self) -> int:
        """Number of channels in the file."""
        return self.feed_forward.channels if self.feed_forward else 1

    @property
    def note(self) -> str:
        """What stands in for a missing block; empty if nothing does."""
        if self.feed_forward is None:
            return f"blk.{self.number} has one channel of zeros instead of a feed-forward block, which llama.cpp needs"
        if self.attention is None and self.number == 0:
            return "blk.0 has one head of zeros instead of attention, which llama.cpp needs in the first layer"
        return ""

    def fillers(self, model_map: ModelMap) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the tensors that stand in for a missing block."""
        hidden, width = model_map.model.config.hidden_size, model_map.attention[0].head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if self.attention is None and self.number == 0:
            shapes |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), (width, hidden))
            shapes |= {"attn_output": (hidden, width), "attn_norm": (hidden,)}
        if self.feed_forward is None:
            shapes |= {"ffn_gate": (1, hidden), "ffn_up": (1, hidden), "ffn_down": (hidden, 1), "ffn_norm": (hidden,)}
        for name, shape in shapes.items():
            yield f"blk.{self.number}.{name}.weight", torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)


def gguf_layers(model_map: ModelMap) -> list[GGUFLayer]:
    """Return the layers of a model with a single stack that have a block."""
    attention = {layer.index: layer for layer in model_map.attention}
    feed_forward = {block.index: block for block in model_map.feed_forward}
    layers = [
        layer for layer in layers_in(model_map.model, model_map.attention[0].family) if not is_absent(layer.module)
    ]
    return [
        GGUFLayer(number, layer.name, attention.get(layer.index), feed_forward.get(layer.index))
        for number, layer in enumerate(layers)
    ]
