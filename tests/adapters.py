"""Small LoRA adapters for tests, in PEFT's format, without PEFT."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPES = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (16, 32), "mlp.down_proj": (32, 48)}  # of the tiny Llama


def write_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]] = SHAPES, layers: int = 2, seed: int = 0, **config: Any
) -> Path:
    """Write a random adapter of rank 3 for projections (outputs, inputs) of each layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (outputs, inputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(3, inputs, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, 3, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    modules = [name.rpartition(".")[2] for name in shapes]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "bias": "none"}
    content = {**settings, "target_modules": modules, "base_model_name_or_path": "tiny", **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@cache
def adapter(name: str = "one", **settings: Any) -> str:
    """Write an adapter into a temporary folder of this process, and return its path."""
    folder = Path(tempfile.mkdtemp(prefix="lmeval-prune-adapter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(write_adapter(folder / name, **settings))
