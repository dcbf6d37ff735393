"""Cuts what a plan removes out of a model's weights, and finds the class that can run what is left.

What is left is computed by name and tensor: rows of the projections that compute a head or a channel, columns of the
one that reads it. Then a class is looked for that builds parameters of just these shapes: the model's own with other
counts in its configuration; Mistral's for a Llama whose head count does not divide its width; else the stock class
with some parameters reshaped (`lmeval_prune/checkpoints/modeling_pruned.py`), which any layers fit.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lmeval_prune.architectures import (
    AttentionLayer,
    ModelMap,
    adapters_of,
    loadable_fingerprints,
    map_model,
    uncuttable,
)
from lmeval_prune.architectures.blocks import attribute_of, in_features, is_transposed
from lmeval_prune.checkpoints.loading import has_own_layers, pruned_class, stock_class
from lmeval_prune.checkpoints.pruned import manifest_of, save_checkpoint
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.plan import Plan, plan_of, projection_named
from lmeval_prune.surgery.kept import KeptHeads, channel_rows

# What modules call their counts; each is written where a module has an attribute of that name.
_COUNTS = {
    "heads": ("num_heads", "num_attention_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_heads"),
    "share": ("num_key_value_groups",),
    "width": ("all_head_size", "split_size"),
    "kv_width": ("kv_dim",),
}
_WIDTH_OF_QUERIES = {"gpt_bigcode": "embed_dim"}  # whose fused projection is split by it
_READ_FROM_CONFIG = {"phi3": ("num_attention_heads", "num_key_value_heads")}  # in the forward pass
_STAGES = "_lmeval_prune_stages"  # what a model remembers of its cuts until it is written
_SEEN = "_lmeval_prune_seen"  # and of the questions that it was trained on
_CHANNELS = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim")


@dataclass(frozen=True)
class Cut:
    """What became of a model.

    Attributes:
        model: the smaller model, in evaluation mode.
        manifest: what its checkpoint says of it.
        plan: what was executed.
        parent: the model that it was cut from.
    """

    model: Any
    manifest: dict[str, Any]
    plan: Plan
    parent: ModelMap = field(repr=False)

    def save(self, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write it as a checkpoint; see `save_checkpoint`."""
        save_checkpoint(
            folder,
            self.model,
            self.manifest,
            tokenizer,
            lambda half: self.plan.save(half / "plan.json", self.parent),
            [getattr(self.parent.model.config, "_name_or_path", "")],
        )


def cut_to(
    folder: str | os.PathLike[str],
    model: Any,
    plan: Plan | HeadMask,
    tokenizer: Any = None,
    keep_shapes: bool = False,
) -> Cut:
    """Execute a plan and write the checkpoint.

    Raises:
        InputError: as of `cut` and of `save_checkpoint`.
    """
    found = cut(model, plan, keep_shapes)
    found.save(folder, tokenizer)
    return found


