"""Options of a command: declared by its function, set by a recipe (`--config`) and the command line.

The options are the function's parameters, with their types, their defaults and their help from `Args:`, and the fields
of the dataclass that the function creates from `**options`. A tuple is written `5,10,15`, a dictionary
`NAME=VALUE,NAME=VALUE`. A `Sequence` can be repeated, a `bool` is a flag. `lambda_` is `--lambda`, and `--num-fewshot`
is `--num_fewshot`. With a recipe, an empty value (`--task ""`) takes an option back: its default counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from keyword import iskeyword
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser

from lmeval_prune.errors import InputError, brief, check_exists, did_you_mean
from lmeval_prune.settings import describe, is_supported_type, parse_value, union_members

INCLUDE_PATH, INCLUDE_HELP = "include_path", "folder with YAML files of tasks of your own, as for lm_eval"


def mutually_exclusive(*names: str) -> Callable[[Any], Any]:
    """Declare options of which a command takes at most one; the command line's option replaces the recipe's."""

    def declare(function: Any) -> Any:
        function.mutually_exclusive = names
        return function

    return declare


def first_argument(name: str, word: str = "") -> Callable[[Any], Any]:
    """Declare the option of a command's first word; `--NAME` may be left out.

    If the option is a tuple, it has all first words. `word` stands for one of them in messages, by default the option's
    name.
    """

    def declare(function: Any) -> Any:
        function.first_argument, function.first_word = name, word
        return function

    return declare


def takes_tasks(function: Any) -> Any:
    """Declare that a command takes lm-eval's tasks: it gets the option `--include_path`, which `main` reads."""
    function.takes_tasks = True
    return function


def with_packaged_recipes(words: Sequence[str]) -> list[str]:
    """Return words with this package's recipe for a `configs/…` that is not here: the first word, or of `--config`."""
    result = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, path = word.rpartition("=")
        recipe = Path(__file__).parent / path
        is_input = (option if equals else before) in ("", "--config", "--grid")
        is_own = is_input and path.startswith("configs/") and not Path(path).exists() and recipe.is_file()
        result.append(f"{option}{equals}{recipe}" if is_own else word)
    return result


def read_options(
    command: str, function: Callable[..., int], words: Sequence[str], commands: Iterable[str] = ()
) -> dict[str, Any]:
    """Read the options of a command as arguments of its function; `--help` prints them and ends the program.

    A first word that is not an option is the value of the option that `first_argument` declares, else of `name`;
    several first words are the values of a tuple, else of the option `names`. A recipe may have sections of all
    `commands`.

    Raises:
        InputError: an option is unknown, missing or not of its type, or the recipe cannot be read.
    """
    parser = command_parser(command, function)
    words = _name_first_words(parser, function, words)
    try:
        if not {"-h", "--help"} & set(words):
            words = _with_recipe(parser, command, words, function, [command, *commands])
        options = parser.parse_args(words).as_dict()
    except argparse.ArgumentError as error:
        raise InputError(_without_prefix(str(error))) from None
    del options["config"]
    return {f"{name}_" if iskeyword(name) else name: value for name, value in options.items()}


def command_parser(command: str, function: Callable[..., int]) -> Parser:
    """Return the parser of a command's options; the reference of the documentation reads it, too."""
    parser = Parser(prog=f"lmeval-prune {command}", description=summary(function))
    parser.add_function_arguments(function, as_group=False)
    if getattr(function, "takes_tasks", False):
        parser.add_argument(f"--{INCLUDE_PATH}", type=str | None, metavar="FOLDER", help=INCLUDE_HELP)
    section = command.split()[0]
    config_help = f"YAML recipe: its section `{section}` sets options; the command line overrides it"
    config_help += ", and an empty value takes an option back"
    parser.add_argument("--config", metavar="FILE", help=config_help)
    parser.usage = _usage(parser, function)
    return parser


def summary(function: Callable[..., Any]) -> str:
    """Return the first line of a command's docstring."""
    return (function.__doc__ or "").partition("\n")[0]


def as_typed(message: str, options: Mapping[str, Any]) -> str:
    """Write the options in a message as on the command line: `--ratio=3` for `ratio=3`."""
    for name, value in options.items():
        option = name.rstrip("_")
        if message.startswith((f"{option}={value}", f"{option}={value!r}")):
            message = f"--{message}"
        elif isinstance(value, bool):
            message = re.sub(rf"(?<!-)\b{option}=true\b", f"--{option}", message)
    return message


