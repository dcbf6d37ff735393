"""Recognise the layers of a model whose family the table does not name.

An entry of the table describes the model if the live modules have its names and consistent shapes, and if a proof holds
for a tiny random model of the same class in float64: noise on the rows of one head may change the head's own slice of
the output projection's input, and no other. So a head mask, which zeroes the slice, is the head's columns of the output
projection set to zero. The same is proven of the rows of channels.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lmeval_prune.architectures.blocks import (
    AttentionLayer,
    FeedForward,
    Rows,
    attribute_of,
    in_features,
    out_features,
    projection_in,
    read_blocks,
)
from lmeval_prune.architectures.identity import text_config
from lmeval_prune.architectures.table import FAMILIES, Family
from lmeval_prune.errors import InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # shared by all heads
_MAX_DEPTH = 16
_LLAMA, _NEOX = FAMILIES["llama"], FAMILIES["gpt_neox"]
_VARIANTS = (  # entries under other names
    *((replace(_LLAMA, attention=name), "llama") for name in ("mixer", "temporal_block")),
    (replace(_LLAMA, output="out_proj"), "llama"),
    (replace(_LLAMA, width="v_head_dim", head_parameters=FAMILIES["gpt_oss"].head_parameters), "llama"),
    (replace(_NEOX, attention="self_attn", width="head_dim"), "gpt_neox"),
)
VOCABULARY = 64  # of tiny models
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
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
}
_LIMITS = {  # of numbers whose names match a pattern; the first match counts
    r"chunk_size$": 8,
    r"_token_id$": 2,
    r"^(num_experts_per_tok|top_k_experts|moe_topk|moe_top_k|moe_k)$": 2,
    r"^(?!.*(size|dim)).*expert": 4,
}
_DEPTHS = ("num_hidden_layers", "decoder_layers", "encoder_layers", "n_layer")


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
        limits = [f"heads are masked, not cut ({self.family.uncuttable})"] if self.family.uncuttable else []
        limits += [] if self.feed_forward else ["no channels"]
        return f"built like {self.entry}, proven in float64{''.join(f'; {limit}' for limit in limits)}"


def recognise(model: Any) -> Fit:
    """Return the entry of the table that describes the layers of a model whose family is not in the table."""
    fits, reasons = _fits(model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        fits, reasons = [], ["encoder-decoders are not recognised"]
    for fit in fits:
        why_no_heads, why_no_channels = refute(model, fit.family, fit.depth)
        if not why_no_heads:
            without = replace(fit, family=replace(fit.family, feed_forward=None), feed_forward=())
            return without if why_no_channels else fit
        reasons.append(f"it looks like {fit.entry}, but {why_no_heads}")
    name = getattr(text_config(model), "model_type", "") or type(model).__name__
    reason = next(iter(reasons), "its modules are not called like those of a known family")
    raise InputError(
        f"model family {name!r} is not supported: {reason}; describe its heads by attention_path (e.g. "
        f"model.layers.*.self_attn), attention_output (e.g. o_proj) and attention_heads"
    )


def _fits(model: nn.Module) -> tuple[list[Fit], list[str]]:
    """Return the entries that fit a model's modules, best first, or else why those with the same names do not."""
    entries: dict[Family, str] = {}
    for name, entry in FAMILIES.items():
        entries.setdefault(entry, name)
    fits, reasons = [], []
    for entry, name in [*entries.items(), *_VARIANTS]:
        family = entry if entry.fused or entry.key_value_pairs else replace(entry, value=f"{entry.value}|{entry.key}")
        family = replace(family, feed_forward=None)
        try:
            attention = read_blocks(model, family)[0]
            if reason := next(filter(None, map(_mismatch, attention)), ""):
                reasons.append(f"it looks like {name}, but {reason}")
            elif attention:
                reason = next(filter(None, map(_why_uncuttable, attention)), "")
                family = replace(family, uncuttable=family.uncuttable or reason)
                fit = Fit(name, family, attention, ())
                for names in dict.fromkeys([entry.feed_forward, *(known.feed_forward for known in FAMILIES.values())]):
                    with_channels = replace(family, feed_forward=names)
                    blocks = read_blocks(model, with_channels)[1]
                    if blocks and all(map(_has_channels, blocks)):
                        fit = Fit(name, with_channels, attention, blocks)
                        break
                fits.append(fit)
        except (InputError, AttributeError) as error:  # the latter: a projection without a weight
            reasons.append(f"it looks like {name}, but {error}")
    return sorted(fits, key=lambda fit: bool(fit.family.uncuttable)), [] if fits else reasons


