"""Writes an adapter as llama.cpp reads it, and looks at the model file that it is for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from gguf import GGUFReader

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import in_features, out_features
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.export.gguf_names import output_projection
from lmeval_prune.export.gguf_tensors import KINDS, Tensors
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


def check_gguf_base(path: Path, architecture: str, model_map: ModelMap, dtype: torch.dtype) -> None:
    """Refuse a model file whose output projections an adapter cannot cancel.

    Args:
        path: of the file that is to be served.
        architecture: of the adapter.
        model_map: of the model that it is made from.
        dtype: of the adapter.

    Raises:
        InputError: the file cannot be read, is another architecture's, or its projections are of another type or shape.
    """
    if not path.is_file():
        raise InputError(
            f"there is no file {path}, and its types cannot be checked; name the file that is to be served"
        )
    try:
        file = GGUFReader(path)
        own = file.fields["general.architecture"].contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path} is no whole GGUF file ({first_line(error)})") from error
    if own != architecture:
        raise InputError(f"{path} is a {own} model, and the adapter one of {architecture}")
    kinds = {one.name: (one.tensor_type, [int(size) for size in one.shape]) for one in file.tensors}
    for layer in model_map.attention:
        name = output_projection(layer.index)
        if name not in kinds:
            raise InputError(f"{path} has no tensor {name}: it is another model")
        kind, shape = kinds[name]
        if kind != KINDS[dtype]:
            known = [str(one).removeprefix("torch.") for one, its in KINDS.items() if its == kind]
            hint = (
                f"give --dtype {known[0]}" if known else "an adapter cannot cancel rounded weights; serve a plain file"
            )
            raise InputError(f"{path} has {name} in {kind.name}, not {KINDS[dtype].name}: {hint}")
        if shape != [in_features(layer.o_proj), out_features(layer.o_proj)]:
            raise InputError(f"{path} has {name} of shape {shape}: it is another model")
