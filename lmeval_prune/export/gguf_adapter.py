"""Write adapters for llama.cpp, and check the model file that they apply to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf_format import GGUFFile, output_projection
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


def check_gguf_weights(path: Path, weights: Iterable[tuple[int, Tensor]]) -> None:
    """Refuse a GGUF model file with other weights than those that an adapter cancels.

    `weights` are the number of each layer, and its output projection in the type of the server.
    """
    tensors = {tensor.name: tensor for part in _parts(path) for tensor in GGUFReader(part).tensors}
    for number, weight in weights:
        name = output_projection(number)
        stored = tensors.get(name)
        # copied: torch warns of read-only memory
        values = None if stored is None else torch.tensor(dequantize(stored.data, stored.tensor_type))
        if values is None or values.shape != weight.shape or not torch.equal(values, weight.to(torch.float32)):
            raise InputError(
                f"{path} has other weights in {name} than the model that the adapters are made for, so that they would "
                f"not prune it; name its own file: `lmeval-prune export model --format gguf` writes it"
            )


def _parts(path: Path) -> list[Path]:
    """Return the files of a model that is split as by `llama-gguf-split`."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not match:
        return [path]
    prefix, count = match[1], int(match[3])
    return [path.with_name(f"{prefix}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
