"""Choose the model class for the tensors of a cut model, and load them.

In this order: the model's own class with other numbers of layers, heads and channels in its configuration; Mistral's
class for a Llama whose width is no multiple of the number of heads; the model's own class with reshaped parameters and
absent modules (`lmeval_prune/checkpoints/modeling_pruned.py`), which fits any layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from lmeval_prune.architectures.blocks import Block, attribute_of, in_features, layers_in, read_blocks
from lmeval_prune.checkpoints.loading import PREFIX, has_pruned_layers, pruned_class, stock_class
from lmeval_prune.checkpoints.modeling_pruned import LAYER_NUMBERS
from lmeval_prune.errors import InputError
from lmeval_prune.surgery.kept import Kept, Outputs, is_inside

_CHANNELS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim")
_DEPTHS = {  # settings of the number of layers, by stack
    "": ("num_hidden_layers",),
    "encoder": ("encoder_layers", "num_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}


def models_with(tensors: dict[str, Tensor], kept: Kept) -> Iterator[tuple[Any, str]]:
    """Yield models with these tensors (by name) in the kept layers, best class first, and a note on the class."""
    for base in _bases(kept):
        named = {base.name(name): tensor for name, tensor in tensors.items()}
        shapes = {name: tuple(x.shape) for name, x in named.items()}
        for model_class, config, note in _stock_candidates(kept, base):
            built = _build(model_class, config)
            if built is not None and _shapes(built) == shapes and _has_kept_heads(built, kept):
                yield _load(model_class, config, kept, named, base), note
                break
        else:
            yield _pruned_model(named, shapes, kept, base)


def _build(model_class: Any, config: Any) -> Any:
    """Build a model on the meta device; return None if its class refuses the configuration."""
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except Exception:  # classes raise errors of any type
        return None


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


# --------------------------------------------------------------------------- layers that stay


@dataclass(frozen=True)
class Base:
    """A configuration of the stock class, whose shapes may still differ from those of the cut model."""

    config: Any
    built: Any  # the stock model, without weights
    absent: Mapping[str, Outputs]  # arguments of `Absent` by module name in the model that is cut
    renamed_layers: Mapping[str, str] = field(default_factory=dict)  # by their names in the model that is cut
    numbers: Mapping[str, dict[str, int]] = field(default_factory=dict)  # new layer numbers of attention modules

    def name(self, before: str) -> str:
        for layer, name in self.renamed_layers.items():
            if is_inside(f"{before}.", [layer]):
                return name + before.removeprefix(layer)
        return before

    def index(self, block: Block) -> int:
        renamed = (name for layer, name in self.renamed_layers.items() if is_inside(f"{block.name}.", [layer]))
        return next((int(name.rpartition(".")[2]) for name in renamed), block.index)


def _bases(kept: Kept) -> Iterator[Base]:
    """Yield configurations that may fit, the smallest model first."""
    model = kept.model_map.model
    stock, config = stock_class(model), copy.deepcopy(model.config)
    if has_pruned_layers(config):  # without the settings of earlier cuts
        del config.pruned_modules
        if getattr(config, "allow_global_per_layer_attribute_access", False):  # the earlier cut wrote sizes of layers
            config.per_layer_config = None
        for name in ("auto_map", "allow_global_per_layer_attribute_access"):  # an earlier cut wrote them
            config.__dict__.pop(name, None)
    built = _build(stock, config)
    if kept.layers and (smaller := _with_fewer_layers(kept, stock, config, built)):
        yield _with_cache_numbers(smaller, kept)
    yield _with_cache_numbers(Base(config, built, {**kept.absent, **kept.layers}), kept)


def _with_fewer_layers(kept: Kept, stock: type, config: Any, built: Any) -> Base | None:
    """Return a base without the layers that return their input; None if the class builds other layers then."""
    renamed: dict[str, str] = {}
    changes: dict[str, Any] = {}
    stacks: dict[str, list[tuple[str, int]]] = {}
    for layer in layers_in(built, kept.model_map.attention[0].family):
        stacks.setdefault(layer.stack, []).append((layer.name, layer.index))
    for stack, layers in stacks.items():
        staying = [(name, index) for name, index in layers if name not in kept.layers]
        renamed |= {name: f"{name.rpartition('.')[0]}.{number}" for number, (name, _) in enumerate(staying)}
        if len(staying) == len(layers):
            continue
        setting = next((name for name in _DEPTHS.get(stack, ()) if _has_setting(config, name)), None)
        if setting is None:
            return None
        changes[setting] = len(staying)
        if len(stacks) == 1:
            changes |= _settings_of_layers(config, len(layers), [index for _, index in staying])
    smaller = _changed_config(config, changes)
    smaller_built = None if smaller is None else _build(stock, smaller)
    if smaller_built is None or not _has_same_modules(built, smaller_built, renamed):
        return None
    return Base(smaller, smaller_built, kept.absent, renamed)


def _settings_of_layers(config: Any, depth: int, staying: list[int]) -> dict[str, Any]:
    """Return the settings of single layers for the layers that stay, in their new order."""
    values = config.to_dict()
    settings: dict[str, Any] = {
        name: [value[index] for index in staying]
        for name, value in values.items()
        if isinstance(value, list) and len(value) == depth and not name.endswith("token_id")
    }
    if values.get("per_layer_config"):
        layers = {int(index): changes for index, changes in values["per_layer_config"].items()}
        settings["per_layer_config"] = {n: layers[index] for n, index in enumerate(staying) if index in layers}
    if isinstance(values.get("mlp_only_layers"), list):  # numbers of layers
        settings["mlp_only_layers"] = [n for n, index in enumerate(staying) if index in values["mlp_only_layers"]]
    if isinstance(values.get("first_k_dense_replace"), int):
        settings["first_k_dense_replace"] = sum(index < values["first_k_dense_replace"] for index in staying)
    if "attention_types" in values and isinstance(values.get("attention_layers"), list):  # GPT-Neo derives them
        settings["attention_types"] = [[[values["attention_layers"][index]], 1] for index in staying]
    return settings


def _has_same_modules(built: Any, smaller: Any, renamed: Mapping[str, str]) -> bool:
    """Return whether the layers of a smaller model are those of the model under new names, but for their numbers."""
    modules, smaller_modules = dict(built.named_modules()), dict(smaller.named_modules())

    def facts(layer: nn.Module) -> dict[str, Any]:
        settings = {
            (name, key): value
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_") and key not in LAYER_NUMBERS
            if isinstance(value, str | int | float | tuple | None)
        }
        classes = {name: type(module).__qualname__ for name, module in layer.named_modules()}
        return {"classes": classes, "shapes": _shapes(layer), "settings": settings}

    return all(
        name in smaller_modules and facts(modules[before]) == facts(smaller_modules[name])
        for before, name in renamed.items()
    )


def _with_cache_numbers(base: Base, kept: Kept) -> Base:
    """Number the kept attention blocks so that they fill the cache in order.

    Masks and positions are computed from the first layer of the cache, and of each type: so the kept blocks of a type
    take the first numbers of that type, and the first layer gets a type that stays.
    """
    staying = {base.name(heads.layer.name) for heads in kept.heads}
    changed: dict[str, dict[str, int]] = {}
    config = copy.deepcopy(base.config)
    text = config.get_text_config()
    names = {module: name for name, module in base.built.named_modules()}
    holders: dict[str, dict[str, list[tuple[nn.Module, str]]]] = {}  # modules and attributes, by stack and layer
    for layer in read_blocks(base.built, kept.model_map.attention[0].family)[0]:
        pairs = [(module, attribute) for module in layer.module.modules() for attribute in LAYER_NUMBERS]
        if held := [pair for pair in pairs if isinstance(vars(pair[0]).get(pair[1]), int)]:
            holders.setdefault(layer.stack, {})[layer.name] = held
    for layers in holders.values():
        numbers = {name: int(getattr(*held[0])) for name, held in layers.items()}
        left = {name: number for name, number in numbers.items() if name in staying}
        if not left or len(left) == len(layers):
            continue
        types = list(getattr(text, "layer_types", None) or [""] * (1 + max(numbers.values())))
        has_first = 0 in numbers.values()  # of a hybrid, the first layer may have no attention
        if has_first and types[0] and types[0] not in {types[number] for number in left.values()}:
            types[0] = types[next(iter(left.values()))]
            text.layer_types = types
        free = sorted(numbers.values())
        for name, before in left.items():
            number = next(number for number in free if types[number] == types[before])
            free.remove(number)
            for module, attribute in layers[name]:
                if getattr(module, attribute) != number:
                    changed[names[module]] = {attribute: number}
    return replace(base, config=config, numbers=changed)


# --------------------------------------------------------------------------- configurations


def _has_setting(config: Any, name: str) -> bool:
    """Return whether a configuration has a setting, also by its usual name."""
    return name in config.to_dict() or name in (config.attribute_map or {})


def _changed_config(config: Any, changes: Mapping[str, Any]) -> Any:
    """Copy a configuration with other values; return None if its class refuses them."""
    changes = {config.attribute_map.get(name, name): value for name, value in changes.items()}
    for name in changes:  # transformers prints a page if what is computed from other settings is set
        derived = getattr(type(config), name, None)
        if isinstance(derived, property) and derived.fset is None:
            return None
    try:
        changed = type(config).from_dict(config.to_dict() | changes)
    except Exception:  # classes raise errors of any type
        return None
    copy_implementations(config, changed)
    changed._name_or_path = config._name_or_path
    return changed


def copy_implementations(source: Any, target: Any) -> None:
    for name in ("_attn_implementation", "_experts_implementation"):
        if getattr(source, name, None) is not None:
            setattr(target, name, getattr(source, name))


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


def _head_dim(kept: Kept) -> dict[str, int]:
    """Return the setting of the head width, but where `head_dim` is that of queries or keys alone."""
    layer = kept.heads[0].layer
    return {} if layer.family.width == "v_head_dim" else {"head_dim": layer.head_dim}


# --------------------------------------------------------------------------- stock classes


def _stock_candidates(kept: Kept, base: Base) -> Iterator[tuple[type, Any, str]]:
    """Yield transformers classes and configurations that may fit the kept layers, each with a note."""
    model, first = kept.model_map.model, kept.heads[0]
    config, stock = base.config, stock_class(model)
    if base.absent or kept.layers_differ():
        return
    changes: dict[str, Any] = {}
    if not all(heads.unchanged for heads in kept.heads) or has_pruned_layers(model.config):
        names = [name for name in ("num_key_value_heads", "num_kv_heads") if _has_setting(config, name)]
        changes |= {"num_attention_heads": len(first.heads), **dict.fromkeys(names, len(first.kv_heads))}
        changes |= _head_dim(kept)
    for block in kept.model_map.feed_forward:
        stack_name = f"{block.stack}_ffn_dim"
        settings = (stack_name,) if block.stack and _has_setting(config, stack_name) else _CHANNELS
        if block.label in kept.channels:
            changes |= {name: len(kept.channels[block.label]) for name in settings if _has_setting(config, name)}
    changed = _changed_config(config, changes)
    if changed is not None:
        yield stock, changed, unusual_head_dim(changed)
    mistral = getattr(transformers, stock.__name__.replace("Llama", "Mistral", 1), None)
    if mistral and config.model_type == "llama" and not getattr(config, "mlp_bias", False):
        known = transformers.MistralConfig().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
        values = {name: value for name, value in config.to_dict().items() if name in known}
        changed = _changed_config(transformers.MistralConfig(**{**values, "sliding_window": None}), changes)
        if changed is not None:
            changed._name_or_path = config._name_or_path
            yield mistral, changed, f"written as {mistral.__name__} with sliding_window null, which computes the same"


def _has_kept_heads(model: Any, kept: Kept) -> bool:
    """Return whether a model splits its layers into the kept heads and scales attention scores the same."""
    try:
        layers = read_blocks(model, kept.heads[0].layer.family)[0]
    except InputError:  # its width is no multiple of its heads
        return False
    actual = [(x.heads, x.kv_heads, x.head_dim, attribute_of(x.module, "scaling")) for x in layers]
    return actual == [
        (len(x.heads), len(x.kv_heads), x.layer.head_dim, attribute_of(x.layer.module, "scaling")) for x in kept.heads
    ]


# --------------------------------------------------------------------------- pruned classes


def _pruned_model(
    tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], kept: Kept, base: Base
) -> tuple[Any, str]:
    """Return a model of the model's own class with reshaped parameters and absent modules, and a note on its class."""
    model_type, before = kept.model_map.model_type, _shapes(base.built)
    stock, config = stock_class(kept.model_map.model), copy.deepcopy(base.config)

    def is_parameter(name: str) -> bool:
        path, _, parameter = name.rpartition(".")
        return parameter in base.built.get_submodule(path)._parameters

    names = {module: base.name(name) for name, module in kept.model_map.model.named_modules()}
    attributes: dict[str, dict[str, Any]] = {}  # of modules, where they differ from those of the stock model
    for heads in kept.heads:
        layer, count, kv_count = heads.layer, len(heads.heads), len(heads.kv_heads)
        width = count * layer.head_dim
        if in_features(base.built.get_submodule(names[layer.o_proj])) == width:
            continue
        counts = {  # by the attributes in which attention modules store them
            **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads"), count),
            **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_heads"), kv_count),
            "num_key_value_groups": count // kv_count,
            **dict.fromkeys(("all_head_size", "split_size"), width),
            "kv_dim": kv_count * layer.head_dim,
        }
        for module in layer.module.modules():
            values: dict[str, Any] = {n: x for n, x in counts.items() if isinstance(getattr(module, n, None), int)}
            if module is layer.module and model_type == "gpt_bigcode":  # splits the fused projection by it
                values["embed_dim"] = width
            if module is layer.module and model_type == "phi3":  # reads them in the forward pass
                values["config"] = {"num_attention_heads": count, "num_key_value_heads": kv_count}
            stock_module = base.built.get_submodule(names[module])
            if changed := {name: x for name, x in values.items() if getattr(stock_module, name) != x}:
                attributes[names[module]] = changed
    for name, layer_numbers in base.numbers.items():
        attributes.setdefault(name, {}).update(layer_numbers)
    config.pruned_modules = {
        "shapes": {n: [*x] for n, x in shapes.items() if before.get(n) != x and is_parameter(n)},
        "attributes": attributes,
        **({"absent": {base.name(name): [*x] for name, x in base.absent.items()}} if base.absent else {}),
    }
    config.architectures = [f"{PREFIX}{stock.__name__}"]
    _add_layer_configs(config, kept, base)
    differs = "layers differ" if kept.layers_differ() else f"{stock.__name__} does not fit"
    why = "blocks are absent" if base.absent else differs
    return _load(pruned_class(stock), config, kept, tensors, base), (
        f"{why}: loaded by lmeval_prune.load_pretrained, pruned-hf, or transformers with trust_remote_code=True"
    )