def _mismatch(layer: AttentionLayer) -> str:
    """Return which projection of a layer does not have the shape of its numbers of heads; empty if all have."""
    family = layer.family
    query, key, value = (projection_in(layer.module, name) for name in (family.query, family.key, family.value))
    if query is None or key is None or value is None:
        names = {family.query: query, family.key: key, family.value: value}
        return f"{layer.name} has no {next(name for name, part in names.items() if part is None).partition('|')[0]}"
    heads = f"{layer.heads} heads and {layer.kv_heads} key-value heads of width {layer.head_dim} in {layer.name}"
    if layer.kv_heads < 1 or layer.heads % layer.kv_heads:
        return f"there cannot be {heads}"
    if attribute_of(layer.module, "num_key_value_groups") not in (None, layer.group_size):
        return f"its num_key_value_groups is not that of {heads}"
    if family.fused:
        fits = out_features(query) == (layer.heads + 2 * layer.kv_heads) * layer.head_dim
    elif family.key_value_pairs:
        fits = out_features(key) % layer.heads == 0 and out_features(key) > layer.heads * layer.head_dim
    else:
        fits = len({in_features(module) for module in (query, key, value)}) == 1
        fits = fits and out_features(key) == layer.kv_heads * layer.key_dim
        fits = fits and out_features(value) == layer.kv_heads * layer.head_dim
    fits = fits and (family.fused is not None or out_features(query) % layer.heads == 0)
    return "" if fits else f"its projections are not those of {heads}"


def _why_uncuttable(layer: AttentionLayer) -> str:
    """Return which parameter of an attention module has rows of several heads that surgery does not know."""
    family, module = layer.family, layer.module
    query, key, value = (projection_in(module, name) for name in (family.query, family.key, family.value))
    if key is value and not family.fused and not family.key_value_pairs:
        return "its keys are its values, too"
    inside = {part for each in (layer.o_proj, query, key, value) if each is not None for part in each.modules()}
    query_dim = out_features(query) // layer.heads if query is not None and not family.fused else layer.head_dim
    for name, parameter in module.named_parameters():
        path = name.rpartition(".")[0]
        is_latent = family.key_value_pairs and path.split(".")[0] in _LATENT
        is_after_projection = path.startswith(f"{family.output.rpartition('.')[0]}.")
        is_head_norm = path != "" and parameter.shape in ((layer.head_dim,), (query_dim,))
        is_known = (
            parameter.numel() <= 1 or name in dict(family.head_parameters) or module.get_submodule(path) in inside
        )
        if not (is_known or is_latent or is_after_projection or is_head_norm):
            return f"{name} of its attention is not known to surgery"
    return ""


def _has_channels(block: FeedForward) -> bool:
    """Return whether the projections of a block have a row and a column for each channel, and nothing else has."""
    rows = block.channels * (2 if block.gate is block.up else 1)
    if any(out_features(part) != rows for part in block.parts.values()):
        return False
    inside = {module for part in (*block.parts.values(), block.down) for module in part.modules()}
    others = (module for module in block.module.modules() if module not in inside) if block.name else ()
    return not any(x.shape[:1] == (block.channels,) for module in others for x in module.parameters(recurse=False))


# --------------------------------------------------------------------------- tiny models


def tiny_model(model: Any, layers: int) -> Any:
    """Build a random float64 model of a model's class, or of its text decoder, with few and small layers."""
    return _built(*_tiny(model, layers))


def _tiny(model: Any, layers: int) -> tuple[Any, Any, str]:
    """Return the class of a model or of its text decoder, that of its configuration, and the tiny one's values as JSON.

    The classes are those before the model was cut or wrapped. A size without a usual name stays as it is.
    """
    model = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    config = model.config.get_text_config()
    classes = type(model if config is model.config else model.get_decoder()).__mro__
    is_cut = hasattr(config, "pruned_modules")
    model_class = next(kind for kind in classes if not is_cut or kind.__module__.startswith("transformers."))
    values, usual = config.to_dict(), config.attribute_map or {}
    depth = next((values[name] for name in _DEPTHS if name in values), 0)
    sizes = {**_SIZES, **dict.fromkeys(_DEPTHS, layers)}
    if "qk_rope_head_dim" not in values:  # in latent attention, head_dim has another meaning
        is_setting = hasattr(type(config), "head_dim")  # else a cut wrote it, and only some modules may read it
        sizes["head_dim"] = 16 if is_setting else sizes["hidden_size"] // sizes["num_attention_heads"]
    heads, kv_heads = (values.get(usual.get(name, name)) for name in ("num_attention_heads", "num_key_value_heads"))
    if kv_heads and heads:
        sizes["num_key_value_heads"] = 2 if kv_heads < heads else 4
    for name, size in sizes.items():
        if isinstance(values.get(usual.get(name, name)), int):
            values[usual.get(name, name)] = size
    for name in ("quantization_config", "pruned_modules", "architectures", "auto_map"):
        values.pop(name, None)
    layer_configs = {  # of layers that differ, e.g. by wider heads: twice those of the other layers
        number: {key: 2 * sizes.get(key, value) for key, value in changes.items()}
        for number, changes in (values.pop("per_layer_config", None) or {}).items()
        if int(number) < layers
    }
    if layer_configs and not is_cut:  # else a cut wrote them
        values["per_layer_config"] = layer_configs

    def shrunk(name: str, value: Any) -> Any:
        if isinstance(value, list) and len(value) == depth:
            return [_SIZES.get(name, setting) for setting in value[:layers]]
        if isinstance(value, dict) and str(value.get("rope_type")) in ("longrope", "su"):  # factors for each frequency
            return {"rope_type": "default", "rope_theta": value["rope_theta"]}
        if isinstance(value, dict):
            return {key: shrunk(key, setting) for key, setting in value.items()}
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        return min(value, next((limit for pattern, limit in _LIMITS.items() if re.search(pattern, name)), value))

    small = {name: shrunk(name, value) for name, value in values.items()}
    return model_class, type(config), json.dumps(small, sort_keys=True)


