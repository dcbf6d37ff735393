"""Choose the model class for the tensors of a cut model, and load them.

In this order: the model's own class with other numbers of layers, heads and channels in its configuration; Mistral's
class for a Llama whose width is no multiple of the number of heads; the model's own class with reshaped parameters and
absent modules (`lmeval_prune/checkpoints/modeling_pruned.py`), which fits any layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from lmeval_prune.architectures import AttentionLayer
from lmeval_prune.architectures.blocks import attribute_of, in_features
from lmeval_prune.architectures.layers import read_blocks
from lmeval_prune.checkpoints.loading import has_pruned_layers, pruned_class, stock_class
from lmeval_prune.errors import InputError
from lmeval_prune.surgery.bases import (
    Base,
    bases,
    build,
    changed_config,
    copy_implementations,
    has_setting,
    renamed_tensors,
)
from lmeval_prune.surgery.kept import Kept, KeptHeads

# Names of the attributes in which attention modules store their counts.
_COUNTS = {
    "heads": ("num_heads", "num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_heads"),
    "group_size": ("num_key_value_groups",),
    "width": ("all_head_size", "split_size"),
    "kv_width": ("kv_dim",),
}
_QUERY_WIDTH = {"gpt_bigcode": "embed_dim"}  # attribute that the forward pass reads to split the fused projection
_READ_FROM_CONFIG = {"phi3": ("num_attention_heads", "num_key_value_heads")}  # read in the forward pass
_CHANNELS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim")


def models_with(tensors: dict[str, Tensor], kept: Kept) -> Iterator[tuple[Any, str]]:
    """Yield models with these tensors (by name) in the kept layers, best class first, and a note on the class.

    The note may be empty.
    """
    for base in bases(kept):
        named = renamed_tensors(tensors, base)
        shapes = {name: tuple(x.shape) for name, x in named.items()}
        for model_class, config, note in _stock_candidates(kept, base):
            built = build(model_class, config)
            if built is not None and _shapes(built) == shapes and _has_same_layers(built, kept):
                yield _load(model_class, config, kept, named, base), note
                break
        else:
            yield _pruned_model(named, shapes, kept, base)


def _pruned_model(
    tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], kept: Kept, base: Base
) -> tuple[Any, str]:
    """Return a model of the model's own class with reshaped parameters and absent modules, and a note on its class."""
    stock, config, before = stock_class(kept.model_map.model), copy.deepcopy(base.config), _shapes(base.built)
    attributes = _changed_attributes(kept, base)
    for name, numbers in base.numbers.items():
        attributes.setdefault(name, {}).update(numbers)
    config.pruned_modules = {
        "shapes": {n: [*x] for n, x in shapes.items() if before.get(n) != x and _is_parameter(n, base.built)},
        "attributes": attributes,
        **({"absent": {name: [*arguments] for name, arguments in base.absent.items()}} if base.absent else {}),
    }
    config.architectures = [f"Pruned{stock.__name__}"]
    _add_layer_configs(config, kept, base)
    differs = "layers differ" if kept.layers_differ() else f"{stock.__name__} does not fit"
    why = "blocks are absent" if base.absent else differs
    return _load(pruned_class(stock), config, kept, tensors, base), (
        f"{why}: loaded by lmeval_prune.load_pretrained, pruned-hf, or transformers with trust_remote_code=True"
    )


def unusual_head_dim(config: Any) -> str:
    """Return a note if the family's configurations normally have no `head_dim`, else an empty text."""
    heads, hidden = getattr(config, "num_attention_heads", 0), getattr(config, "hidden_size", 0)
    width = config.to_dict().get("head_dim")
    if width is None or width * heads == hidden or "head_dim" in type(config)().to_dict():
        return ""
    return (
        f"head_dim is {width}, and {config.model_type} has no such setting of its own: transformers reads it; engines "
        f"that divide the width {hidden} by {heads} heads cannot load this (vLLM: --model-impl transformers)"
    )


def _stock_candidates(kept: Kept, base: Base) -> Iterator[tuple[type, Any, str]]:
    """Yield transformers classes and configurations that may fit the kept layers, each with a note."""
    model, first = kept.model_map.model, kept.heads[0]
    config, stock = base.config, stock_class(model)
    if base.absent or kept.layers_differ():
        return
    changes: dict[str, Any] = {}
    if not all(heads.unchanged for heads in kept.heads) or has_pruned_layers(model.config):
        changes |= _counts(config, len(first.heads), len(first.kv_heads), first.layer)
    for block in kept.model_map.feed_forward:
        if block.label not in kept.channels:
            continue
        stack_name = f"{block.stack}_ffn_dim"
        names = (stack_name,) if block.stack and has_setting(config, stack_name) else _CHANNELS
        changes |= {name: len(kept.channels[block.label]) for name in names if has_setting(config, name)}
    changed = changed_config(config, changes)
    if changed is not None:
        yield stock, changed, unusual_head_dim(changed)
    mistral = getattr(transformers, stock.__name__.replace("Llama", "Mistral", 1), None)
    if mistral and config.model_type == "llama" and not getattr(config, "mlp_bias", False):
        changed = changed_config(_mistral_config(config), changes)
        if changed is not None:
            changed._name_or_path = config._name_or_path
            yield (
                mistral,
                changed,
                f"written as {mistral.__name__} with sliding_window null, which computes the same",
            )


def _mistral_config(config: Any) -> Any:
    names = transformers.MistralConfig().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    values = {name: value for name, value in config.to_dict().items() if name in names}
    return transformers.MistralConfig(**{**values, "sliding_window": None})


