"""Settings that users write: on the command line, in YAML recipes, in model_args and in Python.

Their types and bounds are annotations of dataclass fields (`Settings`) and of the parameters of a command's function. A
command takes the parameters as options, with their help from `Args:`, and the fields of the dataclass that the
function creates from `**options`. A tuple is written `5,10,15`, a dictionary `NAME=VALUE,NAME=VALUE`. A `Sequence` can
be repeated, a `bool` is a flag. `lambda_` is `--lambda`, and `--num-fewshot` is `--num_fewshot`. What the command line
says counts over a recipe (`--config`); an empty value (`--task ""`) takes an option of the recipe back.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import takewhile
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Interval
from jsonargparse import ArgumentParser

from lmeval_prune.errors import InputError, brief, check_exists, did_you_mean

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
LearningRate = Annotated[float, Interval(gt=0, le=1e37)]  # AdamW computes ten times of it in float32
Decay = Annotated[float, Interval(ge=0, le=100)]  # a thousand times what is usual
Scale = Annotated[float, Interval(gt=0, le=1e6)]  # of lengths and terms of a loss, whose squares float32 squares again
ScaleOrZero = Annotated[float, Interval(ge=0, le=1e6)]

INCLUDE_PATH = "include_path"


# ---------------------------------------------------------------------- values


def parse_value(name: str, value: Any, annotation: Any) -> Any:
    """Parse a user's value by the annotation of its field; `InputError` if it has another type or is out of bounds.

    `"3"` is accepted as a whole number, and a number as a string. Annotations are `bool`, `int`, `float`, `str`,
    `Literal`, `tuple` or `dict` of these, any of them `| None`, with bounds (`Annotated[float, Interval(ge=0, le=1)]`);
    with any other annotation the value is returned unchanged.
    """
    if not is_supported_type(annotation):
        return value
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    kinds = union_members(annotation)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if type(plain) in (int, float) and str(plain) in choices:
        return str(plain)
    try:
        if isinstance(plain, bool) and bool not in kinds:  # pydantic takes true for 1
            raise ValueError("is true or false, which is no value here")
        return _adapter(annotation).validate_python(plain)
    except ValueError as error:  # pydantic's ValidationError is one
        problem = error.errors()[0]["msg"].replace("Input should", "must", 1) if hasattr(error, "errors") else error
        raise InputError(f"{name}={value!r} {problem}{did_you_mean(str(value), map(str, choices))}") from None


@functools.cache
def annotations_of(declaration: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields or a function's parameters, with their bounds."""
    return get_type_hints(declaration, include_extras=True)


@functools.cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False))


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, without bounds."""
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for item in get_args(annotation) for kind in union_members(item))
    return (annotation,)


@functools.cache
def is_supported_type(annotation: Any) -> bool:
    """Return whether `parse_value` parses a type; it does not parse `Any` alone or unions of two types."""
    others = [kind for kind in union_members(annotation) if kind is not types.NoneType]
    if len(others) != 1 or others == [Any]:
        return False
    if get_origin(others[0]) in (tuple, dict):
        return all(item in (..., Any, types.NoneType) or is_supported_type(item) for item in get_args(others[0]))
    return get_origin(others[0]) is Literal or others[0] in (bool, int, float, str)


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
    """Convert a JSON value to tuples and `FrozenMapping`; `InputError` if it is not JSON."""
    if isinstance(value, list | tuple):
        return tuple(freeze(name, item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return FrozenMapping({key: freeze(name, item) for key, item in value.items()})
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"{name} has a {type(value).__name__}, which is not JSON")


def to_plain_json(name: str, value: Any) -> Any:
    """Convert a value to lists and dictionaries; `InputError` if it is not JSON."""
    return json.loads(json.dumps(freeze(name, value)))


# ---------------------------------------------------------------------- dataclasses


class Use(NamedTuple):
    """Options that are read only under a condition."""

    when: str  # the condition, as words that say what to give
    holds: Callable[[Any], bool]  # called with the settings; True under the condition
    names: tuple[str, ...]  # of the options


def differs_from_default(settings: Any, name: str) -> bool:
    field = next(field for field in fields(settings) if field.name == name)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(settings, name) != default)


@dataclass(frozen=True)
class Settings:
    """Base of frozen dataclasses whose values users write: each field is parsed by its type and bounds, or refused.

    Keyword-only fields are internal: users cannot set them. A subclass with its own `__post_init__` (for conditions on
    several fields) calls this one. Values other than the defaults are refused where `uses`, also of base classes, says
    that they are not read.
    """

    hashable: ClassVar[bool] = False  # fields that are compared are frozen, so that settings can be dictionary keys
    uses: ClassVar[tuple[Use, ...]] = ()

    @classmethod
    def message_prefix(cls) -> str:
        return ""

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy does not accept a type as hashable
        annotations = annotations_of(kind)
        for field in fields(self):
            name = f"{kind.message_prefix()}{field.name}"
            value = parse_value(name, getattr(self, field.name), annotations[field.name])
            value = freeze(name, value) if self.hashable and field.compare else value
            object.__setattr__(self, field.name, value)
        for use in (use for base in kind.__mro__ for use in vars(base).get("uses", ())):
            changed = [name for name in use.names if differs_from_default(self, name)]
            if changed and not use.holds(self):
                raise InputError(f"{changed[0]} is for {use.when}; give that, or leave out {changed[0]}")

    @classmethod
    def setting_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.init and not field.kw_only]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], subject: str) -> Self:
        """Create settings from a dictionary; `InputError` if a field is unknown, missing or not of its type.

        The message begins with `subject`, e.g. `method flap`.
        """
        names = cls.setting_names()
        if unknown := [name for name in values if name not in names]:
            hint = did_you_mean(str(unknown[0]), names) or f"; it has {', '.join(names) or 'none'}"
            raise InputError(f"{subject} has no setting {unknown[0]!r}{hint}")
        needed = [f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]
        if missing := [name for name in needed if name not in values]:
            raise InputError(f"{subject} needs {', '.join(missing)}")
        return cls(**values)


def resolve_device(name: str | None) -> Any:
    """Return a torch device: without a name, and for `cuda:0`, lm-eval's default, a CPU if there is no GPU."""
    import torch

    has_gpu = torch.cuda.is_available()
    if name is None or (name == "cuda:0" and not has_gpu):
        return torch.device("cuda" if has_gpu else "cpu")
    return torch.empty(0, device=name).device


