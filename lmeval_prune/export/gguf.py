"""Write models and tokenizers as GGUF, llama.cpp's file format, also with layers that differ or lack a block.

`deci` computes a layer with no heads without attention, but in a layer with no channels it drops the attention, too;
and it takes the width of heads from the first layer. So a layer without a feed-forward block is written with one
channel of zeros, and a first layer without attention with one head of zeros. A layer without any block is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from torch import Tensor

from lmeval_prune.architectures import ModelMap, map_model, text_config
from lmeval_prune.architectures.blocks import is_absent, layers_in
from lmeval_prune.artefacts import check_writable, new_file
from lmeval_prune.checkpoints.loading import (
    check_unquantised,
    is_trained,
    manifest_of,
    skeleton_of,
    tokenizer_of,
    with_weights,
)
from lmeval_prune.decoding.request import end_tokens
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.surgery.card import pruning_tags, removed_lines, write_card
from lmeval_prune.surgery.cut import cut

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
SERVER_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in GGUF_TYPES}  # types that servers support
MANIFEST = "lmeval_prune.manifest"  # key of the manifest, in JSON
_QWEN2_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
# Names of recognised pre-tokenizers (`pre` in llama-vocab.cpp), by the steps of `pre_tokenizer` in tokenizer.json.
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULE_OF_STEPS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _PUNCTUATION_AND_SPACES,): "llama-bpe",
    (_CONTRACTIONS_AND_WORDS + r"\p{N}" + _PUNCTUATION_AND_SPACES,): "qwen2",
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "tekken",
}
IGNORING_MERGES = ("llama-bpe", "tekken")  # a piece of text that is a token is taken without merging
# Tokens that llama.cpp recognises as EOS tokens by their text.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("<|end_of_text|>", "<end_of_utterance>"),
)


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
    gguf_architecture(map_model(bare))
    rope_type, activation = rope_of(bare.config)["rope_type"], bare.config.hidden_act
    if rope_type not in ("default", "linear", "llama3") or activation != "silu":
        raise InputError(f"GGUF files are not written with rope of type {rope_type} and {activation}")
    tokenizer = tokenizer_of(pretrained, revision)
    if tokenizer is not None:
        check_tokenizer(tokenizer, splitting)
    check_writable(output)
    if plan:
        result = cut(pretrained, plan, zeroed, revision)
        model, manifest = result.model, result.manifest
    else:
        model = with_weights(bare, pretrained, revision)
        manifest = manifest_of(model) or {"parent": map_model(model).record(), "stages": [], "notes": []}
    notes = [note for note in manifest["notes"] if note != manifest.get("about_class")]  # GGUF has no classes
    for number, layer in enumerate(gguf_layers(map_model(model))):
        if layer.fillers:
            notes.append(f"blk.{number} has zeros in {', '.join(layer.fillers)}, because llama.cpp needs this block")
    manifest = {**manifest, "notes": notes}
    torch_dtype = SERVER_DTYPES[dtype] if dtype else None
    architecture = write_gguf_model(output, model, manifest, tokenizer, torch_dtype, splitting)
    training = "It was trained afterwards." if not plan and "files" in manifest and is_trained(manifest) else ""
    tags, removed = ["gguf", *pruning_tags(manifest)], removed_lines(manifest)
    path = Path(output).with_suffix(".README.md")  # beside the file: several may share a folder
    origin, task = (pretrained, revision), "text-generation"
    write_card(path, Path(output).name, origin, "gguf", tags, removed, task, training, is_adapter=False)
    print(f"{output}: architecture {architecture}{'' if tokenizer else ', no tokenizer'}")
    for note in notes:
        print(f"  {note}")


def gguf_architecture(model_map: ModelMap) -> str:
    """Return llama.cpp's architecture for a model, with or without weights.

    - `llama` needs the same numbers of heads and channels in all layers; `deci` allows different numbers, and layers
      without attention. Both allow biases everywhere and Llama 3's rope factors. Their query and key rows have another
      order.
    - `qwen2` allows only its own biases, and heads · head_dim must equal the hidden size. Any other Qwen2 is written as
      `llama` or `deci`.
    - `qwen3` is the only one that normalises queries and keys.
    """
    family, config = model_map.model_type, model_map.model.config
    if family not in FAMILIES or text_config(model_map.model) is not config:  # the latter: towers for images or sound
        raise InputError(f"{config.model_type} models are not written as GGUF; supported: {', '.join(FAMILIES)}")
    is_uniform = len({(layer.heads, layer.kv_heads, layer.channels) for layer in gguf_layers(model_map)}) == 1
    biases = [name for name, _ in model_map.model.named_parameters() if name.endswith(".bias")]
    has_biases = any(not (family == "qwen2" and name.endswith(_QWEN2_BIASES)) for name in biases)
    is_stock = is_uniform and not has_biases and rope_of(config)["rope_type"] != "llama3"
    if family == "qwen3" and not is_stock:
        raise InputError("llama.cpp's qwen3 has no layers that differ, biases or llama3's rope; write a checkpoint")
    first = model_map.attention[0]
    if family == "qwen3" or (family == "qwen2" and is_stock and first.heads * first.head_dim == config.hidden_size):
        return family
    return "llama" if is_uniform else "deci"


class GGUFLayer(NamedTuple):
    """One layer of a GGUF file."""

    name: str  # dotted name of the layer's module
    heads: int
    kv_heads: int
    channels: int
    fillers: dict[str, tuple[int, ...]]  # shapes of the weights that stand in for a missing block, by name


def gguf_layers(model_map: ModelMap) -> list[GGUFLayer]:
    """Return the layers of a model with a single stack that have a block."""
    blocks = {layer.index: layer for layer in model_map.attention}
    feed_forward = {block.index: block for block in model_map.feed_forward}
    hidden, width = model_map.model.config.hidden_size, model_map.attention[0].head_dim
    layers: list[GGUFLayer] = []
    for layer in layers_in(model_map.model, model_map.attention[0].family):
        if is_absent(layer.module):
            continue
        attention, channels, shapes = blocks.get(layer.index), 1, dict[str, tuple[int, ...]]()
        if attention is None and not layers:
            shapes |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), (width, hidden))
            shapes |= {"attn_output": (hidden, width), "attn_norm": (hidden,)}
        if layer.index in feed_forward:
            channels = feed_forward[layer.index].channels
        else:
            shapes |= {"ffn_gate": (1, hidden), "ffn_up": (1, hidden), "ffn_down": (hidden, 1), "ffn_norm": (hidden,)}
        heads = (attention.heads, attention.kv_heads) if attention else (int(not layers),) * 2
        layers.append(GGUFLayer(layer.name, *heads, channels, shapes))
    return layers


def rope_of(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **(getattr(config, "rope_parameters", None) or {})}


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
    architecture, dtype = gguf_architecture(model_map), dtype or model.dtype
    file_type = "ALL_F32" if dtype == torch.float32 else f"MOSTLY_{GGUF_TYPES[dtype].name}"
    with new_file(Path(path)) as temporary:
        writer = GGUFWriter(str(temporary), architecture, use_temp_file=True)
        config, width, layers = model.config, model_map.attention[0].head_dim, gguf_layers(model_map)
        limit = config.max_position_embeddings
        writer.add_type("model")
        writer.add_name(model_map.name)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(min(getattr(config, "sliding_window", None) or limit, limit))  # they have no window
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(len(layers))
        for add, numbers in (
            (writer.add_head_count, [layer.heads for layer in layers]),
            (writer.add_head_count_kv, [layer.kv_heads for layer in layers]),
            (writer.add_feed_forward_length, [layer.channels for layer in layers]),
        ):
            add(numbers[0] if len(set(numbers)) == 1 else numbers)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(width)
        rope = rope_of(config)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        writer.add_file_type(LlamaFileType[file_type])
        writer.add_string(MANIFEST, json.dumps(manifest))
        if tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            ends = end_tokens(getattr(model, "generation_config", None)) or end_tokens(model.config)
            add_tokenizer(writer, tokenizer, model.config.vocab_size, splitting, ends)
        heads_of_rows = dict[str, int]()
        if architecture in ("llama", "deci"):
            for layer in model_map.attention:
                heads_of_rows |= {f"{layer.name}.q_proj": layer.heads, f"{layer.name}.k_proj": layer.kv_heads}
        for number, gguf_layer in enumerate(layers):
            for part, shape in gguf_layer.fillers.items():
                values = torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
                add_tensor(writer, f"blk.{number}.{part}.weight", values, dtype)
        gguf_names = get_tensor_name_map(
            next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture), len(layers)
        )
        renumbered = {f"{x.name}.": f"{x.name.rpartition('.')[0]}.{number}." for number, x in enumerate(layers)}
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and tensor.data_ptr() == model.get_input_embeddings().weight.data_ptr():
                continue  # llama.cpp uses the embeddings instead
            layer_name = next((prefix for prefix in renumbered if name.startswith(prefix)), "")
            written = renumbered.get(layer_name, "") + name.removeprefix(layer_name)
            gguf_name = gguf_names.get_name(written, (".weight", ".bias"))
            assert gguf_name, f"llama.cpp's {architecture} has no tensor for {name}"
            if heads := heads_of_rows.get(name.rpartition(".")[0]):
                # rope rotates pairs of a head's rows: i and i + d/2 in transformers, 2i and 2i + 1 in llama.cpp's
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            add_tensor(writer, gguf_name, tensor, dtype)
        if rope["rope_type"] == "llama3":
            frequencies = model.model.rotary_emb.inv_freq.to(torch.float64)
            exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
            add_tensor(writer, "rope_freqs.weight", rope["rope_theta"] ** -exponents / frequencies, torch.float32)
        write_gguf(writer)
    return architecture


def add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Add a matrix as `dtype`, or a vector as float32."""
    gguf_type = GGUF_TYPES[dtype if tensor.dim() > 1 else torch.float32]
    values = tensor.detach().cpu().to(dtype if tensor.dim() > 1 else torch.float32)
    if not values.isfinite().all():
        raise InputError(f"{name} has weights outside the range of {gguf_type.name}; give another --dtype")
    writer.add_tensor(name, quantize(values.float().contiguous().numpy(), gguf_type), raw_dtype=gguf_type)


