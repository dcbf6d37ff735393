"""Reads a live model layer by layer: attention and feed-forward projections, heads, key-value heads, channels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from lmeval_prune.architectures.blocks import (
    AttentionLayer,
    Block,
    FeedForward,
    attribute_of,
    find_in,
    in_features,
    out_features,
    projection_in,
)
from lmeval_prune.architectures.identity import model_name, weights_fingerprint
from lmeval_prune.architectures.table import FAMILIES, Family, FeedForwardNames
from lmeval_prune.errors import InputError


class ModelMap:
    """Where everything is in a live model; made by `map_model`.

    Attributes:
        model: the model.
        attention: its attention layers, in order.
        feed_forward: the dense feed-forward blocks of these layers, in order; a layer with experts has none, nor has
            a family that was described by hand.
        model_type, name, revision: what its configuration says.
    """

    def __init__(
        self,
        model: Any,
        attention: Sequence[AttentionLayer],
        model_type: str,
        name: str = "",
        revision: str = "",
        feed_forward: Sequence[FeedForward] = (),
    ) -> None:
        self.model = model
        self.attention = tuple(attention)
        self.feed_forward = tuple(feed_forward)
        self.model_type = model_type
        self.name = name
        self.revision = revision

    @cached_property
    def by_key(self) -> dict[tuple[str, int], AttentionLayer]:
        """Attention layers by (stack, index)."""
        return {(layer.stack, layer.index): layer for layer in self.attention}

    @cached_property
    def weights(self) -> str | None:
        """`weights_fingerprint` of the model, as its weights were when this was first asked."""
        return weights_fingerprint(self.model)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks; `("",)` for a model with one."""
        return tuple(dict.fromkeys(layer.stack for layer in self.attention))

    @property
    def total_heads(self) -> int:
        """Query heads in the whole model."""
        return sum(layer.heads for layer in self.attention)

    def signature(self) -> dict[str, Any]:
        """What an artefact records of the shapes: `{"model_type", "heads": {"L0": [heads, kv_heads, head_dim]}}`."""
        shapes = {layer.label: [layer.heads, layer.kv_heads, layer.head_dim] for layer in self.attention}
        return {"model_type": self.model_type, "heads": shapes}

    def channels(self) -> dict[str, int]:
        """Feed-forward channels by layer: `{"L0": 1536}`."""
        return {block.label: block.channels for block in self.feed_forward}


def map_model(
    model: nn.Module,
    *,
    attention_path: str | None = None,
    attention_output: str | None = None,
    attention_heads: int | None = None,
) -> ModelMap:
    """Read a transformers model, wrapped in PEFT or not.

    Args:
        model: a live model (its weights may be on the meta device).
        attention_path: for a family that the table lacks, the dotted name of the attention modules
            with `*` or `{i}` for the layer number, e.g. `model.layers.*.self_attn`.
        attention_output: name of the output projection inside it, e.g. `o_proj`.
        attention_heads: query heads a layer.

    Raises:
        InputError: the family is unknown, or the description does not fit the model.
    """
    config = getattr(model, "config", None)
    text_config: Any = config
    if config is not None and hasattr(config, "get_text_config"):
        text_config = config.get_text_config()
    model_type = getattr(text_config, "model_type", "") or ""
    if attention_path is not None or attention_output is not None or attention_heads is not None:
        family = _described(attention_path, attention_output, attention_heads)
    elif model_type in FAMILIES:
        family = FAMILIES[model_type]
    else:
        raise InputError(
            f"unknown model family {model_type!r}; known: {', '.join(sorted(FAMILIES))}. For another one give "
            f"attention_path (e.g. model.layers.*.self_attn), attention_output (e.g. o_proj) and attention_heads"
        )
    attention: dict[tuple[str, int], AttentionLayer] = {}
    feed_forward: list[FeedForward] = []
    for layer in layers_in(model, family):
        own = _read_attention(layer, family.attention, family, attention_heads)
        cross = _read_attention(replace(layer, stack="cross"), family.cross_attention, family, attention_heads)
        for found in filter(None, (own, cross)):
            other = attention.setdefault((found.stack, found.index), found)
            if other is not found:
                raise InputError(
                    f"{other.name} and {found.name} both look like attention layer {found.label} of this model"
                )
        block = _read_feed_forward(layer, family.feed_forward)
        if own and block:  # what has no such attention is a layer of another tower, such as an image encoder
            feed_forward.append(block)
    if not attention:
        raise InputError(
            f"no attention layers found in this {model_type or type(model).__name__} model: no {family.attention!r} "
            f"with {family.output!r} in modules called {family.layer!r}"
        )
    order = {"": 0, "encoder": 0, "decoder": 1, "cross": 2}
    return ModelMap(
        model,
        sorted(attention.values(), key=lambda layer: (order[layer.stack], layer.index)),
        model_type,
        model_name(getattr(config, "_name_or_path", "") or ""),
        getattr(config, "_commit_hash", None) or "",
        sorted(feed_forward, key=lambda block: (order[block.stack], block.index)),
    )


