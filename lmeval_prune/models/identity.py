"""Models without their weights, and what determines an answer besides its request and interventions.

Models with the same identity give the same answers. It is part of the keys of stored answers, outcomes and grid cells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from lmeval_prune.architectures import ModelMap, config_fingerprint, map_model
from lmeval_prune.artefacts import CREATED_BY, content_digest, digest, files_digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import as_input_error, checkpoint_identity, language_skeleton
from lmeval_prune.checkpoints.modeling_pruned import without_warnings_of_layers
from lmeval_prune.interventions import combined, interventions_on
from lmeval_prune.models.arguments import FAMILY_DESCRIPTION
from lmeval_prune.models.head_router import POLICIES

# Arguments that change where and how fast an answer is computed, but not the answer; the dtype is read from the model.
IGNORED_ARGUMENTS = {
    *("batch_size", "max_batch_size", "device", "parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory"),
    *("offload_folder", "dtype"),
}
# Arguments whose value is a file or folder, except for the policies of a router.
_PATH_ARGUMENTS = {"tokenizer", "peft", "delta", "router", "router_store"}

# Raised whenever the decoding engine, or the way requests are sent to a model or a server, gives other answers than
# before. (Methods have their own versions.)
ANSWERING = 1
SERVED_ANSWERING = 2  # of the requests to servers; 2: they name penalties, and continue the beginning of an answer


class Checkpoint:
    """A language model without its weights; `InputError` if it does not exist or is not a language model.

    `loading` are the model_args that load it, including `pretrained`; see `Arguments.loading`.
    """

    def __init__(self, loading: Mapping[str, Any]) -> None:
        self.loading = dict(loading)
        self.path = embedded.resolve(str(loading["pretrained"]))
        embedded.check_name(self.path)
        self.revision: Any = loading.get("revision")
        self.files = {name: str(loading[name]) for name in ("subfolder", "gguf_file") if loading.get(name)}
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

    @cached_property
    def tokenizer(self) -> Any:
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

    def chat_template(self, name: bool | str) -> str:
        """Return a digest of the chat template of this name (True: the default); an empty string for False."""
        if not name:
            return ""
        return digest(self.tokenizer.get_chat_template(name if isinstance(name, str) else None))

    def identity(self) -> dict[str, Any]:
        """Identify the model by the content of its files, as JSON; `InputError` if it has no weights."""
        weights = checkpoint_identity(str(self.loading["pretrained"]), self.revision, **self.files)
        fingerprint = tokenizer_fingerprint(self.tokenizer)
        return identity_of(
            *(self.config, self.tokenizer, fingerprint, self.generation_config, self.dtype, self.loading),
            weights=weights,
        )


def identity_of(
    config: Any,
    tokenizer: Any,
    fingerprint: str,
    generation: Mapping[str, Any],
    dtype: str,
    arguments: Mapping[str, Any],
    **weights: Any,
) -> dict[str, Any]:
    """Return what answers depend on of a model beside its interventions, as JSON; None is left out.

    `fingerprint` is the tokenizer's, `arguments` are the model_args, `weights` is what identifies weights and code.
    """
    skipped = {*IGNORED_ARGUMENTS, "pretrained", "revision", "subfolder", "gguf_file"}
    own = {name: argument_identity(name, value) for name, value in sorted(arguments.items()) if name not in skipped}
    from lm_eval.models.utils import resolve_max_length

    length = resolve_max_length(config, tokenizer)
    if arguments.get("truncation"):  # by settings of the tokenizer beside its rules
        own |= {name: getattr(tokenizer, name) for name in ("model_max_length", "truncation_side")}
    elif not arguments.get("max_length") and length != resolve_max_length(config, None):
        own["model_max_length"] = length
    identity = {
        "config": config_fingerprint(config),
        "tokenizer": fingerprint,
        "generation_config": generation_digest(generation),
        "dtype": dtype,
        "arguments": own,
        **weights,
    }
    return {name: value for name, value in identity.items() if value is not None}


def generation_digest(generation: Mapping[str, Any]) -> str:
    """Return a digest of a generation config without its limit of new tokens, or an empty string."""
    ignored = ("transformers_version", "max_new_tokens")  # the task's limit counts
    settings = {name: str(value) for name, value in generation.items() if name not in ignored}
    return digest(settings) if settings else ""


def remote_code(objects: Iterable[Any]) -> str | None:
    """Return a digest of the files from which transformers loaded classes of objects; None if all are of packages."""
    names = {type(item).__module__ for item in objects}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith("transformers_modules.")]
    folders = {Path(str(module.__file__)).parent for module in modules}  # of one checkpoint and one version of its code
    files = [file for folder in sorted(folders) for file in sorted(folder.glob("*.py"))]
    return files_digest(files) if files else None


def argument_identity(name: str, value: Any) -> Any:
    """Return an argument's value as JSON; files and folders are identified by their content."""
    is_path = name in _PATH_ARGUMENTS and value not in POLICIES
    if is_path and isinstance(value, str | os.PathLike) and Path(value).expanduser().exists():
        return {"content": content_digest(Path(value).expanduser())}
    return value if isinstance(value, bool | int | float | None) else str(value)


@cache
def code_versions(*libraries: str) -> dict[str, Any]:
    """Return the version of this package's answering and those of libraries, by default lm-eval and transformers."""
    return {**{name: version(name) for name in libraries or ("lm_eval", "transformers")}, "answering": ANSWERING}


def interventions_report(lm: Any, model: Any, weights: str | None) -> dict[str, Any]:
    """Report the interventions on the model of `lm` and the fingerprint of its weights for the results file."""
    info: dict[str, Any] = {"created_by": CREATED_BY, "weights_fingerprint": weights, "heads": []}
    for intervention in combined(interventions_on(model)):
        info |= intervention.report(lm.model_map)
    return info


def vocabulary_digest(tokenizer: Any, *settings: str) -> str:
    """Return a digest of a tokenizer's vocabulary, rules and special tokens, and of `settings`."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return digest([content, str(tokenizer.special_tokens_map), *settings])


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary, rules, special tokens and settings that change texts or tokens."""
    settings = ["split_special_tokens"] if getattr(tokenizer, "split_special_tokens", False) else []
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        fast = getattr(tokenizer, "backend_tokenizer", None)
        cleans_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        if fast is None or type(fast.model).__name__ != "BPE" or getattr(tokenizer, cleans_bpe, False):
            settings.append("clean_up_tokenization_spaces")
    return vocabulary_digest(tokenizer, *settings)