def write_gguf(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --------------------------------------------------------------------------- tokenizers


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, size: int, splitting: str | None = None, ends: Sequence[int] = ()
) -> None:
    """Add a byte-level BPE tokenizer to a GGUF file, padded to the model's vocabulary; `ends` are its EOS tokens."""
    description, rule = check_tokenizer(tokenizer, splitting)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    added = {token["id"]: token for token in description["added_tokens"]}
    pieces = {number: piece for piece, number in description["model"]["vocab"].items()}
    types = [TokenType.NORMAL if number in pieces else TokenType.UNUSED for number in range(size)]
    for number, token in added.items():
        pieces[number] = token["content"]
        if number < size:
            types[number] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_token_list([pieces.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(types)
    merges = description["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])

    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    others = [x for x in ends if x != numbers["eos"] and tokenizer.convert_ids_to_tokens(x) not in END_TEXTS]
    names = ("eos", "eot", "eom") if numbers["eos"] is None else ("eot", "eom")
    if len(others) > len(names):
        raise InputError(f"llama.cpp has {len(names)} names for the EOS tokens {others}; remove some of eos_token_id")
    for name, number in {**numbers, **dict(zip(names, others, strict=False))}.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    tokens = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(numbers["bos"] is not None and tokens[:1] == [numbers["bos"]])
    writer.add_add_eos_token(numbers["eos"] is not None and tokens[-1:] == [numbers["eos"]])
    writer.add_add_space_prefix(False)
    templates = tokenizer.chat_template  # a text, or a dictionary of texts
    if isinstance(templates, dict):
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    if templates:
        writer.add_chat_template(templates)


def check_tokenizer(tokenizer: Any, splitting: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the content of tokenizer.json, and llama.cpp's name of the pre-tokenizer (default: the recognised one).

    Refuses a tokenizer that llama.cpp cannot reproduce: not byte-level BPE, or one that changes the text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    steps = _parts(description.get("pre_tokenizer"), "pretokenizers")
    if description["model"].get("type") != "BPE" or not any(step["type"] == "ByteLevel" for step in steps):
        raise InputError("only byte-level BPE is written as GGUF; write a checkpoint, and convert it with llama.cpp")
    normalizers = [part["type"] for part in _parts(description.get("normalizer"), "normalizers")]
    unsupported = [kind for kind in normalizers if kind != "NFC"]
    unsupported += ["add_prefix_space"] * any(step.get("add_prefix_space") for step in steps)
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    unsupported += [affix for affix in affixes if description["model"].get(affix)]
    if unsupported:
        raise InputError(f"the tokenizer has {unsupported[0]}, which llama.cpp does not support; write a checkpoint")
    if splitting:
        return description, splitting
    known = tuple(filter(None, map(_splitting_step, steps)))
    if known not in RULE_OF_STEPS:
        raise InputError("the pre-tokenizer is not recognised; name that of llama-vocab.cpp by --splitting")
    rule, ignores_merges = RULE_OF_STEPS[known], bool(description["model"].get("ignore_merges"))
    if ignores_merges != (rule in IGNORING_MERGES):
        raise InputError(f"the tokenizer and llama.cpp's {rule} differ in ignore_merges; name another --splitting")
    return description, rule


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    return [] if step is None else step[name] if step["type"] == "Sequence" else [step]


def _splitting_step(step: dict[str, Any]) -> str:
    """Return a step of the pre-tokenizer as in `RULE_OF_STEPS`; empty if it does not split."""
    if step["type"] == "Split":
        is_isolating = step["behavior"] == "Isolated" and not step["invert"]
        return str(step["pattern"].get("Regex", "none")) if is_isolating else f"Split {step['behavior']}"
    if step["type"] == "Digits" and step["individual_digits"]:
        return "digits"
    if step["type"] == "ByteLevel":
        return "bytes" if step["use_regex"] else ""
    return str(step["type"])