def _built(model_class: Any, config_class: Any, values: str) -> Any:
    """Build a random float64 model on the CPU; its weights are large, so that every head matters."""
    import torch

    config = config_class.from_dict(json.loads(values))
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


# --------------------------------------------------------------------------- proofs


def refute(model: Any, family: Family, layers: int) -> tuple[str, str]:
    """Return why an entry does not describe a model's heads, and why not its channels; empty texts if it is proven."""
    import torch
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # warnings about the sizes of the tiny model would be taken for the user's model
    try:
        with torch.device("cpu"):
            return _refute(*_tiny(model, layers), family)
    except Exception as error:  # model classes raise errors of any type
        return f"no tiny model of its class can be built and run to prove its heads ({first_line(error)})", ""
    finally:
        logging.set_verbosity(verbosity)


def refute_depth(model: Any, family: Family, layers: int) -> str:
    """Return why a layer does more than add the outputs of its blocks to the residual stream; empty if it does not."""
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
        sublayers = read_blocks(tiny, family)[2]
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
def _refute(model_class: Any, config_class: Any, values: str, family: Family) -> tuple[str, str]:
    model = _built(model_class, config_class, values)
    attention, feed_forward, _ = read_blocks(model, family)
    if not attention:
        return "a tiny model of its class has no such attention", ""
    heads = channels = ""
    if family.feed_forward and not feed_forward:
        channels = "a tiny model of its class has no such feed-forward block"
    blocks = {block.label: block for block in feed_forward}
    for layer in attention:
        counts = {"q": layer.heads, "k": layer.kv_heads, "v": layer.kv_heads}
        rows = [(layer.o_proj, part, n, layer.rows(part, n)) for part, count in counts.items() for n in range(count)]
        if layer.stack != "cross" and (block := blocks.get(layer.label)):
            some = (0, 5, block.channels - 1)
            rows += [(block.down, part, n, block.rows(part, n)) for part in block.parts for n in some]
        changed = _changed_inputs(model, [(reader, own) for reader, _, _, own in rows])
        for (reader, part, index, _), columns in zip(rows, changed, strict=True):
            if reader is not layer.o_proj:
                if columns.nonzero().flatten().tolist() != [index]:
                    channels = channels or f"row {index} of {part} in {layer.label} computes other channels, too"
                continue
            is_changed = columns.unflatten(-1, (layer.heads, layer.head_dim)).any(-1)
            actual = {head for head in range(layer.heads) if is_changed[head]}
            own = {head for head in range(layer.heads) if (head if part == "q" else layer.kv_head_of(head)) == index}
            # queries and keys of a family that cannot be cut may be normed over all heads
            if actual != own and not (layer.family.uncuttable and part != "v" and own <= actual):
                heads = (
                    heads or f"rows of {part}{index} in {layer.label} compute heads {sorted(actual)}, not {sorted(own)}"
                )
    return heads, channels


def _changed_inputs(model: Any, rows: Sequence[tuple[nn.Module, Rows]]) -> list[Tensor]:
    """Return for each reader which of its inputs change by noise on the output of the rows beside it, boolean."""
    import torch

    generator = torch.Generator().manual_seed(1)
    recorded: dict[nn.Module, Tensor] = {}

    def add_noise(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        batch = output.reshape(len(rows) + 1, -1, output.shape[-1]).clone()
        for sequence, (_, noisy_rows) in zip(batch[1:], rows, strict=True):
            if noisy_rows.module is module:
                noise = sequence[:, noisy_rows.start : noisy_rows.stop]
                noise += 3 * torch.randn(noise.shape, dtype=noise.dtype, generator=generator)
        return batch.reshape(output.shape)

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorded.setdefault(module, inputs[0].reshape(len(rows) + 1, -1, inputs[0].shape[-1]))

    handles = [module.register_forward_hook(add_noise) for module in {own.module for _, own in rows}]
    handles += [module.register_forward_pre_hook(record) for module in {reader for reader, _ in rows}]
    tokens = torch.randint(3, VOCABULARY, (1, 7), generator=generator).repeat(len(rows) + 1, 1)
    try:
        with torch.no_grad():
            model(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    inputs = [(recorded[reader][0], recorded[reader][n]) for n, (reader, _) in enumerate(rows, 1)]
    return [(noisy - plain).abs().amax(0) > _ROUNDING for plain, noisy in inputs]