def cut(model: Any, plan: Plan | HeadMask, keep_shapes: bool = False) -> Cut:
    """Execute a plan: a new model without what the plan removes. The old one stays as it is.

    Args:
        model: a transformers model of a known family, stock or cut before.
        plan: made for it; a head mask is one.
        keep_shapes: leave what the plan removes in the model, with zero weights: for engines that read no other shapes.

    Raises:
        InputError: the plan does not fit the model, or such a model cannot be cut.
    """
    model_map = map_model(model)
    plan = plan_of(plan) if isinstance(plan, HeadMask) else plan
    check_cuttable(model_map, bool(plan.heads) and not keep_shapes)
    plan = plan.fit_to(model_map)
    pruned = {(layer.stack, layer.index): numbers for layer, numbers in plan.heads_by_layer(model_map)}
    stays = KeptHeads.zeroed if keep_shapes else KeptHeads.of
    kept = [stays(layer, pruned.get((layer.stack, layer.index), ())) for layer in model_map.attention]
    lost = {block.label: set(numbers) for block, numbers in plan.channels_by_layer(model_map)}
    channels = {
        block.label: [c for c in range(block.channels) if keep_shapes or c not in lost.get(block.label, ())] or [0]
        for block in model_map.feed_forward
    }
    surgeon = _Surgeon(model_map, plan)
    tensors = surgeon.tensors(kept, channels, lost)
    with torch.random.fork_rng(devices=[]):  # classes are built with weights that are drawn, and then replaced
        smaller, note = _dressed(model_map, tensors, kept, channels)
    fillers = {one.layer.label: list(one.fillers) for one in kept if one.fillers}
    notes = [note] if note else []
    count = sum(map(len, fillers.values()))
    if keep_shapes:
        zeroed = f"{count} heads and {sum(map(len, lost.values()))} channels"
        notes.append(f"{zeroed} stay with zero weights: nothing is removed")
    elif fillers:
        notes.append(f"{count} pruned heads stay as zeroed fillers, so that groups are equal: they are not removed")
    removed = {
        "heads": sum(one.layer.heads - len(one.heads) for one in kept),
        "heads_total": model_map.total_heads,
        "kv_heads": sum(one.layer.kv_heads - len(one.kv_heads) for one in kept),
        "channels": sum(block.channels - len(channels[block.label]) for block in model_map.feed_forward),
        "fillers": fillers,
    }
    stage = {
        "parent": identity_of(model_map),
        "plan": {**plan.settings(), "made": dict(plan.made)},
        "removed": removed,
        "kept_heads": {one.layer.label: list(one.heads) for one in kept},
        "notes": notes,
    }
    before = getattr(model, _STAGES, None) or (manifest_of(model) or {}).get("stages", [])
    setattr(smaller, _STAGES, [*before, stage])
    setattr(smaller, _SEEN, seen_by(model))
    own_map = map_model(smaller)
    manifest = {
        "parent": stage["parent"],
        "class": type(smaller).__name__,
        "weights": loadable_fingerprints(smaller, own_map.weights),
        "removed": removed,
        "notes": notes,
        "about_class": note,
        "scores": {
            name: [round(float(x.mean()), 6) for x in one] for name, one in plan.scores.items() if "heads." in name
        },
        "stages": getattr(smaller, _STAGES),
        **getattr(smaller, _SEEN),
    }
    return Cut(smaller, manifest, plan, model_map)


def seen_by(model: Any) -> dict[str, list[str]]:
    """Questions that a model was trained on, as its manifest has them: a cut makes none of them unseen."""
    known: dict[str, list[str]] | None = getattr(model, _SEEN, None)
    if known is None:
        manifest = manifest_of(model) or {}
        known = {name: manifest[name] for name in ("trained_on", "validated_on") if name in manifest}
    return known


def is_quantised(model: Any) -> bool:
    """Whether a model's weights are, or would be when loaded, no plain numbers."""
    return bool(getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None))


def check_cuttable(model_map: ModelMap, heads: bool) -> None:
    """Refuse a model that cannot be cut, by name; on a model without weights, too.

    Args:
        model_map: of the model.
        heads: whether heads are to go.

    Raises:
        InputError: saying why.
    """
    reason = uncuttable(model_map)
    if heads and reason:
        raise InputError(
            f"heads cannot be cut out of this {model_map.model_type} model: {reason}; evaluate the plan by plan=FILE, "
            f"or remove channels only"
        )
    if getattr(model_map.model, "is_quantized", False):
        raise InputError("a quantised model cannot be cut; load it in float32 or bfloat16")
    if adapters_of(model_map.model) or hasattr(model_map.model, "peft_config"):
        raise InputError("a model with adapters cannot be cut; merge them first (merge_and_unload)")


def identity_of(model_map: ModelMap) -> dict[str, Any]:
    """What a manifest says of the model that a checkpoint was made from."""
    weights = loadable_fingerprints(model_map.model, model_map.weights)
    return {
        "name": model_map.name,
        "revision": model_map.revision,
        "weights": weights,
        **model_map.signature(),
        "channels": model_map.channels(),
    }


