"""Export heads as LoRA adapters: pruning heads is a low-rank update of their layer's output projection W.

A has the rows of the identity that select the inputs of the pruned heads, and B = -W Aᵀ, so W + B A has zero columns
for these heads. B is computed from the weights in the server's type. Merged in that type, the columns are exactly zero,
which is checked for each adapter. Servers do not merge: in 16 bits, rounding errors of the pruned heads remain.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from markupsafe import Markup
from safetensors.torch import save
from torch import Tensor

from lmeval_prune.architectures import AttentionLayer, map_model
from lmeval_prune.architectures.blocks import columns_of, is_transposed, weight_of
from lmeval_prune.artefacts import content_digest, digest, new_folder, output_lock, write_artefact, write_bytes
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import checkpoint_identity, is_quantised, skeleton_of, with_weights
from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf import GGUF_TYPES, SERVER_DTYPES, add_tensor, gguf_architecture, write_gguf
from lmeval_prune.export.manifest import MANIFEST, SCHEMA, VERSION, adapter_name, read_adapter
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.plan import tensors_digest
from lmeval_prune.surgery.card import CARD, PIPELINES, auto_class, shown, write_card

PLAIN_LINEAR_CLASSES = {"Linear", "Conv1D", "FalconLinear"}  # compute x Wᵀ + b and nothing else


def export_adapters(
    pretrained: str,
    masks: Sequence[HeadMask],
    output: str,
    dtype: str | None = None,
    format: Literal["peft", "gguf"] = "peft",
    served: str | None = None,
    revision: str | None = None,
) -> tuple[dict[str, Any], Any]:
    """Write an adapter for each mask to a folder of its own, and print its name; existing adapters are kept.

    Arguments as in `lmeval-prune export adapter`. Returns the fields `format`, `dtype` and `base` of the adapters'
    manifests, and the configuration of the model.
    """
    skeleton, name_or_file = skeleton_of(pretrained, revision), served or embedded.resolve(pretrained)
    kinds = {type(layer.o_proj).__name__ for layer in map_model(skeleton).attention}
    if is_quantised(skeleton) or not kinds <= PLAIN_LINEAR_CLASSES:
        raise InputError(
            f"an adapter is not exact for {', '.join(kinds)} or quantised weights; give plain ones as --pretrained, "
            f"and {pretrained} as --served"
        )
    model_map = map_model(with_weights(skeleton, pretrained, revision))
    kind = SERVER_DTYPES[dtype] if dtype else weight_of(model_map.attention[0].o_proj).dtype
    fitted = {mask.heads: mask.by_layer(model_map) for mask in (mask.fit_to(model_map) for mask in masks)}
    pools = sorted(fitted.items(), key=lambda pool: [layer.index for layer, _ in pool[1]])
    pruned = [pair for _, pairs in pools for pair in pairs]
    if format == "gguf":
        gguf_architecture(model_map)  # refuses others
        if served or name_or_file.endswith(".gguf"):  # files of ollama have other names
            _check_gguf_weights(Path(name_or_file), dict.fromkeys(layer for layer, _ in pruned), kind)
    rank = max(len(heads) * layer.head_dim for layer, heads in pruned)
    base = {
        "pretrained": name_or_file,
        "name": model_map.name,
        "revision": model_map.revision,
        "checkpoint": checkpoint_identity(pretrained, revision),
        **model_map.signature(),
    }
    settings: dict[str, Any] = {"format": format, "dtype": str(kind).removeprefix("torch."), "base": base}
    model, known, loader, written = model_map.model, embedded.name_of(pretrained), auto_class(model_map.model), 0
    name_of = {module: name for name, module in model.named_modules()}
    with output_lock(Path(output)):
        for heads, layers in pools:
            name = adapter_name(heads)
            folder, own = Path(output) / name, {"name": name, "heads": list(heads), **settings}
            if folder.exists():
                manifest = read_adapter(folder)
                if other := [key for key, value in own.items() if manifest[key] != value]:
                    raise InputError(f"{folder} is an adapter of another {other[0]}; name another folder, or remove it")
                if any(content_digest(folder / file) != sha256 for file, sha256 in manifest["files"].items()):
                    raise InputError(f"files of {folder} have changed since; remove it to export the adapter again")
                continue
            updates = {layer: _update(layer, lost, kind, rank, name_of[layer.o_proj]) for layer, lost in layers}
            parts = [(layer, part, x) for layer, pair in updates.items() for part, x in zip("ab", pair, strict=True)]
            modules = {name_of[layer.o_proj]: lost for layer, lost in layers}
            used = {name_of[layer.o_proj]: updates[layer][1][:, : len(lost) * layer.head_dim] for layer, lost in layers}
            with new_folder(folder) as unfinished:
                if format == "gguf":
                    writer = GGUFWriter(str(unfinished / "adapter.gguf"), gguf_architecture(model_map))
                    writer.add_type("adapter")
                    writer.add_name(name)
                    writer.add_string("adapter.type", "lora")
                    writer.add_float32("adapter.lora.alpha", float(rank))
                    for layer, part, tensor in parts:
                        add_tensor(writer, f"blk.{layer.index}.attn_output.weight.lora_{part}", tensor, kind)
                    write_gguf(writer)
                else:
                    tensors = {
                        f"base_model.model.{name_of[layer.o_proj]}.lora_{part.upper()}.weight": tensor.contiguous()
                        for layer, part, tensor in parts
                    }
                    write_bytes(unfinished / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
                    task = "CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION"
                    config = {
                        "peft_type": "LORA",
                        "task_type": "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else task,
                        "base_model_name_or_path": name_or_file,
                        "r": rank,
                        "lora_alpha": rank,
                        "target_modules": [*modules],
                        "fan_in_fan_out": is_transposed(model_map.attention[0].o_proj),
                        "inference_mode": True,
                    }
                    write_bytes(unfinished / "adapter_config.json", f"{json.dumps(config, indent=2)}\n".encode())
                content = {
                    **own,
                    "rank": rank,
                    "hash": digest([tensors_digest(used), modules, own["dtype"]]),
                    "modules": modules,
                    "files": {file.name: content_digest(file) for file in sorted(unfinished.iterdir())},
                }
                write_artefact(unfinished / MANIFEST, SCHEMA, VERSION, content)
                shown_name = known or shown(pretrained)
                removed = [f"attention heads {'+'.join(heads)}, by a LoRA update of rank {rank}"]
                write_card(
                    unfinished / CARD, name, (pretrained, revision), format, ["lora", "pruned"], removed,
                    PIPELINES.get(loader), auto_class="" if known else loader, dtype=own["dtype"],
                    pretrained=shown_name, pretrained_quoted=Markup(shlex.quote(shown_name)), is_adapter=True,
                )  # fmt: skip
            written += 1
            print(folder, flush=True)
    counts = f"{written} adapters written, {len(pools) - written} kept"
    print(f"{output}: {counts}; rank {rank}, {settings['dtype']}; merged, all are exact")
    return settings, model_map.model.config


def _update(
    layer: AttentionLayer, heads: Sequence[int], dtype: torch.dtype, rank: int, name: str
) -> tuple[Tensor, Tensor]:
    """Compute A (rank, inputs) and B (outputs, rank) of a layer without some heads; check that merged, B A is exact.

    Rows of A and columns of B beyond the heads' width are zero.
    """
    weight, columns = weight_of(layer.o_proj).to(dtype), columns_of(layer, heads)
    lora_a = weight.new_zeros(rank, weight.shape[1])
    lora_a[range(len(columns)), columns] = 1
    lora_b = weight.new_zeros(weight.shape[0], rank)
    lora_b[:, : len(columns)] = -weight[:, columns]
    exact = torch.promote_types(weight.dtype, torch.float32)
    expected = weight.clone()
    expected[:, columns] = 0
    if not torch.equal(weight + (lora_b.to(exact) @ lora_a.to(exact)).to(weight.dtype), expected):
        raise InputError(f"merged into {name}, the adapter is not exact; give another --dtype")
    return lora_a, lora_b


def _check_gguf_weights(path: Path, layers: Iterable[AttentionLayer], dtype: torch.dtype) -> None:
    """Refuse a GGUF model file with other weights than those that the adapters cancel."""
    paths = [path]
    if split := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name):  # as by `llama-gguf-split`
        count = int(split[2])
        paths = [path.with_name(f"{split[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    tensors = {tensor.name: tensor for part in paths for tensor in GGUFReader(part).tensors}
    for layer in layers:
        name, weight = f"blk.{layer.index}.attn_output.weight", weight_of(layer.o_proj).to(dtype)
        stored = tensors.get(name)
        # copied: torch warns of read-only memory
        values = None if stored is None else torch.tensor(dequantize(stored.data, stored.tensor_type))
        is_same = values is not None and torch.equal(values, weight.float())
        # ggml rounds a layer's input to the type of its weights: the adapter, of another one, would leave a rest
        if stored is None or not is_same or stored.tensor_type != GGUF_TYPES[weight.dtype]:
            raise InputError(f"{path} has other weights in {name}, or of another type, than the adapters")
