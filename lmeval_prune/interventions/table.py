"""The methods by the names of their model_args, and how they are read from what users write and from artefacts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.architectures import ModelMap, is_dispatched
from lmeval_prune.artefacts import read_artefact
from lmeval_prune.errors import InputError
from lmeval_prune.registry import Registry, import_path

logger = logging.getLogger(__name__)
SCHEMA_VERSION = 3
ALLOWANCES = ("allow_empty_layer", "allow_other_model")
METHODS = Registry(  # a method's module is imported when it is first used
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
    return METHODS.name_of(kind, import_path(kind))


def load_intervention(path: str | os.PathLike[str], allow_other_model: bool = False) -> Any:
    """Read an artefact of any method in the table, by its schema."""
    kinds = {kind.schema(): kind for kind in map(METHODS.load, METHODS.own)}
    try:
        content, _ = read_artefact(path, tuple(kinds), SCHEMA_VERSION)
    except InputError:  # before classes of other packages are imported
        elsewhere = {kind.schema(): kind for kind in map(METHODS.load, METHODS.keys() - METHODS.own.keys())}
        if not elsewhere:
            raise
        kinds |= elsewhere
        content, _ = read_artefact(path, tuple(kinds), SCHEMA_VERSION)
    return kinds[content["schema"]].load(path, allow_other_model)


def parse_intervention(name: str, value: Any, allowances: Mapping[str, bool]) -> Any:
    """Create an intervention from a model_arg.

    Args:
        name: a method of the table, or `mask` for an artefact of any method.
        value: value of the method's first field, a dictionary of its fields, or the file of an artefact.
        allowances: values of `ALLOWANCES` for methods that have these fields.
    """
    kind: Any = None if name == "mask" else METHODS.load(name)
    if kind is None or (isinstance(value, str) and value.endswith(".json")):
        artefact = load_intervention(value, bool(allowances.get("allow_other_model")))
        intervention = artefact.converted(kind) if kind else artefact
        if intervention is None:
            raise InputError(
                f"{name}={value} is a {artefact.schema()} artefact with more settings than {name} has; give it as mask="
            )
    else:
        names = kind.setting_names()
        if not names and str(value).lower() not in ("true", "{}"):
            raise InputError(f"{name} has no settings; give {name}=true")
        intervention = kind.from_dict(value if isinstance(value, dict) else dict.fromkeys(names[:1], value), name)
    own = {field.name for field in fields(intervention)}
    return replace(intervention, **{key: allows for key, allows in allowances.items() if key in own})


# ---------------------------------------------------------------------- the model of an artefact


class ModelRecord(TypedDict):
    """The model of an artefact."""

    name: str
    revision: str
    model_type: str
    heads: dict[str, Any]  # shapes by layer
    weights: list[str]  # fingerprints of the weights, also rounded to smaller types


class ArtefactContents(TypedDict):
    """Fields of an intervention's artefact."""

    model: ModelRecord
    settings: dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """The artefact that an intervention was loaded from: its file, and the hash of its content.

    `allow_other_model` accepts another model than the artefact's if the intervention fits it.
    """

    path: str
    sha256: str
    model: ModelRecord
    allow_other_model: bool = False

    def check(self, model_map: ModelMap) -> None:
        if self.allow_other_model:
            return
        model, subject = self.model, f"{self.path} was made for"
        fix = "make one for this model, or give allow_other_model=true if it fits"
        if model_map.signature() != {"model_type": model["model_type"], "heads": model["heads"]}:
            raise InputError(f"{subject} {model['name']}, whose layers or heads differ from this model's; {fix}")
        check_weights(model["weights"], model["name"], model["revision"], model_map, subject, fix)


def check_weights(
    fingerprints: list[str], name: str, revision: str, model_map: ModelMap, subject: str, fix: str
) -> None:
    """Refuse a model with other weights, or with another name or revision if the weights cannot be compared.

    `fingerprints` are those of the expected weights, also rounded to smaller types; empty if unknown. `subject` and
    `fix` begin and end the message.
    """
    model = model_map.model
    if fingerprints and all(parameter.is_meta for parameter in model.parameters()) and not is_dispatched(model):
        return
    if fingerprints and not getattr(model, "is_quantized", False):
        if model_map.weights not in fingerprints:  # None if some cannot be read
            raise InputError(f"{subject} other weights ({name}) than this model's ({model_map.name}); {fix}")
        return
    if not fingerprints and model_map.weights:
        logger.warning("%s %s, without fingerprints of the weights: only the name is compared", subject, name)
    for expected, actual in ((name.lower(), model_map.name.lower()), (revision, model_map.revision)):
        if expected and actual and expected != actual:
            raise InputError(f"{subject} {expected}, this model is {actual}; {fix}")
