"""A grid's YAML: variants (with axes), tasks, and evaluation settings.

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

A variant's settings are `prepare`, `seed`, `selected_on` and model_args, which are merged with those of `model`. The
model_args belong to `pruned-hf`, or to `pruned-server` if they have a `base_url`. A list under `each:`, anywhere in the
settings, is an axis: it makes one variant per value. Several axes make one variant per combination of values.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml

from lmeval_prune.config import Count, Natural, Positive, Seed, Settings, packaged
from lmeval_prune.errors import InputError, brief, check_exists, did_you_mean
from lmeval_prune.grid.folder import check_name
from lmeval_prune.interventions import METHODS
from lmeval_prune.models.arguments import argument_names, hf_arguments
from lmeval_prune.models.servers import SERVER_ARGUMENTS, SERVER_OPTIONS

SEED = 1234
VARIANT_SETTINGS = ("prepare", "seed", "selected_on")  # all other settings of a variant are model_args
SHARED_TASK_SETTINGS = ("limit", "num_fewshot", "gen_kwargs", "metric")  # a grid may set them for all tasks
FROM_PRETRAINED_ARGUMENTS = {"attn_implementation", "variant", "use_safetensors"}  # `hf` passes them to from_pretrained
# Settings that hold for the whole run. A variant that sets one is refused with this remedy.
RUN_ARGUMENTS = {"responses": "leave it out", "batch_size": "set `batch_size:` once", "device": "set `device:` once"}
# Names of settings beside this package's arguments; a method cannot have them.
OTHER_SETTINGS = {*hf_arguments(), *FROM_PRETRAINED_ARGUMENTS, *VARIANT_SETTINGS, *SERVER_ARGUMENTS}
METHODS.reserve(OTHER_SETTINGS | SERVER_OPTIONS)


@dataclass(frozen=True)
class Variant(Settings):
    """A model with its interventions."""

    name: str  # in tables and on pages
    model_args: dict[str, Any]  # of `pruned-hf` or `pruned-server`
    prepare: dict[str, dict[str, Any]] = field(default_factory=dict)  # the preparation as `{NAME: fields}`, or empty
    seed: Seed = SEED  # lm-eval's four seeds
    selected_on: tuple[str, ...] = ()  # tasks whose questions the variant was selected on

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model_args.get("pretrained"), str):
            raise InputError("the model is missing; add `model: {pretrained: NAME}`")
        if self.served and self.prepare:
            raise InputError("a served model cannot be prepared; give its heads or its mask")
        for name, remedy in RUN_ARGUMENTS.items():
            if name in self.model_args:
                raise InputError(f"{name} cannot be set for a variant; {remedy}")

    @cached_property
    def served(self) -> bool:
        return "base_url" in self.model_args


@dataclass(frozen=True)
class GridTask(Settings):
    """A task or group of lm-eval and its evaluation settings."""

    task: str  # name of the task, or path of its YAML
    name: str = ""  # name in the grid; by default the task's name
    limit: Positive | None = None  # as for lm_eval: number of questions, or a share below 1
    num_fewshot: Natural | None = None  # as for lm_eval
    gen_kwargs: dict[str, Any] = field(default_factory=dict)  # as for lm_eval
    # `METRIC` or `METRIC,FILTER`; by default `exact_match`, `acc` or `pass@N` if the task has it, else its first metric
    metric: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        stem = Path(self.task).stem if self.task.endswith((".yaml", ".yml")) else self.task
        object.__setattr__(self, "name", self.name or stem)


@dataclass(frozen=True)
class Grid(Settings):
    """A parsed grid. Its cells are all pairs of a variant and a task."""

    variants: tuple[Variant, ...]
    tasks: tuple[GridTask, ...]
    title: str = "Grid"  # of the page
    apply_chat_template: bool | str = False  # as for lm_eval
    system_instruction: str | None = None  # as for lm_eval
    metadata: dict[str, Any] = field(default_factory=dict)  # as for lm_eval
    batch_size: int | str = 8  # as for lm_eval; in half precision it can change an answer by rounding
    device: str | None = None  # as for lm_eval
    together: Count = 16  # largest number of masks that the decoding engine runs in one batch
    measure: bool = True  # measure parameters, FLOPs, speed and memory of each variant
    distance: Natural = 0  # documents of a task on which the distance from the model without interventions is measured
    baseline: str | None = None  # variant that the others are compared with, unless `grid compare` names another

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("variants", "tasks"):
            names = Counter(member.name for member in getattr(self, kind))
            if duplicate := next((name for name, count in names.items() if count > 1), None):
                raise InputError(f"two {kind} are called {duplicate!r}; give each its own name")
        if self.baseline is not None:
            check_name("baseline", self.baseline, [variant.name for variant in self.variants])

    @classmethod
    def read(cls, path: str) -> Self:
        check_exists(packaged(path), file=True)
        try:
            return cls.of(yaml.load(packaged(path).read_text(encoding="utf-8"), _UniqueKeyLoader))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not valid YAML: {brief(str(error), 300)}") from None
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def of(cls, content: Any) -> Self:
        if not isinstance(content, dict) or not content.get("variants") or not content.get("tasks"):
            raise InputError("a grid has `variants:` and `tasks:`")
        settings = dict(content)
        model, seed = settings.pop("model", None) or {}, settings.pop("seed", SEED)
        tasks = settings["tasks"] if isinstance(settings["tasks"], list) else [settings["tasks"]]
        defaults = {name: settings.pop(name) for name in SHARED_TASK_SETTINGS if name in settings}
        settings["variants"] = tuple(
            variant
            for name, block in settings["variants"].items()
            for variant in _variants(str(name), block, {**model, "seed": seed})
        )
        parsed = []
        for task in tasks:  # a name or a dictionary; its gen_kwargs are merged with those of the grid
            own: dict[str, Any] = {"task": task} if isinstance(task, str) else task
            merged = {**defaults, **own}
            merged["gen_kwargs"] = {**(defaults.get("gen_kwargs") or {}), **(own.get("gen_kwargs") or {})}
            values = {str(name): value for name, value in merged.items() if value is not None}
            parsed.append(GridTask.from_dict(values, f"task {own.get('task')}"))
        settings["tasks"] = tuple(parsed)
        return cls.from_dict(settings, "a grid")


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys; PyYAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        if duplicate := next((key for key, count in keys.items() if count > 1), None):
            raise InputError(f"the key {duplicate!r} is repeated (line {node.start_mark.line + 1}); leave one out")
        return super().construct_mapping(node, deep)


# ---------------------------------------------------------------------- variants


def _variants(name: str, block: Any, shared: dict[str, Any]) -> Iterator[Variant]:
    """Yield the variants of an entry of `variants:`: the product of its axes.

    `{AXIS}` in the name becomes the axis' value; axes that the name does not mention are appended. An axis is called by
    its last key, or by its whole path if two axes share their last key.
    """
    own_settings = block or {}
    block = {**own_settings, **{key: value for key, value in shared.items() if key not in own_settings}}  # own first
    try:
        valid_names = {*argument_names(), *OTHER_SETTINGS, *(SERVER_OPTIONS if "base_url" in block else ())}
        if unknown := [str(key) for key in block if key not in valid_names]:
            hint = did_you_mean(unknown[0], valid_names) or "; neither pruned-hf nor pruned-server has this model_arg"
            raise InputError(f"unknown axis or setting {unknown[0]!r}{hint}")
        for texts, settings in _expanded(block):
            count = Counter(path[-1] for path in texts)
            text_of = {path[-1] if count[path[-1]] == 1 else "_".join(path): text for path, text in texts.items()}
            further = [f"{label}={text}" for label, text in text_of.items() if f"{{{label}}}" not in name]
            full_name = " ".join([re.sub(r"\{(\w+)\}", lambda match: text_of[match[1]], name), *further])  # noqa: B023
            arguments = {key: value for key, value in settings.items() if value is not None}
            separate = {key: arguments.pop(key) for key in VARIANT_SETTINGS if key in arguments}
            if isinstance(tasks := separate.get("selected_on", ()), str):
                separate["selected_on"] = (tasks,)
            if "prepare" in separate:
                value = separate["prepare"]
                value = {value: {}} if isinstance(value, str) else value  # `NAME`, or `{NAME: fields}`
                if len(value) > 1:
                    raise InputError(f"`prepare:` must be a single {{NAME: {{SETTING: VALUE}}}}, not {value!r}")
                separate["prepare"] = {str(kind): dict(fields or {}) for kind, fields in value.items()}
            yield Variant(full_name, arguments, **separate)
    except InputError as error:
        raise InputError(f"variant {name!r}: {error}") from None


def _expanded(settings: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[dict[tuple[str, ...], str], Any]]:
    """Yield for each combination of values those of each axis as text, by its path, and the settings with them."""
    if not isinstance(settings, dict):
        yield {}, settings
    elif "each" not in settings:
        inner = [list(_expanded(value, (*path, str(key)))) for key, value in settings.items()]
        for chosen in itertools.product(*inner):
            texts = {axis: text for own, _ in chosen for axis, text in own.items()}
            yield texts, dict(zip(settings, (value for _, value in chosen), strict=True))
    elif len(settings) > 1 or not isinstance(settings["each"], list) or not settings["each"]:
        raise InputError(f"`each:` at {'.'.join(path)} must be the only key, with a list of values")
    else:
        yield from (({path: x if isinstance(x, str) else json.dumps(x)}, x) for x in settings["each"])
