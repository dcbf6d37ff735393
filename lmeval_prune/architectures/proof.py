"""Prove on a tiny random model in float64 which rows of the projections belong to a head, and which to a channel.

Noise on the rows of one head may change the head's own slice of the output projection's input, and no other. So a head
mask, which zeroes the slice, is the head's columns of the output projection set to zero.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.blocks import AttentionLayer, FeedForward, Rows
from lmeval_prune.architectures.layers import read_blocks
from lmeval_prune.architectures.table import Family
from lmeval_prune.errors import first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lmeval_prune.architectures.sublayers import Sublayer

VOCABULARY = 64
_MAX_PARAMETERS = 60_000_000  # of the tiny model: a class with more ignores sizes in its configuration
_ROUNDING = 1e-5  # smaller changes are rounding: some classes route tokens to experts in float32
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_attention_heads_per_layer", "swa_num_attention_heads"), 4),
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 64,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
}
_LIMITS = {  # of numbers whose names match a pattern; the first match counts
    r"chunk_size$": 8,
    r"_token_id$": 2,
    r"^(num_experts_per_tok|top_k_experts|moe_topk|moe_top_k|moe_k)$": 2,
    r"^(?!.*(size|dim)).*expert": 4,
}
_DEPTHS = ("num_hidden_layers", "decoder_layers", "encoder_layers", "n_layer")
_HEAD_DIM = 16


@dataclass(frozen=True)
class Refutation:
    """Why an entry of the table does not describe a model; empty texts if it is proven."""

    heads: str = ""
    channels: str = ""


def refute(model: Any, family: Family, layers: int) -> Refutation:
    """Compare a family's entry with a tiny random model of the same class and configuration, with few `layers`."""
    import torch
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # warnings about the sizes of the tiny model would be taken for the user's model
    try:
        model_class, config = _text_class(model)
        values = json.dumps(tiny_config(config, layers), sort_keys=True)
        config_class: Any = type(config)
        with torch.device("cpu"):
            return _refute(model_class, config_class, values, family)
    except Exception as error:  # model classes raise errors of any type
        return Refutation(f"no tiny model of its class can be built and run to prove its heads ({first_line(error)})")
    finally:
        logging.set_verbosity(verbosity)


def tiny_model(model: Any, layers: int) -> Any:
    """Build a random float64 model of a model's class and configuration, with few layers and small sizes.

    Of a model with several towers, only the text decoder is built, without its head.
    """
    model_class, config = _text_class(model)
    return _built(model_class, type(config).from_dict(tiny_config(config, layers)))


def tiny_config(config: Any, layers: int) -> dict[str, Any]:
    """Return a model's configuration with few layers and small sizes; a size without a usual name stays as it is."""
    values, attribute_map = config.to_dict(), config.attribute_map or {}
    depth = next((values[name] for name in _DEPTHS if name in values), 0)
    sizes = _tiny_sizes(config, values, layers)
    for name, size in sizes.items():
        if isinstance(values.get(attribute_map.get(name, name)), int):
            values[attribute_map.get(name, name)] = size
    for name in ("quantization_config", "pruned_modules", "architectures", "auto_map"):
        values.pop(name, None)
    layer_configs = _layer_configs(values.pop("per_layer_config", None) or {}, sizes, layers)
    if layer_configs and not hasattr(config, "pruned_modules"):  # else a cut wrote them
        values["per_layer_config"] = layer_configs
    return {name: _shrunk(name, value, depth, layers) for name, value in values.items()}


def _tiny_sizes(config: Any, values: dict[str, Any], layers: int) -> dict[str, int]:
    """Return the sizes of a tiny model by their usual names; `values` are the model's own settings."""
    attribute_map = config.attribute_map or {}
    heads, kv_heads = (
        values.get(attribute_map.get(name, name)) for name in ("num_attention_heads", "num_key_value_heads")
    )
    sizes = {**_SIZES, **dict.fromkeys(_DEPTHS, layers)}
    if "qk_rope_head_dim" not in values:  # in latent attention, head_dim has another meaning
        is_setting = hasattr(type(config), "head_dim")  # else a cut wrote it, and only some modules may read it
        sizes["head_dim"] = _HEAD_DIM if is_setting else sizes["hidden_size"] // sizes["num_attention_heads"]
    if kv_heads and heads:
        sizes["num_key_value_heads"] = 2 if kv_heads < heads else 4
    return sizes


