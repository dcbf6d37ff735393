"""Writes a model as llama.cpp reads it, layers that differ included."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, RopeScalingType

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf_names import gguf_architecture, tensor_name
from lmeval_prune.export.gguf_tensors import KINDS, Tensors
from lmeval_prune.export.gguf_tokenizer import add_tokenizer

MANIFEST = "lmeval_prune.manifest"  # among the file's settings, as JSON
_INTERLEAVED = ("llama", "deci")  # rotate neighbouring rows of queries and keys
_TYPES = {
    torch.float32: LlamaFileType.ALL_F32,
    torch.float16: LlamaFileType.MOSTLY_F16,
    torch.bfloat16: LlamaFileType.MOSTLY_BF16,
}


def write_gguf_model(
    path: str | os.PathLike[str],
    model: Any,
    manifest: dict[str, Any],
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    splitting: str | None = None,
) -> str:
    """Write a GGUF file with a model and its tokenizer; it appears whole.

    Args:
        path: where to; what stands there is replaced.
        model: a causal language model of a family in `gguf_names.FAMILIES`, its layers alike or not.
        manifest: what to say of it.
        tokenizer: of the model; None: the file has none, and is asked by tokens.
        dtype: type of the matrices, if not the model's; what has one dimension is float32.
        splitting: what llama.cpp calls the rule by which the tokenizer splits text, where it is not recognised.

    Returns:
        The architecture.

    Raises:
        InputError: llama.cpp has no form for such a model or tokenizer, or nothing can be written.
    """
    path = Path(path)
    model_map = map_model(model)
    architecture = check_writable_as_gguf(model_map)
    dtype = dtype or model.dtype
    if dtype not in KINDS:
        raise InputError(f"the weights are {dtype}, which llama.cpp does not read; give --dtype float32")
    half = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = Tensors(half, architecture)
        _add_settings(tensors.writer, model_map, architecture)
        tensors.writer.add_file_type(_TYPES[dtype])
        tensors.writer.add_string(MANIFEST, json.dumps(manifest))
        if tokenizer is None:
            tensors.writer.add_tokenizer_model("no_vocab")
        else:
            add_tokenizer(tensors.writer, tokenizer, model.config.vocab_size, splitting)
        _add_tensors(tensors, model_map, architecture, dtype)
        tensors.write()
        half.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        half.unlink(missing_ok=True)
    return architecture


def check_writable_as_gguf(model_map: ModelMap) -> str:
    """The architecture that a model is written as; on a model without weights, too.

    Raises:
        InputError: llama.cpp has no form for it, or it is not written here yet.
    """
    config = model_map.model.config
    architecture = gguf_architecture(model_map)
    kind = _rope(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise InputError(f"rotary embedding of type {kind} is not written as GGUF yet; write a checkpoint instead")
    if config.hidden_act != "silu":
        raise InputError(f"llama.cpp's {architecture} computes with silu, this model with {config.hidden_act}")
    return architecture


def _rope(config: Any) -> dict[str, Any]:
    found = dict(getattr(config, "rope_parameters", None) or {})
    return {"rope_type": "default", "rope_theta": 10000.0, **found}


def _add_settings(writer: GGUFWriter, model_map: ModelMap, architecture: str) -> None:
    config, first = model_map.model.config, model_map.attention[0]
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_type("model")
    writer.add_name(model_map.name)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(min(window, config.max_position_embeddings))  # there is no sliding window in llama.cpp's
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(model_map.attention))
    writer.add_head_count(_one_or_all([layer.heads for layer in model_map.attention]))
    writer.add_head_count_kv(_one_or_all([layer.kv_heads for layer in model_map.attention]))
    writer.add_feed_forward_length(_one_or_all([block.channels for block in model_map.feed_forward]))
    writer.add_key_length(first.head_dim)
    writer.add_value_length(first.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(first.head_dim)
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _one_or_all(numbers: Sequence[int]) -> Any:
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _add_tensors(tensors: Tensors, model_map: ModelMap, architecture: str, dtype: torch.dtype) -> None:
    model = model_map.model
    heads = {}
    if architecture in _INTERLEAVED:
        names = {module: name for name, module in model.named_modules()}
        for layer in model_map.attention:
            heads[f"{names[layer.module]}.q_proj"] = layer.heads
            heads[f"{names[layer.module]}.k_proj"] = layer.kv_heads
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tensor.data_ptr() == model.get_input_embeddings().weight.data_ptr():
            continue  # read from the embeddings where it is missing
        own = tensor_name(name)
        if own is None:
            raise InputError(f"llama.cpp's {architecture} has no tensor for {name} of this model")
        kind = dtype if tensor.dim() > 1 else torch.float32
        tensors.add(own, tensor, kind, heads.get(name.rpartition(".")[0], 0))
    if _rope(model.config)["rope_type"] == "llama3":
        own_frequencies = model.model.rotary_emb.inv_freq.to(torch.float64)
        steps = torch.arange(len(own_frequencies), dtype=torch.float64) / len(own_frequencies)
        plain = _rope(model.config)["rope_theta"] ** -steps
        tensors.add("rope_freqs.weight", plain / own_frequencies, torch.float32)