def _add_layer_configs(config: Any, kept: Kept, base: Base) -> None:
    """Add the layers' sizes under the keys that other engines read, if the family supports them."""
    is_supported = _has_setting(config, "num_key_value_heads") and hasattr(config, "per_layer_config")
    # heterogeneous: the family itself has layers with other settings
    if kept.model_map.stacks != ("",) or not is_supported or getattr(config, "is_heterogeneous", False):
        return
    layers = {
        base.index(heads.layer): {"num_attention_heads": len(heads.heads), "num_key_value_heads": len(heads.kv_heads)}
        for heads in kept.heads
    }
    if _has_setting(config, "intermediate_size"):
        for block in kept.model_map.feed_forward:
            if block.label in kept.channels:
                layers.setdefault(base.index(block), {})["intermediate_size"] = len(kept.channels[block.label])
    for name, value in _head_dim(kept).items():
        setattr(config, name, value)
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = layers


def _load(model_class: Any, config: Any, kept: Kept, tensors: dict[str, Tensor], base: Base) -> Any:
    """Build a model of tensors: those of the parent are copied, the others are its own, so that none is there twice."""
    config, model = copy.deepcopy(config), kept.model_map.model
    config._name_or_path = f"{getattr(model.config, '_name_or_path', '')}-pruned"
    implementation = model.config._attn_implementation
    with no_init_weights():  # random weights, which would be replaced, take minutes in a large model
        smaller: Any = model_class._from_config(config, dtype=model.dtype, attn_implementation=implementation)
    copy_implementations(model.config, smaller.config)
    shared = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    copies: dict[Any, Tensor] = {}  # a tied weight has several names; tensors without elements have no address
    state_dict = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() in shared:
            view = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if view not in copies:
                copies[view] = tensor.clone(memory_format=torch.contiguous_format)
            state_dict[name] = copies[view]
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
