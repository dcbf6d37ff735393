"""Finds the class that builds parameters of the shapes that a cut leaves, and fills it.

It is the model's own with other counts in its configuration; Mistral's for a Llama whose head count does not divide its
width; else the stock class with some parameters reshaped (`lmeval_prune/checkpoints/modeling_pruned.py`), which any
layers fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, map_model
from lmeval_prune.architectures.blocks import attribute_of, in_features
from lmeval_prune.checkpoints.loading import has_own_layers, pruned_class, stock_class
from lmeval_prune.errors import InputError
from lmeval_prune.surgery.kept import Kept, KeptHeads

# What modules call their counts; each is written where a module has an attribute of that name.
_COUNTS = {
    "heads": ("num_heads", "num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_heads"),
    "share": ("num_key_value_groups",),
    "width": ("all_head_size", "split_size"),
    "kv_width": ("kv_dim",),
}
_QUERY_WIDTH = {"gpt_bigcode": "embed_dim"}  # the fused projection is split by it
_READ_FROM_CONFIG = {"phi3": ("num_attention_heads", "num_key_value_heads")}  # in the forward pass
_CHANNELS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim")
_OWN_TO_A_CUT = ("auto_map", "allow_global_per_layer_attribute_access")


def model_with(tensors: dict[str, Tensor], kept: Kept) -> tuple[Any, str]:
    """Return a model with these tensors, and a note on its class.

    Args:
        tensors: of the smaller model, by name.
        kept: what stays of each layer.
    """
    model, shapes = kept.model_map.model, {name: tuple(x.shape) for name, x in tensors.items()}
    for kind, config, note in _stock_candidates(kept):
        built = _built(kind, config)
        if built is not None and _shapes(built) == shapes and _has_same_layers(built, kept):
            return _filled(kind, config, model, tensors), note
    stock, config = stock_class(model), _flat(model.config)
    why = "layers differ" if kept.layers_differ() else _why_not_stock(kept)
    like = _built(stock, config)
    if like is None:
        raise InputError(f"{stock.__name__} cannot be built from its own configuration, so that it cannot be cut")
    before = _shapes(like)
    config.pruned_modules = {
        "shapes": {n: [*shape] for n, shape in shapes.items() if before.get(n) != shape and _is_parameter(n, like)},
        "attributes": _attributes(kept, like),
    }
    config.architectures = [f"Pruned{stock.__name__}"]
    _add_layer_configs(config, kept)
    return _filled(pruned_class(stock), config, model, tensors), (
        f"{why}: loaded by lmeval_prune.load_pretrained, pruned-hf, or transformers with trust_remote_code=True"
    )


def unusual_head_dim(config: Any) -> str:
    """Return a note on a width of heads that the family's own configurations never give; else nothing."""
    heads, hidden = getattr(config, "num_attention_heads", 0), getattr(config, "hidden_size", 0)
    width = config.to_dict().get("head_dim")
    if width is None or width * heads == hidden or "head_dim" in type(config)().to_dict():
        return ""
    return (
        f"head_dim is {width}, and {config.model_type} has no such setting of its own: transformers reads it; engines "
        f"that divide the width {hidden} by {heads} heads cannot load this (vLLM: --model-impl transformers)"
    )


def _stock_candidates(kept: Kept) -> Iterator[tuple[type, Any, str]]:
    """Yield stock classes and configurations that may have such layers, each with a note."""
    model, first = kept.model_map.model, kept.heads[0]
    config, stock = _flat(model.config), stock_class(model)
    if kept.layers_differ():
        return
    changes: dict[str, Any] = {}
    if not all(heads.unchanged for heads in kept.heads) or has_own_layers(model.config):
        changes |= _counts(config, len(first.heads), len(first.kv_heads), first.layer)
    for block in kept.model_map.feed_forward:
        of_stack = f"{block.stack}_ffn_dim"
        names = (of_stack,) if block.stack and _has(config, of_stack) else _CHANNELS
        changes |= {name: len(kept.channels[block.label]) for name in names if _has(config, name)}
    changed = _changed(config, changes)
    if changed is not None:
        yield stock, changed, unusual_head_dim(changed)
    twin = getattr(transformers, stock.__name__.replace("Llama", "Mistral", 1), None)
    if twin and config.model_type == "llama" and not getattr(config, "mlp_bias", False):
        as_mistral = _changed(_as_mistral(config), changes)
        if as_mistral is not None:
            as_mistral._name_or_path = config._name_or_path
            yield (
                twin,
                as_mistral,
                f"Llama's class refuses {len(first.heads)} heads in a width of {config.hidden_size}: written as "
                f"{twin.__name__} with sliding_window null, the same mathematics",
            )


