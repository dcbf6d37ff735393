"""Write models as GGUF files, also with layers of different shapes, and with layers that lack a block."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, RopeScalingType

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.artefacts import check_writable, new_file
from lmeval_prune.checkpoints.pruned import is_trained, manifest_of
from lmeval_prune.checkpoints.skeleton import check_unquantised, skeleton_of, with_weights
from lmeval_prune.checkpoints.tokenizer import tokenizer_of
from lmeval_prune.decoding.request import end_tokens
from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf_format import (
    GGUF_TYPES,
    SERVER_DTYPES,
    GGUFFile,
    gguf_architecture,
    rope_of,
    tensor_names,
)
from lmeval_prune.export.gguf_layers import GGUFLayer, gguf_layers
from lmeval_prune.export.gguf_tokenizer import add_tokenizer, check_tokenizer
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.surgery.card import pruning_tags, removed_lines, write_card
from lmeval_prune.surgery.cut import cut_checkpoint, identity_of

CARD_SUFFIX = ".README.md"  # beside the file: several may share a folder
MANIFEST = "lmeval_prune.manifest"  # key of the manifest, in JSON
INTERLEAVED_ARCHITECTURES = ("llama", "deci")  # see `interleave_rows`


def export_gguf(
    pretrained: str,
    plan: Plan | None,
    output: str,
    zeroed: bool,
    dtype: str | None,
    splitting: str | None,
    revision: str | None,
) -> None:
    """Write a model as a GGUF file with a card, cut by a plan if there is one; see `lmeval-prune export model`."""
    bare = skeleton_of(pretrained, revision)
    check_unquantised(bare, pretrained)
    check_writable_as_gguf(map_model(bare))
    tokenizer = tokenizer_of(pretrained, revision)
    if tokenizer is not None:
        check_tokenizer(tokenizer, splitting)
    check_writable(output)
    if plan:
        result = cut_checkpoint(pretrained, plan, revision, zeroed)
        model, manifest = result.model, result.manifest
    else:
        model = with_weights(bare, pretrained, revision)
        manifest = manifest_of(model) or {"parent": identity_of(map_model(model)), "stages": [], "notes": []}
    notes = [note for note in manifest["notes"] if note != manifest.get("about_class")]  # GGUF has no classes
    notes += [layer.note for layer in gguf_layers(map_model(model)) if layer.note]
    manifest = {**manifest, "notes": notes}
    torch_dtype = SERVER_DTYPES[dtype] if dtype else None
    architecture = write_gguf_model(output, model, manifest, tokenizer, torch_dtype, splitting)
    training = "It was trained afterwards." if not plan and "files" in manifest and is_trained(manifest) else ""
    tags, removed = ["gguf", *pruning_tags(manifest)], removed_lines(manifest)
    write_card(
        Path(output).with_suffix(CARD_SUFFIX), Path(output).name, (pretrained, revision), "gguf", tags, removed,
        "text-generation", training, is_adapter=False,
    )  # fmt: skip
    print(f"{output}: architecture {architecture}{'' if tokenizer else ', no tokenizer'}")
    for note in notes:
        print(f"  {note}")


def write_gguf_model(
    path: str | os.PathLike[str],
    model: Any,
    manifest: dict[str, Any],
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    splitting: str | None = None,
) -> str:
    """Write a model and its tokenizer atomically to a GGUF file, and return the architecture.

    Matrices have the type `dtype` (default: the model's), vectors float32. `splitting` names llama.cpp's
    pre-tokenizer, if it cannot be recognised. Without a tokenizer, the server takes prompts as tokens only.
    """
    model_map = map_model(model)
    architecture = check_writable_as_gguf(model_map)
    dtype = dtype or model.dtype
    file_type = "ALL_F32" if dtype == torch.float32 else f"MOSTLY_{GGUF_TYPES[dtype].name}"
    with new_file(Path(path)) as temporary:
        file = GGUFFile(temporary, architecture)
        _add_settings(file.writer, model_map)
        file.writer.add_file_type(LlamaFileType[file_type])
        file.writer.add_string(MANIFEST, json.dumps(manifest))
        if tokenizer is None:
            file.writer.add_tokenizer_model("no_vocab")
        else:
            ends = end_tokens(getattr(model, "generation_config", None)) or end_tokens(model.config)
            add_tokenizer(file.writer, tokenizer, model.config.vocab_size, splitting, ends)
        _add_tensors(file, model_map, architecture, dtype)
        file.write()
    return architecture


def check_writable_as_gguf(model_map: ModelMap) -> str:
    """Return the architecture for a model, with or without weights; refuse a model that cannot be written."""
    config = model_map.model.config
    architecture = gguf_architecture(model_map)
    rope_type, activation = rope_of(config)["rope_type"], config.hidden_act
    if rope_type not in ("default", "linear", "llama3") or activation != "silu":
        raise InputError(f"llama.cpp's {architecture} has no rope of type {rope_type} with {activation}")
    return architecture


def _add_settings(writer: GGUFWriter, model_map: ModelMap) -> None:
    config, first = model_map.model.config, model_map.attention[0]
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_type("model")
    writer.add_name(model_map.name)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(min(window, config.max_position_embeddings))  # these architectures have no sliding window
    writer.add_embedding_length(config.hidden_size)
    layers = gguf_layers(model_map)
    writer.add_block_count(len(layers))
    writer.add_head_count(_number_or_list([layer.heads for layer in layers]))
    writer.add_head_count_kv(_number_or_list([layer.kv_heads for layer in layers]))
    writer.add_feed_forward_length(_number_or_list([layer.channels for layer in layers]))
    writer.add_key_length(first.head_dim)
    writer.add_value_length(first.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(first.head_dim)
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _number_or_list(numbers: Sequence[int]) -> Any:
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _renumbered(name: str, layers: Sequence[GGUFLayer]) -> str:
    for layer in layers:
        if name.startswith(f"{layer.name}."):
            return f"{layer.name.rpartition('.')[0]}.{layer.number}{name.removeprefix(layer.name)}"
    return name


def _add_tensors(file: GGUFFile, model_map: ModelMap, architecture: str, dtype: torch.dtype) -> None:
    model = model_map.model
    heads_of_rows = {}
    if architecture in INTERLEAVED_ARCHITECTURES:
        names = {module: name for name, module in model.named_modules()}
        for layer in model_map.attention:
            heads_of_rows[f"{names[layer.module]}.q_proj"] = layer.heads
            heads_of_rows[f"{names[layer.module]}.k_proj"] = layer.kv_heads
    layers = gguf_layers(model_map)
    gguf_name_of = tensor_names(architecture, len(layers))
    for gguf_layer in layers:
        for name, tensor in gguf_layer.fillers(model_map):
            file.add(name, tensor, dtype if tensor.dim() > 1 else torch.float32)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tensor.data_ptr() == model.get_input_embeddings().weight.data_ptr():
            continue  # llama.cpp uses the embeddings instead
        gguf_name = gguf_name_of(_renumbered(name, layers))
        assert gguf_name, f"llama.cpp's {architecture} has no tensor for {name}"
        heads = heads_of_rows.get(name.rpartition(".")[0], 0)
        file.add(gguf_name, tensor, dtype if tensor.dim() > 1 else torch.float32, heads)
    if rope_of(model.config)["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.to(torch.float64)
        exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
        unscaled = rope_of(model.config)["rope_theta"] ** -exponents
        file.add("rope_freqs.weight", unscaled / frequencies, torch.float32)
