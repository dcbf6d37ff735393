"""Create interventions from what users write: a value of a method's first field, its fields, or an artefact's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import Intervention, load_intervention
from lmeval_prune.interventions.table import METHODS

ALLOWANCES = ("allow_empty_layer", "allow_other_model")


def parse_intervention(name: str, value: Any, allowances: Mapping[str, bool]) -> Intervention:
    """Create an intervention.

    Args:
        name: a method of the table, or `mask` for an artefact of any method.
        value: value of the method's first field, a dictionary of its fields, or the file of an artefact.
        allowances: values of `ALLOWANCES` for methods that have these fields.
    """
    if name == "mask":
        return with_allowances(load_intervention(value, bool(allowances.get("allow_other_model"))), allowances)
    kind: Any = METHODS.load(name)
    if isinstance(value, str) and value.endswith(".json"):
        artefact = load_intervention(value, bool(allowances.get("allow_other_model")))
        converted = artefact.converted(kind)
        if converted is None:
            raise InputError(
                f"{name}={value} is a {artefact.schema()} artefact with more settings than {name} has; give it as mask="
            )
        return with_allowances(converted, allowances)
    names = kind.setting_names()
    if not names and str(value).lower() not in ("true", "{}"):
        raise InputError(f"{name} has no settings; give {name}=true")
    settings = value if isinstance(value, dict) else dict.fromkeys(names[:1], value)
    return with_allowances(kind.from_dict(settings, name), allowances)


def with_allowances(intervention: Intervention, allowances: Mapping[str, bool]) -> Intervention:
    """Return an intervention with those of some allowances that are fields of it."""
    names = {field.name for field in fields(intervention)}
    changes: dict[str, Any] = {name: value for name, value in allowances.items() if name in names}
    return replace(intervention, **changes)
