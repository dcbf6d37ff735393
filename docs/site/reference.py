"""Write the reference of the site from the code: commands, recipes, model_args, the grid's YAML, the Python API."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from docstring_parser import DocstringStyle, parse

from lmeval_prune import _LAZY
from lmeval_prune.cli import COMMANDS
from lmeval_prune.config import annotations_of, command_parser, declared, is_supported_type, union_members
from lmeval_prune.grid.configuration import SHARED_TASK_SETTINGS, VARIANT_SETTINGS, Grid, GridTask
from lmeval_prune.grid.preparations import PREPARATIONS
from lmeval_prune.interventions.table import METHODS
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.servers import ServerOptions
from lmeval_prune.pruners.table import PRUNERS

# The pages of the API: a package or module whose public names are shown, in the order of the page.
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "interventions": (
        "Interventions",
        (
            *("interventions", "interventions.token_filter", "interventions.probe_pruning", "interventions.base"),
            "interventions.attention_call",
        ),
    ),
    "plans": ("Pruners, plans, surgery", ("pruners.base", "pruners.parts", "pruners.calibration", "surgery.cut")),
    "models": ("Models and checkpoints", ("architectures", "checkpoints.loading")),
    "decoding": ("Decoding engine", ("decoding",)),
    "evaluation": (
        "Evaluation",
        ("models.pruned_hf", "models.resumable", "sprint.outcomes", "sprint.router", "grid.preparations", "scoring"),
    ),
    "files": ("Files, settings, errors", ("config", "errors", "artefacts")),
}


def escape(text: object) -> str:
    """Escape a text of the code for a cell of a Markdown table; what is in backticks stays code."""
    parts = re.split(r"(`[^`]+`)", " ".join(str(text).split()))
    plain = re.compile(r"([\\*_<>\[\]|])")
    return "".join(part.replace("|", r"\|") if part[:1] == "`" else plain.sub(r"\\\1", part) for part in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table; the cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def description(function: Any) -> str:
    """Return a docstring without its sections."""
    return re.split(r"\n\s*(?:Args|Attributes|Raises|Returns):\n", inspect.cleandoc(function.__doc__ or ""))[0].strip()


# ---------------------------------------------------------------------- commands and recipes


def options_of(name: str) -> list[Any]:
    """Return the actions of a command's parser, except those that all commands have."""
    parser = command_parser(name, resolve_name(COMMANDS[name]))
    actions = [action for action in parser._actions if action.dest not in ("help", "config")]
    for action in actions:
        action.values = parser.types[action.dest]
    return actions


def takes_words(name: str) -> bool:
    """Tell whether a command passes its words on, and has no options of its own."""
    return bool(inspect.getfullargspec(resolve_name(COMMANDS[name])).varargs)


def values(annotation: Any) -> str:
    """Describe the values of an option: their type and bounds."""
    if not is_supported_type(annotation):
        return "text; can be repeated"
    kind = union_members(annotation)[0]
    of_items = [item for item in get_args(kind) if item is not ...] if get_origin(kind) in (tuple, dict) else []
    if get_origin(kind) is tuple:
        return f"A,B,… of {values(of_items[0])}"
    words = {"Literal": ", ".join(map(str, get_args(kind))), "dict": "NAME=VALUE,…"}
    name = getattr(get_origin(kind), "__name__", "") or getattr(kind, "__name__", "Literal")
    name = "Literal" if get_origin(kind) is Literal else name
    hint = next((part for part in (annotation, *get_args(annotation)) if get_origin(part) is Annotated), None)
    bounds = [
        f"{sign} {limit:g}"
        for bound in getattr(hint, "__metadata__", ())
        for key, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (limit := getattr(bound, key, None)) is not None and abs(limit) != math.inf
    ]
    return " ".join([words.get(name, name), *bounds])


