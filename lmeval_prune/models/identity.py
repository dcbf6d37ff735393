"""Everything that an answer depends on beside the request and what is applied: the model, and the versions of code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lmeval_prune.architectures import ModelMap, adapters_of
from lmeval_prune.artefacts import CREATED_BY, content_digest, digest
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import combined, interventions_on
from lmeval_prune.models.head_router import POLICIES

if TYPE_CHECKING:
    from lmeval_prune.models.checkpoint import Checkpoint

# Arguments that change where and how fast a response is computed, but not what it should be; the type of the weights
# is taken from the model.
NOT_PART_OF_AN_ANSWER = {
    *("batch_size", "max_batch_size", "device", "parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory"),
    *("offload_folder", "dtype"),
}
# Arguments that name a file or folder, unless the value is one of a router's policies.
_PATHS = {"tokenizer", "peft", "delta", "router", "router_store"}


# Raised whenever answers to the same requests come out otherwise than before, by the decoding engine or by how requests
# are put to a model or a server. (Methods have versions of their own.)
ANSWERING = 1


@dataclass(frozen=True)
class ModelIdentity:
    """A model as far as answers depend on it. Models of one kind with the same identity answer alike."""

    config: str  # a fingerprint
    tokenizer: str  # a fingerprint
    generation_config: str  # the model's own settings of generation
    dtype: str  # of its weights, or in which a server computes
    arguments: Mapping[str, Any]  # model_args that change answers
    # fingerprint of the loaded weights, or digest of a checkpoint's files; None for a server
    weights: str | None = None
    adapters: str | None = None  # digest of PEFT adapters on a loaded model
    server: str | None = None  # kind of server
    checkpoint: str | None = None  # digest of the checkpoint that a server serves

    @classmethod
    def of_model(cls, lm: Any) -> Self:
        """Identify a loaded `PrunedHFLM`.

        Raises:
            InputError: weights are offloaded, so that two models could not be told apart.
        """
        if lm.weights is None:
            raise InputError(
                "stored answers need weights that can be read, and some are offloaded; leave out the cache"
            )
        generation_config, adapters = getattr(lm.model, "generation_config", None), adapters_of(lm.model)
        arguments = sorted(lm.arguments.others.items())
        return cls(
            config_fingerprint(lm.config),
            lm.tokenizer_fingerprint,
            generation_config.to_json_string() if generation_config else "",
            str(lm.model.dtype),
            {name: str(value) for name, value in arguments if name not in NOT_PART_OF_AN_ANSWER},
            lm.weights,
            digest(adapters) if adapters else None,
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Identify a checkpoint that is not loaded: by the content of its files, wherever they are.

        Raises:
            InputError: there are no weights.
        """
        skipped = {*NOT_PART_OF_AN_ANSWER, "pretrained", "revision", "subfolder", "gguf_file"}
        arguments = sorted(checkpoint.loading.items())
        return cls(
            config_fingerprint(checkpoint.config),
            tokenizer_fingerprint(checkpoint.tokenizer),
            checkpoint.generation_digest,
            checkpoint.dtype,
            {name: argument_identity(name, value) for name, value in arguments if name not in skipped},
            checkpoint_identity(str(checkpoint.loading["pretrained"]), checkpoint.revision, **checkpoint.files),
        )

    @classmethod
    def of_server(cls, lm: Any) -> Self:
        """Identify the model of a `PrunedServerLM`, as far as it is known here."""
        return cls(
            config_fingerprint(lm.config),
            tokenizer_fingerprint(lm.tokenizer),
            lm.checkpoint.generation_digest,
            lm.dtype,
            {name: str(value) for name, value in sorted(lm.options.answer_options.items())},
            server=lm.kind.name + ("-chat" if lm.chat else ""),
            checkpoint=lm.base,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the parts that are known, as JSON: part of the keys of stored answers, outcomes and cells."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check_loaded(self, lm: Any) -> None:
        """Refuse a loaded `PrunedHFLM` whose configuration, tokenizer or type is another than its checkpoint's here."""
        loaded = {"config": config_fingerprint(lm.config)}
        if not {"add_bos_token", "use_fast_tokenizer"} & self.arguments.keys():  # with which `hf` loads another one
            loaded["tokenizer"] = lm.tokenizer_on_disk
        if self.dtype != "auto" and not getattr(lm.config, "quantization_config", None):
            loaded["dtype"] = str(lm.model.dtype).removeprefix("torch.")
        if other := [name for name, value in loaded.items() if value != getattr(self, name)]:
            raise InputError(
                f"the model {lm.pretrained} that was loaded has another {' and '.join(other)} than when its cells were "
                f"named; has its folder changed? Start the command again"
            )


def argument_identity(name: str, value: Any) -> Any:
    """Return an argument's value as JSON; a file or folder, where the argument names one, by its content."""
    is_path = name in _PATHS and value not in POLICIES
    if is_path and isinstance(value, str | os.PathLike) and Path(value).expanduser().exists():
        return {"content": content_digest(Path(value).expanduser())}
    return value if isinstance(value, bool | int | float | None) else str(value)


@cache
def code_versions(*libraries: str) -> dict[str, Any]:
    """Return the versions of the code that answers depend on; by default of lm-eval and transformers, too."""
    return {**{name: version(name) for name in libraries or ("lm_eval", "transformers")}, "answering": ANSWERING}


def describe_version_change(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """Say by which versions something was made, and which there are now."""
    if before is None:
        return "do not say which versions made them"

    def text(versions: dict[str, Any]) -> str:
        changed = [name for name in now if before.get(name) != now[name]]
        known = [(name, versions[name]) for name in changed if name in versions]
        return " and ".join(f"version {n} of {name}" if isinstance(n, int) else f"{name} {n}" for name, n in known)

    return f"were made by {text(before)}, this is {text(now)}"


def applied(model_map: ModelMap, weights: str | None) -> dict[str, Any]:
    """Report what is applied to a model with this fingerprint of its weights, for the results file."""
    info: dict[str, Any] = {"created_by": CREATED_BY, "weights_fingerprint": weights, "heads": []}
    for intervention in combined(interventions_on(model_map.model)):
        info |= intervention.report(model_map)
    return info


def config_fingerprint(config: Any) -> str:
    """Return a digest of what a configuration says of the computation, not of where and by what it was written."""
    elsewhere = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    return digest({key: str(value) for key, value in config.to_dict().items() if key not in elsewhere})


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a digest of how texts become tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return digest([content, str(tokenizer.special_tokens_map)])
