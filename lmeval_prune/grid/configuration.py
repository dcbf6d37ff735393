"""What a grid's YAML says: variants (with axes), tasks, and how they are asked.

```yaml
model: {pretrained: smollm2-135m, dtype: float32}
variants:
  dense: {}
  "without {heads}": {heads: {each: [L5H3, L9H0]}}              # two variants
  "random 10%, {seed}": {prepare: {random_heads: {share: 0.1, seed: {each: [0, 1, 2]}}}}
tasks:
  - prune_tiny
  - {task: prune_gsm8k, limit: 200}
```

A variant's settings are model_args of `pruned-hf` (with `base_url`: of `pruned-server`) that come to those of `model`,
and `prepare`, `seed`, `selected_on`.
`each:` spans an axis, wherever it stands; several axes are multiplied.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from lmeval_prune.errors import InputError, nearest, yaml_fault
from lmeval_prune.models.served import API_OPTIONS, SERVER_ARGUMENTS
from lmeval_prune.settings import typed, types_of

SEED = 1234
MOST_VARIANTS = 10_000  # of one entry of `variants:`
_OWN = ("prepare", "seed", "selected_on")  # settings of a variant that are no model_args
_LOADING = {"attn_implementation", "variant", "use_safetensors"}  # model_args that only `from_pretrained` knows


@dataclass(frozen=True)
class Variant:
    """One model as it is evaluated.

    Attributes:
        name: by which tables and pages call it.
        model_args: of `pruned-hf`.
        prepare: what is made first: `{NAME: fields}`, a line of `PREPARATIONS`.
        seed: of everything that is drawn; lm-eval's four seeds.
        selected_on: tasks whose questions the variant was chosen on.
    """

    name: str
    model_args: dict[str, Any]
    prepare: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int = SEED
    selected_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """One column of the grid: a task or group of lm-eval's, and how it is asked.

    Attributes:
        task: its name, or a YAML file.
        name: by which the grid calls it; default the task.
        limit: as for lm_eval: so many questions, or a share below 1.
        num_fewshot, gen_kwargs: as for lm_eval.
        metric: `METRIC` or `METRIC,FILTER` that is compared; default `exact_match`, `acc`, `pass@N`, else the first.
    """

    task: str
    name: str = ""
    limit: float | None = None
    num_fewshot: int | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None


@dataclass(frozen=True)
class Grid:
    """A grid as its YAML says it.

    Attributes:
        variants, tasks: the two axes of cells.
        title: of the page.
        apply_chat_template, system_instruction, metadata: as for lm_eval.
        batch_size, device: as for lm_eval; in half types their rounding can change an answer.
        together: at most so many variants that are only masks share one pass of the decoding engine.
        measure: measure parameters, FLOPs, speed and memory of each variant.
        baseline: name of the variant that the others are compared with, unless `compare` is told another.
    """

    variants: tuple[Variant, ...]
    tasks: tuple[Asked, ...]
    title: str = "Grid"
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    batch_size: int | str = 8
    device: str | None = None
    together: int = 16
    measure: bool = True
    baseline: str | None = None

    @classmethod
    def read(cls, path: str) -> Grid:
        """Read a grid's YAML.

        Raises:
            InputError: it cannot be read, or says something that is not known.
        """
        if not Path(path).is_file():
            raise InputError(f"no such file: {path}")
        try:
            content = yaml.load(Path(path).read_text(encoding="utf-8"), _Once)
            return cls.of(content)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not valid YAML: {yaml_fault(error)}") from None
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def of(cls, content: Any) -> Grid:
        """A grid of what its YAML holds.

        Raises:
            InputError: as of `read`.
        """
        shared = {one.name for one in fields(Asked)} - {"task", "name"}
        known = [one.name for one in fields(cls)] + ["model", "seed", *sorted(shared)]
        if not isinstance(content, dict) or not content.get("variants") or not content.get("tasks"):
            raise InputError("a grid has `variants:` and `tasks:`")
        for name in content:
            if name not in known:
                raise InputError(f"a grid has no setting {name!r}{nearest(str(name), known)}")
        model, seed = content.get("model") or {}, content.get("seed", SEED)
        if not isinstance(content["variants"], dict):
            raise InputError("`variants:` holds NAME: VALUE pairs")
        for name in ("model", "metadata", "gen_kwargs"):
            _check_pairs(name, content.get(name))
        variants = [one for name, block in content["variants"].items() for one in _variants(name, block, model, seed)]
        defaults = {name: content[name] for name in shared if name in content}
        listed = content["tasks"] if isinstance(content["tasks"], list) else [content["tasks"]]
        tasks = [_asked(one, defaults) for one in listed]
        for what, names in (("variants", [one.name for one in variants]), ("tasks", [one.name for one in tasks])):
            twice = next((name for name, count in Counter(names).items() if count > 1), None)
            if twice:
                raise InputError(f"two {what} are called {twice!r}; give each a name of its own")
        own = {one.name for one in fields(cls)} - {"variants", "tasks"}
        settings = {name: _typed(cls, name, content[name]) for name in own if name in content}
        grid = cls(tuple(variants), tuple(tasks), **settings)
        if grid.baseline is not None:
            grid.check_baseline(grid.baseline)
        if grid.together < 1:
            raise InputError(f"together must be at least 1, not {grid.together}")
        size = str(grid.batch_size)
        if isinstance(grid.batch_size, bool) or not re.fullmatch(r"[1-9]\d*|auto(:\d+)?", size):
            raise InputError(f"batch_size is a whole number from 1, or auto, not {size}")
        return grid

    def check_baseline(self, name: str) -> None:
        """Refuse a baseline that is not there."""
        check_name("baseline", name, [one.name for one in self.variants])


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The pairs; see the base class."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise InputError(f"{twice!r} stands twice in one place (line {node.start_mark.line + 1}); leave one out")
        return super().construct_mapping(node, deep)


def check_name(what: str, name: str, known: list[str]) -> None:
    """Refuse a name that a grid does not have.

    Raises:
        InputError: naming those that it has.
    """
    if name not in known:
        shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        raise InputError(f"there is no {what} {name!r} in the grid{nearest(name, known) or f'; it has {shown}'}")


def _check_pairs(name: str, given: Any) -> None:
    """Refuse what is not written as pairs, such as lm-eval's own `NAME=VALUE`."""
    if given is not None and not isinstance(given, dict):
        raise InputError(f"`{name}:` holds {{NAME: VALUE}} pairs, not {given!r}")