def _described(path: str | None, output: str | None, heads: int | None) -> Family:
    """A family as a user describes it: what its feed-forward blocks are called stays unknown."""
    if path is None or output is None or heads is None:
        raise InputError("describe an architecture with all three of attention_path, attention_output, attention_heads")
    path = path.replace("*", "{i}")  # braces cannot be typed in lm-eval's --model_args
    if "{i}" not in path:
        raise InputError(f"attention_path={path} must contain * or {{i}} where the layer number stands")
    before, _, after = path.partition("{i}")
    layer, _, attention = after.partition(".")
    return Family(rf"{re.escape(before)}(?P<layer>\d+){re.escape(layer)}", attention, output)


def layers_in(model: nn.Module, family: Family) -> Iterator[Block]:
    """The modules of a model that a family calls layers, with their stacks and numbers."""
    matcher = re.compile(rf"(?:^|.*\.){family.layer}$")
    for name, module in model.named_modules():
        found = matcher.match(name)
        if found:
            yield Block(found.groupdict().get("stack") or "", int(found["layer"]), name, module)


def layers_with_attention(model_map: ModelMap) -> list[nn.Module]:
    """The modules of a model's layers, in order."""
    names = [layer.name for layer in model_map.attention]
    every = layers_in(model_map.model, model_map.attention[0].family)
    return [one.module for one in every if any(f"{name}.".startswith(f"{one.name}.") for name in names)]


def _inside(layer: Block, path: str) -> Block | None:
    """What is at a path in a layer; at an empty path, the layer itself."""
    if not path:
        return layer
    found = find_in(layer.module, path)
    return found and replace(layer, name=f"{layer.name}.{found[0]}", module=found[1])


def _read_attention(layer: Block, path: str | None, family: Family, count: int | None) -> AttentionLayer | None:
    block = None if path is None else _inside(layer, path)
    if block is None:
        return None
    module, output = block.module, projection_in(block.module, family.output)
    if output is None:
        return None
    inputs = in_features(output)
    width = inputs // count if count else attribute_of(module, family.width)
    if not isinstance(width, int) or width <= 0 or inputs % width:
        raise InputError(
            f"{block.name}: {inputs} inputs of {family.output} cannot be divided into heads "
            f"(width {width}, heads {count})"
        )
    heads = inputs // width
    query, key = projection_in(module, family.query), projection_in(module, family.key)
    kv_heads, query_dim = heads, width
    if query is not None and key is not None:
        if family.fused:
            kv_heads = (out_features(query) // width - heads) // 2
        else:
            query_dim = out_features(query) // heads
            if not family.key_value_pairs:
                kv_heads = out_features(key) // query_dim
    return AttentionLayer(
        **vars(block),
        o_proj=output,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        query_dim=query_dim,
        family=family,
    )


def _read_feed_forward(layer: Block, names: FeedForwardNames | None) -> FeedForward | None:
    block = None if names is None else _inside(layer, names.block)
    if names is None or block is None:
        return None
    gate, up, down = (projection_in(block.module, path) for path in (names.gate, names.up, names.down))
    if up is None or down is None:
        return None
    return FeedForward(**vars(block), gate=gate, up=up, down=down, channels=in_features(down))