def _counts(config: Any, heads: int, kv_heads: int, layer: AttentionLayer) -> dict[str, Any]:
    names = [name for name in ("num_key_value_heads", "num_kv_heads") if has_setting(config, name)]
    return {"num_attention_heads": heads, **_head_dim(layer), **dict.fromkeys(names, kv_heads)}


def _head_dim(layer: AttentionLayer) -> dict[str, int]:
    """Return the setting of the head width, which otherwise follows from the number of heads.

    Where values have a width of their own, `head_dim` is that of queries or keys and is not changed.
    """
    return {} if layer.family.width == "v_head_dim" else {"head_dim": layer.head_dim}


def _is_parameter(name: str, model: Any) -> bool:
    path, _, parameter = name.rpartition(".")
    return parameter in model.get_submodule(path)._parameters


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


def _has_same_layers(model: Any, kept: Kept) -> bool:
    """Return whether a model splits its layers into the kept heads and scales attention scores the same."""
    layers = _attention_of(model, kept)
    return len(layers) == len(kept.heads) and all(
        (layer.heads, layer.kv_heads, layer.head_dim) == (len(heads.heads), len(heads.kv_heads), heads.layer.head_dim)
        and attribute_of(layer.module, "scaling") == attribute_of(heads.layer.module, "scaling")
        for layer, heads in zip(layers, kept.heads, strict=True)
    )


def _attention_of(model: Any, kept: Kept) -> list[AttentionLayer]:
    """Return the attention layers of a model of the same family; none if its width is no multiple of its heads."""
    try:
        return read_blocks(model, kept.heads[0].layer.family)[0]
    except InputError:
        return []


def _changed_attributes(kept: Kept, base: Base) -> dict[str, dict[str, Any]]:
    """Return the count attributes of attention modules that differ from the stock model, by module name."""
    names = {module: base.name(name) for name, module in kept.model_map.model.named_modules()}
    stock_model = base.built
    attributes = {}
    for heads in kept.heads:
        width = len(heads.heads) * heads.layer.head_dim
        if in_features(stock_model.get_submodule(names[heads.layer.o_proj])) == width:
            continue
        for module in heads.layer.module.modules():
            stock_module = stock_model.get_submodule(names[module])
            counts = _module_counts(module, heads, kept.model_map.model_type)
            changed = {name: value for name, value in counts.items() if getattr(stock_module, name) != value}
            if changed:
                attributes[names[module]] = changed
    return attributes


def _module_counts(module: Any, kept: KeptHeads, model_type: str) -> dict[str, Any]:
    heads, kv_heads, layer = len(kept.heads), len(kept.kv_heads), kept.layer
    counts = {
        "heads": heads,
        "kv_heads": kv_heads,
        "group_size": kept.group_size,
        "width": heads * layer.head_dim,
        "kv_width": kv_heads * layer.head_dim,
    }
    values: dict[str, Any] = {
        name: counts[count]
        for count, names in _COUNTS.items()
        for name in names
        if isinstance(getattr(module, name, None), int)
    }
    if module is layer.module:
        if model_type in _QUERY_WIDTH:
            values[_QUERY_WIDTH[model_type]] = counts["width"]
        if model_type in _READ_FROM_CONFIG:
            values["config"] = dict(zip(_READ_FROM_CONFIG[model_type], (heads, kv_heads), strict=True))
    return values


def _add_layer_configs(config: Any, kept: Kept, base: Base) -> None:
    """Add the layers' sizes under the keys that other engines read, if the family supports them."""
    model_map = kept.model_map
    if (
        model_map.stacks != ("",)
        or not has_setting(config, "num_key_value_heads")
        or not hasattr(config, "per_layer_config")
    ):
        return
    if getattr(config, "is_heterogeneous", False):  # the family itself has layers with other settings
        return
    layers = {
        base.index(heads.layer): {"num_attention_heads": len(heads.heads), "num_key_value_heads": len(heads.kv_heads)}
        for heads in kept.heads
    }
    if has_setting(config, "intermediate_size"):
        for block in model_map.feed_forward:
            if block.label in kept.channels:
                layers.setdefault(base.index(block), {})["intermediate_size"] = len(kept.channels[block.label])
    for name, value in _head_dim(kept.heads[0].layer).items():
        setattr(config, name, value)
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = layers


def _load(model_class: Any, config: Any, kept: Kept, tensors: dict[str, Tensor], base: Base) -> Any:
    """Build a model of tensors in their own dtype; buffers and generation settings are those of the parent.

    Tensors that the parent has, too, are copied; the others become the model's own, so that no tensor is there twice.
    """
    config, model = copy.deepcopy(config), kept.model_map.model
    config._name_or_path = f"{getattr(model.config, '_name_or_path', '')}-pruned"
    implementation = model.config._attn_implementation
    with no_init_weights():  # random weights, which would be replaced, take minutes in a large model
        smaller: Any = model_class._from_config(config, dtype=model.dtype, attn_implementation=implementation)
    copy_implementations(model.config, smaller.config)
    shared = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    copies: dict[Any, Tensor] = {}  # a tied weight has several names; tensors without elements have no address

    def own_tensor(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in shared:
            return tensor
        view = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if view not in copies:
            copies[view] = tensor.clone(memory_format=torch.contiguous_format)
        return copies[view]

    state_dict = {name: own_tensor(tensor) for name, tensor in tensors.items()}
    smaller.load_state_dict(state_dict, strict=True, assign=True)
    smaller = smaller.to(next(iter(tensors.values())).device)
    constants = {base.name(name): buffer for name, buffer in model.named_buffers()}
    for name, buffer in smaller.named_buffers():  # the model may have computed them in another dtype
        if name not in tensors and name in constants and constants[name].shape == buffer.shape:
            buffer.data = constants[name].detach().clone()
    smaller.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        smaller.generation_config = copy.deepcopy(model.generation_config)
    return smaller.eval()
