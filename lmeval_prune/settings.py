"""Settings that users write: parsed by the types and bounds of their fields, frozen, and converted to JSON."""

from __future__ import annotations

import functools
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Interval

from lmeval_prune.errors import InputError, did_you_mean

# Bounds of fields, in annotations: `ratio: Share`.
Share = Annotated[float, Interval(ge=0, le=1)]
ShareBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
Finite = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]
Seed = Annotated[int, Interval(ge=0, lt=2**31)]
Divisor = Annotated[float, Interval(ge=1e-6, le=1e6)]  # of logits in float32: far beyond, quotients are infinite or 0
_INT_LIMIT = 2**63  # of torch's and numpy's whole numbers
LearningRate = Annotated[float, Interval(gt=0, le=1e37)]  # AdamW computes ten times of it in float32
Decay = Annotated[float, Interval(ge=0, le=100)]  # a thousand times what is usual
Scale = Annotated[float, Interval(gt=0, le=1e6)]  # of lengths and terms of a loss, whose squares float32 squares again
ScaleOrZero = Annotated[float, Interval(ge=0, le=1e6)]


class FrozenMapping(dict[str, Any]):
    """An immutable, hashable dictionary."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return FrozenMapping, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("settings are immutable; create new ones")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse


def freeze(name: str, value: Any) -> Any:
    """Convert a JSON value to tuples and `FrozenMapping`; `InputError` if it is not JSON, and so has no identity."""
    if isinstance(value, list | tuple):
        return tuple(freeze(name, item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return FrozenMapping({key: freeze(name, item) for key, item in value.items()})
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{name} holds a {type(value).__name__}, which is not JSON; give numbers, strings, lists or dictionaries with "
        f"string keys"
    )


def to_plain_json(name: str, value: Any) -> Any:
    """Convert a frozen value to lists and dictionaries; `InputError` if it is not JSON."""
    value = freeze(name, value)
    if isinstance(value, tuple):
        return [to_plain_json(name, item) for item in value]
    return {key: to_plain_json(name, item) for key, item in value.items()} if isinstance(value, Mapping) else value


def parse_value(name: str, value: Any, annotation: Any) -> Any:
    """Parse a user's value by the annotation of its field; `InputError` if it has another type or is out of bounds.

    `"3"` is accepted as a whole number, and a number as a string. Annotations are `bool`, `int`, `float`, `str`,
    `Literal`, `tuple` or `dict` of these, any of them `| None`, with bounds (`Annotated[float, Interval(ge=0, le=1)]`);
    with any other annotation the value is returned unchanged.
    """
    if not is_supported_type(annotation):
        return value
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        if isinstance(plain, bool) and bool not in union_members(annotation):
            raise ValueError
        if type(plain) in (int, float) and str(plain) in _choices(annotation):
            return str(plain)
        if isinstance(plain, float) and not math.isfinite(plain) and float not in union_members(annotation):
            raise ValueError
        result = _adapter(annotation).validate_python(plain)
        if any(isinstance(item, float) and math.isnan(item) for item in _leaves(result)):
            raise ValueError
        if any(isinstance(item, int) and abs(item) >= _INT_LIMIT for item in _leaves(result)):
            raise InputError(f"{name}={value!r} is too large a number")
        return result
    except InputError:
        raise
    except ValueError:  # pydantic's ValidationError is one
        raise InputError(f"{name}={value!r} must be {describe(annotation)}{_remedy(plain, annotation)}") from None


def _remedy(value: Any, annotation: Any) -> str:
    """Return the end of the message: to quote a word such as `true`, or the most similar choice."""
    if isinstance(value, bool) and str in union_members(annotation):
        return "; put a word such as true in quotes"
    return did_you_mean(str(value), map(str, _choices(annotation)))


def _choices(annotation: Any) -> list[Any]:
    return [choice for kind in union_members(annotation) if get_origin(kind) is Literal for choice in get_args(kind)]


def describe(annotation: Any) -> str:
    """Describe the values of an annotation in words: `a number, at least 0 and below 1`."""
    kind = next(kind for kind in union_members(annotation) if kind is not types.NoneType)
    origin = get_origin(kind)
    if origin is Literal:
        *others, last = map(str, get_args(kind))
        words = f"{', '.join(others)} or {last}" if others else last
    elif origin is tuple:
        item = get_args(kind)[0]
        count = "one or more " if any(getattr(bound, "min_length", 0) for bound in _bounds(annotation)) else ""
        item_type = union_members(item)[0]
        items = f"{describe(item)}," if get_origin(item) is Literal else _PLURALS[get_origin(item_type) or item_type]
        words = f"{count}{items} separated by commas" if get_origin(item_type) is not dict else f"a list of {items}"
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
_PLURALS = {int: "whole numbers", float: "numbers", str: "names", bool: "truths", dict: "mappings of names to values"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_SUPPORTED = (bool, int, float, str, types.NoneType, Any)


@functools.cache
def annotations_of(declaration: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields or a function's parameters, with their bounds."""
    return get_type_hints(declaration, include_extras=True)


