"""Configurations of a model's own class for the layers that stay: with fewer layers, or with layers that do nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import AttentionLayer
from lmeval_prune.architectures.layers import layers_in, read_blocks
from lmeval_prune.checkpoints.loading import has_pruned_layers, stock_class
from lmeval_prune.checkpoints.modeling_pruned import LAYER_NUMBERS
from lmeval_prune.surgery.depth import Outputs, is_inside
from lmeval_prune.surgery.kept import Kept

_CUT_SETTINGS = ("auto_map", "allow_global_per_layer_attribute_access")  # settings that an earlier cut wrote
_DEPTHS = {  # settings of the number of layers, by stack
    "": ("num_hidden_layers",),
    "encoder": ("encoder_layers", "num_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}


@dataclass(frozen=True)
class Base:
    """A configuration of the stock class, whose shapes may still differ from those of the cut model.

    Attributes:
        config: the configuration.
        built: the stock model, without weights.
        absent: arguments of `Absent` by module name.
        renamed_layers: new names of layers by their names in the model that is cut; empty if names stay.
        numbers: new layer numbers of attention modules, as `attributes` of the cut configuration.
    """

    config: Any
    built: Any
    absent: Mapping[str, Outputs]
    renamed_layers: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, dict[str, int]] = field(default_factory=dict)

    def name(self, before: str) -> str:
        """Return the new name of a module or tensor."""
        for layer, name in self.renamed_layers.items():
            if before == layer or before.startswith(f"{layer}."):
                return name + before.removeprefix(layer)
        return before

    def index(self, layer: AttentionLayer | Any) -> int:
        """Return the new number of the layer that holds a block."""
        layers = self.renamed_layers.items()
        holders = [name for before, name in layers if layer.name == before or is_inside(layer.name, [before])]
        return int(holders[0].rpartition(".")[2]) if holders else int(layer.index)


def bases(kept: Kept) -> Iterator[Base]:
    """Yield configurations that may fit, the smallest model first."""
    model, depth = kept.model_map.model, kept.depth
    stock, config = stock_class(model), uncut_config(model.config)
    with torch.device("meta"):
        built = stock(copy.deepcopy(config))
    if depth.layers and (smaller := _with_fewer_layers(kept, stock, config, built)):
        yield _with_cache_numbers(smaller, kept)
    yield _with_cache_numbers(Base(config, built, {**depth.absent, **depth.layers}), kept)


def build(model_class: Any, config: Any) -> Any:
    """Build a model on the meta device; return None if its class refuses the configuration."""
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except Exception:  # classes raise errors of any type
        return None


def uncut_config(config: Any) -> Any:
    """Copy a configuration without the settings of earlier cuts."""
    config = copy.deepcopy(config)
    if has_pruned_layers(config):
        del config.pruned_modules
        if getattr(config, "allow_global_per_layer_attribute_access", False):  # the earlier cut wrote sizes of layers
            config.per_layer_config = None
        for name in _CUT_SETTINGS:
            config.__dict__.pop(name, None)
    return config


def has_setting(config: Any, name: str) -> bool:
    """Return whether a configuration has a setting, also by its usual name."""
    return name in config.to_dict() or name in (config.attribute_map or {})


def changed_config(config: Any, changes: Mapping[str, Any]) -> Any:
    """Copy a configuration with other values; return None if its class refuses them."""
    changes = {config.attribute_map.get(name, name): value for name, value in changes.items()}
    if any(_is_derived(config, name) for name in changes):
        return None
    values = config.to_dict() | changes
    try:
        changed = type(config).from_dict(values)
    except Exception:  # classes raise errors of any type
        return None
    copy_implementations(config, changed)
    changed._name_or_path = config._name_or_path
    return changed


def _is_derived(config: Any, name: str) -> bool:
    """Return whether a configuration computes a setting from others; transformers prints a page if it is set."""
    attribute = getattr(type(config), name, None)
    return isinstance(attribute, property) and attribute.fset is None


def copy_implementations(source: Any, target: Any) -> None:
    """Copy the attention and experts implementation between configurations."""
    for name in ("_attn_implementation", "_experts_implementation"):
        if getattr(source, name, None) is not None:
            setattr(target, name, getattr(source, name))


# --------------------------------------------------------------------------- fewer layers


def _with_fewer_layers(kept: Kept, stock: type, config: Any, built: Any) -> Base | None:
    """Return a base without the layers that return their input; None if the class builds other layers then."""
    renamed: dict[str, str] = {}
    changes: dict[str, Any] = {}
    stacks: dict[str, list[tuple[str, int]]] = {}
    for layer in layers_in(built, kept.model_map.attention[0].family):
        stacks.setdefault(layer.stack, []).append((layer.name, layer.index))
    for stack, layers in stacks.items():
        staying = [(name, index) for name, index in layers if name not in kept.depth.layers]
        renamed |= {name: f"{name.rpartition('.')[0]}.{number}" for number, (name, _) in enumerate(staying)}
        if len(staying) == len(layers):
            continue
        setting = next((name for name in _DEPTHS.get(stack, ()) if has_setting(config, name)), None)
        if setting is None:
            return None
        changes[setting] = len(staying)
        if len(stacks) == 1:
            changes |= settings_of_layers(config, len(layers), [index for _, index in staying])
    smaller = changed_config(config, changes)
    smaller_built = None if smaller is None else build(stock, smaller)
    if smaller_built is None or not _has_same_modules(built, smaller_built, renamed):
        return None
    base = Base(smaller, smaller_built, {}, renamed)
    return Base(
        smaller, smaller_built, {base.name(name): arguments for name, arguments in kept.depth.absent.items()}, renamed
    )


def settings_of_layers(config: Any, depth: int, staying: list[int]) -> dict[str, Any]:
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
        return {
            name: (
                type(module).__qualname__,
                {key: tuple(x.shape) for key, x in module.named_parameters(recurse=False)},
                {
                    key: value
                    for key, value in vars(module).items()
                    if not key.startswith("_") and key not in LAYER_NUMBERS and _is_plain(value)
                },
            )
            for name, module in layer.named_modules()
        }

    if any(name not in smaller_modules for name in renamed.values()):
        return False
    return all(facts(modules[before]) == facts(smaller_modules[name]) for before, name in renamed.items())


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | tuple)


# --------------------------------------------------------------------------- the cache


def _with_cache_numbers(base: Base, kept: Kept) -> Base:
    """Number the kept attention blocks so that they fill the cache in order.

    Masks and positions are computed from the first layer of the cache, and from the first of each type. So the kept
    blocks of a type take the first numbers of that type, and the first layer gets a type that stays.
    """
    staying = {base.name(heads.layer.name) for heads in kept.heads}
    numbers: dict[str, dict[str, int]] = {}
    config = copy.deepcopy(base.config)
    text = config.get_text_config()
    attention = read_blocks(base.built, kept.model_map.attention[0].family)[0]
    names = {module: name for name, module in base.built.named_modules()}
    for stack in dict.fromkeys(layer.stack for layer in attention):
        layers = [layer for layer in attention if layer.stack == stack and _layer_numbers(layer)]
        staying_layers = [layer for layer in layers if layer.name in staying]
        if not staying_layers or len(staying_layers) == len(layers):
            continue
        types = list(getattr(text, "layer_types", None) or [""] * (1 + max(map(_number, layers))))
        has_first = 0 in map(_number, layers)  # of a hybrid, the first layer may have no attention
        if has_first and types[0] and types[0] not in {types[_number(layer)] for layer in staying_layers}:
            types[0] = types[_number(staying_layers[0])]
            text.layer_types = types
        free = sorted(map(_number, layers))
        for layer in staying_layers:
            number = next(number for number in free if types[number] == types[_number(layer)])
            free.remove(number)
            for module, attribute in _layer_numbers(layer).items():
                if getattr(module, attribute) != number:
                    numbers[names[module]] = {attribute: number}
    return Base(config, base.built, base.absent, base.renamed_layers, numbers)


def _number(layer: AttentionLayer) -> int:
    module, attribute = next(iter(_layer_numbers(layer).items()))
    return int(getattr(module, attribute))


def _layer_numbers(layer: AttentionLayer) -> dict[nn.Module, str]:
    """Return the modules of an attention block that keep their layer's number, and the attributes that hold it."""
    return {
        module: attribute
        for module in layer.module.modules()
        for attribute in LAYER_NUMBERS
        if isinstance(vars(module).get(attribute), int)
    }


def renamed_tensors(tensors: Mapping[str, Tensor], base: Base) -> dict[str, Tensor]:
    """Return tensors under the names that they have in a base."""
    return {base.name(name): tensor for name, tensor in tensors.items()}
