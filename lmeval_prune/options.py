"""Options of a command: declared by its function, given by a recipe (`--config`) and the command line.

The parameters of the function are the options, with their types, their defaults and what `Args:` says about them; so
are the fields of a dataclass that it makes of its `**options`. A tuple is written `5,10,15`, a dictionary
`NAME=VALUE,NAME=VALUE`; a `Sequence` may be given several times, a `bool` is a flag; `lambda_` is `--lambda`, and
`--num-fewshot` is `--num_fewshot`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from keyword import iskeyword
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser

from lmeval_prune.errors import InputError, did_you_mean, yaml_error_text
from lmeval_prune.settings import describe, is_supported_type, kinds, parse_value


def mutually_exclusive(*names: str) -> Callable[[Any], Any]:
    """Declare that a command takes one of these options; the command line's replaces the recipe's."""

    def declare(function: Any) -> Any:
        function.mutually_exclusive = names
        return function

    return declare


def first_argument(name: str) -> Callable[[Any], Any]:
    """Declare that a command's first word, if it is no option, is this option; else it is `name`."""

    def declare(function: Any) -> Any:
        function.first_argument = name
        return function

    return declare


def read_options(
    command: str, function: Callable[..., int], words: Sequence[str], commands: Iterable[str] = ()
) -> dict[str, Any]:
    """Read the options of a command; `--help` prints them and ends the program.

    Args:
        command: its name; the first word of it is its section in a recipe.
        function: which declares the options.
        words: of the command line, after the command; a first one that is no option is the option `name`, or the one
            that `first_argument` declares; first ones are the option `names`.
        commands: names of all commands, which may have sections in a recipe, too.

    Returns:
        Arguments of the function.

    Raises:
        InputError: an option is unknown, missing or not of its type, or the recipe cannot be read.
    """
    parser = Parser(prog=f"lmeval-prune {command}", description=summary(function))
    parser.add_function_arguments(function, as_group=False)
    section = command.split()[0]
    about = f"YAML recipe: its section `{section}` gives options, and the command line counts over it"
    parser.add_argument("--config", metavar="FILE", help=about)
    leading = getattr(function, "first_argument", "name")
    if leading in parser.known and words and not words[0].startswith("-"):
        words = [f"--{leading}", *words]
    if "names" in parser.known:
        count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
        words = ["--names", ",".join(words[:count]), *words[count:]] if count else words
    try:
        if not {"-h", "--help"} & set(words):
            words = _with_recipe(
                parser, command, words, getattr(function, "mutually_exclusive", ()), [command, *commands]
            )
        options = parser.parse_args(words).as_dict()
    except argparse.ArgumentError as error:
        raise InputError(_one_line(str(error))) from None
    del options["config"]
    return {f"{name}_" if iskeyword(name) else name: value for name, value in options.items()}


def summary(function: Callable[..., Any]) -> str:
    """Return the first line of a command's docstring."""
    return (function.__doc__ or "").partition("\n")[0]


class Parser(ArgumentParser):
    """Reads options that are written as this module says.

    Attributes:
        known: names of its options.
        repeated: options that may be given several times.
    """

    def __init__(self, **settings: Any) -> None:
        self.known: set[str] = set()
        self.repeated: set[str] = set()
        super().__init__(**settings, formatter_class=argparse.HelpFormatter, exit_on_error=False, allow_abbrev=False)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        """Add an option; its value is read as every setting is, by its type and bounds."""
        hint = settings.get("type") or getattr(settings.get("action"), "_typehint", None)
        kind = kinds(hint)[0]
        name = names[-1].strip("-+").rstrip("_")
        self.known.add(name)
        if get_origin(kind) is Sequence:
            self.repeated.add(name)
            settings |= {"action": "append", "type": get_args(kind)[0], "default": []}
        elif is_supported_type(hint):
            settings |= {"action": None, "type": partial(_value, hint)}
            letters = {tuple: "A,B,…", dict: "NAME=VALUE,…"}.get(get_origin(kind))
            settings["metavar"] = letters or settings.get("metavar") or name.upper()
            if kind is bool:
                settings |= {"nargs": "?", "const": True, "metavar": "true|false"}
        settings["help"] = _help(settings)
        return super().add_argument(*(n for n in names if n[:2] != "--"), f"--{name}", **settings)


def _help(settings: Mapping[str, Any]) -> str:
    """Return an option's help with its default."""
    text, default = settings.get("help") or "", settings.get("default")
    if settings.get("required"):
        return f"{text} (required)"
    if (default or type(default) in (int, float)) and default != argparse.SUPPRESS:
        words = ",".join(map(str, default)) if isinstance(default, tuple) else default
        return f"{text} (default: {words})"
    return text