def _typed(kind: type, name: str, value: Any) -> Any:
    return typed(name, value, types_of(kind)[name])


def _asked(given: Any, defaults: dict[str, Any]) -> Asked:
    """One column."""
    own = {"task": given} if isinstance(given, str) else given
    known = [one.name for one in fields(Asked)]
    if not isinstance(own, dict) or not isinstance(own.get("task"), str):
        raise InputError(f"a task is a name, or has `task: NAME`, not {given!r}")
    for name in own:
        if name not in known:
            raise InputError(f"a task has no setting {name!r}{nearest(str(name), known)}")
    _check_pairs("gen_kwargs", own.get("gen_kwargs"))
    merged = {**defaults, **own}
    merged["gen_kwargs"] = {**(defaults.get("gen_kwargs") or {}), **(own.get("gen_kwargs") or {})}
    made = Asked(**{name: _typed(Asked, name, value) for name, value in merged.items() if value is not None})
    if made.limit is not None and made.limit <= 0:
        raise InputError(f"limit of {made.task} must be above 0, not {made.limit}")
    return (
        made
        if made.name
        else Asked(
            **{**vars(made), "name": Path(made.task).stem if made.task.endswith((".yaml", ".yml")) else made.task}
        )
    )


def _variants(name: str, block: Any, model: dict[str, Any], seed: int) -> Iterator[Variant]:
    """The variants of one block: the product of its axes."""
    block = {} if block is None else block
    if not isinstance(block, dict):
        raise InputError(f"variant {name!r} holds settings as NAME: VALUE, not {block!r}")
    block = {**block, **{key: value for key, value in {**model, "seed": seed}.items() if key not in block}}
    for key in block:
        _check_known(name, str(key), API_OPTIONS if "base_url" in block else set())
    axes = list(_axes(block, ()))
    count = math.prod(len(_at(block, path)["each"]) for path in axes)
    if count > MOST_VARIANTS:
        raise InputError(
            f"variant {name!r} stands for {count:,} variants, the product of its `each:` lists, and at most "
            f"{MOST_VARIANTS:,} are taken: shorten the lists, or share them out among several grids"
        )
    labels = _labels(axes)
    for values in itertools.product(*(_at(block, path)["each"] for path in axes)):
        chosen = block
        for path, value in zip(axes, values, strict=True):
            chosen = _replaced(chosen, path, value)
        made = dict(chosen)
        own = {key: made.pop(key, None) for key in _OWN}
        prepare = _preparation(name, own["prepare"] or {})
        if "base_url" in made and prepare:
            raise InputError(f"variant {name!r} is served and cannot be prepared here; give its heads or its mask")
        if "base_url" not in made and (stray := sorted(SERVER_ARGUMENTS & made.keys())):
            raise InputError(f"variant {name!r}: {stray[0]} is a server's; name the server, base_url: http://HOST:PORT")
        given = own["selected_on"] or []
        chosen_on = [given] if isinstance(given, str) else given
        if not isinstance(chosen_on, list) or not all(isinstance(one, str) for one in chosen_on):
            raise InputError(f"variant {name!r}: `selected_on:` is a list of tasks, not {given!r}")
        drawn = typed(f"variant {name!r}: seed", SEED if own["seed"] is None else own["seed"], int)
        if not isinstance(made.get("pretrained"), str):
            raise InputError(f"variant {name!r} names no model; give `model: {{pretrained: NAME}}`")
        for key in ("responses", "batch_size", "device"):
            if key in made:
                raise InputError(f"{key} is no axis; {'leave it out' if key == 'responses' else f'set `{key}:` once'}")
        full = _named(str(name), dict(zip(labels, values, strict=True)))
        given = {key: value for key, value in made.items() if value is not None}
        yield Variant(full, given, prepare, drawn, tuple(chosen_on))