# ---------------------------------------------------------------------- commands


@dataclass(frozen=True)
class command:  # noqa: N801
    """Decorator of a command's function: what the command is beside its options."""

    first: str = ""  # option whose value is the command's first word; of a tuple, all first words
    word: str = ""  # name of the first word in the usage; empty: the option's
    takes_tasks: bool = False  # of lm-eval, and so `--include_path`, which `cli.main` reads
    resumes: bool = False  # the same command resumes an interrupted one in its `output`

    def __call__(self, function: Any) -> Any:
        function.declared = self
        return function


def declared(function: Any) -> command:
    """Return what a command declares."""
    return getattr(function, "declared", None) or command()


def summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def read_options(
    name: str, function: Callable[..., int], words: Sequence[str], commands: Iterable[str] = ()
) -> dict[str, Any]:
    """Read the options of a command as arguments of its function; `--help` prints them and ends the program.

    A recipe may have sections of all `commands`. `InputError` if an option is unknown, missing or not of its type, or
    if the recipe cannot be read.
    """
    parser = command_parser(name, function)
    if {"-h", "--help"} & {*words}:
        parser.print_help()
        raise SystemExit(0)
    typed = _typed_words(parser, declared(function).first, deque(words))
    recipe: dict[str, Any] = {}
    if "config" in typed:
        sections = list(dict.fromkeys(other.split()[0] for other in (name, *commands)))
        recipe = _recipe_section(packaged(typed.pop("config")[-1]), sections)
    for option in (*recipe, *typed):
        if option not in parser.types:
            raise InputError(f"{name} has no option {option!r}{did_you_mean(str(option), parser.types)}")
    if recipe:  # an empty value takes an option of the recipe back
        typed = {option: [word for word in words if word != ""] for option, words in typed.items()}
        recipe = {option: value for option, value in recipe.items() if value is not None and option not in typed}
    options = {}
    for action in parser._actions:
        option, value = action.dest, action.default
        if option in ("help", "config"):
            continue
        if typed.get(option):
            can_repeat = get_origin(union_members(parser.types[option])[0]) is Sequence
            value = _parse_option(option, typed[option] if can_repeat else typed[option][-1], parser.types[option])
        elif option in recipe:
            value = _parse_option(option, recipe[option], parser.types[option])
        elif action.required:
            raise InputError(f"{name} needs --{option}; {parser.prog} --help explains it")
        options[f"{option}_" if iskeyword(option) else option] = value
    return options


def _typed_words(parser: Parser, first: str, words: deque[str]) -> dict[str, list[str]]:
    """Return the values that follow each option on a command line; `first` is the option of words before them."""
    typed: dict[str, list[str]] = {}
    if get_origin(union_members(parser.types.get(first))[0]) is tuple:
        if leading := list(takewhile(lambda word: not word.startswith("-"), words)):
            typed[first] = [json.dumps(leading)]
            words = deque(list(words)[len(leading) :])
    elif first and words and not words[0].startswith("-"):
        typed[first] = [words.popleft()]
    while words:
        word = words.popleft()
        option, equals, value = word.partition("=")
        option = option.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            raise InputError(f"{word!r} follows no option; {parser.prog} --help lists them")
        if not equals and words and not words[0].startswith("--"):
            value = words.popleft()
        elif not equals and bool in union_members(parser.types.get(option)):
            value = "true"
        elif not equals and option in parser.types:
            raise InputError(f"--{option} needs a value")
        typed.setdefault(option, []).append(value)
    return typed


