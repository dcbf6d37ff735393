"""Read output projections one at a time, so that exports of large models need little memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from lmeval_prune.architectures import AttentionLayer, ModelMap, tensor_in_layer
from lmeval_prune.architectures.blocks import in_features, is_transposed, out_features
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import broken_weights_message
from lmeval_prune.checkpoints.skeleton import with_weights
from lmeval_prune.errors import InputError


class Projections:
    """Weights of output projections, read from the safetensors files of a checkpoint.

    The whole model is loaded if the files do not have the names of its modules: other formats, and names that
    transformers changes when it loads the model.
    """

    def __init__(self, pretrained: str, model_map: ModelMap, revision: str | None = None) -> None:
        self.pretrained, self.revision, self.model_map = pretrained, revision, model_map
        self.names = {module: name for name, module in model_map.model.named_modules()}
        self._last: tuple[str, Tensor] | None = None

    def name(self, layer: AttentionLayer) -> str:
        """Return the full name of a layer's output projection."""
        return self.names[layer.o_proj]

    def weight(self, layer: AttentionLayer) -> Tensor:
        """Return a projection's weight in its stored type, shape (outputs, inputs); the last weight is cached."""
        name = self.name(layer)
        if self._last is None or self._last[0] != name:
            self._last = None  # free its memory before reading
            self._last = (name, self._read(name, layer.o_proj))
        return self._last[1]

    def _read(self, name: str, module: nn.Module) -> Tensor:
        transposed = is_transposed(module)
        prefix = f"{self.model_map.model.base_model_prefix}."
        shape = (
            [in_features(module), out_features(module)] if transposed else [out_features(module), in_features(module)]
        )
        for stored_name in (name, name.removeprefix(prefix), prefix + name):
            file = self._files.get(f"{stored_name}.weight")
            if file is None:
                continue
            with safe_open(file, "pt") as opened:
                weight: Tensor = opened.get_tensor(f"{stored_name}.weight")
            if list(weight.shape) == shape:
                if not weight.isfinite().all():
                    raise InputError(broken_weights_message(self.pretrained, tensor_in_layer(f"{name}.weight")))
                return weight.T if transposed else weight
        weight = self.model.get_submodule(name).weight.detach()
        return weight.T if transposed else weight

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Return the file of each tensor."""
        file_of: dict[str, Path] = {}
        for file in self._safetensors():
            with safe_open(file, "pt") as opened:
                file_of |= dict.fromkeys(opened.keys(), Path(file))
        return file_of

    def _safetensors(self) -> list[Path]:
        """Return the safetensors files that transformers would read; the folder may hold others."""
        source = embedded.resolve(self.pretrained)
        for name in ("model.safetensors", "model.safetensors.index.json"):
            try:
                file = cached_file(source, name, revision=self.revision)
                if file and name.endswith(".json"):
                    return [
                        Path(shard) for shard in get_checkpoint_shard_files(source, file, revision=self.revision)[0]
                    ]
            except (OSError, ValueError):
                continue
            if file:
                return [Path(file)]
        return []

    @cached_property
    def model(self) -> Any:
        """Load the whole model."""
        return with_weights(self.model_map.model, self.pretrained, self.revision)
