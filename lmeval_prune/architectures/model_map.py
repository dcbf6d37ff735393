"""Find the attention layers, heads and feed-forward channels of a live model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
_ORDER = {"": 0, "encoder": 0, "decoder": 1, "cross": 2}


class ModelMap:
    """Location of every head and channel in a live model; `map_model` builds it.

    Attributes:
        model: the model.
        attention: attention layers, in order.
        feed_forward: dense feed-forward blocks of these layers, in order. Mixture-of-experts layers, and families
            that a user describes by hand, have none.
        model_type, name, revision: from the model's configuration.
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
        self._results: dict[Any, Any] = {}

    def once(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the cached result for `key`, or compute it; the key must name everything the result depends on."""
        if key not in self._results:
            self._results[key] = compute()
        result: T = self._results[key]
        return result

    @cached_property
    def by_key(self) -> dict[tuple[str, int], AttentionLayer]:
        """Attention layers by (stack, index)."""
        return {(layer.stack, layer.index): layer for layer in self.attention}

    @cached_property
    def weights(self) -> str | None:
        """`weights_fingerprint` of the model, computed at first use."""
        return weights_fingerprint(self.model)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks; `("",)` for a model with a single stack."""
        return tuple(dict.fromkeys(layer.stack for layer in self.attention))

    @property
    def is_causal(self) -> bool:
        """True if tokens attend only to earlier tokens; bidirectional modules declare `is_causal=False`."""
        modules = (module for layer in self.attention for module in layer.module.modules())
        return self.stacks == ("",) and all(getattr(module, "is_causal", True) for module in modules)

    @property
    def predicts_next_token(self) -> bool:
        """True if the model is a causal language model with an output head."""
        has_head = getattr(self.model, "get_output_embeddings", lambda: None)() is not None
        return self.is_causal and has_head and bool(getattr(self.model, "can_generate", bool)())

    @property
    def total_heads(self) -> int:
        """Number of query heads in the whole model."""
        return sum(layer.heads for layer in self.attention)

    def signature(self) -> dict[str, Any]:
        """Return the shapes that artefacts store: `{"model_type", "heads": {"L0": [heads, kv_heads, head_dim]}}`."""
        shapes = {layer.label: [layer.heads, layer.kv_heads, layer.head_dim] for layer in self.attention}
        return {"model_type": self.model_type, "heads": shapes}

    def channels(self) -> dict[str, int]:
        """Return the number of feed-forward channels by layer: `{"L0": 1536}`."""
        return {block.label: block.channels for block in self.feed_forward}


def map_model(
    model: nn.Module,
    *,
    attention_path: str | None = None,
    attention_output: str | None = None,
    attention_heads: int | None = None,
) -> ModelMap:
    """Map a transformers model, with or without PEFT adapters.

    Args:
        model: a live model; its weights may be on the meta device.
        attention_path: for a family that the table lacks, dotted name of the attention modules with `*` or `{i}` in
            place of the layer number, e.g. `model.layers.*.self_attn`.
        attention_output: name of the output projection in the attention module, e.g. `o_proj`.
        attention_heads: query heads per layer.

    Raises:
        InputError: the family is unknown, or the description does not fit the model.
    """
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    model_type = getattr(text_config, "model_type", "") or ""
    described = (attention_path, attention_output, attention_heads)
    if described == (None, None, None) and model_type not in FAMILIES:
        raise InputError(
            f"unknown model family {model_type!r}; known: {', '.join(sorted(FAMILIES))}. For another one give "
            f"attention_path (e.g. model.layers.*.self_attn), attention_output (e.g. o_proj) and attention_heads"
        )
    family = FAMILIES[model_type] if described == (None, None, None) else _described(*described)
    attention: dict[tuple[str, int], AttentionLayer] = {}
    feed_forward: list[FeedForward] = []
    for layer in layers_in(model, family):
        self_attention = _read_attention(layer, family.attention, family, attention_heads)
        cross = _read_attention(replace(layer, stack="cross"), family.cross_attention, family, attention_heads)
        for block in filter(None, (self_attention, cross)):
            other = attention.setdefault((block.stack, block.index), block)
            if other is not block:
                raise InputError(
                    f"{other.name} and {block.name} both look like attention layer {block.label} of this model"
                )
        channels = _read_feed_forward(layer, family.feed_forward)
        if self_attention and channels:  # a layer without attention belongs to another tower, e.g. an image encoder
            feed_forward.append(channels)
    if not attention:
        raise InputError(
            f"no attention layers found in this {model_type or type(model).__name__} model: no {family.attention!r} "
            f"with {family.output!r} in modules called {family.layer!r}"
        )
    return ModelMap(
        model,
        sorted(attention.values(), key=_position),
        model_type,
        model_name(getattr(config, "_name_or_path", "") or ""),
        getattr(config, "_commit_hash", None) or "",
        sorted(feed_forward, key=_position),
    )


def position_limit(model: Any) -> int | None:
    """Return the maximum number of tokens of a model; None if its configuration names no limit.

    RoBERTa reserves its first positions for padding; they do not count.
    """
    config = model.config.get_text_config()
    values = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))  # the latter: MPT
    limit = next((value for value in values if isinstance(value, int)), None)
    if limit is None or limit < 1:
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1
    return limit


