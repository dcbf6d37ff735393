"""Reads a live model layer by layer: attention projections, head counts, sizes, key-value heads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lmeval_prune.architectures.identity import model_name, weights_fingerprint
from lmeval_prune.architectures.table import FAMILIES, Family
from lmeval_prune.errors import InputError


@dataclass(frozen=True)
class Rows:
    """Rows of a projection's output that belong to one head.

    Attributes:
        module: the projection (`nn.Linear`, `Conv1D`, or a wrapper of one).
        start, stop: the rows; of `module.weight` for a Linear, of `module.weight.T` for a Conv1D.
    """

    module: nn.Module
    start: int
    stop: int


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer.

    Attributes:
        stack: `""` in a model with one stack, else `"encoder"`, `"decoder"` or `"cross"`.
        index: layer number, zero-based, as in `L5H3`.
        name: dotted name of the attention module.
        module, o_proj: the attention module and its output projection.
        heads: number of query heads.
        kv_heads: number of key-value heads; number g serves query heads g·G … g·G+G−1, G = heads / kv_heads.
        head_dim: width of one head's slice of the output projection's input.
        query_dim: rows of one head in the query projection (differs from `head_dim` in latent attention).
    """

    stack: str
    index: int
    name: str
    module: nn.Module
    o_proj: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    query_dim: int
    family: Family

    def columns(self, head: int) -> slice:
        """Columns of the output projection's input that `head` fills."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    def kv_head_of(self, head: int) -> int:
        """Key-value head that a query head reads."""
        return head // (self.heads // self.kv_heads)

    def rows(self, part: str, index: int) -> Rows:
        """Rows that compute query head `index` (`part="q"`) or key-value head `index` (`"k"`, `"v"`)."""
        module = _projection(self.module, {"q": self.family.query, "k": self.family.key, "v": self.family.value}[part])
        assert module is not None
        if self.family.fused:
            start = self.family.fused(part, index, self.heads, self.kv_heads, self.head_dim)
            return Rows(module, start, start + self.head_dim)
        if self.family.key_value_pairs and part != "q":
            pair = _out_features(module) // self.kv_heads
            start = index * pair + (pair - self.head_dim if part == "v" else 0)
            return Rows(module, start, start + (self.head_dim if part == "v" else pair - self.head_dim))
        size = self.query_dim if part in "qk" else self.head_dim
        return Rows(module, index * size, (index + 1) * size)

    @property
    def label(self) -> str:
        """`"L5"`, or `"encoder.L5"` in a model with several stacks."""
        return f"{self.stack}.L{self.index}" if self.stack else f"L{self.index}"


class ModelMap:
    """Where everything is in a live model; made by `map_model`.

    Attributes:
        model: the model.
        attention: its attention layers, in order.
        model_type, name, revision: what its configuration says.
    """

    def __init__(
        self, model: Any, attention: Sequence[AttentionLayer], model_type: str, name: str = "", revision: str = ""
    ) -> None:
        self.model = model
        self.attention = tuple(attention)
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
    described = (attention_path, attention_output, attention_heads)
    if any(value is not None for value in described):
        if attention_path is None or attention_output is None or attention_heads is None:
            raise InputError(
                "describe an architecture with all three of attention_path, attention_output, attention_heads"
            )
        attention_path = attention_path.replace("*", "{i}")  # braces cannot be typed in lm-eval's --model_args
        if "{i}" not in attention_path:
            raise InputError(f"attention_path={attention_path} must contain * or {{i}} where the layer number stands")
        pattern = re.escape(attention_path).replace(re.escape("{i}"), r"(?P<layer>\d+)")
        family = Family(pattern, attention_output)
    elif model_type in FAMILIES:
        family = FAMILIES[model_type]
    else:
        raise InputError(
            f"unknown model family {model_type!r}; known: {', '.join(sorted(FAMILIES))}. For another one give "
            f"attention_path (e.g. model.layers.*.self_attn), attention_output (e.g. o_proj) and attention_heads"
        )
    matcher = re.compile(rf"(?:^|.*\.){family.attention}$")
    layers: dict[tuple[str, int], AttentionLayer] = {}
    for name, module in model.named_modules():
        found = matcher.match(name)
        if not found or _projection(module, family.output) is None:
            continue
        layer = _read(name, module, found.groupdict(), family, attention_heads)
        key = (layer.stack, layer.index)
        if key in layers:
            raise InputError(
                f"{layers[key].name} and {name} both look like attention layer {layer.label} of this model"
            )
        layers[key] = layer
    if not layers:
        raise InputError(
            f"no attention layers found in this {model_type or type(model).__name__} model by {family.attention!r}"
        )
    if {layer.stack for layer in layers.values()} == {"decoder"}:  # only one stack: no prefix needed
        layers = {("", index): replace(layer, stack="") for (_, index), layer in layers.items()}
    order = {"": 0, "encoder": 0, "decoder": 1, "cross": 2}
    return ModelMap(
        model,
        sorted(layers.values(), key=lambda layer: (order[layer.stack], layer.index)),
        model_type,
        model_name(getattr(config, "_name_or_path", "") or ""),
        getattr(config, "_commit_hash", None) or "",
    )


def _read(name: str, module: nn.Module, found: dict[str, str], family: Family, count: int | None) -> AttentionLayer:
    output = _projection(module, family.output)
    assert output is not None
    inputs = _in_features(output)
    width = inputs // count if count else _attribute(module, family.width)
    if not isinstance(width, int) or width <= 0 or inputs % width:
        raise InputError(
            f"{name}: {inputs} inputs of {family.output} cannot be divided into heads (width {width}, heads {count})"
        )
    heads = inputs // width
    cross = found.get("kind") in {"EncDecAttention", "encoder_attn"}
    query, key = _projection(module, family.query), _projection(module, family.key)
    kv_heads, query_dim = heads, width
    if query is not None and key is not None:
        if family.fused:
            kv_heads = (_out_features(query) // width - heads) // 2
        else:
            query_dim = _out_features(query) // heads
            if not family.key_value_pairs:
                kv_heads = _out_features(key) // query_dim
    return AttentionLayer(
        stack="cross" if cross else found.get("stack") or "",
        index=int(found["layer"]),
        name=name,
        module=module,
        o_proj=output,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        query_dim=query_dim,
        family=family,
    )


def _projection(module: nn.Module, path: str) -> nn.Module | None:
    """Submodule at a dotted path; alternatives are separated by `|`, the first that exists is taken."""
    for choice in path.split("|"):
        found = _attribute(module, choice)
        if isinstance(found, nn.Module):
            return found
    return None


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in GPT-2's `Conv1D`, and not (outputs, inputs)."""
    return type(module).__name__ == "Conv1D"


def _in_features(module: nn.Module) -> int:
    return _features(module, "in_features", 0)


def _out_features(module: nn.Module) -> int:
    return _features(module, "out_features", 1)


def _features(module: nn.Module, attribute: str, axis: int) -> int:
    size = getattr(module, attribute, None)
    if size is None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        size = weight.shape[axis if is_transposed(module) else 1 - axis]
    return int(size)
