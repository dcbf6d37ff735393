"""Settings as people write them: read by the types of the fields that they are for, frozen, and written as JSON."""

from __future__ import annotations

import functools
import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Interval

from lmeval_prune.errors import InputError, did_you_mean

# Bounds of fields, in annotations: `ratio: Share`.
Share = Annotated[float, Interval(ge=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
Seed = Annotated[int, Interval(ge=0, lt=2**31)]


class FrozenMapping(dict[str, Any]):
    """A dictionary that does not change and can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return FrozenMapping, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("settings do not change; make new ones")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse


def frozen(name: str, value: Any) -> Any:
    """A JSON value with tuples for lists and `FrozenMapping` for dictionaries.

    Raises:
        InputError: it is none, so that nothing could tell it from another one.
    """
    if isinstance(value, list | tuple):
        return tuple(frozen(name, item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return FrozenMapping({key: frozen(name, item) for key, item in value.items()})
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{name} holds a {type(value).__name__}, which cannot be told from another one; give numbers, texts, lists or "
        f"dictionaries by texts"
    )


def to_plain_json(name: str, value: Any) -> Any:
    """A frozen value as JSON knows it.

    Raises:
        InputError: as of `frozen`.
    """
    value = frozen(name, value)
    if isinstance(value, tuple):
        return [to_plain_json(name, item) for item in value]
    return {key: to_plain_json(name, item) for key, item in value.items()} if isinstance(value, Mapping) else value


def parse_value(name: str, value: Any, annotation: Any) -> Any:
    """Read what a user wrote by the annotation of its field.

    Args:
        name: of the field, for the message.
        value: as JSON, YAML or a command line has it: `"3"` is a whole number, too, and a number is a text.
        annotation: `bool`, `int`, `float`, `str`, `Literal`, `tuple` or `dict` of these, any of them `| None`, with
            bounds (`Annotated[float, Interval(ge=0, le=1)]`). A value for any other annotation is returned as it is.

    Raises:
        InputError: the value is of another type or out of bounds.
    """
    if not is_supported_type(annotation):
        return value
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        if isinstance(plain, bool) and bool not in kinds(annotation):
            raise ValueError
        if isinstance(plain, float) and not math.isfinite(plain) and float not in kinds(annotation):
            raise ValueError
        result = _adapter(annotation).validate_python(plain)
        if any(isinstance(item, float) and math.isnan(item) for item in _leaves(result)):
            raise ValueError
        return result
    except ValueError:  # pydantic's ValidationError is one
        raise InputError(f"{name}={value!r} must be {describe(annotation)}{_remedy(plain, annotation)}") from None


def _remedy(value: Any, annotation: Any) -> str:
    """Return the end of a refusal: how a word becomes a text, or the choice that was probably meant."""
    if isinstance(value, bool) and str in kinds(annotation):
        return "; quotes make one of a word such as true"
    choices = [choice for kind in kinds(annotation) if get_origin(kind) is Literal for choice in get_args(kind)]
    return did_you_mean(str(value), map(str, choices))


def describe(annotation: Any) -> str:
    """Describe in words what a field takes: `a number, at least 0 and below 1`."""
    kind = next(kind for kind in kinds(annotation) if kind is not types.NoneType)
    origin = get_origin(kind)
    if origin is Literal:
        *others, last = map(str, get_args(kind))
        words = f"{', '.join(others)} or {last}" if others else last
    elif origin is tuple:
        item = get_args(kind)[0]
        count = "one or more " if any(getattr(bound, "min_length", 0) for bound in _bounds(annotation)) else ""
        words = f"{count}{_PLURALS[kinds(item)[0]]} separated by commas"
        return ", each ".join(filter(None, [words, _limits(item)]))
    else:
        words = _NOUNS.get(origin or kind, "text")
    return ", ".join(filter(None, [words, _limits(annotation)]))


def _limits(annotation: Any) -> str:
    """Describe the bounds of an annotation; empty if it has none."""
    return " and ".join(
        f"{word} {limit}" if limit != math.inf else "finite"
        for bound in _bounds(annotation)
        for key, word in _BOUNDS.items()
        if (limit := getattr(bound, key, None)) is not None
    )


_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", dict: "NAME=VALUE pairs separated by commas"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "names", bool: "truths"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_READABLE = (bool, int, float, str, types.NoneType, Any)


@functools.cache
def annotations_of(declaration: Any) -> dict[str, Any]:
    """Annotations of a dataclass's fields, or of a function's parameters, with their bounds."""
    return get_type_hints(declaration, include_extras=True)


@functools.cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True))


def kinds(annotation: Any) -> tuple[Any, ...]:
    """Alternatives of a union, without bounds."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for item in get_args(annotation) for kind in kinds(item))
    return (annotation,)


def _bounds(annotation: Any) -> tuple[Any, ...]:
    """What `Annotated` adds to a type, or to an alternative of a union."""
    if get_origin(annotation) is Annotated:
        return annotation.__metadata__
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(bound for item in get_args(annotation) for bound in _bounds(item))
    return ()


@functools.cache
def is_supported_type(annotation: Any) -> bool:
    """Return whether a type is made of those that users write; `Any` alone and unions of two kinds are not read."""
    others = [kind for kind in kinds(annotation) if kind is not types.NoneType]
    if len(others) != 1 or others == [Any]:
        return False
    origin = get_origin(others[0])
    if origin in (tuple, dict):
        return all(item in (..., *_READABLE) or is_supported_type(item) for item in get_args(others[0]))
    return origin is Literal or others[0] in _READABLE


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def required_fields(declaration: Any) -> list[str]:
    """Return the names of a dataclass's fields that have no default."""
    return [
        each.name
        for each in fields(declaration)
        if each.init and each.default is MISSING and each.default_factory is MISSING
    ]


@dataclass(frozen=True)
class Settings:
    """Base of frozen dataclasses whose values users write: each field is read by its type and bounds, or refused.

    A subclass with a `__post_init__` of its own (for what several fields say together) calls this one.

    Attributes:
        hashable: (of the class) fields that are compared become `frozen`, so that settings can be keys.
    """

    hashable: ClassVar[bool] = False

    @classmethod
    def label(cls, message: str) -> str:
        """Return a message that begins with a field's name as users know the field; a method puts its name before."""
        return message

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy takes a type for what cannot be hashed
        annotations = annotations_of(kind)
        for field in fields(self):
            try:
                value = parse_value(field.name, getattr(self, field.name), annotations[field.name])
                value = frozen(field.name, value) if self.hashable and field.compare else value
            except InputError as error:
                raise InputError(self.label(str(error))) from None
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], what: str) -> Self:
        """Make settings of a dictionary.

        Args:
            values: fields by name.
            what: subject of the message, e.g. `method flap`.

        Raises:
            InputError: a field is unknown, missing or not of its type.
        """
        known = {each.name: each for each in fields(cls) if each.init}
        for name in values:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise InputError(f"{what} has no setting {name!r}; {has}{did_you_mean(str(name), known)}")
        if missing := [name for name in required_fields(cls) if name not in values]:
            raise InputError(f"{what} needs {', '.join(missing)}")
        return cls(**values)


def resolve_device(name: str | None, strictly: bool = True) -> Any:
    """Return a device of torch; without a name a GPU if there is one.

    Args:
        name: torch's, or None.
        strictly: take `cpu` and `cuda` alone; else any that is there, and lm-eval's own default, `cuda:0`, as no name.

    Raises:
        InputError: torch knows none of that name, or it is not there.
    """
    if strictly and name is not None and not re.fullmatch(r"cpu(:0)?|cuda(:\d{1,3})?", str(name)):
        raise InputError(f"device={name} is not for this; use cpu or cuda")
    import torch

    gpus = torch.cuda.device_count()
    if name is None or (name == "cuda:0" and not strictly and not gpus):
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
        there = (
            (device.index or 0) < gpus
            if device.type == "cuda"
            else torch.empty(0, device=device).device.type == device.type
        )
    except (AssertionError, RuntimeError, NotImplementedError, TypeError):
        there = False
    if not there:
        has = f"{gpus} GPUs" if gpus else "no GPU that torch can use"
        raise InputError(f"device={name} is not there (this machine has {has}); use cpu, or cuda where there is a GPU")
    return device