class Parser(ArgumentParser):
    """Parses the notation of this module.

    Attributes:
        option_names: names of its options.
        types: their annotations.
        repeatable: those that can be repeated.
        lists: those that are tuples.
    """

    def __init__(self, **settings: Any) -> None:
        self.option_names: set[str] = set()
        self.types: dict[str, Any] = {}
        self.repeatable: set[str] = set()
        self.lists: set[str] = set()
        super().__init__(**settings, formatter_class=argparse.HelpFormatter, exit_on_error=False, allow_abbrev=False)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        """Add an option; its value is parsed like every setting."""
        hint = settings.get("type") or getattr(settings.get("action"), "_typehint", None)
        kind = union_members(hint)[0]
        name = names[-1].strip("-+").rstrip("_")
        self.option_names.add(name)
        self.types[name] = hint
        if get_origin(kind) is Sequence:
            self.repeatable.add(name)
            settings |= {"action": "append", "type": get_args(kind)[0], "default": []}
        elif is_supported_type(hint):
            settings |= {"action": None, "type": partial(_parse_word, hint)}
            if get_origin(kind) is tuple:
                self.lists.add(name)
            notation = {tuple: "A,B,…", dict: "NAME=VALUE,…"}.get(get_origin(kind))
            settings["metavar"] = notation or settings.get("metavar") or name.upper()
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


def _first_option(parser: Parser, function: Callable[..., int]) -> str:
    """Return the option that a command's first words are values of; it may not exist."""
    return getattr(function, "first_argument", "names" if "names" in parser.option_names else "name")


def _first_words(parser: Parser, function: Callable[..., int]) -> str:
    """Return how the first words of a command are written."""
    name = _first_option(parser, function)
    is_list = name in parser.lists
    word = getattr(function, "first_word", "") or (name.removesuffix("s") if is_list else name).upper()
    return f"{word} {word} …" if is_list else word


def _usage(parser: Parser, function: Callable[..., int]) -> str:
    """Return the line that shows how a command is written: its first words and required options."""
    name, first = _first_option(parser, function), ""
    required = {action.dest: action for action in parser._actions if action.required}
    if name in parser.option_names:
        words = _first_words(parser, function)
        first = f" {words}" if name in required else f" [{words}]"
    others = "".join(f" --{dest} {action.metavar}" for dest, action in required.items() if dest != name)
    return f"%(prog)s{first}{others} [options]"


def _name_first_words(parser: Parser, function: Callable[..., int], words: Sequence[str]) -> list[str]:
    """Put the name of an option before the first words of a command line; see `read_options`."""
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    if not count:
        return list(words)
    name = _first_option(parser, function)
    if name in parser.lists:
        return [f"--{name}", json.dumps(words[:count]), *words[count:]]
    if name not in parser.option_names:
        raise InputError(f"{words[0]!r} follows no option; {parser.prog} --help lists them")
    return [f"--{name}", *words]


def _check_file(name: str | None, words: Sequence[str]) -> None:
    """Refuse a missing file or folder of the option `name`; it is named before missing options."""
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        option, equals, value = word.partition("=")
        path = value if equals else following
        if option == f"--{name}" and not path.startswith("--"):
            check_exists(path)


def _with_recipe(
    parser: Parser, command: str, words: Sequence[str], function: Callable[..., int], commands: Sequence[str]
) -> list[str]:
    """Check the options of the recipe and of the command line, and put the recipe's before the command line's."""
    exclusive = getattr(function, "mutually_exclusive", ())
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    config_parser.add_argument("--config")
    options, other_words = config_parser.parse_known_args([_underscored(word) for word in words])
    sections = list(dict.fromkeys(name.split()[0] for name in commands))
    recipe = _recipe_section(Path(options.config), sections) if options.config else {}
    other_words, taken_back = _take_back(other_words) if options.config else (other_words, [])
    typed_names = [word[2:].partition("=")[0] for word in other_words if word.startswith("--")]
    _check_names(parser, command, recipe, exclusive, f"{options.config}: ")
    _check_names(parser, command, typed_names, exclusive, "")
    _check_names(parser, command, taken_back, (), "")
    overridden = {*typed_names, *taken_back, *(exclusive if set(exclusive) & set(typed_names) else ())}
    recipe = {name: value for name, value in recipe.items() if name not in overridden and value is not None}
    other_words = [
        *(word for name, value in recipe.items() for word in _as_words(name, value, parser.repeatable)),
        *other_words,
    ]
    _check_required(parser, command, {*typed_names, *recipe}, function, other_words)
    return other_words


