"""Writes an adapter as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmeval_prune.export.gguf_names import output_projection
from lmeval_prune.export.gguf_tensors import Tensors
from lmeval_prune.export.updates import Update


def write_gguf_adapter(path: Path, architecture: str, name: str, updates: Iterable[Update]) -> None:
    """Write a GGUF file with an adapter.

    Args:
        path: where to.
        architecture: llama.cpp's name of the model's, which the server compares with that of the model.
        name: of the adapter.
        updates: what it adds to output projections.
    """
    updates = list(updates)
    tensors = Tensors(path, architecture)
    tensors.writer.add_type("adapter")
    tensors.writer.add_name(name)
    tensors.writer.add_string("adapter.type", "lora")
    tensors.writer.add_float32("adapter.lora.alpha", float(len(updates[0].lora_a)))
    for one in updates:
        projection = output_projection(one.index)
        tensors.add(f"{projection}.lora_a", one.lora_a, one.lora_a.dtype)
        tensors.add(f"{projection}.lora_b", one.lora_b, one.lora_b.dtype)
    tensors.write()