def commands() -> str:
    """Write the page of the commands."""
    parts = [
        "# Commands",
        "Made from the code, as `lmeval-prune COMMAND --help` prints it. Options can also be set in a "
        "[recipe](recipes.md), `--config FILE`. `--num-fewshot` and `--num_fewshot` are the same option.",
        table(
            ["command", ""],
            [
                [f"[`{name}`](#{anchor(name)})", escape(description(resolve_name(target)).partition("\n")[0])]
                for name, target in COMMANDS.items()
            ],
        ),
    ]
    for name, target in COMMANDS.items():
        function = resolve_name(target)
        parts += [f"## lmeval-prune {name}", escape_text(description(function))]
        if takes_words(name):
            parts.append("All its words are passed on.")
            continue
        first = declared(function).first
        rows = []
        for action in options_of(name):
            cell = f"`--{action.dest}`" + (" or the first words" if action.dest == first else "")
            rows.append([cell, escape(values(action.values)), escape(action.help or "")])
        parts.append(table(["option", "values", ""], rows))
    return "\n\n".join(parts) + "\n"


def anchor(name: str) -> str:
    """Return the anchor of a command's heading."""
    return f"lmeval-prune-{name}".replace(" ", "-")


def escape_text(text: str) -> str:
    """Escape what a docstring does not mean as Markdown: angle brackets."""
    return text.replace("<", "&lt;")