def _position(block: Block) -> tuple[int, int]:
    return _ORDER[block.stack], block.index


def _described(path: str | None, output: str | None, heads: int | None) -> Family:
    """Build a family, without feed-forward blocks, from a user's description."""
    if path is None or output is None or heads is None:
        raise InputError("describe an architecture with all three of attention_path, attention_output, attention_heads")
    path = path.replace("*", "{i}")  # lm-eval's --model_args does not accept braces
    if "{i}" not in path:
        raise InputError(f"attention_path={path} must contain * or {{i}} in place of the layer number")
    before, _, after = path.partition("{i}")
    layer, _, attention = after.partition(".")
    return Family(rf"{re.escape(before)}(?P<layer>\d+){re.escape(layer)}", attention, output)


def layers_in(model: nn.Module, family: Family) -> Iterator[Block]:
    """Yield the layers of a model as blocks, by the family's name pattern."""
    matcher = re.compile(rf"(?:^|.*\.){family.layer}$")
    for name, module in model.named_modules():
        if match := matcher.match(name):
            yield Block(match.groupdict().get("stack") or "", int(match["layer"]), name, module)


def layers_with_attention(model_map: ModelMap) -> list[nn.Module]:
    """Return the layer modules that hold attention, in order."""
    names = [f"{layer.name}." for layer in model_map.attention]
    layers = layers_in(model_map.model, model_map.attention[0].family)
    return [layer.module for layer in layers if any(name.startswith(f"{layer.name}.") for name in names)]


def _at(layer: Block, path: str) -> Block | None:
    """Return the submodule at a path in a layer; the layer itself for an empty path."""
    if not path:
        return layer
    match = find_in(layer.module, path)
    return Block(layer.stack, layer.index, f"{layer.name}.{match[0]}", match[1]) if match else None


def _read_attention(layer: Block, path: str | None, family: Family, count: int | None) -> AttentionLayer | None:
    block = None if path is None else _at(layer, path)
    output = None if block is None else projection_in(block.module, family.output)
    if block is None or output is None:
        return None
    module, inputs = block.module, in_features(output)
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
            kv_heads = heads if family.key_value_pairs else out_features(key) // query_dim
    return AttentionLayer(
        block.stack, block.index, block.name, module, output, heads, kv_heads, width, query_dim, family
    )


def _read_feed_forward(layer: Block, names: FeedForwardNames | None) -> FeedForward | None:
    block = None if names is None else _at(layer, names.block)
    if names is None or block is None:
        return None
    gate, up, down = (projection_in(block.module, path) for path in (names.gate, names.up, names.down))
    if up is None or down is None:
        return None
    return FeedForward(block.stack, block.index, block.name, block.module, gate, up, down, in_features(down))
