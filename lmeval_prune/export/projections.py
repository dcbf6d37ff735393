"""Reads a model's output projections one at a time, so that a pool of adapters needs no whole model in memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from lmeval_prune.architectures import AttentionLayer, ModelMap, tensor_in_layer
from lmeval_prune.architectures.blocks import in_features, is_transposed, out_features
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.pruned import broken_weights
from lmeval_prune.checkpoints.skeleton import with_weights
from lmeval_prune.errors import InputError, first_line


class Projections:
    """The weights of output projections, from a checkpoint's safetensors files where they have them by name.

    Else (other formats, names that transformers changes as it loads) the model is loaded once.

    Args:
        pretrained, revision: the model, as for lm_eval.
        model_map: of the model without weights.
    """

    def __init__(self, pretrained: str, model_map: ModelMap, revision: str | None = None) -> None:
        self.pretrained, self.revision, self.model_map = pretrained, revision, model_map
        self.names = {module: name for name, module in model_map.model.named_modules()}
        self._last: tuple[str, Tensor] | None = None

    def name(self, layer: AttentionLayer) -> str:
        """Full name of a layer's output projection."""
        return self.names[layer.o_proj]

    def weight(self, layer: AttentionLayer) -> Tensor:
        """A projection's weight as it is stored, (outputs, inputs); the last one that was read is remembered.

        Raises:
            InputError: it cannot be read.
        """
        name = self.name(layer)
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is read
            self._last = (name, self._read(name, layer.o_proj))
        return self._last[1]

    def _read(self, name: str, like: nn.Module) -> Tensor:
        transposed = is_transposed(like)
        prefix = f"{self.model_map.model.base_model_prefix}."
        shape = [in_features(like), out_features(like)] if transposed else [out_features(like), in_features(like)]
        for known in (name, name.removeprefix(prefix), prefix + name):
            file = self._files.get(f"{known}.weight")
            if file is None:
                continue
            try:
                with safe_open(file, "pt") as opened:
                    found: Tensor = opened.get_tensor(f"{known}.weight")
            except (OSError, SafetensorError) as error:
                raise InputError(f"the weights of {self.pretrained} cannot be read ({first_line(error)})") from error
            if list(found.shape) == shape:
                if not found.isfinite().all():
                    raise InputError(broken_weights(self.pretrained, tensor_in_layer(f"{name}.weight")))
                return found.T if transposed else found
        whole = self.model.get_submodule(name).weight.detach()
        return whole.T if transposed else whole

    @cached_property
    def _files(self) -> dict[str, Path]:
        """By tensor, the file that it is in."""
        found: dict[str, Path] = {}
        for file in self._safetensors():
            try:
                with safe_open(file, "pt") as opened:
                    found |= dict.fromkeys(opened.keys(), Path(file))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{file} cannot be read ({first_line(error)}); fetch the model again") from error
        return found

    def _safetensors(self) -> list[Path]:
        """The files that transformers would read, of a folder or a hub; none if there are no safetensors.

        Others beside them do not count: a folder may hold weights of other days.
        """
        settings: dict[str, Any] = {"revision": self.revision}
        source = embedded.resolve(self.pretrained)
        for name in ("model.safetensors", "model.safetensors.index.json"):
            try:
                file = cached_file(source, name, **settings)
                if file and name.endswith(".json"):
                    return [Path(one) for one in get_checkpoint_shard_files(source, file, **settings)[0]]
            except (OSError, ValueError):
                continue
            if file:
                return [Path(file)]
        return []

    @cached_property
    def model(self) -> Any:
        """The whole model, loaded when it is first asked for."""
        return with_weights(self.model_map.model, self.pretrained, self.revision)
