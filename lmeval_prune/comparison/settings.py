"""Settings of an evaluation that have to agree in runs that are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmeval_prune.artefacts import without_addresses
from lmeval_prune.comparison.results_files import ResultsFile
from lmeval_prune.errors import brief

# entries of a task's configuration that its questions and prompts show, or that say nothing about its evaluation
_IGNORED = {
    "_qualified_name", "alias", "custom_dataset", "dataset_kwargs", "dataset_name", "dataset_path", "fewshot_split",
    "group", "metadata", "should_decontaminate", "doc_to_decontamination_query", "tag", "task", "task_alias",
    "test_split", "training_split", "validation_split", "process_docs", "unsafe_code", "use_prompt", "version",
}  # fmt: skip
# entries that change nothing but prompts: what differs explains prompts that differ
_PROMPT = {
    "description", "doc_to_choice", "doc_to_text", "fewshot_config", "fewshot_delimiter", "gen_prefix", "num_fewshot",
    "target_delimiter", "doc_to_audio", "doc_to_image",
}  # fmt: skip
# what lm-eval writes of the model that was loaded: another one can have been saved under the same name
_MODEL = ("model_dtype", "model_num_parameters", "peft_sha", "delta_sha")
_MISSING = "not set"


class Settings(NamedTuple):
    """Settings of a task, by name."""

    prompt: dict[str, Any]  # of its prompts
    other: dict[str, Any]  # of generation, filters and metrics
    lm_eval: str | None  # lm-eval's version

    @property
    def of_repeats(self) -> dict[str, Any]:
        """Return the settings that agree in repeats with several seeds."""
        return {name: value for name, value in (self.prompt | self.other).items() if name != "fewshot_seed"}


def settings_of(file: ResultsFile, task: str) -> Settings:
    """Return the settings of a task in a results file."""
    results = file.results
    config = {name: value for name, value in results["configs"][task].items() if name not in _IGNORED}
    prompt = {
        "system_instruction": results.get("system_instruction"),
        "apply_chat_template": results.get("chat_template_sha") is not None,
        "fewshot_as_multiturn": bool(results.get("fewshot_as_multiturn")),
        "fewshot_seed": file.config.get("fewshot_seed"),
        **{name: value for name, value in config.items() if name in _PROMPT},
    }
    other = {name: value for name, value in config.items() if name not in _PROMPT}
    other["version of the task"] = (results.get("versions") or {}).get(task)
    return Settings(_flat(prompt), _flat(other), results.get("lm_eval_version"))


def model_of(file: ResultsFile) -> dict[str, Any]:
    """Return what a results file says of the model's weights; without a digest of them also the revision on the Hub."""
    pruning = file.config.get("pruning")
    weights = pruning.get("weights_fingerprint") if isinstance(pruning, Mapping) else None
    names = _MODEL if weights else (*_MODEL, "model_sha")  # which changes with any file of the repository
    return _flat({**{name: file.config.get(name) for name in names}, "weights of the model": weights})


def different(first: Mapping[str, Any], second: Mapping[str, Any], has_same_version: bool) -> list[str]:
    """Return `NAME: VALUE and VALUE` of the settings that differ.

    Settings that only one of two versions of lm-eval writes are not compared.
    """
    names = [*first, *(name for name in second if name not in first)]
    shared = names if has_same_version else [name for name in names if name in first and name in second]
    return [
        f"{name}: {brief(str(first.get(name, _MISSING)), 40)} and {brief(str(second.get(name, _MISSING)), 40)}"
        for name in shared
        if first.get(name) != second.get(name)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by names with dots; addresses in the texts of functions are left out."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None and value is not False and value not in ("", []):  # these are the same as not set
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
            flat[prefix + name] = without_addresses(text) if isinstance(text, str) else text
    return flat


def seed_text(file: ResultsFile) -> str:
    """Return lm-eval's four seeds, or one number if they are equal, and the seed among the model's arguments."""
    values = [file.config.get(f"{name}_seed") for name in ("random", "numpy", "torch", "fewshot")]
    shown = values if len(set(values)) > 1 else values[:1]
    texts = ["/".join(map(str, shown))] if shown != [None] else []
    return " and ".join([*texts, *(f"seed={value}" for name, value in file.model_args.items() if name == "seed")])
