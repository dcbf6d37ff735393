"""Recognise the layers of a model whose family the table does not name.

An entry of the table describes the model if the live modules have its names and consistent shapes, and if the float64
proof of `proof.py` holds for a tiny random model of the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.blocks import (
    AttentionLayer,
    FeedForward,
    attribute_of,
    in_features,
    out_features,
    projection_in,
)
from lmeval_prune.architectures.identity import text_config
from lmeval_prune.architectures.layers import read_blocks
from lmeval_prune.architectures.proof import refute
from lmeval_prune.architectures.table import FAMILIES, Family
from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from torch import nn

_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # shared by all heads
_MAX_DEPTH = 16
_LLAMA, _NEOX = FAMILIES["llama"], FAMILIES["gpt_neox"]
_VARIANTS = (  # entries under other names
    *((replace(_LLAMA, attention=name), "llama") for name in ("mixer", "temporal_block")),
    (replace(_LLAMA, output="out_proj"), "llama"),
    (replace(_LLAMA, width="v_head_dim", head_parameters=FAMILIES["gpt_oss"].head_parameters), "llama"),
    (replace(_NEOX, attention="self_attn", width="head_dim"), "gpt_neox"),
)


@dataclass(frozen=True)
class Fit:
    """An entry of the table, fitted to the modules of a model."""

    entry: str  # a family of the table with this entry
    family: Family  # the entry, with the changes that the model's modules need
    attention: Sequence[AttentionLayer]
    feed_forward: Sequence[FeedForward]

    @property
    def depth(self) -> int:
        """Number of layers, from the first, that contains every kind of layer."""
        kinds = {(type(x.module), x.heads, x.kv_heads, x.head_dim): x.index for x in reversed(self.attention)}
        first = [*kinds.values(), *(block.index for block in self.feed_forward[:1])]
        return min(max(2, *(index + 1 for index in first)), _MAX_DEPTH)

    def summary(self) -> str:
        """Return what is known of the model's heads and channels."""
        limits = [f"heads are masked, not cut ({self.family.uncuttable})"] if self.family.uncuttable else []
        limits += [] if self.feed_forward else ["no channels"]
        return f"built like {self.entry}, proven in float64{''.join(f'; {limit}' for limit in limits)}"


def recognise(model: Any) -> Fit:
    """Return the entry of the table that describes the layers of a model whose family is not in the table."""
    config: Any = getattr(model, "config", None)
    text = text_config(model)
    name = getattr(text, "model_type", "") or type(model).__name__
    fits, reasons = _fits(model)
    if getattr(config, "is_encoder_decoder", False):
        fits, reasons = [], ["encoder-decoders are not recognised"]
    for fit in fits:
        refutation = refute(model, fit.family, fit.depth)
        if not refutation.heads:
            if refutation.channels:
                return replace(fit, family=replace(fit.family, feed_forward=None), feed_forward=())
            return fit
        reasons.append(f"it looks like {fit.entry}, but {refutation.heads}")
    reason = next(iter(reasons), "its modules are not called like those of a known family")
    raise InputError(
        f"model family {name!r} is not supported: {reason}; describe its heads by attention_path (e.g. "
        f"model.layers.*.self_attn), attention_output (e.g. o_proj) and attention_heads"
    )


def _fits(model: nn.Module) -> tuple[list[Fit], list[str]]:
    """Return the entries that fit a model's modules, or else why those with the same names of modules do not.

    Entries that know all parameters of the attention come first.
    """
    entries: dict[Family, str] = {}
    for name, entry in FAMILIES.items():
        entries.setdefault(entry, name)
    fits, reasons = [], []
    for entry, name in [*entries.items(), *_VARIANTS]:
        family = entry if entry.fused or entry.key_value_pairs else replace(entry, value=f"{entry.value}|{entry.key}")
        family = replace(family, feed_forward=None)
        try:
            attention, _ = read_blocks(model, family)
            if reason := next(filter(None, map(_mismatch, attention)), ""):
                reasons.append(f"it looks like {name}, but {reason}")
            elif attention:
                fits.append(_fit(model, name, replace(family, feed_forward=entry.feed_forward), attention))
        except (InputError, AttributeError) as error:  # the latter: a projection without a weight
            reasons.append(f"it looks like {name}, but {error}")
    return sorted(fits, key=lambda fit: bool(fit.family.uncuttable)), [] if fits else reasons


