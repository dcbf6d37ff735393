"""The arguments of lm-eval's `hf`, and the types of those that are numbers or switches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from typing import Any

from lmeval_prune.config import Count, Natural, parse_value

_TYPES = {"int": int, "bool": bool, "None": None}
_BOUNDED = {"max_length": Count | None, "prefix_token_id": Natural | None}  # narrower than hf's annotation


@cache
def hf_arguments() -> Mapping[str, Any]:
    """Map the names of hf's arguments to their types; `Any` for what is neither a number nor a switch."""
    from lm_eval.models.huggingface import HFLM

    parameters = inspect.signature(HFLM.__init__).parameters
    types = {
        name: _type_of(parameter.annotation) for name, parameter in parameters.items() if name not in ("self", "kwargs")
    }
    return {**types, **{name: kind for name, kind in _BOUNDED.items() if name in types}}


def parse_hf_argument(name: str, value: Any) -> Any:
    """Return a user's value of an argument of `hf`; `InputError` if it should be a number or switch and is none."""
    return value if value is None else parse_value(name, value, hf_arguments().get(name, Any))


def _type_of(annotation: Any) -> Any:
    """Return an annotation of whole numbers, switches and None as a type, and any other as `Any`."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    names = [name.strip() for name in text.split("|")]
    return reduce(or_, (_TYPES[name] for name in names)) if {*names} <= _TYPES.keys() else Any