class _Surgeon:
    """Takes rows and columns out of the tensors of a model."""

    def __init__(self, model_map: ModelMap, plan: Plan) -> None:
        self.names = {module: name for name, module in model_map.model.named_modules()}
        self.found: dict[str, Tensor] = {name: x.detach() for name, x in model_map.model.state_dict().items()}
        self.model_map = model_map
        for name in sorted(plan.compensation):
            self._compensate(name, plan.compensation[name])

    def tensors(
        self, kept: Sequence[KeptHeads], channels: dict[str, list[int]], lost: dict[str, set[int]]
    ) -> dict[str, Tensor]:
        """All tensors of the model, those of the smaller one where they differ."""
        for one in kept:
            layer = one.layer
            if not one.unchanged:
                for module, rows in one.rows().items():
                    self._rows(module, rows)
                for path, which in layer.family.head_parameters:
                    numbers = one.heads if which == "q" else one.kv_heads
                    self._entries(f"{self.names[layer.module]}.{path}", numbers)
                self._columns(layer.o_proj, one.columns())
            if one.fillers:
                self._zero_columns(layer.o_proj, one.filler_columns())
        for block in self.model_map.feed_forward:
            staying = channels[block.label]
            if len(staying) < block.channels:
                for module, rows in channel_rows(block, staying).items():
                    self._rows(module, rows)
                self._columns(block.down, staying)
            left = [place for place, channel in enumerate(staying) if channel in lost.get(block.label, ())]
            if left:  # all went, and one stays, or shapes are kept: it adds nothing
                self._zero_columns(block.down, left)
        return self.found

    def _take(self, name: str, numbers: Sequence[int], axis: int) -> None:
        tensor = self.found[name]
        self.found[name] = tensor.index_select(axis, torch.tensor(numbers, device=tensor.device))

    def _rows(self, module: nn.Module, numbers: Sequence[int]) -> None:
        name = self.names[module]
        self._take(f"{name}.weight", numbers, int(is_transposed(module)))
        if f"{name}.bias" in self.found:
            self._take(f"{name}.bias", numbers, 0)

    def _columns(self, module: nn.Module, numbers: Sequence[int]) -> None:
        self._take(f"{self.names[module]}.weight", numbers, int(not is_transposed(module)))

    def _zero_columns(self, module: nn.Module, numbers: Sequence[int]) -> None:
        name = f"{self.names[module]}.weight"
        index = torch.tensor(numbers, device=self.found[name].device)
        self.found[name] = self.found[name].index_fill(int(not is_transposed(module)), index, 0)

    def _entries(self, name: str, numbers: Sequence[int]) -> None:
        if name in self.found:
            self._take(name, numbers, 0)

    def _compensate(self, name: str, tensor: Tensor) -> None:
        module = projection_named(name, self.model_map)
        own = f"{self.names[module]}.{name.rpartition('.')[2]}"
        like = self.found[f"{self.names[module]}.weight"]
        tensor = tensor.to(like)
        if name.endswith(".weight"):
            self.found[own] = tensor.T.contiguous() if is_transposed(module) else tensor
        else:
            self.found[own] = self.found[own] + tensor if own in self.found else tensor


def _dressed(
    model_map: ModelMap, tensors: dict[str, Tensor], kept: Sequence[KeptHeads], channels: dict[str, list[int]]
) -> tuple[Any, str]:
    """A model with these tensors, and what is to be said of its class."""
    model = model_map.model
    stock = stock_class(model)
    for kind, config, note in _stock_candidates(model_map, kept, channels):
        built = _built(kind, config, "meta")
        if built is not None and _same_shapes(built, tensors) and _same_layers(map_model(built), kept):
            return _filled(kind, config, model, tensors), note
    why = "layers differ" if _layers_differ(model_map, kept, channels) else _why_not_stock(model_map, kept)
    config = _flat(model.config)
    like = _built(stock, config, "meta")
    if like is None:
        raise InputError(f"{stock.__name__} cannot be built from its own configuration, so that it cannot be cut")
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    own = {name: tuple(x.shape) for name, x in like.state_dict().items()}
    config.pruned_modules = {
        "shapes": {
            name: shape for name, shape in shapes.items() if own.get(name) != tuple(shape) and _is_own(name, like)
        },
        "attributes": _attributes(model_map, kept, like),
    }
    config.architectures = [f"Pruned{stock.__name__}"]
    _add_layer_configs(config, model_map, kept, channels)
    return _filled(pruned_class(stock), config, model, tensors), (
        f"{why}: loaded by lmeval_prune.load_pretrained, pruned-hf, or transformers with trust_remote_code=True"
    )


def _layers_differ(model_map: ModelMap, kept: Sequence[KeptHeads], channels: dict[str, list[int]]) -> bool:
    """Return whether some layers keep other numbers of heads or channels than others of the model or of their stack."""
    widths = {(block.stack, len(channels[block.label])) for block in model_map.feed_forward}
    stacks = {block.stack for block in model_map.feed_forward}
    return len({(len(one.heads), len(one.kv_heads)) for one in kept}) > 1 or len(widths) > len(stacks)