@functools.cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True))


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, without bounds."""
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for item in get_args(annotation) for kind in union_members(item))
    return (annotation,)


def _bounds(annotation: Any) -> tuple[Any, ...]:
    """Return the metadata that `Annotated` adds to a type or to the alternatives of a union."""
    if get_origin(annotation) is Annotated:
        return annotation.__metadata__
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(bound for item in get_args(annotation) for bound in _bounds(item))
    return ()


@functools.cache
def is_supported_type(annotation: Any) -> bool:
    """Return whether `parse_value` parses a type; it does not parse `Any` alone or unions of two types."""
    others = [kind for kind in union_members(annotation) if kind is not types.NoneType]
    if len(others) != 1 or others == [Any]:
        return False
    origin = get_origin(others[0])
    if origin in (tuple, dict):
        return all(item in (..., *_SUPPORTED) or is_supported_type(item) for item in get_args(others[0]))
    return origin is Literal or others[0] in _SUPPORTED


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def required_fields(declaration: Any) -> list[str]:
    """Return the names of a dataclass's fields that have no default."""
    return [
        field.name
        for field in fields(declaration)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]


class Use(NamedTuple):
    """Options that are read only under a condition.

    Attributes:
        when: the condition, as words that say what to give.
        holds: called with the settings; True under the condition.
        names: names of the options.
    """

    when: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...]


def check_used(settings: Any, uses: Iterable[Use], context: Any = None) -> None:
    """Raise `InputError` for a setting that is not its default, and that nothing reads.

    `context`: what the conditions are of; default: the settings.
    """
    for use in uses:
        changed = [name for name in use.names if differs_from_default(settings, name)]
        if changed and not use.holds(settings if context is None else context):
            raise InputError(f"{changed[0]} is for {use.when}; give that, or leave out {changed[0]}")


def differs_from_default(settings: Any, name: str) -> bool:
    """Return whether a setting has another value than its default."""
    field = next(field for field in fields(settings) if field.name == name)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(settings, name) != default)


@dataclass(frozen=True)
class Settings:
    """Base of frozen dataclasses whose values users write: each field is parsed by its type and bounds, or refused.

    Keyword-only fields are internal: users cannot set them. A subclass with its own `__post_init__` (for conditions on
    several fields) calls this one.

    Attributes:
        hashable: (class variable) fields that are compared are frozen, so that settings can be dictionary keys.
        uses: (class variable) fields that are read only under conditions; others than their defaults are refused where
            they are not read. Those of base classes count, too.
    """

    hashable: ClassVar[bool] = False
    uses: ClassVar[tuple[Use, ...]] = ()

    @classmethod
    def label(cls, message: str) -> str:
        """Return a message that begins with a field's name as users know it, e.g. with the method's name before it."""
        return message

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy does not accept a type as hashable
        annotations = annotations_of(kind)
        for field in fields(self):
            try:
                value = parse_value(field.name, getattr(self, field.name), annotations[field.name])
                value = freeze(field.name, value) if self.hashable and field.compare else value
            except InputError as error:
                raise InputError(self.label(str(error))) from None
            object.__setattr__(self, field.name, value)
        for base in kind.__mro__:
            check_used(self, vars(base).get("uses", ()))

    @classmethod
    def setting_names(cls) -> list[str]:
        """Return the names of the fields that users can set."""
        return [field.name for field in fields(cls) if field.init and not field.kw_only]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], subject: str) -> Self:
        """Create settings from a dictionary; `InputError` if a field is unknown, missing or not of its type.

        The message begins with `subject`, e.g. `method flap`.
        """
        names = cls.setting_names()
        for name in values:
            if name not in names:
                hint = did_you_mean(str(name), names) or f"; it has {', '.join(names) or 'none'}"
                raise InputError(f"{subject} has no setting {name!r}{hint}")
        if missing := [name for name in required_fields(cls) if name not in values]:
            raise InputError(f"{subject} needs {', '.join(missing)}")
        try:
            return cls(**values)
        except InputError:
            raise
        except ValueError as error:  # of a class from elsewhere
            raise InputError(f"{subject}: {error}") from error


def resolve_device(name: str | None, strictly: bool = True) -> Any:
    """Return a torch device, without a name a GPU if there is one; `InputError` if the device does not exist.

    `strictly` accepts only `cpu` and `cuda`. Otherwise `cuda:0`, lm-eval's default, is treated like None.
    """
    if strictly and name is not None and not re.fullmatch(r"cpu(:0)?|cuda(:\d{1,3})?", str(name)):
        raise InputError(f"device={name} cannot be used here; use cpu or cuda")
    import torch

    gpus = torch.cuda.device_count()
    if name is None or (name == "cuda:0" and not strictly and not gpus):
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda":
            exists = (device.index or 0) < gpus
        else:
            exists = torch.empty(0, device=device).device.type == device.type
    except (AssertionError, RuntimeError, NotImplementedError, TypeError):
        exists = False
    if not exists:
        available = f"{gpus} GPUs" if gpus else "no GPU that torch can use"
        raise InputError(f"device={name} does not exist (this machine has {available}); use cpu, or cuda with a GPU")
    return device


def resumes(function: Any) -> Any:
    """Declare that the same command resumes an interrupted one in its `output`; `main` says so."""
    function.resumes = True
    return function