def _layer_configs(layer_configs: dict[str, Any], sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """Return the settings of layers that differ, e.g. wider heads: twice those of the other layers."""
    return {
        name: {key: 2 * sizes.get(key, value) for key, value in changes.items()}
        for name, changes in layer_configs.items()
        if int(name) < layers
    }


def _shrunk(name: str, value: Any, depth: int, layers: int) -> Any:
    if isinstance(value, list) and len(value) == depth:
        return [_SIZES.get(name, setting) for setting in value[:layers]]
    if isinstance(value, dict) and str(value.get("rope_type")) in ("longrope", "su"):  # factors for each frequency
        return {"rope_type": "default", "rope_theta": value["rope_theta"]}
    if isinstance(value, dict):
        return {key: _shrunk(key, setting, depth, layers) for key, setting in value.items()}
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return min(value, next((limit for pattern, limit in _LIMITS.items() if re.search(pattern, name)), value))


def _text_class(model: Any) -> tuple[Any, Any]:
    """Return the class of a model, or of its text decoder, before it was cut or wrapped, and its configuration."""
    model = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    config = model.config.get_text_config()
    classes = type(model if config is model.config else model.get_decoder()).__mro__
    is_cut = hasattr(config, "pruned_modules")
    return next(kind for kind in classes if not is_cut or kind.__module__.startswith("transformers.")), config


def _built(model_class: Any, config: Any) -> Any:
    """Build a random float64 model on the CPU; its weights are large, so that every head matters."""
    import torch

    config._experts_implementation = "eager"  # the others have no float64
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"with small sizes it has {size} parameters")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = model_class._from_config(config, dtype=torch.float64).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model