def _with_recipe(
    parser: Parser, command: str, words: Sequence[str], mutually_exclusive: Sequence[str], commands: Sequence[str]
) -> list[str]:
    """Return the recipe's options that the command line leaves open, then the command line, both checked."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    options, rest = first.parse_known_args([_underscored(word) for word in words])
    sections = list(dict.fromkeys(name.split()[0] for name in commands))
    recipe = _section(Path(options.config), sections) if options.config else {}
    typed_names = [word[2:].partition("=")[0] for word in rest if word.startswith("--")]
    _check_names(parser, command, recipe, mutually_exclusive, f"{options.config}: ")
    _check_names(parser, command, typed_names, mutually_exclusive, "")
    replaced = {*typed_names, *mutually_exclusive} if set(mutually_exclusive) & set(typed_names) else set(typed_names)
    recipe = {name: value for name, value in recipe.items() if name not in replaced and value is not None}
    _check_required(parser, command, {*typed_names, *recipe})
    return [*(word for name, value in recipe.items() for word in _spelled(name, value, parser.repeated)), *rest]


def _check_required(parser: Parser, command: str, names: set[str]) -> None:
    required = [action.dest for action in parser._actions if action.required]
    missing = [f"--{name}" for name in required if name not in names]
    if missing:
        raise InputError(f"{command} needs {', '.join(missing)}, on the command line or in a --config file")


def _check_names(
    parser: Parser, command: str, names: Iterable[str], mutually_exclusive: Sequence[str], source: str
) -> None:
    """Refuse options that the command does not have, and two of which only one may be given."""
    for name in names:
        if name not in parser.known or name in ("help", "config"):
            raise InputError(f"{source}{command} has no option {name!r}{did_you_mean(str(name), parser.known)}")
    if len(set(mutually_exclusive) & set(names)) > 1:
        raise InputError(f"{source}give {' or '.join(mutually_exclusive)}, not both")


def _underscored(word: str) -> str:
    """Write `--num-fewshot=2` as `--num_fewshot=2`."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def _section(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """Read the section of a recipe that has the first of the known names."""
    import yaml

    if not path.is_file():
        raise InputError(f"no such file: {path}")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {yaml_error_text(error)}") from None
    name = known[0]
    for other in recipe if isinstance(recipe, dict) else ():
        if other not in known:
            raise InputError(
                f"{path} has a section {other!r}, and there is no such command{did_you_mean(str(other), known)}"
            )
    section = recipe.get(name) if isinstance(recipe, dict) else None
    if not isinstance(section, dict):
        raise InputError(f"{path} must have sections, one of them `{name}:` with options")
    return section


def _spelled(name: str, value: Any, repeated: set[str]) -> list[str]:
    """Write an option of a recipe as words of a command line."""
    if name in repeated and isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    values = value if name in repeated and isinstance(value, list) else [value]
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value, default=str)}" for value in values]


def _value(annotation: Any, word: Any) -> Any:
    """Read the word of a command line by an annotation."""
    if word == "null" and NoneType in kinds(annotation) and str not in kinds(annotation):
        return None
    origins = {get_origin(kind) for kind in kinds(annotation)}
    try:
        value = _pairs(word) if dict in origins else _items(word) if tuple in origins else word
        return parse_value("value", value, annotation)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {describe(annotation)}, not {word!r}") from None


def _items(word: Any) -> Any:
    """Split `A,B`; a recipe has a list, also as JSON."""
    if not isinstance(word, str):
        return word
    return json.loads(word) if word.startswith("[") else [item for item in map(str.strip, word.split(",")) if item]


def _pairs(value: Any) -> dict[str, Any]:
    """Read `NAME=VALUE,NAME=VALUE` as lm-eval does; a recipe has a dictionary."""
    if isinstance(value, str):
        from lm_eval._cli.utils import key_val_to_dict

        value = json.loads(value) if value.startswith("{") else key_val_to_dict(value)
    return dict(value)


def _one_line(message: str) -> str:
    """Write an error of argparse in one line."""
    return re.sub(
        r"^argument (\S+): (must be)?",
        lambda match: f"{match[1]} {match[2]}" if match[2] else f"{match[1]}: ",
        " ".join(message.split()),
    )


@contextmanager
def as_options() -> Iterator[None]:
    """Name options in refusals as the command line has them."""
    try:
        yield
    except InputError as error:
        raise InputError(re.sub(r"\b(allow_other_model|allow_empty_layer)=true", r"--\1", str(error))) from None
