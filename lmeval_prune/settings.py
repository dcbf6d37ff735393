"""Settings as people write them: read by the types of the fields that they are for, frozen, and written as JSON."""

from __future__ import annotations

import functools
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from lmeval_prune.errors import InputError

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class FrozenMapping(Mapping[str, Any]):
    """A dictionary that does not change and can be hashed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


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


def as_json(name: str, value: Any) -> Any:
    """A frozen value as JSON knows it.

    Raises:
        InputError: as of `frozen`.
    """
    value = frozen(name, value)
    if isinstance(value, tuple):
        return [as_json(name, item) for item in value]
    return {key: as_json(name, item) for key, item in value.items()} if isinstance(value, Mapping) else value


def typed(name: str, value: Any, annotation: Any) -> Any:
    """What a user wrote, as a `bool`, `int`, `float` or `str`, where the annotation is one of these (or `| None`).

    Raises:
        InputError: it is of another type.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    (kind, *others) = [kind for kind in kinds if kind is not types.NoneType] or [None]
    if others or kind not in _READERS or (value is None and types.NoneType in kinds):
        return value
    reader, words = _READERS[kind]
    try:
        return reader(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(f"{name}={value!r} is {words}") from None


types_of = functools.cache(get_type_hints)  # of a dataclass's fields, or of a function's parameters


def _bool(value: Any) -> bool:
    return _WORDS[str(value).lower()]


def _int(value: Any) -> int:
    number = int(value) if isinstance(value, str | Integral) else float(value)
    if isinstance(value, bool) or number != int(number):
        raise ValueError
    return int(number)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | str) or math.isnan(float(value)):
        raise TypeError
    return float(value)


def _str(value: Any) -> str:
    """Return a text; of a number its own, for lm-eval reads `name=3` as one. Truths and None may mean several."""
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number and not isinstance(value, str | os.PathLike):
        raise TypeError
    return str(value)


_READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (_bool, "neither true nor false"),
    int: (_int, "not a whole number"),
    float: (_float, "not a number"),
    str: (_str, "not a text; quotes make one of a word such as true"),
}


def device_named(name: str | None, strictly: bool = True) -> Any:
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
