"""GGUF, llama.cpp's file format: names of architectures and tensors, and a writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from torch import Tensor

from lmeval_prune.architectures import ModelMap, text_config
from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf_layers import gguf_layers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
SERVER_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in GGUF_TYPES}  # types that servers support
_QWEN2_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")


def gguf_architecture(model_map: ModelMap) -> str:
    """Return llama.cpp's architecture for a model.

    - `llama` needs the same numbers of heads and channels in all layers; `deci` allows different numbers, and layers
      without attention. Both allow biases everywhere and Llama 3's rope factors. Their query and key rows have another
      order (`interleave_rows`).
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
    has_factors = rope_of(config)["rope_type"] == "llama3"
    is_stock = is_uniform and not has_biases and not has_factors
    if family == "qwen3" and not is_stock:
        raise InputError(
            "llama.cpp's qwen3 supports neither layers that differ nor biases nor llama3's rope; write a checkpoint"
        )
    first = model_map.attention[0]
    fills_hidden_size = first.heads * first.head_dim == config.hidden_size
    if family == "qwen3" or (family == "qwen2" and is_stock and fills_hidden_size):
        return family
    return "llama" if is_uniform else "deci"


def tensor_names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """Return a function that maps transformers' parameter names to GGUF tensor names, or to None."""
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, layers)
    return lambda name: names.get_name(name, (".weight", ".bias"))


def output_projection(layer: int) -> str:
    """Return the GGUF name of the output projection's weight."""
    return f"blk.{layer}.attn_output.weight"


def rope_of(config: Any) -> dict[str, Any]:
    """Return the rope parameters of a configuration."""
    return {"rope_type": "default", "rope_theta": 10000.0, **(getattr(config, "rope_parameters", None) or {})}


class GGUFFile:
    """A GGUF file whose tensors are converted one at a time, when they are written."""

    def __init__(self, path: Path, architecture: str) -> None:
        self.writer = GGUFWriter(str(path), architecture)
        self._conversions: list[Callable[[], Any]] = []

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype, heads: int = 0) -> None:
        """Add a tensor that `write` converts to `dtype`; with `heads`, `interleave_rows` reorders its rows first."""
        gguf_type = GGUF_TYPES[dtype]

        def convert() -> Any:
            values = interleave_rows(tensor, heads) if heads else tensor
            values = values.detach().cpu().to(dtype)
            if not values.isfinite().all():
                raise InputError(f"{name} has weights outside the range of {gguf_type.name}; give another --dtype")
            return quantize(values.to(torch.float32).contiguous().numpy(), gguf_type)

        size = tensor.numel() * dtype.itemsize
        self.writer.add_tensor_info(name, list(tensor.shape), np.dtype("f4"), size, gguf_type)
        self._conversions.append(convert)

    def write(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        for convert in self._conversions:
            self.writer.write_tensor_data(convert())
        self.writer.close()


def interleave_rows(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection, shape (heads * d, ...), for llama.cpp's `llama` and `deci`.

    Rope rotates pairs of a head's rows: rows i and i + d/2 in transformers, rows 2i and 2i + 1 in these architectures.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
