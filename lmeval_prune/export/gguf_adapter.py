"""Write adapters for llama.cpp, and check the model file that they apply to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features, out_features
from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf_format import GGUF_TYPES, GGUFFile, output_projection
from lmeval_prune.export.updates import Update


def write_gguf_adapter(path: Path, architecture: str, name: str, updates: Iterable[Update]) -> None:
    """Write a GGUF file with an adapter; the server checks that the model has the same architecture."""
    updates = list(updates)
    file = GGUFFile(path, architecture)
    file.writer.add_type("adapter")
    file.writer.add_name(name)
    file.writer.add_string("adapter.type", "lora")
    file.writer.add_float32("adapter.lora.alpha", float(len(updates[0].lora_a)))
    for update in updates:
        projection = output_projection(update.index)
        file.add(f"{projection}.lora_a", update.lora_a, update.lora_a.dtype)
        file.add(f"{projection}.lora_b", update.lora_b, update.lora_b.dtype)
    file.write()


def check_gguf_base(path: Path, architecture: str, model_map: ModelMap, dtype: torch.dtype) -> None:
    """Refuse a GGUF model file whose output projections differ from the adapter's in type or shape."""
    file_architecture, tensors = _read(path)
    if file_architecture != architecture:
        raise InputError(f"{path} is a {file_architecture} model, and the adapter is for {architecture}")
    for layer in model_map.attention:
        name = output_projection(layer.index)
        shape = [in_features(layer.o_proj), out_features(layer.o_proj)]
        if name not in tensors or tensors[name].shape.tolist() != shape:
            raise InputError(f"{path} has no tensor {name} of shape {shape}: it is another model")
        kind = tensors[name].tensor_type
        if kind != GGUF_TYPES[dtype]:
            raise InputError(f"{path} has {name} in {kind.name}, not {GGUF_TYPES[dtype].name}: give another --dtype")


def check_gguf_weights(path: Path, weights: Iterable[tuple[int, Tensor]]) -> None:
    """Refuse a GGUF model file, which passed `check_gguf_base`, with other weights than those that an adapter cancels.

    `weights` are the number of each layer, and its output projection in the file's type.
    """
    _, tensors = _read(path)
    for number, weight in weights:
        stored = tensors[output_projection(number)]
        values = torch.tensor(dequantize(stored.data, stored.tensor_type))  # copied: torch warns of read-only memory
        if not torch.equal(values.view_as(weight), weight.to(torch.float32)):
            raise InputError(
                f"{path} has other weights in {stored.name} than the model that the adapters are made for, so that "
                f"they would not prune it; name its own file: `lmeval-prune export model --format gguf` writes it"
            )


def _read(path: Path) -> tuple[str, dict[str, ReaderTensor]]:
    """Return the architecture and the tensors of a GGUF model file; of one that is split, those of all its parts."""
    architecture = ""
    tensors: dict[str, ReaderTensor] = {}
    for part in _parts(path):
        file = GGUFReader(part)
        architecture = architecture or file.fields["general.architecture"].contents()
        tensors |= {tensor.name: tensor for tensor in file.tensors}
    return architecture, tensors


def _parts(path: Path) -> list[Path]:
    """Return the files of a model that is split as by `llama-gguf-split`."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not match:
        return [path]
    prefix, count = match[1], int(match[3])
    return [path.with_name(f"{prefix}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
