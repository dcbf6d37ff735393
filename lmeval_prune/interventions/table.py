"""The registry of methods by the names of their model_args. A method's module is imported when it is first used."""

from __future__ import annotations

from lmeval_prune.registry import Registry, import_path

METHODS = Registry(
    group="lmeval_prune.interventions",
    setting="method",
    own={
        "heads": "lmeval_prune.interventions.head_mask:HeadMask",
        "plan": "lmeval_prune.interventions.plan:Plan",
        "probe_pruning": "lmeval_prune.interventions.probe_pruning:ProbePruning",
        "token_filter": "lmeval_prune.interventions.token_filter:TokenFilter",
        "lora": "lmeval_prune.interventions.lora:Lora",
    },
)


def method_name(kind: type) -> str:
    """Return the name of a class in the registry, or its import path if the registry lacks it."""
    return METHODS.name_of(kind, import_path(kind))
