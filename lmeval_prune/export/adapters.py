"""Export heads as LoRA adapters: pruning heads is a low-rank update of their layer's output projection W.

A has the rows of the identity that select the inputs of the pruned heads, and B = -W Aᵀ, so W + B A has zero columns
for these heads. B is computed from the weights in the server's type. Merged in that type, the columns are exactly zero,
which is checked for each adapter. Servers do not merge: in 16 bits, rounding errors of the pruned heads remain.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


@dataclass(frozen=True)
class Update:
    """A low-rank update of an output projection: `lora_b @ lora_a` is added to its weight."""

    module: str  # full name of the projection
    index: int  # of its layer
    heads: list[int]  # pruned heads
    lora_a: Tensor  # (rank, inputs), rows of the identity
    lora_b: Tensor  # (outputs, rank), the negated weight columns of these inputs
    columns: int  # used columns of `lora_b` and rows of `lora_a`; the others are zero


class AdapterExport:
    """Exports an adapter for each mask to a folder of its own; existing adapters are kept.

    Args:
        pretrained, revision: the model, as for lm_eval.
        masks: the heads of each adapter.
        output: folder for the adapters' folders.
        dtype: type in which the server computes; default: the type of the weights.
        format: `peft`, or `gguf` for llama.cpp.
        served: name of the model on the server; default `pretrained`.
    """

    def __init__(
        self,
        pretrained: str,
        masks: Sequence[HeadMask],
        output: str,
        dtype: str | None = None,
        format: Literal["peft", "gguf"] = "peft",
        served: str | None = None,
        revision: str | None = None,
    ) -> None:
        self.pretrained, self.revision = pretrained, revision
        self.output, self.format = Path(output), format
        self.served = served or embedded.resolve(pretrained)
        skeleton = skeleton_of(pretrained, revision)
        kinds = {type(layer.o_proj).__name__ for layer in map_model(skeleton).attention}
        if is_quantised(skeleton) or not kinds <= PLAIN_LINEAR_CLASSES:
            raise InputError(
                f"an adapter cannot cancel columns of {', '.join(sorted(kinds))} exactly, or of quantised weights; "
                f"give plain weights as --pretrained, and {pretrained} as --served"
            )
        self.model_map = map_model(with_weights(skeleton, pretrained, revision))
        self.architecture = gguf_architecture(self.model_map) if format == "gguf" else ""
        stored = weight_of(self.model_map.attention[0].o_proj).dtype
        self.torch_dtype = SERVER_DTYPES[dtype] if dtype else stored
        self.dtype = str(self.torch_dtype).removeprefix("torch.")
        resolved = [mask.fit_to(self.model_map) for mask in masks]
        resolved.sort(key=lambda mask: [layer.index for layer, _ in self._layers(mask)])
        self.masks = {adapter_name(mask.heads): mask for mask in resolved}
        if format == "gguf" and (served or self.served.endswith(".gguf")):  # files of ollama have other names
            self._check_gguf_weights(Path(self.served))
        pruned = [pair for mask in resolved for pair in self._layers(mask)]
        self.rank = max(len(heads) * layer.head_dim for layer, heads in pruned)
        self.base = {
            "pretrained": self.served,
            "name": self.model_map.name,
            "revision": self.model_map.revision,
            "checkpoint": checkpoint_identity(pretrained, revision),
            **self.model_map.signature(),
        }

    def _layers(self, mask: HeadMask) -> list[tuple[AttentionLayer, list[int]]]:
        return HeadMask(mask.heads, allow_empty_layer=True).by_layer(self.model_map)

    def _check_gguf_weights(self, path: Path) -> None:
        """Refuse a GGUF model file with other weights than those that the adapters cancel."""
        paths = [path]
        if split := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name):  # as by `llama-gguf-split`
            count = int(split[2])
            paths = [path.with_name(f"{split[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
        tensors = {tensor.name: tensor for part in paths for tensor in GGUFReader(part).tensors}
        for layer in dict.fromkeys(layer for mask in self.masks.values() for layer, _ in self._layers(mask)):
            name, weight = f"blk.{layer.index}.attn_output.weight", weight_of(layer.o_proj).to(self.torch_dtype)
            stored = tensors.get(name)
            # copied: torch warns of read-only memory
            values = None if stored is None else torch.tensor(dequantize(stored.data, stored.tensor_type))
            is_same = values is not None and torch.equal(values, weight.float())
            # ggml rounds a layer's input to the type of its weights: the adapter, of another one, would leave a rest
            if stored is None or not is_same or stored.tensor_type != GGUF_TYPES[weight.dtype]:
                raise InputError(
                    f"{path} has other weights in {name}, or of another type, than the adapters: they would not "
                    f"prune it; name its own file: `lmeval-prune export model --format gguf` writes it"
                )

    def run(self) -> Iterator[tuple[str, bool]]:
        """Write the adapters; yield the name of each, and whether it is new."""
        with output_lock(self.output):
            for name, mask in self.masks.items():
                folder = self.output / name
                if is_new := not folder.exists():
                    updates = list(self.updates(mask))
                    with new_folder(folder) as temporary:
                        self._write(temporary, name, mask, updates)
                else:
                    manifest = read_adapter(folder)
                    own = {"heads": list(mask.heads), "format": self.format, "dtype": self.dtype, "base": self.base}
                    if differs := [key for key, value in own.items() if manifest[key] != value]:
                        raise InputError(
                            f"{folder} is an adapter of another {differs[0]}; name another folder, or remove it"
                        )
                    for file, sha256 in manifest["files"].items():
                        if content_digest(folder / file) != sha256:
                            raise InputError(f"{folder}/{file} has changed since; remove {folder} to export it again")
                yield name, is_new

    def updates(self, mask: HeadMask) -> Iterator[Update]:
        """Compute the update of each layer of a mask; check that it only zeroes columns if merged."""
        names = {module: name for name, module in self.model_map.model.named_modules()}
        for layer, heads in self._layers(mask):
            weight, columns = weight_of(layer.o_proj).to(self.torch_dtype), columns_of(layer, heads)
            lora_a = weight.new_zeros(self.rank, weight.shape[1])
            lora_a[range(len(columns)), columns] = 1
            lora_b = weight.new_zeros(weight.shape[0], self.rank)
            lora_b[:, : len(columns)] = -weight[:, columns]
            exact = torch.promote_types(weight.dtype, torch.float32)
            expected = weight.clone()
            expected[:, columns] = 0
            if not torch.equal(weight + (lora_b.to(exact) @ lora_a.to(exact)).to(weight.dtype), expected):
                raise InputError(f"merged into {names[layer.o_proj]}, the adapter is not exact; give another --dtype")
            yield Update(names[layer.o_proj], layer.index, heads, lora_a, lora_b, len(columns))

    def _write(self, folder: Path, name: str, mask: HeadMask, updates: list[Update]) -> None:
        if self.format == "gguf":
            writer = GGUFWriter(str(folder / "adapter.gguf"), self.architecture)
            writer.add_type("adapter")
            writer.add_name(name)
            writer.add_string("adapter.type", "lora")
            writer.add_float32("adapter.lora.alpha", float(self.rank))
            for update in updates:
                for part, tensor in (("a", update.lora_a), ("b", update.lora_b)):
                    place = f"blk.{update.index}.attn_output.weight.lora_{part}"
                    add_tensor(writer, place, tensor, self.torch_dtype)
            write_gguf(writer)
        else:
            tensors = {
                f"base_model.model.{update.module}.lora_{part}.weight": tensor.contiguous()
                for update in updates
                for part, tensor in (("A", update.lora_a), ("B", update.lora_b))
            }
            write_bytes(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
            model = self.model_map.model
            task = "CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION"
            config = {
                "peft_type": "LORA",
                "task_type": "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else task,
                "base_model_name_or_path": self.served,
                "r": self.rank,
                "lora_alpha": self.rank,
                "target_modules": [update.module for update in updates],
                "fan_in_fan_out": is_transposed(self.model_map.attention[0].o_proj),
                "inference_mode": True,
            }
            write_bytes(folder / "adapter_config.json", f"{json.dumps(config, indent=2)}\n".encode())
        columns = {update.module: update.lora_b[:, : update.columns] for update in updates}
        modules = {update.module: update.heads for update in updates}
        content = {
            "name": name,
            "heads": list(mask.heads),
            "format": self.format,
            "dtype": self.dtype,
            "rank": self.rank,
            "hash": digest([tensors_digest(columns), modules, self.dtype]),
            "base": self.base,
            "modules": modules,
            "files": {file.name: content_digest(file) for file in sorted(folder.iterdir())},
        }
        write_artefact(folder / MANIFEST, SCHEMA, VERSION, content)
        known, loader = embedded.name_of(self.pretrained), auto_class(self.model_map.model)
        pretrained, pipeline = known or shown(self.pretrained), PIPELINES.get(loader.removeprefix("AutoModel"))
        removed = [f"attention heads {'+'.join(mask.heads)}, by a LoRA update of rank {self.rank}"]
        write_card(
            folder / CARD, name, (self.pretrained, self.revision), self.format, ["lora", "pruned"], removed, pipeline,
            auto_class="" if known else loader, dtype=self.dtype, pretrained=pretrained,
            pretrained_quoted=Markup(shlex.quote(pretrained)), is_adapter=True,
        )  # fmt: skip
