"""Configuration, tokenizer and modules of a model in a folder or on the hub, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.artefacts import digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import as_input_error, language_skeleton
from lmeval_prune.checkpoints.modeling_pruned import without_warnings_of_layers
from lmeval_prune.models.arguments import FAMILY_DESCRIPTION


class Checkpoint:
    """A language model without weights; `InputError` if it does not exist or is not a language model.

    Args:
        loading: model_args that load the model, including `pretrained`; see `Arguments.loading`.

    Attributes:
        path: folder, or name on the hub.
        config: transformers' configuration.
        map: the model's layers and heads.
    """

    def __init__(self, loading: Mapping[str, Any]) -> None:
        self.loading = dict(loading)
        self.path = embedded.resolve(str(loading["pretrained"]))
        embedded.check_name(self.path, self.loading)
        self._trust = bool(loading.get("trust_remote_code"))
        with self._refused(), without_warnings_of_layers():
            self.config: Any = AutoConfig.from_pretrained(
                self.path, **self.files, revision=self.revision, trust_remote_code=self._trust
            )
        bare = language_skeleton(self.config, self._trust)
        self.map: ModelMap = map_model(bare, **{name: loading[name] for name in FAMILY_DESCRIPTION if name in loading})

    def _refused(self) -> Any:
        name = "/".join([str(self.loading["pretrained"]), *self.files.values()])
        return as_input_error(f"cannot read the model {name}; correct pretrained=")

    @property
    def revision(self) -> Any:
        """Return the revision on the hub, or None."""
        return self.loading.get("revision")

    @property
    def files(self) -> dict[str, str]:
        """Return `subfolder` and `gguf_file`, if they are set."""
        return {name: str(self.loading[name]) for name in ("subfolder", "gguf_file") if self.loading.get(name)}

    @cached_property
    def tokenizer(self) -> Any:
        """Load the same tokenizer as `hf`."""
        files = dict(self.files)
        if name := self.loading.get("tokenizer"):
            files.pop("gguf_file", None)
        with self._refused():
            return AutoTokenizer.from_pretrained(
                str(name or self.path), **files, revision=self.revision, trust_remote_code=self._trust
            )

    @cached_property
    def dtype(self) -> str:
        """Return the dtype in which the weights are loaded; `auto` if only the weights determine it."""
        name = str(self.loading.get("dtype") or "auto").removeprefix("torch.")
        dtype = getattr(self.config, "dtype", None) if name == "auto" else getattr(torch, name, name)
        return str(dtype or "auto").removeprefix("torch.")

    @property
    def depends_on_batch(self) -> bool:
        """Return whether answers can depend on the order of sums, and so on the shape of a batch."""
        return self.dtype not in ("float32", "float64") or bool(self.loading.get("mixed_precision_dtype"))

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Return the model's generation config; empty if it has none."""
        try:
            config = GenerationConfig.from_pretrained(
                self.path, revision=self.revision or "main", subfolder=self.files.get("subfolder", "")
            )
        except OSError:
            return {}
        settings: dict[str, Any] = config.to_dict()
        return settings

    @property
    def generation_digest(self) -> str:
        """Return a digest of `generation_config` without its limit of new tokens, or an empty string."""
        settings = {key: str(value) for key, value in self.generation_config.items() if key != "transformers_version"}
        settings |= {"max_new_tokens": str(None)} if "max_new_tokens" in settings else {}
        return digest(settings) if settings else ""

    def chat_template(self, name: bool | str) -> str:
        """Return a digest of the chat template of this name (True: the default); an empty string for False."""
        if not name:
            return ""
        return digest(self.tokenizer.get_chat_template(name if isinstance(name, str) else None))