def _take_back(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove the options with an empty value from words; return the other words, and the names of these options."""
    other_words, names = list[str](), list[str]()
    for word in words:
        if word == "" and other_words and other_words[-1].startswith("--") and "=" not in other_words[-1]:
            names.append(other_words.pop()[2:])
        elif word.startswith("--") and word.endswith("=") and word.count("=") == 1:
            names.append(word[2:-1])
        else:
            other_words.append(word)
    return other_words, names


def _check_required(
    parser: Parser, command: str, names: Collection[str], function: Callable[..., int], words: Sequence[str]
) -> None:
    """Refuse missing options, and before them a missing file."""
    first = _first_option(parser, function)
    required = [action.dest for action in parser._actions if action.required]
    if missing := [
        _first_words(parser, function) if name == first else f"--{name}" for name in required if name not in names
    ]:
        _check_file(getattr(function, "first_argument", None), words)
        raise InputError(f"{command} needs {', '.join(missing)}, on the command line or in a --config file")


def _check_names(parser: Parser, command: str, names: Iterable[str], exclusive: Sequence[str], source: str) -> None:
    """Refuse unknown and mutually exclusive options."""
    for name in names:
        if name not in parser.option_names or name in ("help", "config"):
            raise InputError(f"{source}{command} has no option {name!r}{did_you_mean(str(name), parser.option_names)}")
    if len(set(exclusive) & set(names)) > 1:
        raise InputError(f"{source}give {' or '.join(exclusive)}, not both")


def _underscored(word: str) -> str:
    """Convert `--num-fewshot=2` to `--num_fewshot=2`."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def _recipe_section(path: Path, sections: Sequence[str]) -> dict[str, Any]:
    """Read the first of `sections` from a recipe; the recipe may have the others, too."""
    import yaml

    check_exists(path, file=True)
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {brief(str(error), 300)}") from None
    recipe = recipe if isinstance(recipe, dict) else {}
    for name in recipe:
        if name not in sections:
            hint = did_you_mean(str(name), sections)
            raise InputError(f"{path} has a section {name!r}, and there is no such command{hint}")
    section = recipe.get(sections[0])
    if not isinstance(section, dict):
        raise InputError(f"{path} must have sections, one of them `{sections[0]}:` with options")
    return section


def _as_words(name: str, value: Any, repeatable: set[str]) -> list[str]:
    """Convert an option of a recipe to words of a command line."""
    if name in repeatable and isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    values = value if name in repeatable and isinstance(value, list) else [value]
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value, default=str)}" for value in values]


def _parse_word(annotation: Any, word: Any) -> Any:
    """Parse a word of the command line by an annotation."""
    members = union_members(annotation)
    if word == "null" and NoneType in members and str not in members:
        return None
    origins = {get_origin(kind) for kind in members}
    try:
        value = _split_pairs(word) if dict in origins else _split_items(word) if tuple in origins else word
        return parse_value("value", value, annotation)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {describe(annotation)}, not {word!r}") from None


def _split_items(word: Any) -> Any:
    """Split `A,B`; a recipe's list arrives as JSON."""
    if not isinstance(word, str):
        return word
    return json.loads(word) if word.startswith("[") else [item for item in map(str.strip, word.split(",")) if item]


def _split_pairs(word: Any) -> dict[str, Any]:
    """Split `NAME=VALUE,NAME=VALUE` as lm-eval does; a recipe's dictionary arrives as JSON."""
    if isinstance(word, str):
        from lm_eval._cli.utils import key_val_to_dict

        word = json.loads(word) if word.startswith("{") else key_val_to_dict(word)
    return dict(word)


def _without_prefix(message: str) -> str:
    """Shorten an error of argparse to one line without the word `argument`."""
    return re.sub(
        r"^argument (\S+): (must be)?",
        lambda match: f"{match[1]} {match[2]}" if match[2] else f"{match[1]}: ",
        " ".join(message.split()),
    )
