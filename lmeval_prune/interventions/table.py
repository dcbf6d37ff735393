"""The table of methods by the names of their model_args. A method's module is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

METHODS = {
    "heads": "lmeval_prune.interventions.head_mask:HeadMask",
    "plan": "lmeval_prune.interventions.plan:Plan",
    "probe_pruning": "lmeval_prune.interventions.probe_pruning:ProbePruning",
    "token_filter": "lmeval_prune.interventions.token_filter:TokenFilter",
    "lora": "lmeval_prune.interventions.lora:Lora",
}


def method_class(name: str) -> Any:
    """Import and return the class of a method."""
    module, _, attribute = METHODS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def method_name(kind: type) -> str:
    """Return the name of a class in the table, or its import path if the table lacks it."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, target in METHODS.items() if target == path), path)