def refute_depth(model: Any, read: Callable[[Any], Iterable[Sublayer]], layers: int) -> str:
    """Return why a layer does more than add the outputs of its blocks to the residual stream; empty if it does not.

    Without the outputs of its blocks, which `read` returns, each of the few `layers` of a tiny random model of the same
    class must return its input.
    """
    import torch

    changed: list[str] = []

    def zero(_: nn.Module, __: Any, output: Any) -> Any:
        is_tuple = isinstance(output, tuple)
        return (torch.zeros_like(output[0]), *output[1:]) if is_tuple else torch.zeros_like(output)

    def compare(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        before = inputs[0] if inputs else next(iter(named.values()))
        if not torch.equal(output[0] if isinstance(output, tuple) else output, before):
            changed.append(type(layer).__name__)

    try:
        tiny = tiny_model(model, layers)
        sublayers = list(read(tiny))
        for sublayer in sublayers:
            sublayer.output.register_forward_hook(zero)
        for name in {sublayer.layer for sublayer in sublayers}:
            tiny.get_submodule(name).register_forward_hook(compare, with_kwargs=True)
        with torch.no_grad():
            tiny(torch.arange(3, 10)[None], use_cache=False)
    except Exception as error:  # model classes raise errors of any type
        return f"no tiny model of its class can be built and run to prove its blocks ({first_line(error)})"
    return f"a {changed[0]} without its blocks does not return its input" if changed else ""


@lru_cache(maxsize=256)
def _refute(model_class: Any, config_class: Any, values: str, family: Family) -> Refutation:
    model = _built(model_class, config_class.from_dict(json.loads(values)))
    attention, feed_forward = read_blocks(model, family)
    if not attention:
        return Refutation("a tiny model of its class has no such attention")
    heads = channels = ""
    if family.feed_forward and not feed_forward:
        channels = "a tiny model of its class has no such feed-forward block"
    blocks = {block.label: block for block in feed_forward}
    for layer in attention:
        block = None if layer.stack == "cross" else blocks.get(layer.label)
        kv_heads = range(layer.kv_heads)
        rows = _numbered_rows(layer, {"q": range(layer.heads), "k": kv_heads, "v": kv_heads})
        inputs = {layer.o_proj: rows}
        if block:
            inputs[block.down] = _numbered_rows(block, dict.fromkeys(block.parts, (0, 5, block.channels - 1)))
        changed = _changed_inputs(model, inputs)
        heads = heads or _refute_heads(layer, rows, changed[layer.o_proj])
        if block:
            channels = channels or _refute_channels(block, inputs[block.down], changed[block.down])
    return Refutation(heads, channels)


_Numbered = tuple[str, int, Rows]  # part, number of the head or channel, its rows


def _numbered_rows(owner: AttentionLayer | FeedForward, numbers: Mapping[str, Iterable[int]]) -> list[_Numbered]:
    return [(part, number, owner.rows(part, number)) for part, selected in numbers.items() for number in selected]


def _refute_heads(layer: AttentionLayer, rows: Sequence[_Numbered], changed: Tensor) -> str:
    """Return which head changes with rows that are not its own.

    Queries and keys of a family that cannot be cut may be normed over all heads.
    """
    for (part, index, _), columns in zip(rows, changed, strict=True):
        is_changed = columns.unflatten(-1, (layer.heads, layer.head_dim)).any(-1)
        actual = {head for head in range(layer.heads) if is_changed[head]}
        expected = {head for head in range(layer.heads) if (head if part == "q" else layer.kv_head_of(head)) == index}
        if actual != expected and not (layer.family.uncuttable and part != "v" and expected <= actual):
            return f"rows of {part}{index} in {layer.label} compute heads {sorted(actual)}, not {sorted(expected)}"
    return ""


def _refute_channels(block: FeedForward, rows: Sequence[_Numbered], changed: Tensor) -> str:
    for (part, channel, _), columns in zip(rows, changed, strict=True):
        if columns.nonzero().flatten().tolist() != [channel]:
            return f"row {channel} of {part} in {block.label} computes other channels, too"
    return ""


def _changed_inputs(model: Any, rows: dict[nn.Module, list[_Numbered]]) -> dict[nn.Module, Tensor]:
    """Return which inputs of each projection change by noise on the output of some rows: (rows, inputs), boolean.

    The first sequence of the batch is without noise, and each of the others has noise on one set of rows.
    """
    import torch

    all_rows = [part_rows for reader_rows in rows.values() for _, _, part_rows in reader_rows]
    generator = torch.Generator().manual_seed(1)
    recorded: dict[nn.Module, Tensor] = {}

    def add_noise(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        batch = output.reshape(len(all_rows) + 1, -1, output.shape[-1]).clone()
        for sequence, noisy_rows in zip(batch[1:], all_rows, strict=True):
            if noisy_rows.module is module:
                noise = sequence[:, noisy_rows.start : noisy_rows.stop]
                noise += 3 * torch.randn(noise.shape, dtype=noise.dtype, generator=generator)
        return batch.reshape(output.shape)

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorded.setdefault(module, inputs[0].reshape(len(all_rows) + 1, -1, inputs[0].shape[-1]))

    handles = [module.register_forward_hook(add_noise) for module in {part_rows.module for part_rows in all_rows}]
    handles += [module.register_forward_pre_hook(record) for module in rows]
    tokens = torch.randint(3, VOCABULARY, (1, 7), generator=generator).repeat(len(all_rows) + 1, 1)
    try:
        with torch.no_grad():
            model(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    changed, start = {}, 1
    for reader, reader_rows in rows.items():
        plain, noisy = recorded[reader][:1], recorded[reader][start : start + len(reader_rows)]
        changed[reader] = (noisy - plain).abs().amax(1) > _ROUNDING
        start += len(reader_rows)
    return changed
