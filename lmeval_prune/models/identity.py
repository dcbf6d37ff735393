"""Identities of models and versions of the code, which determine an answer besides its request and interventions."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lmeval_prune.architectures import adapters_of, config_fingerprint
from lmeval_prune.artefacts import CREATED_BY, content_digest, digest, files_digest
from lmeval_prune.checkpoints.loading import checkpoint_identity
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import combined, interventions_on
from lmeval_prune.models.head_router import POLICIES

if TYPE_CHECKING:
    from lmeval_prune.models.checkpoint import Checkpoint

# Arguments that change where and how fast an answer is computed, but not the answer; the dtype is read from the model.
IGNORED_ARGUMENTS = {
    *("batch_size", "max_batch_size", "device", "parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory"),
    *("offload_folder", "dtype"),
}
# Arguments whose value is a file or folder, except for the policies of a router.
_PATH_ARGUMENTS = {"tokenizer", "peft", "delta", "router", "router_store"}

# By this setting, transformers cleans up texts of byte-pair encoding, too.
_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

# Raised whenever the decoding engine, or the way requests are sent to a model or a server, gives other answers than
# before. (Methods have their own versions.)
ANSWERING = 1
SERVED_ANSWERING = 2  # of the requests to servers; 2: they name penalties, and continue the beginning of an answer


@dataclass(frozen=True)
class ModelIdentity:
    """Properties of a model that determine its answers. Models with the same identity give the same answers."""

    config: str  # fingerprint
    tokenizer: str  # fingerprint
    generation_config: str  # the model's own generation config
    dtype: str  # of the weights
    arguments: Mapping[str, Any]  # model_args that change answers
    # fingerprint of the loaded weights, or digest of a checkpoint's files
    weights: str | None = None
    adapters: str | None = None  # digest of PEFT adapters on a loaded model
    code: str | None = None  # digest of code that came with the checkpoint (`trust_remote_code`)

    @classmethod
    def of_model(cls, lm: Any) -> Self:
        """Identify a loaded `PrunedHFLM`; `InputError` if its weights are offloaded and have no fingerprint."""
        if lm.weights is None:
            raise InputError(
                "the weights are offloaded and cannot be identified, as stored answers require; leave out the cache"
            )
        generation_config, adapters = copy.deepcopy(getattr(lm.model, "generation_config", None)), adapters_of(lm.model)
        if generation_config:
            generation_config.max_new_tokens = None  # the task's limit counts
        arguments = sorted(lm.arguments.others.items())
        return cls(
            config_fingerprint(lm.config),
            lm.tokenizer_fingerprint,
            generation_config.to_json_string() if generation_config else "",
            str(lm.model.dtype),
            {name: str(value) for name, value in arguments if name not in IGNORED_ARGUMENTS}
            | _truncation(lm.config, lm.tokenizer, lm.arguments.others),
            lm.weights,
            digest(adapters) if adapters else None,
            _remote_code([*lm.model.modules(), lm.config, lm.tokenizer]),
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Identify a checkpoint by the content of its files, without loading it; `InputError` if it has no weights."""
        skipped = {*IGNORED_ARGUMENTS, "pretrained", "revision", "subfolder", "gguf_file"}
        arguments = sorted(checkpoint.loading.items())
        return cls(
            config_fingerprint(checkpoint.config),
            tokenizer_fingerprint(checkpoint.tokenizer),
            checkpoint.generation_digest,
            checkpoint.dtype,
            {name: argument_identity(name, value) for name, value in arguments if name not in skipped}
            | _truncation(checkpoint.config, checkpoint.tokenizer, checkpoint.loading),
            checkpoint_identity(str(checkpoint.loading["pretrained"]), checkpoint.revision, **checkpoint.files),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not None: part of the keys of stored answers, outcomes and grid cells."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _truncation(config: Any, tokenizer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tokenizer, beside its rules, by which `hf` truncates texts under some model_args."""
    if arguments.get("truncation"):
        return {name: getattr(tokenizer, name) for name in ("model_max_length", "truncation_side")}
    from lm_eval.models.utils import resolve_max_length

    length = resolve_max_length(config, tokenizer)
    is_tokenizers = not arguments.get("max_length") and length != resolve_max_length(config, None)
    return {"model_max_length": length} if is_tokenizers else {}


def _remote_code(objects: Iterable[Any]) -> str | None:
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


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary, rules and special tokens."""
    return digest(_vocabulary(tokenizer))


def _vocabulary(tokenizer: Any) -> list[Any]:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return [content, str(tokenizer.special_tokens_map)]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's vocabulary, rules, special tokens and settings that change texts or tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    settings = [name for name in ("split_special_tokens",) if getattr(tokenizer, name, False)]
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        is_bpe = fast is not None and type(fast.model).__name__ == "BPE"
        if not is_bpe or getattr(tokenizer, _CLEANS_BPE, False):
            settings.append("clean_up_tokenization_spaces")
    return digest([*_vocabulary(tokenizer), *settings])