def _fit(model: nn.Module, name: str, family: Family, attention: Sequence[AttentionLayer]) -> Fit:
    """Add to an entry the feed-forward names that the model has, and why its heads cannot be cut."""
    reason = next(filter(None, map(_why_uncuttable, attention)), "")
    family = replace(family, uncuttable=family.uncuttable or reason)
    for names in dict.fromkeys([family.feed_forward, *(entry.feed_forward for entry in FAMILIES.values())]):
        _, blocks = read_blocks(model, replace(family, feed_forward=names))
        if blocks and all(map(_has_channels, blocks)):
            return Fit(name, replace(family, feed_forward=names), attention, blocks)
    return Fit(name, replace(family, feed_forward=None), attention, ())


def _mismatch(layer: AttentionLayer) -> str:
    """Return which projection of a layer does not have the shape of its numbers of heads; empty if all have."""
    names = (layer.family.query, layer.family.key, layer.family.value)
    projections = [projection_in(layer.module, name) for name in names]
    for name, projection in zip(names, projections, strict=True):
        if projection is None:
            return f"{layer.name} has no {name.partition('|')[0]}"
    heads = f"{layer.heads} heads and {layer.kv_heads} key-value heads of width {layer.head_dim} in {layer.name}"
    if layer.kv_heads < 1 or layer.heads % layer.kv_heads:
        return f"there cannot be {heads}"
    if attribute_of(layer.module, "num_key_value_groups") not in (None, layer.group_size):
        return f"its num_key_value_groups is not that of {heads}"
    return "" if _has_shapes(layer, *filter(None, projections)) else f"its projections are not those of {heads}"


def _has_shapes(layer: AttentionLayer, query: nn.Module, key: nn.Module, value: nn.Module) -> bool:
    """Return whether projections have the rows of a layer's heads, and read inputs of the same width."""
    if layer.family.fused:
        return out_features(query) == (layer.heads + 2 * layer.kv_heads) * layer.head_dim
    if out_features(query) != layer.heads * layer.query_dim:
        return False
    if layer.family.key_value_pairs:
        return out_features(key) % layer.heads == 0 and out_features(key) > layer.heads * layer.head_dim
    same_inputs = len({in_features(module) for module in (query, key, value)}) == 1
    has_keys = out_features(key) == layer.kv_heads * layer.key_dim
    return same_inputs and has_keys and out_features(value) == layer.kv_heads * layer.head_dim


def _why_uncuttable(layer: AttentionLayer) -> str:
    """Return which parameter of an attention module has rows of several heads that surgery does not know."""
    family, module = layer.family, layer.module
    query, key, value = (projection_in(module, name) for name in (family.query, family.key, family.value))
    if key is value and not family.fused and not family.key_value_pairs:
        return "its keys are its values, too"
    projection_modules = {
        part
        for projection in (layer.o_proj, query, key, value)
        if projection is not None
        for part in projection.modules()
    }
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if owner not in projection_modules and not _is_cuttable(layer, name, parameter):
            return f"{name} of its attention is not known to surgery"
    return ""


def _is_cuttable(layer: AttentionLayer, name: str, parameter: nn.Parameter) -> bool:
    """Return whether surgery knows a parameter outside the projections, or can keep it whole."""
    family, path = layer.family, name.rpartition(".")[0]
    is_latent = family.key_value_pairs and path.split(".")[0] in _LATENT
    is_after_projection = path.startswith(f"{family.output.rpartition('.')[0]}.")
    is_head_norm = path != "" and parameter.shape in ((layer.head_dim,), (layer.query_dim,))
    is_scalar = parameter.numel() <= 1
    is_named = name in dict(family.head_parameters)
    return is_latent or is_after_projection or is_head_norm or is_scalar or is_named


def _has_channels(block: FeedForward) -> bool:
    """Return whether the projections of a block have a row and a column for each channel, and nothing else has."""
    parts = [*block.parts.values(), block.down]
    rows = block.channels * (2 if block.gate is block.up else 1)
    if any(out_features(part) != rows for part in parts[:-1]):
        return False
    projection_modules = {module for part in parts for module in part.modules()}
    others = (module for module in block.module.modules() if module not in projection_modules) if block.name else ()
    return not any(x.shape[:1] == (block.channels,) for module in others for x in module.parameters(recurse=False))