def _why_not_stock(model_map: ModelMap, kept: Sequence[KeptHeads]) -> str:
    """Return why no stock class has layers that are alike, and with how many heads one would."""
    stock, heads, width = stock_class(model_map.model), len(kept[0].heads), kept[0].layer.head_dim
    share = heads // len(kept[0].kv_heads)
    own = _flat(model_map.model.config)
    hidden = getattr(own, "hidden_size", 0)

    def fits(count: int) -> bool:
        config = _changed(own, _counts(own, count, count // share, kept[0].layer))
        built = _built(stock, config, "meta") if config is not None else None
        return built is not None and map_model(built).attention[0].head_dim == width

    if fits(heads):
        return f"{stock.__name__} has no such biases"
    plain = next((n for n in range(heads - 1, 0, -1) if n % share == 0 and hidden % n == 0 and fits(n)), 0)
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


def _is_own(name: str, like: Any) -> bool:
    """Whether a tensor is a parameter, and no second name of a tied one."""
    path, _, parameter = name.rpartition(".")
    return parameter in like.get_submodule(path)._parameters


def _flat(config: Any) -> Any:
    """A configuration without what an earlier cut wrote into it."""
    found = copy.deepcopy(config)
    if has_own_layers(found):
        del found.pruned_modules
        for name in ("auto_map", "allow_global_per_layer_attribute_access"):
            found.__dict__.pop(name, None)
        if getattr(found, "is_heterogeneous", False):
            found.per_layer_config = None
    return found


def _stock_candidates(
    model_map: ModelMap, kept: Sequence[KeptHeads], channels: dict[str, list[int]]
) -> Iterator[tuple[type, Any, str]]:
    """Stock classes and configurations that may have such layers, and what is to be said of them."""
    model = model_map.model
    config = _flat(model.config)
    if _layers_differ(model_map, kept, channels):
        return
    changes: dict[str, Any] = {}
    if not all(one.unchanged for one in kept) or has_own_layers(model.config):
        changes |= _counts(config, len(kept[0].heads), len(kept[0].kv_heads), kept[0].layer)
    for block in model_map.feed_forward:
        own_name = f"{block.stack}_ffn_dim"
        names = (own_name,) if block.stack and _has(config, own_name) else _CHANNELS
        changes |= {name: len(channels[block.label]) for name in names if _has(config, name)}
    stock = stock_class(model)
    own = _changed(config, changes)
    if own is not None:
        yield stock, own, unusual_head_dim(own)
    twin = getattr(transformers, stock.__name__.replace("Llama", "Mistral", 1), None)
    if twin and config.model_type == "llama" and not getattr(config, "mlp_bias", False):
        from transformers import MistralConfig

        values = {name: value for name, value in config.to_dict().items() if name in MistralConfig().to_dict()}
        for name in ("model_type", "architectures", "transformers_version"):
            values.pop(name, None)
        as_mistral = _changed(MistralConfig(**{**values, "sliding_window": None}), changes)
        if as_mistral is not None:
            as_mistral._name_or_path = config._name_or_path
            note = (
                f"Llama's class refuses {len(kept[0].heads)} heads in a width of {config.hidden_size}: written as "
                f"{twin.__name__} with sliding_window null, the same mathematics"
            )
            yield twin, as_mistral, note


def _head_dim(layer: AttentionLayer) -> dict[str, int]:
    """The width of a head, which must be said where it no longer follows from the number of heads.

    With latent attention it never did, and the name means something else.
    """
    return {} if layer.family.key_value_pairs else {"head_dim": layer.head_dim}


def unusual_head_dim(config: Any) -> str:
    """What is to be said of a width of heads that the family's own configurations never give; else nothing."""
    heads, hidden = getattr(config, "num_attention_heads", 0), getattr(config, "hidden_size", 0)
    width = config.to_dict().get("head_dim")
    if width is None or width * heads == hidden or "head_dim" in type(config)().to_dict():
        return ""
    return (
        f"head_dim is {width}, and {config.model_type} has no such setting of its own: transformers reads it; engines "
        f"that divide the width {hidden} by {heads} heads cannot load this (vLLM: --model-impl transformers)"
    )


def _has(config: Any, name: str) -> bool:
    return name in config.to_dict() or name in (config.attribute_map or {})


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """A configuration with other values; None if its class refuses them."""
    values = config.to_dict()
    for name, value in changes.items():
        values[config.attribute_map.get(name, name)] = value
    try:
        found = type(config).from_dict(values)
    except Exception:  # each class has its own way of refusing
        return None
    _same_implementations(found, config)
    found._name_or_path = config._name_or_path
    return found


def _same_implementations(config: Any, other: Any) -> None:
    for name in ("_attn_implementation", "_experts_implementation"):
        if getattr(other, name, None) is not None:
            setattr(config, name, getattr(other, name))


def _built(kind: Any, config: Any, device: str) -> Any:
    try:
        with torch.device(device):
            return kind(copy.deepcopy(config))
    except Exception:  # what the class refuses, it refuses in its own way
        return None


def _same_shapes(built: Any, tensors: dict[str, Tensor]) -> bool:
    found = {name: tuple(x.shape) for name, x in built.state_dict().items()}
    return found == {name: tuple(x.shape) for name, x in tensors.items()}


def _same_layers(built: ModelMap, kept: Sequence[KeptHeads]) -> bool:
    """Whether a model reads its layers as these heads, and scales their scores alike."""
    return len(built.attention) == len(kept) and all(
        (layer.heads, layer.kv_heads, layer.head_dim) == (len(one.heads), len(one.kv_heads), one.layer.head_dim)
        and attribute_of(layer.module, "scaling") == attribute_of(one.layer.module, "scaling")
        for layer, one in zip(built.attention, kept, strict=True)
    )


def _attributes(model_map: ModelMap, kept: Sequence[KeptHeads], like: Any) -> dict[str, dict[str, Any]]:
    """Of attention modules, the counts that they are to hold, where the stock model `like` has others."""
    names = {module: name for name, module in model_map.model.named_modules()}
    found: dict[str, dict[str, Any]] = {}
    for one in kept:
        layer = one.layer
        built_output = in_features(like.get_submodule(names[layer.o_proj]))
        if built_output == len(one.heads) * layer.head_dim:
            continue
        counts = {
            "heads": len(one.heads),
            "kv_heads": len(one.kv_heads),
            "share": len(one.heads) // len(one.kv_heads),
            "width": len(one.heads) * layer.head_dim,
            "kv_width": len(one.kv_heads) * layer.head_dim,
        }
        for module in layer.module.modules():
            own: dict[str, Any] = {
                name: counts[count]
                for count, known in _COUNTS.items()
                for name in known
                if isinstance(getattr(module, name, None), int)
            }
            if module is layer.module and (name := _WIDTH_OF_QUERIES.get(model_map.model_type)):
                own[name] = counts["width"]
            if module is layer.module and (read := _READ_FROM_CONFIG.get(model_map.model_type)):
                own["config"] = dict(zip(read, (counts["heads"], counts["kv_heads"]), strict=True))
            built = like.get_submodule(names[module])
            own = {name: value for name, value in own.items() if getattr(built, name) != value}
            if own:
                found[names[module]] = own
    return found


def _add_layer_configs(
    config: Any, model_map: ModelMap, kept: Sequence[KeptHeads], channels: dict[str, list[int]]
) -> None:
    """Write the layers' sizes under the keys that other engines read, where the family has them."""
    if model_map.stacks != ("",) or not _has(config, "num_key_value_heads") or not hasattr(config, "per_layer_config"):
        return
    layers: dict[int, dict[str, int]] = {}
    for one in kept:
        layers[one.layer.index] = {"num_attention_heads": len(one.heads), "num_key_value_heads": len(one.kv_heads)}
    if _has(config, "intermediate_size"):
        for block in model_map.feed_forward:
            layers.setdefault(block.index, {})["intermediate_size"] = len(channels[block.label])
    for name, value in _head_dim(kept[0].layer).items():
        setattr(config, name, value)
    config.allow_global_per_layer_attribute_access = True
    config.per_layer_config = layers


def _filled(kind: Any, config: Any, model: Any, tensors: dict[str, Tensor]) -> Any:
    """A model of a class, with these tensors in their own type."""
    config = copy.deepcopy(config)
    config._name_or_path = f"{getattr(model.config, '_name_or_path', '')}-pruned"
    smaller: Any = kind._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    _same_implementations(smaller.config, model.config)
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