def _check_known(variant: str, name: str, more: set[str]) -> None:
    from lmeval_prune.models.arguments import argument_names

    known = {*argument_names(), *_hf_arguments(), *_OWN, *_LOADING, *SERVER_ARGUMENTS, *more}
    if name not in known:
        hint = nearest(name, known) or "; it is no model_arg of pruned-hf or pruned-server"
        raise InputError(f"variant {variant!r} has an unknown axis or setting {name!r}{hint}")


def _hf_arguments() -> set[str]:
    from lm_eval.models.huggingface import HFLM

    return set(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}


def _preparation(variant: str, given: Any) -> dict[str, dict[str, Any]]:
    """`NAME` or `{NAME: fields}`."""
    given = {given: {}} if isinstance(given, str) else given
    settings = next(iter(given.values()), None) if isinstance(given, dict) else given
    if not isinstance(given, dict) or len(given) > 1 or not isinstance(settings, dict | None):
        raise InputError(f"variant {variant!r}: `prepare:` is one {{NAME: {{SETTING: VALUE}}}}, not {given!r}")
    return {str(name): dict(settings or {}) for name, settings in given.items()}


def _axes(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where `each:` stands."""
    if isinstance(value, dict):
        if "each" in value:
            if len(value) > 1 or not isinstance(value["each"], list) or not value["each"]:
                raise InputError(f"`each:` at {'.'.join(map(str, path))} stands alone and has a list that is not empty")
            yield path
            return
        for key, inner in value.items():
            yield from _axes(inner, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    return new if not path else {**value, path[0]: _replaced(value[path[0]], path[1:], new)}


def _labels(axes: list[tuple[Any, ...]]) -> list[str]:
    """Of each axis its last key; the whole path, if two have the same."""
    short = [str(path[-1]) for path in axes]
    return [
        name if short.count(name) == 1 else "_".join(map(str, path)) for name, path in zip(short, axes, strict=True)
    ]


def _named(template: str, values: dict[str, Any]) -> str:
    """A variant's name: `{AXIS}` replaced, and what is not mentioned added."""
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    for placeholder in re.findall(r"\{(\w+)\}", template):
        if placeholder not in shown:
            raise InputError(f"variant {template!r} has no axis {placeholder!r}{nearest(placeholder, shown)}")
    rest = [f"{name}={value}" for name, value in shown.items() if f"{{{name}}}" not in template]
    return " ".join([re.sub(r"\{(\w+)\}", lambda found: shown[found[1]], template), *rest])
