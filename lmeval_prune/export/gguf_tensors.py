"""Tensors of PyTorch in a GGUF file, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

KINDS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


class Tensors:
    """Tensors that are to stand in a GGUF file; each is converted when it is written, and not kept.

    Attributes:
        writer: of the file; settings are added to it.
    """

    def __init__(self, path: Path, architecture: str) -> None:
        self.writer = GGUFWriter(str(path), architecture)
        self._later: list[Callable[[], Any]] = []

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype, heads: int = 0) -> None:
        """Add a tensor.

        Args:
            name: as llama.cpp calls it.
            tensor: its values.
            dtype: type in which they are written.
            heads: if not 0, the rows of so many heads are written in the order of `interleaved`.
        """
        kind = KINDS[dtype]

        def data() -> Any:
            values = interleaved(tensor, heads) if heads else tensor
            return quantize(values.detach().cpu().to(dtype).to(torch.float32).contiguous().numpy(), kind)

        self.writer.add_tensor_info(name, list(tensor.shape), np.dtype("f4"), tensor.numel() * dtype.itemsize, kind)
        self._later.append(data)

    def write(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        for data in self._later:
            self.writer.write_tensor_data(data())
        self.writer.close()


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp's `llama` and `deci` rotate them.

    Rotary embedding turns pairs. Transformers pairs row i of a head with row i + d/2, these architectures rows 2i and
    2i + 1: row i goes to place 2i, row i + d/2 to 2i + 1.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
