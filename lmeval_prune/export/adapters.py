"""Export heads as LoRA adapters: pruning heads is a low-rank update of their layer's output projection W.

A has the rows of the identity that select the inputs of the pruned heads, and B = -W Aᵀ, so W + B A has zero columns
for these heads. B is computed from the weights in the server's type. Merged in that type, the columns are exactly zero,
which is checked for each adapter. Servers do not merge: in 16 bits, rounding errors of the pruned heads remain.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from markupsafe import Markup
from safetensors.torch import save

from lmeval_prune.architectures import AttentionLayer, ModelMap, map_model
from lmeval_prune.architectures.blocks import is_transposed, weight_of
from lmeval_prune.artefacts import content_digest, digest, new_folder, output_lock, write_artefact, write_bytes
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.skeleton import is_quantised, skeleton_of, with_weights
from lmeval_prune.errors import InputError
from lmeval_prune.export.gguf_adapter import check_gguf_weights, write_gguf_adapter
from lmeval_prune.export.gguf_format import SERVER_DTYPES, gguf_architecture
from lmeval_prune.export.manifest import MANIFEST, SCHEMA, VERSION, adapter_name, read_adapter
from lmeval_prune.export.updates import Update
from lmeval_prune.interventions.compensation import tensors_digest
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.surgery.card import CARD, PIPELINES, auto_class, shown, write_card

Format = Literal["peft", "gguf"]
PLAIN_LINEAR_CLASSES = ("Linear", "Conv1D", "FalconLinear")  # compute x Wᵀ + b and nothing else


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
        format: Format = "peft",
        served: str | None = None,
        revision: str | None = None,
    ) -> None:
        self.pretrained, self.revision = pretrained, revision
        self.output, self.format = Path(output), format
        self.served = served or embedded.resolve(pretrained)
        skeleton = skeleton_of(pretrained, revision)
        check_adaptable(map_model(skeleton), pretrained)
        self.model_map = map_model(with_weights(skeleton, pretrained, revision))
        self.names = {module: name for name, module in self.model_map.model.named_modules()}
        self.architecture = gguf_architecture(self.model_map) if format == "gguf" else ""
        stored = weight_of(self.model_map.attention[0].o_proj).dtype
        self.torch_dtype = SERVER_DTYPES[dtype] if dtype else stored
        self.dtype = str(self.torch_dtype).removeprefix("torch.")
        self.masks = self._by_name(masks)
        if format == "gguf" and (served or self.served.endswith(".gguf")):  # files of ollama have other names
            check_gguf_weights(Path(self.served), self._pruned_weights())
        self.rank = max(self._rank(mask) for mask in self.masks.values())
        self.base = {
            "pretrained": self.served,
            "name": self.model_map.name,
            "revision": self.model_map.revision,
            "checkpoint": checkpoint_identity(pretrained, revision),
            **self.model_map.signature(),
        }

    def _by_name(self, masks: Sequence[HeadMask]) -> dict[str, HeadMask]:
        """Return the masks by adapter name, ordered by layer, without duplicates."""
        resolved = [mask.fit_to(self.model_map) for mask in masks]
        resolved.sort(key=lambda mask: [layer.index for layer, _ in self._layers(mask)])
        return {adapter_name(mask.heads): mask for mask in resolved}

    def _layers(self, mask: HeadMask) -> list[tuple[AttentionLayer, list[int]]]:
        return HeadMask(mask.heads, allow_empty_layer=True).by_layer(self.model_map)

    def _pruned_weights(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and the output projection, in the server's type, of each layer that a mask prunes."""
        pruned = {layer.index: layer for mask in self.masks.values() for layer, _ in self._layers(mask)}
        for number, layer in sorted(pruned.items()):
            yield number, weight_of(layer.o_proj).to(self.torch_dtype)

    def _rank(self, mask: HeadMask) -> int:
        return max(len(heads) * layer.head_dim for layer, heads in self._layers(mask))

    def run(self) -> Iterator[tuple[str, bool]]:
        """Write the adapters; yield the name of each, and whether it is new."""
        with output_lock(self.output):
            for name, mask in self.masks.items():
                folder = self.output / name
                exists = folder.exists()
                if exists:
                    self._check_existing(folder, mask)
                else:
                    updates = list(self.updates(mask))
                    with new_folder(folder) as temporary:
                        self._write(temporary, name, mask, updates)
                yield name, not exists

    def updates(self, mask: HeadMask) -> Iterator[Update]:
        """Compute and check the update of each layer of a mask."""
        for layer, heads in self._layers(mask):
            weight = weight_of(layer.o_proj).to(self.torch_dtype)
            yield Update.of(self.names[layer.o_proj], layer, heads, weight, self.rank)

    def _check_existing(self, folder: Path, mask: HeadMask) -> None:
        manifest = read_adapter(folder)
        expected = {"heads": list(mask.heads), "format": self.format, "dtype": self.dtype}
        expected["base"] = json.loads(json.dumps(self.base))
        differs = [name for name, value in expected.items() if manifest[name] != value]
        if differs:
            raise InputError(f"{folder} is an adapter of another {differs[0]}; name another folder, or remove it")
        for name, sha256 in manifest["files"].items():
            if content_digest(folder / name) != sha256:
                raise InputError(f"{folder}/{name} has changed since the export; remove {folder} to export it again")

    def _write(self, folder: Path, name: str, mask: HeadMask, updates: list[Update]) -> None:
        if self.format == "gguf":
            write_gguf_adapter(folder / "adapter.gguf", self.architecture, name, updates)
        else:
            tensors = {
                f"base_model.model.{update.module}.lora_{part}.weight": tensor.contiguous()
                for update in updates
                for part, tensor in (("A", update.lora_a), ("B", update.lora_b))
            }
            write_bytes(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
            config = json.dumps(self._peft_config(updates), indent=2) + "\n"
            write_bytes(folder / "adapter_config.json", config.encode())
        columns = {update.module: update.lora_b[:, : update.columns] for update in updates}
        modules = {update.module: list(update.heads) for update in updates}
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
        self._write_card(folder, name, mask)

    def _write_card(self, folder: Path, name: str, mask: HeadMask) -> None:
        known, loader = embedded.name_of(self.pretrained), auto_class(self.model_map.model)
        pretrained, pipeline = known or shown(self.pretrained), PIPELINES.get(loader.removeprefix("AutoModel"))
        removed = [f"attention heads {'+'.join(mask.heads)}, by a LoRA update of rank {self.rank}"]
        write_card(
            folder / CARD, name, (self.pretrained, self.revision), "gguf" if self.format == "gguf" else "peft",
            ["lora", "pruned"], removed, pipeline, auto_class="" if known else loader, dtype=self.dtype,
            pretrained=pretrained, pretrained_quoted=Markup(shlex.quote(pretrained)), is_adapter=True,
        )  # fmt: skip

    def _peft_config(self, updates: list[Update]) -> dict[str, Any]:
        model = self.model_map.model
        task = "CAUSAL_LM" if model.can_generate() else "FEATURE_EXTRACTION"
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else task,
            "base_model_name_or_path": self.served,
            "r": self.rank,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": [update.module for update in updates],
            "fan_in_fan_out": is_transposed(self.model_map.attention[0].o_proj),
            "init_lora_weights": True,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "inference_mode": True,
        }


def check_adaptable(model_map: ModelMap, pretrained: str) -> None:
    """Refuse a model whose output projections LoRA cannot update exactly."""
    kinds = {type(layer.o_proj).__name__ for layer in model_map.attention}
    if is_quantised(model_map.model) or not kinds <= {*PLAIN_LINEAR_CLASSES}:
        raise InputError(
            f"an adapter cannot cancel columns of {pretrained} exactly (quantised, or {' and '.join(sorted(kinds))}); "
            f"give plain weights as --pretrained, and {pretrained} as --served"
        )