def recipes(root: Path) -> str:
    """Write the page of the recipes: the sections with their options, and the recipes of the package."""
    parts = [
        "# Recipes",
        "A recipe is a YAML file with a section for each command, named by the command's first word: "
        "`lmeval-prune COMMAND --config FILE` reads its section. What the command line says counts over it. "
        "Below is every option with its default; lines with a `#` are optional. "
        "[Commands](commands.md) says what they mean.",
    ]
    for section, names in groupby(sorted(COMMANDS, key=lambda name: name.split()[0]), lambda name: name.split()[0]):
        for name in filter(lambda name: not takes_words(name), names):
            lines = [f"{section}:"]
            for action in sorted(options_of(name), key=lambda action: not action.required):
                shown = yaml.safe_dump(_plain(action.default), default_flow_style=True).strip().removesuffix("\n...")
                lines.append(f"  {action.dest}: …" if action.required else f"  # {action.dest}: {shown}")
            parts += [f"## {name}", "```yaml\n" + "\n".join(lines) + "\n```"]
    parts.append("## Recipes of the package")
    for path in sorted((root / "configs").glob("*/*.yaml")):
        if path.parent.name != "grid":
            parts += [f"### {path.relative_to(root)}", f"```yaml\n{path.read_text(encoding='utf-8').strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------------- dataclasses


def field_rows(declaration: Any, skip: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield the rows of a dataclass's fields: name, values, default, meaning from `Attributes:` of its docstring."""
    documented = parse(declaration.__doc__ or "", DocstringStyle.GOOGLE).params
    meaning = {
        name.strip(): parameter.description or "" for parameter in documented for name in parameter.arg_name.split(",")
    }
    annotations = annotations_of(declaration)
    for field in fields(declaration):
        if not field.init or field.kw_only or field.name in skip:
            continue
        kind = annotations[field.name]
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        shown = "required" if not has_default else "" if default in (None, (), {}, "") else f"`{default}`"
        text = values(kind) if is_supported_type(kind) else ""
        yield [f"`{field.name}`", escape(text), shown, escape(meaning.get(field.name, ""))]


HEAD = ("name", "values", "default", "")


def model_args() -> str:
    """Write the page of the model_args."""
    parts = [
        "# model_args",
        "What `--model_args` of `lm_eval` and `sweep` and `model:` of a grid accept, made from the code. "
        "[pruned-hf](../docs/pruned-hf.md) and [pruned-server](../docs/serving.md#evaluate-on-a-server) explain them.",
        "## pruned-hf",
        "Every argument of lm-eval's `hf`, and:",
        table(HEAD, field_rows(Arguments, skip=("interventions", "others"))),
        "## Methods of pruned-hf",
        "A method is given as one value, or as a dictionary of its settings: `token_filter=0.2`, or in JSON "
        '`{"token_filter": {"ratio": 0.2, "tail": 0.25}}`.',
    ]
    for name in METHODS:
        kind = METHODS.load(name)
        parts += [f"### {name}", escape_text(description(kind)), table(HEAD, field_rows(kind))]
    parts += ["## pruned-server", escape_text(description(ServerOptions)), table(HEAD, field_rows(ServerOptions))]
    return "\n\n".join(parts) + "\n"


def pruners() -> str:
    """Write the page of the pruners' options."""
    parts = ["# Pruners", "Methods of `lmeval-prune prune --method NAME --options NAME=VALUE,…`, made from the code."]
    for name in PRUNERS:
        kind = PRUNERS.load(name)
        rows = list(field_rows(kind))
        parts += [f"## {name}", escape_text(description(kind)), table(HEAD, rows) if rows else "No options."]
    return "\n\n".join(parts) + "\n"


def grid(root: Path) -> str:
    """Write the page of the grid's YAML."""
    documentation = inspect.cleandoc(inspect.getmodule(Grid).__doc__ or "")  # type: ignore[union-attr]
    parts = [
        "# Grid YAML",
        documentation.partition("\n")[2].strip(),
        "[Compare](../docs/compare.md#grid) explains how it is run and compared; this page is made from the code.",
        "## The grid",
        f"`model:` has model_args that all variants share, `variants:` names them, `seed:` is lm-eval's seeds. "
        f"Settings of tasks ({', '.join(f'`{name}`' for name in SHARED_TASK_SETTINGS)}) can be set for all tasks.",
        table(HEAD, field_rows(Grid)),
        "## A task",
        table(HEAD, field_rows(GridTask)),
        "## A variant",
        f"{', '.join(f'`{name}`' for name in VARIANT_SETTINGS)} and [model_args](model-args.md). `{{each: [A, B]}}` in "
        "place of a value makes one variant of each; `{NAME}` in the variant's name is the value.",
        "## Preparations",
        "`prepare: {NAME: {SETTING: VALUE}}` computes something before a variant is evaluated.",
    ]
    for name, target in PREPARATIONS.items():
        kind = resolve_name(target)
        parts += [f"### {name}", escape_text(description(kind)), table(HEAD, field_rows(kind))]
    parts.append("## Grids of the package")
    for path in sorted((root / "configs/grid").glob("*.yaml")):
        parts += [f"### {path.relative_to(root)}", f"```yaml\n{path.read_text(encoding='utf-8').strip()}\n```"]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------- Python


def public_names(module_name: str) -> Iterator[str]:
    """Yield the full names of what a module exports, where they are defined."""
    module = importlib.import_module(f"lmeval_prune.{module_name}")
    exported = getattr(module, "__all__", None)
    for name in exported or [name for name in vars(module) if not name.startswith("_")]:
        value = getattr(module, name)
        home = getattr(value, "__module__", "")
        is_own = home == module.__name__ or (exported and home.startswith("lmeval_prune"))
        if is_own and (inspect.isclass(value) or inspect.isfunction(value)) and value.__doc__:
            yield f"{home}.{value.__qualname__}"


def api() -> dict[str, str]:
    """Write the pages of the Python API; `mkdocstrings` fills in the docstrings."""
    top = {f"{module}.{name}": name for name, module in _LAZY.items()}
    pages, page_of = {}, {}
    for page, (title, modules) in API.items():
        names = list(dict.fromkeys(name for module in modules for name in public_names(module)))
        page_of |= dict.fromkeys(names, page)
        pages[page] = f"# {title}\n\n" + "\n".join(f"::: {name}" for name in names) + "\n"
    rows = []
    for _, name in sorted(top.items(), key=lambda entry: entry[1]):
        value: Any = getattr(importlib.import_module("lmeval_prune"), name)
        full = f"{value.__module__}.{value.__qualname__}"
        if full not in page_of:
            raise SystemExit(f"{full} is on no page of the API; add its module to API in {__file__}")
        rows.append([f"[`{name}`]({page_of[full]}.md#{full})", escape(description(value).partition("\n")[0])])
    pages["index"] = (
        "# Python API\n\nWhat `import lmeval_prune` offers; the other pages have all public names of the rooms.\n\n"
        + table(["name", ""], rows)
        + "\n"
    )
    return pages


def pages(root: Path) -> dict[str, str]:
    """Return all pages of the reference by their paths."""
    makers: dict[str, Callable[[], str]] = {
        "commands": commands,
        "recipes": lambda: recipes(root),
        "model-args": model_args,
        "pruners": pruners,
        "grid-yaml": lambda: grid(root),
    }
    written = {f"reference/{name}.md": make() for name, make in makers.items()}
    return {**written, **{f"reference/api/{name}.md": text for name, text in api().items()}}
