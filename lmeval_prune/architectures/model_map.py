"""Find the attention layers, heads and feed-forward channels of a live model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from lmeval_prune.architectures.blocks import (
    AttentionLayer,
    FeedForward,
    Sublayer,
    attribute_of,
    projection_in,
    read_blocks,
)
from lmeval_prune.architectures.identity import (
    loadable_fingerprints,
    model_name,
    text_config,
    weight_writes,
    weights_fingerprint,
)
from lmeval_prune.architectures.structure import recognise, refute_depth
from lmeval_prune.architectures.table import ALIBI, FAMILIES, Family
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class ModelMap:
    """Location of every head and channel in a live model; `map_model` builds it."""

    model: Any
    attention: tuple[AttentionLayer, ...]  # in order
    model_type: str  # this, name and revision are those of the configuration
    name: str
    revision: str
    feed_forward: tuple[FeedForward, ...]  # dense ones, in order; none of experts, nor of a described family
    sublayers: tuple[Sublayer, ...]  # all blocks in the order of the layers; experts count as a feed-forward block
    _results: dict[Any, Any] = field(default_factory=dict, init=False)
    _fingerprint: tuple[Any, str | None] | None = field(default=None, init=False)  # and `weight_writes`

    def once(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the cached result for `key`, or compute it; the key must name everything the result depends on."""
        if key not in self._results:
            self._results[key] = compute()
        result: T = self._results[key]
        return result

    @property
    def weights(self) -> str | None:
        """`weights_fingerprint` of the model, computed at first use and after weights were written."""
        writes = weight_writes(self.model)
        if self._fingerprint is None or self._fingerprint[0] != writes:
            self._fingerprint = writes, weights_fingerprint(self.model)
        return self._fingerprint[1]

    @cached_property
    def layers(self) -> dict[str, Any]:
        """Modules of the layers that hold a block, by label, in order; attention may be cut out of some."""
        return {sublayer.label: self.model.get_submodule(sublayer.layer) for sublayer in self.sublayers}

    @cached_property
    def why_no_depth(self) -> str:
        is_known = self.model_type in FAMILIES
        return "" if is_known else refute_depth(self.model, self.attention[0].family, recognise(self.model).depth)

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
        has_head = getattr(self.model, "get_output_embeddings", lambda: None)() is not None
        return self.is_causal and has_head and bool(getattr(self.model, "can_generate", bool)())

    @property
    def total_heads(self) -> int:
        return sum(layer.heads for layer in self.attention)

    def signature(self) -> dict[str, Any]:
        """Return the shapes that artefacts store: `{"model_type", "heads": {"L0": [heads, kv_heads, head_dim]}}`."""
        shapes = {layer.label: [layer.heads, layer.kv_heads, layer.head_dim] for layer in self.attention}
        return {"model_type": self.model_type, "heads": shapes}

    def record(self) -> dict[str, Any]:
        """Return what files about this model store of it."""
        weights = loadable_fingerprints(self.model, self.weights)
        return {"name": self.name, "revision": self.revision, "weights": weights, **self.signature()}

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
        attention_path: for a family that is neither in the table nor recognised by its layers, dotted name of the
            attention modules with `*` or `{i}` in place of the layer number, e.g. `model.layers.*.self_attn`.
        attention_output: name of the output projection in the attention module, e.g. `o_proj`.
        attention_heads: query heads per layer.
    """
    config: Any = getattr(model, "config", None)
    model_type = getattr(text_config(model), "model_type", "") or ""
    if (attention_path, attention_output, attention_heads) == (None, None, None):
        family = FAMILIES.get(model_type) or recognise(model).family
    elif attention_path is None or attention_output is None or attention_heads is None:
        raise InputError("describe an architecture with all three of attention_path, attention_output, attention_heads")
    else:  # lm-eval's --model_args does not accept braces
        before, _, after = attention_path.replace("*", "{i}").partition("{i}")
        layer, _, attention_name = after.partition(".")
        pattern = rf"{re.escape(before)}(?P<layer>\d+){re.escape(layer)}"
        family = Family(pattern, attention_name, attention_output)
    attention, feed_forward, sublayers = read_blocks(model, family, attention_heads)
    if not attention:
        names = f"no {family.attention!r} with {family.output!r} in modules called {family.layer!r}"
        raise InputError(f"no attention layers found in this {model_type or type(model).__name__} model: {names}")
    return ModelMap(
        model,
        tuple(attention),
        model_type,
        model_name(getattr(config, "_name_or_path", "") or ""),
        getattr(config, "_commit_hash", None) or "",
        tuple(feed_forward),
        tuple(sublayers),
    )


def position_limit(model: Any) -> int | None:
    """Return the maximum number of tokens of a model; None if its configuration names no limit.

    RoBERTa reserves its first positions for padding; they do not count.
    """
    config = text_config(model)
    values = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))  # the latter: MPT
    limit = next((value for value in values if isinstance(value, int)), None)
    if limit is None or limit < 1:
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1
    return limit


def takes_logits_to_keep(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def cache_argument(outputs: Any) -> dict[str, Any]:
    """Return the cache in the outputs of a model as the keyword argument that the model's next pass takes.

    Its name is `cache`, and in older releases of transformers and own code on the Hub `past_key_values`.

    Args:
        outputs: a `ModelOutput` of a pass with `use_cache=True`.
    """
    name = "cache" if "cache" in outputs else "past_key_values"
    return {name: outputs[name]}


def uncuttable(model_map: ModelMap) -> str:
    """Return why heads of a model can be masked but not cut; empty if they can be cut."""
    for layer in model_map.attention:
        if layer.family.uncuttable:
            return layer.family.uncuttable
        if attribute_of(layer.module, "q_layernorm.norms") is not None:
            return "it has a list of query and key norms, one per head"
        if projection_in(layer.module, layer.family.query) is None:
            return "its query projection is unknown"
    return ALIBI if getattr(model_map.model.config, "alibi", False) else ""
