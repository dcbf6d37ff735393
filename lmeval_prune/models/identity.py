"""What an answer depends on beside the request and what is applied: everything of the model, and of how it is asked."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from lmeval_prune.architectures import ModelMap, adapters_of
from lmeval_prune.artefacts import CREATED_BY, digest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import combined, interventions_on

# Arguments that change where and how fast a response is computed, but not what it should be; the type of the weights
# is taken from the model.
NOT_PART_OF_AN_ANSWER = {
    *("batch_size", "max_batch_size", "device", "parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory"),
    *("offload_folder", "dtype"),
}


# Raised whenever answers to the same requests come out otherwise than before, by the decoding engine or by how requests
# are put to a model or a server. (Methods have versions of their own.)
ANSWERING = 1


@cache
def code_versions(*libraries: str) -> dict[str, Any]:
    """Versions of the code that answers depend on.

    Args:
        libraries: those that compute, by default lm-eval, which cuts prompts and texts, and transformers.
    """
    return {**{name: version(name) for name in libraries or ("lm_eval", "transformers")}, "answering": ANSWERING}


def differing(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """Say by which versions something was made, and which there are now."""
    if before is None:
        return "do not say which versions made them"

    def named(versions: dict[str, Any]) -> str:
        differ = [name for name in now if before.get(name) != now[name]]
        known = [(name, versions[name]) for name in differ if name in versions]
        return " and ".join(f"version {n} of {name}" if isinstance(n, int) else f"{name} {n}" for name, n in known)

    return f"were made by {named(before)}, this is {named(now)}"


def identity_of(lm: Any) -> dict[str, Any]:
    """JSON value of all of a `PrunedHFLM` that an answer depends on, beside what is applied to its model.

    Raises:
        InputError: weights are offloaded, so that two models could not be told apart.
    """
    if lm.weights is None:
        raise InputError("stored answers need weights that can be read, and some are offloaded; leave out the cache")
    made_by, adapters = getattr(lm.model, "generation_config", None), adapters_of(lm.model)
    others = lm.given.others.items()
    return {
        "weights": lm.weights,
        "config": config_fingerprint(lm.config),
        "dtype": str(lm.model.dtype),
        "tokenizer": lm.tokenizer_fingerprint,
        "generation_config": made_by.to_json_string() if made_by else "",
        "arguments": {k: str(v) for k, v in sorted(others) if k not in NOT_PART_OF_AN_ANSWER},
        **({"adapters": digest(adapters)} if adapters else {}),
    }


def applied(model_map: ModelMap, weights: str | None) -> dict[str, Any]:
    """Say what is applied to a model, for the results file.

    Args:
        model_map: of the model.
        weights: its fingerprint.
    """
    info: dict[str, Any] = {"created_by": CREATED_BY, "weights_fingerprint": weights, "heads": []}
    for one in combined(interventions_on(model_map.model)):
        info |= one.report(model_map)
    return info


def config_fingerprint(config: Any) -> str:
    """Of what a configuration says of the model's computation, not of where and by what it was written."""
    elsewhere = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    return digest({key: str(value) for key, value in config.to_dict().items() if key not in elsewhere})


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of how texts become tokens."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return digest([content, str(tokenizer.special_tokens_map)])