def _as_mistral(config: Any) -> Any:
    """Return the configuration of a Llama as that of a Mistral."""
    known = transformers.MistralConfig().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    values = {name: value for name, value in config.to_dict().items() if name in known}
    return transformers.MistralConfig(**{**values, "sliding_window": None})


def _why_not_stock(kept: Kept) -> str:
    """Return why no stock class has layers that are alike, and with how many heads one would."""
    stock, first, config = stock_class(kept.model_map.model), kept.heads[0], _flat(kept.model_map.model.config)
    heads, width, hidden = len(first.heads), first.layer.head_dim, getattr(config, "hidden_size", 0)

    def fits(count: int) -> bool:
        changed = _changed(config, _counts(config, count, count // first.share, first.layer))
        built = _built(stock, changed) if changed is not None else None
        return built is not None and map_model(built).attention[0].head_dim == width

    if fits(heads):
        return f"{stock.__name__} has no such biases"
    plain = next((n for n in range(heads - 1, 0, -1) if n % first.share == 0 and hidden % n == 0 and fits(n)), 0)
    fix = (
        f"with {plain} left in each layer, which divides {hidden}, it would be a plain one"
        if plain
        else "a plain one can lose channels only"
    )
    return f"{stock.__name__} cannot have {heads} heads of width {width} in a width of {hidden} ({fix})"


def _counts(config: Any, heads: int, kv_heads: int, layer: AttentionLayer) -> dict[str, Any]:
    """Return the settings that give each layer so many heads."""
    names = [name for name in ("num_key_value_heads", "num_kv_heads") if _has(config, name)]
    return {"num_attention_heads": heads, **_head_dim(layer), **dict.fromkeys(names, kv_heads)}


def _head_dim(layer: AttentionLayer) -> dict[str, int]:
    """Return the width of a head, which must be said where it no longer follows from the number of heads.

    With latent attention it never did, and the name means something else.
    """
    return {} if layer.family.key_value_pairs else {"head_dim": layer.head_dim}


def _is_parameter(name: str, like: Any) -> bool:
    """Return whether a tensor is a parameter, and no buffer."""
    path, _, parameter = name.rpartition(".")
    return parameter in like.get_submodule(path)._parameters


def _flat(config: Any) -> Any:
    """Return a configuration without what an earlier cut wrote into it."""
    config = copy.deepcopy(config)
    if has_own_layers(config):
        del config.pruned_modules
        for name in _OWN_TO_A_CUT:
            config.__dict__.pop(name, None)
        if getattr(config, "is_heterogeneous", False):
            config.per_layer_config = None
    return config


def _has(config: Any, name: str) -> bool:
    return name in config.to_dict() or name in (config.attribute_map or {})


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """Return a configuration with other values; None if its class refuses them."""
    values = config.to_dict() | {config.attribute_map.get(name, name): value for name, value in changes.items()}
    try:
        changed = type(config).from_dict(values)
    except Exception:  # each class has its own way of refusing
        return None
    _set_implementations(changed, config)
    changed._name_or_path = config._name_or_path
    return changed


def _set_implementations(config: Any, other: Any) -> None:
    for name in ("_attn_implementation", "_experts_implementation"):
        if getattr(other, name, None) is not None:
            setattr(config, name, getattr(other, name))


def _built(kind: Any, config: Any) -> Any:
    """Build a model without weights; None if its class refuses the configuration."""
    try:
        with torch.device("meta"):
            return kind(copy.deepcopy(config))
    except Exception:  # what the class refuses, it refuses in its own way
        return None


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


def _has_same_layers(model: Any, kept: Kept) -> bool:
    """Return whether a model reads its layers as these heads, and scales their scores alike."""
    layers = map_model(model).attention
    return len(layers) == len(kept.heads) and all(
        (layer.heads, layer.kv_heads, layer.head_dim) == (len(heads.heads), len(heads.kv_heads), heads.layer.head_dim)
        and attribute_of(layer.module, "scaling") == attribute_of(heads.layer.module, "scaling")
        for layer, heads in zip(layers, kept.heads, strict=True)
    )


def _attributes(kept: Kept, like: Any) -> dict[str, dict[str, Any]]:
    """Return the counts that attention modules are to hold, by name, where the stock model `like` has others."""
    names = {module: name for name, module in kept.model_map.model.named_modules()}
    attributes = {}
    for heads in kept.heads:
        width = len(heads.heads) * heads.layer.head_dim
        if in_features(like.get_submodule(names[heads.layer.o_proj])) == width:
            continue
        for module in heads.layer.module.modules():
            built = like.get_submodule(names[module])
            counts = _counts_in(module, heads, kept.model_map.model_type)
            changed = {name: value for name, value in counts.items() if getattr(built, name) != value}
            if changed:
                attributes[names[module]] = changed
    return attributes


def _counts_in(module: Any, kept: KeptHeads, model_type: str) -> dict[str, Any]:
    """Return the counts that a module of a layer holds, by the names that it has for them."""
    heads, kv_heads, layer = len(kept.heads), len(kept.kv_heads), kept.layer
    width, kv_width = heads * layer.head_dim, kv_heads * layer.head_dim
    counts = {"heads": heads, "kv_heads": kv_heads, "share": kept.share, "width": width, "kv_width": kv_width}
    names = {name: count for count, known in _COUNTS.items() for name in known}
    values: dict[str, Any] = {
        n: counts[count] for n, count in names.items() if isinstance(getattr(module, n, None), int)
    }
    if module is layer.module:
        if model_type in _QUERY_WIDTH:
            values[_QUERY_WIDTH[model_type]] = width
        if model_type in _READ_FROM_CONFIG:
            values["config"] = dict(zip(_READ_FROM_CONFIG[model_type], (heads, kv_heads), strict=True))
    return values


def _add_layer_configs(config: Any, kept: Kept) -> None:
    """Write the layers' sizes under the keys that other engines read, where the family has them."""
    model_map = kept.model_map
    if model_map.stacks != ("",) or not _has(config, "num_key_value_heads") or not hasattr(config, "per_layer_config"):
        return
    layers = {
        heads.layer.index: {"num_attention_heads": len(heads.heads), "num_key_value_heads": len(heads.kv_heads)}
        for heads in kept.heads
    }
    if _has(config, "intermediate_size"):
        for block in model_map.feed_forward:
            layers.setdefault(block.index, {})["intermediate_size"] = len(kept.channels[block.label])
    for name, value in _head_dim(kept.heads[0].layer).items():
        setattr(config, name, value)
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = layers


def _filled(kind: Any, config: Any, model: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a model of a class, with these tensors in their own type."""
    config = copy.deepcopy(config)
    config._name_or_path = f"{getattr(model.config, '_name_or_path', '')}-pruned"
    smaller: Any = kind._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    _set_implementations(smaller.config, model.config)
    smaller = smaller.to(next(iter(tensors.values())).device)
    for name, parameter in smaller.named_parameters():
        parameter.data = parameter.data.to(tensors[name].dtype)
    smaller.load_state_dict(tensors, strict=True)
    constants = dict(model.named_buffers())
    for name, buffer in smaller.named_buffers():  # as the model has them: they may have been computed in another type
        if name not in tensors and name in constants and constants[name].shape == buffer.shape:
            buffer.data = constants[name].detach().clone()
    smaller.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller.eval()
