"""Variants of a model: the interventions that a router applies for an attempt at a question.

A variant's name determines its effect and rebuilds it: heads as `L5H3+L15H0`, other methods as JSON of their settings
after `resolve`. A method that is read from a file is named by the digest of its identity, and a *record* beside the
name has the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import digest, parse_json
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.interventions import METHODS, HeadMask, Intervention, combined
from lmeval_prune.interventions.parsing import parse_intervention
from lmeval_prune.models.attempts import DENSE, is_heads
from lmeval_prune.registry import class_record
from lmeval_prune.settings import required_fields


class VariantRecord(TypedDict, total=False):
    """What is known of a variant beside its name."""

    label: str
    arguments: dict[str, Any]  # model_args that rebuild it, where the name does not


Records = Mapping[str, VariantRecord]  # by name


@dataclass(frozen=True)
class Variant:
    """Interventions under which an attempt is answered, beside those of the model itself.

    Attributes:
        name: see above; `dense` for none.
        mask: heads to prune, which rows of one batch can have of their own; or None.
        others: the other interventions, which apply to a whole batch.
        record: what rebuilds it, if the name alone does not, and its label.
    """

    name: str = DENSE
    mask: HeadMask | None = None
    others: tuple[Intervention, ...] = ()
    record: VariantRecord = field(default_factory=VariantRecord, compare=False)

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """Return all interventions."""
        return (*self.others, *([self.mask] if self.mask else []))

    @classmethod
    def of(
        cls, value: Any, model_map: ModelMap, allowances: Mapping[str, bool] | None = None, label: str = ""
    ) -> Variant:
        """Create a variant for a model; `allowances` as for `parse_intervention`.

        `value` is `dense`; heads, as for `heads=`; or model_args of methods and `mask`, as a dictionary or as JSON.
        """
        arguments = variant_arguments(value)
        parsed = [parse_intervention(name, setting, allowances or {}) for name, setting in arguments.items()]
        resolved = [intervention.fit_to(model_map) for intervention in combined(parsed)]
        for intervention in resolved:
            if intervention.needs_order:
                raise InputError(f"a variant's answers must not depend on their order (state=run): {arguments}")
        masks = [intervention for intervention in resolved if isinstance(intervention, HeadMask)]
        others = tuple(intervention for intervention in resolved if not isinstance(intervention, HeadMask))
        name = _name(resolved, model_map)
        record = VariantRecord()
        if label and label != name:
            record["label"] = label
        if any(map(_needs_file, others)):
            record["arguments"] = arguments
        return cls(name, masks[0] if masks else None, others, record)

    @classmethod
    def named(
        cls, name: str, model_map: ModelMap, record: VariantRecord | None = None, allowances: Any = None
    ) -> Variant:
        """Rebuild a variant from its name and record; `InputError` if its file or method has changed."""
        record = record or VariantRecord()
        variant = cls.of(record.get("arguments") or name, model_map, allowances, record.get("label", ""))
        if variant.name != name and not is_heads(name):
            raise InputError(
                f"the variant {name[:80]} is now {variant.name[:80]}: a file that it is made from, or its method, has "
                f"changed; put the file back, or sweep into a new folder"
            )
        return variant


def variant_arguments(value: Any) -> dict[str, Any]:
    """Return the model_args of a variant that a user names; arguments as for `Variant.of`."""
    if value == DENSE or value == {}:
        return {}
    if isinstance(value, str) and value.startswith("{"):
        value = parse_json(value, "the variant")
    if not isinstance(value, Mapping):
        return {"heads": value}
    names = (*METHODS, "mask")
    for name in value:
        if name not in names:
            hint = did_you_mean(str(name), names) or f"; it has {', '.join(names)}"
            raise InputError(f"a variant has no setting {name!r}{hint}")
    return {name: _without_names(value[name]) for name in names if name in value}


def _name(resolved: Sequence[Intervention], model_map: ModelMap) -> str:
    """Return the name of resolved interventions."""
    if not resolved:
        return DENSE
    if len(resolved) == 1 and isinstance(resolved[0], HeadMask) and resolved[0].version == 1:
        return str(resolved[0])
    methods: dict[str, Any] = {}
    for intervention in resolved:
        identity = intervention.identity(model_map)
        method, version = identity.pop("method"), identity.pop("version")
        named = class_record(type(intervention)) | ({"version": version} if version != 1 else {})
        methods[method] = ({"sha256": digest(identity)} if _needs_file(intervention) else identity) | named
    return json.dumps(methods, ensure_ascii=False, separators=(",", ":"))


def _needs_file(intervention: Intervention) -> bool:
    """Return whether an intervention was read from a file, and its settings alone do not rebuild it."""
    missing = {*required_fields(type(intervention))} - intervention.settings().keys()
    return bool(missing) or (intervention.origin is not None and not isinstance(intervention, HeadMask))


def _without_names(setting: Any) -> Any:
    """Return a method's settings without the version and the import path of the method, which a name has."""
    named = ("version", "class")
    return {key: item for key, item in setting.items() if key not in named} if isinstance(setting, dict) else setting