def command_parser(name: str, function: Callable[..., int]) -> Parser:
    """Return the parser of a command's options; the reference of the documentation reads it, too."""
    parser = Parser(prog=f"lmeval-prune {name}", description=summary(function))
    parser.add_function_arguments(function, as_group=False)
    about = declared(function)
    if about.takes_tasks:
        include_help = "folder with YAML files of tasks of your own, as for lm_eval"
        parser.add_argument(f"--{INCLUDE_PATH}", type=str | None, metavar="FOLDER", help=include_help)
    config_help = f"YAML recipe: its section `{name.split()[0]}` sets options; the command line overrides it"
    parser.add_argument("--config", metavar="FILE", help=config_help)
    required = {action.dest: action for action in parser._actions if action.required}
    words = [f"--{option} {action.metavar}" for option, action in required.items() if option != about.first]
    if about.first:
        first = (about.word or about.first.removesuffix("s")).upper()
        first = f"{first} {first} …" if get_origin(union_members(parser.types[about.first])[0]) is tuple else first
        words.insert(0, first if about.first in required else f"[{first}]")
    parser.usage = " ".join(["%(prog)s", *words, "[options]"])
    return parser


class Parser(ArgumentParser):
    """The options of a command, with their help."""

    def __init__(self, **settings: Any) -> None:
        self.types: dict[str, Any] = {}  # annotations by name
        super().__init__(**settings, formatter_class=argparse.HelpFormatter)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        """Add an option."""
        hint = settings.get("type") or getattr(settings.get("action"), "_typehint", None)
        kind, name = union_members(hint)[0], names[-1].strip("-+").rstrip("_")
        self.types[name] = hint
        if hint is not None:  # `read_options` parses the value
            notation = {tuple: "A,B,…", dict: "NAME=VALUE,…"}.get(get_origin(kind))
            settings |= {"action": None, "type": lambda word: word}
            settings["metavar"] = "true|false" if kind is bool else notation or settings.get("metavar") or name.upper()
            settings |= {"nargs": "?", "const": True} if kind is bool else {}
            settings |= {"default": []} if get_origin(kind) is Sequence else {}
        default, end = settings.get("default"), ""
        if (default or type(default) in (int, float)) and default != argparse.SUPPRESS:
            end = f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
        settings["help"] = f"{settings.get('help') or ''}{' (required)' if settings.get('required') else end}"
        return super().add_argument(*(n for n in names if n[:2] != "--"), f"--{name}", **settings)


def packaged(path: str) -> Path:
    """Return a recipe's path: that of the package for a `configs/…` that is not here."""
    own = Path(__file__).parent / path
    return own if path.startswith("configs/") and not Path(path).exists() and own.is_file() else Path(path)


def _recipe_section(path: Path, sections: Sequence[str]) -> dict[str, Any]:
    """Read the first of `sections` from a recipe, as JSON; the recipe may have the others, too."""
    import yaml

    check_exists(path, file=True)
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {brief(str(error), 300)}") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get(sections[0]), dict):
        raise InputError(f"{path} must have sections, one of them `{sections[0]}:` with options")
    if unknown := [str(name) for name in recipe if name not in sections]:
        hint = did_you_mean(unknown[0], sections)
        raise InputError(f"{path} has a section {unknown[0]!r}, and there is no such command{hint}")
    return json.loads(json.dumps(recipe[sections[0]], default=str))


def _parse_option(option: str, value: Any, annotation: Any) -> Any:
    """Parse a word of the command line, or a value of a recipe."""
    kinds = union_members(annotation)
    origins = {get_origin(kind) for kind in kinds}
    if Sequence in origins:
        items = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        return [str(item) for item in (items if isinstance(items, list) else [items])]
    if not isinstance(value, str) and not (isinstance(value, list | dict) and origins & {tuple, dict}):
        value = json.dumps(value)
    if value == "null" and types.NoneType in kinds and str not in kinds:
        return None
    try:
        if isinstance(value, str) and dict in origins:
            from lm_eval._cli.utils import key_val_to_dict

            value = json.loads(value) if value.startswith("{") else key_val_to_dict(value)
        elif isinstance(value, str) and tuple in origins:
            items = [item for item in map(str.strip, value.split(",")) if item]
            value = json.loads(value) if value.startswith("[") else items
        return parse_value(f"--{option}", value, annotation)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--{option}={value!r} cannot be read ({error})") from None
