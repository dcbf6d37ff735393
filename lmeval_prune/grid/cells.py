"""Cells: one evaluation of lm-eval's each, named by the hash of everything that its answers and scores depend on.

What counts: the weights (not where they lie), what is applied to the model, the preparation, the task's configuration,
its questions and exemplars, the chat template, the seed where something is drawn, and the versions of lm-eval, of
transformers and of this package, whose scoring changes. What does not: names, paths, device, how many variants share a
pass, the runner; nor batch size and decoding engine, unless the model computes in half precision, where sums that are
rounded in another order give other texts.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.evaluator_utils import get_sample_size
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.artefacts import content_digest, digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.pruned import refused_as
from lmeval_prune.checkpoints.skeleton import language_skeleton
from lmeval_prune.errors import InputError, first_line, nearest
from lmeval_prune.export.manifest import adapter_name, read_adapters
from lmeval_prune.grid.configuration import Asked, Grid, Variant
from lmeval_prune.grid.preparations import preparation, with_chat_template
from lmeval_prune.grid.sources import code_digest
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models import generation
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.identity import (
    NOT_PART_OF_AN_ANSWER,
    code_versions,
    config_fingerprint,
    tokenizer_fingerprint,
)
from lmeval_prune.models.routers import POLICIES, RouterOptions
from lmeval_prune.models.served import ServerOptions, without_server
from lmeval_prune.tasks.named import load_tasks, task_manager

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# of a task's configuration: where its data comes from (the questions themselves count), and names
_ELSEWHERE = {
    *("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata", "tag", "group", "task_alias"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
}
# model_args that name a file or folder, as far as their value is not one of a router's own words
_LM_EVALS_OWN = ("max_gen_toks", "max_tokens", "max_completion_tokens", "until")  # settings of generation
_PATHS = {"tokenizer", "peft", "delta", "router", "router_store"}


@dataclass(frozen=True)
class Cell:
    """One variant on one task.

    Attributes:
        variant, task: their names in the grid.
        model_args: of `pruned-hf`; a preparation's come to them.
        prepare: `{NAME: fields}`, or empty.
        evaluation: how lm-eval is asked: arguments of `simple_evaluate`.
        metadata: for lm-eval's task manager.
        seed: lm-eval's four seeds.
        metric: that is compared, if the grid says so.
        selected_on: tasks whose questions the variant was chosen on.
        identity: what answers and scores depend on.
        prepared: key of the preparation's result, or empty.
        answers: folder of its answers among those of the grid.
        batch_size, device, engine: how it is computed.
    """

    variant: str
    task: str
    model_args: dict[str, Any]
    prepare: dict[str, dict[str, Any]]
    evaluation: dict[str, Any]
    metadata: dict[str, Any]
    seed: int
    metric: str | None
    selected_on: list[str]
    identity: dict[str, Any] = field(repr=False)
    prepared: str
    answers: str
    batch_size: int | str
    device: str | None
    engine: str

    @cached_property
    def key(self) -> str:
        """The hash that names its folder."""
        return digest(self.identity)

    @property
    def served(self) -> bool:
        """Whether servers answer."""
        return "base_url" in self.model_args

    @property
    def model(self) -> str:
        """The name of lm-eval's model class."""
        return "pruned-server" if self.served else "pruned-hf"

    @property
    def costs(self) -> str:
        """A digest of what its model's costs depend on: the model, and what is applied to it."""
        return digest({name: self.identity[name] for name in ("model", "interventions", "preparation", "router")})

    def arguments(self, prepared: Path) -> dict[str, Any]:
        """All model_args.

        Args:
            prepared: the folder of preparations' results.
        """
        made = dict(self.model_args)
        for name, settings in self.prepare.items():
            made |= preparation(name, settings).model_args(prepared / self.prepared)
        if self.served:
            return {**made, "seed": self.seed}
        made.setdefault("engine", self.engine)
        if made["engine"] == "batched":
            made.setdefault("deterministic", True)  # no answer depends on which others are decoded beside it
        return {name: value for name, value in made.items() if (name, value) != ("engine", "generate")}

    def command(self, prepared: Path) -> str:
        """The `lm_eval` command that does the same."""
        words = ["lm_eval", "--model", self.model, "--model_args", json.dumps(self.arguments(prepared))]
        given = self.evaluation
        words += ["--tasks", given["tasks"][0], "--seed", str(self.seed), "--batch_size", str(self.batch_size)]
        for name, value in (("device", self.device), ("limit", given["limit"]), ("num_fewshot", given["num_fewshot"])):
            words += [] if value is None else [f"--{name}", str(value)]
        for name, pairs in (("gen_kwargs", given["gen_kwargs"]), ("metadata", self.metadata)):
            words += [f"--{name}", json.dumps(pairs)] if pairs else []
        template = given["apply_chat_template"]
        words += ["--apply_chat_template", *([template] if isinstance(template, str) else [])] if template else []
        words += ["--system_instruction", given["system_instruction"]] if given["system_instruction"] else []
        return shlex.join([*words, "--log_samples", "--output_path", "OUT"])

    def to_json(self) -> dict[str, Any]:
        """All of it, for `of_json`."""
        return asdict(self)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Cell:
        """The cell of `to_json`."""
        return cls(**content)


def cells_of(grid: Grid) -> list[Cell]:
    """All cells of a grid, after checking everything that can be known without weights.

    Raises:
        InputError: something is unknown or does not fit, or two cells are the same.
    """
    models: dict[str, Model] = {}
    tasks: dict[tuple[str, str], dict[str, Any]] = {}
    cells: list[Cell] = []
    chat = bool(grid.apply_chat_template)
    for variant in grid.variants:
        prepare = {name: with_chat_template(name, settings, chat) for name, settings in variant.prepare.items()}
        variant = replace(variant, prepare=prepare)
        try:
            given = Arguments.of(without_server(variant.model_args))
            base = loaded_with(given)
            named = digest({name: str(value) for name, value in base.items()})
            if named not in models:
                models[named] = Model(base)
            model = models[named]
            identity = _variant_identity(variant, given, model)
        except InputError as error:
            raise InputError(f"variant {variant.name!r}: {error}") from None
        if "base_url" in variant.model_args:
            engine = str(variant.model_args.get("server", ServerOptions.server))
            computed: dict[str, Any] = {"computation": {"server": engine, **_adapters(variant, given, model)}}
        else:
            engine = str(variant.model_args.get("engine") or _engine(given, model))
            computed = _computation(variant, given, model, engine, grid.batch_size)
        metadata = {**base, **grid.metadata}
        made = digest(metadata)
        for asked in grid.tasks:
            if (made, asked.name) not in tasks:
                tasks[made, asked.name] = _task_identity(task_manager(metadata), asked, grid)
            task, drawn = dict(tasks[made, asked.name]), dict[str, Any]()
            if task.pop("draws"):
                drawn = {"seed": variant.seed}
            if task.pop("samples"):
                drawn |= {"engine": engine}
            template = model.chat_template(grid.apply_chat_template)
            answered_by = digest([model.identity, computed] if computed else model.identity)
            place = (f"{Path(str(base['pretrained'])).name}-{answered_by[:8]}", asked.name)
            answers = "/".join(re.sub(r"[^\w.-]", "_", part) for part in place)
            cell = Cell(
                variant.name,
                asked.name,
                dict(variant.model_args),
                variant.prepare,
                _evaluation(asked, grid),
                dict(grid.metadata),
                variant.seed,
                asked.metric,
                list(variant.selected_on),
                {**identity, **computed, "task": task, "template": template, "drawn": drawn, "versions": versions()},
                identity["preparation"].get("key", ""),
                answers,
                grid.batch_size,
                grid.device,
                engine,
            )
            cells.append(cell)
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.key, cell)) is not cell:
            names = f"{other.variant!r} and {cell.variant!r}" if other.variant != cell.variant else f"{cell.variant!r}"
            where = f"on {cell.task}" if other.task == cell.task else f"on {other.task} and {cell.task}"
            raise InputError(f"two cells are the same: {names} {where}; nothing tells them apart, leave one out")
    return cells


def versions() -> dict[str, Any]:
    """Of what gives and scores answers."""
    return {"lmeval-prune": version("lmeval-prune"), **code_versions()}


def loaded_with(given: Arguments) -> dict[str, Any]:
    """The model_args by which a model is loaded, of all that were given; `pretrained` is among them."""
    described = {name: value for name, value in given.description.items() if value is not None}
    return {**given.others, **described}


class Model:
    """A model without weights.

    Args:
        base: the model_args by which it is loaded.

    Raises:
        InputError: it is not there, or cannot be built.
    """

    def __init__(self, base: dict[str, Any]) -> None:
        self.base = base
        name, revision = embedded.resolve(str(base["pretrained"])), base.get("revision")
        embedded.check_name(name, base)
        trust = bool(base.get("trust_remote_code"))
        with refused_as(f"cannot read the model {base['pretrained']}"):
            self.config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                str(base.get("tokenizer") or name), revision=revision, trust_remote_code=trust
            )
        bare = language_skeleton(self.config, trust)
        names = ("attention_path", "attention_output", "attention_heads")
        self.map: ModelMap = map_model(bare, **{key: base[key] for key in names if key in base})

    @cached_property
    def dtype(self) -> str:
        """The type of its weights; `auto`, if only the weights know."""
        given = str(self.base.get("dtype") or "auto").removeprefix("torch.")
        found = getattr(self.config, "dtype", None) if given == "auto" else getattr(torch, given, given)
        return str(found or "auto").removeprefix("torch.")

    @property
    def rounds_coarsely(self) -> bool:
        """Whether the order of sums, and so the shape of a batch, is seen in answers."""
        return self.dtype not in ("float32", "float64") or bool(self.base.get("mixed_precision_dtype"))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON value of all of the model that an answer depends on."""
        skipped = {*NOT_PART_OF_AN_ANSWER, "pretrained", "revision"}
        return {
            "weights": checkpoint_identity(str(self.base["pretrained"]), self.base.get("revision")),
            "config": config_fingerprint(self.config),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "generation_config": self._generation_config(),
            "dtype": self.dtype,
            "arguments": {
                key: _by_content(key, value) for key, value in sorted(self.base.items()) if key not in skipped
            },
        }

    def _generation_config(self) -> str:
        try:
            name = embedded.resolve(str(self.base["pretrained"]))
            found = GenerationConfig.from_pretrained(name, revision=self.base.get("revision") or "main").to_dict()
        except OSError:  # it has none
            return ""
        return digest({key: str(value) for key, value in found.items() if key != "transformers_version"})

    def chat_template(self, wanted: bool | str) -> str:
        """A digest of the template that prompts are put into; empty for none."""
        if not wanted:
            return ""
        try:
            name = wanted if isinstance(wanted, str) else None
            return digest(self.tokenizer.get_chat_template(name))
        except ValueError as error:
            raise InputError(f"apply_chat_template: {first_line(error)}; leave it out for this model") from error


def _by_content(name: str, value: Any) -> Any:
    """A value of an argument as it counts: a file or folder by what is in it, if that argument names one."""
    named = name in _PATHS and value not in POLICIES
    if named and isinstance(value, str | os.PathLike) and Path(value).expanduser().exists():
        return {"content": content_digest(Path(value).expanduser())}
    return value if isinstance(value, bool | int | float | None) else str(value)


def _variant_identity(variant: Variant, given: Arguments, model: Model) -> dict[str, Any]:
    """What a variant is: the model, what is applied to it, and what is made first."""
    routing = {name: variant.model_args[name] for name in RouterOptions.__annotations__ if name in variant.model_args}
    applied = [one.identity(model.map) for one in given.interventions]
    made: dict[str, Any] = {}
    for name, settings in variant.prepare.items():
        made = {"name": name, **preparation(name, settings).identity()}
        made |= {"seed": variant.seed, "versions": versions()}
        made["key"] = digest([model.identity, made])
    return {
        "model": model.identity,
        "interventions": [*applied, digest(model.map.signature())] if applied else [],
        "router": {name: _by_content(name, value) for name, value in routing.items()},
        "preparation": made,
    }


def _adapters(variant: Variant, given: Arguments, model: Model) -> dict[str, Any]:
    """The content of a served variant's adapters, if their folder is named; with a router, of all in it."""
    if "adapters" not in variant.model_args:
        return {}
    known = read_adapters(str(variant.model_args["adapters"]))
    heads = [str(head) for one in given.interventions for head in one.heads_of(model.map)]  # type: ignore[attr-defined]
    names = list(known) if given.tries else [adapter_name(heads), *heads] if heads else []
    return {"adapters": {name: known[name]["hash"] for name in names if name in known}}


def _computation(
    variant: Variant, given: Arguments, model: Model, engine: str, batch_size: int | str
) -> dict[str, Any]:
    """How answers are computed, as far as it changes them."""
    own = variant.model_args.get("deterministic") is not None
    found: dict[str, Any] = {}
    if engine == "batched" and own and not given.engine.deterministic:
        found = {"deterministic": False}
    if model.rounds_coarsely:
        found |= {"engine": engine, "batch_size": str(batch_size)}
        found |= {"rows": given.engine.engine_rows} if engine == "batched" else {}
    return {"computation": found} if found else {}


def _engine(given: Arguments, model: Model) -> str:
    """The faster way to the same texts."""
    in_batches = all((one.tokenwise or one.by_sequence) and not one.needs_order for one in given.interventions)
    return "batched" if in_batches and not model.config.is_encoder_decoder else "generate"


def is_masks(given: Arguments) -> bool:
    """Whether a variant is heads that are masked, and nothing else."""
    return given.tries is None and all(isinstance(one, HeadMask) for one in given.interventions)


# ---------------------------------------------------------------------- tasks


def _evaluation(asked: Asked, grid: Grid) -> dict[str, Any]:
    """Arguments of `simple_evaluate`."""
    return {
        "tasks": [asked.task],
        "limit": asked.limit if asked.limit is None or asked.limit < 1 else int(asked.limit),
        "num_fewshot": asked.num_fewshot,
        "gen_kwargs": dict(asked.gen_kwargs),
        "system_instruction": grid.system_instruction,
        "apply_chat_template": grid.apply_chat_template,
        "fewshot_as_multiturn": bool(grid.apply_chat_template),  # as lm-eval's command does
    }


def _task_identity(manager: TaskManager, asked: Asked, grid: Grid) -> dict[str, Any]:
    """What a task's prompts and scores depend on; and whether something is drawn, and answers are sampled."""
    loaded = load_tasks(manager, [asked.task])
    found: dict[str, Any] = {}
    draws = samples = False
    for name, task in sorted(loaded.items()):
        _override(task, asked)
        _check_asked(name, task, asked)
        config = task.dump_config()
        shots = task.get_config("num_fewshot") or 0
        if task.get_config("output_type") == "generate_until" and generation.samples(config["generation_kwargs"]):
            samples = True
        draws = draws or samples or bool(shots)
        exemplars = list(task.fewshot_docs()) if shots else []
        docs = list(_first(task.eval_docs, get_sample_size(task, asked.limit)))
        found[name] = {
            "class": f"{type(task).__module__}.{type(task).__qualname__}",
            "version": str((config.get("metadata") or {}).get("version", "")),
            "config": {key: value for key, value in config.items() if key not in _ELSEWHERE},
            "code": code_digest(
                task, {key: value for key, value in vars(task.config).items() if key not in _ELSEWHERE}
            ),
            "questions": _digest_of([*docs, *_built(task, docs)]),
            "exemplars": _digest_of([*exemplars, *_built(task, exemplars)]),
        }
    settled = json.loads(json.dumps(found, default=_named))
    settled = {name: {**one, "config": digest(one["config"])} for name, one in settled.items()}
    prompts = {"system": grid.system_instruction or "", "multiturn": bool(grid.apply_chat_template)}
    return {"tasks": settled, **prompts, "draws": draws, "samples": samples}


def _override(task: Any, asked: Asked) -> None:
    """Change a task's configuration as `simple_evaluate` does."""
    if asked.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(asked.gen_kwargs), update=True)
    own = task.get_config("num_fewshot")
    if asked.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=asked.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


def _check_asked(name: str, task: Any, asked: Asked) -> None:
    """Refuse a metric that the task has not, and settings of generation that nobody knows.

    Raises:
        InputError: naming it.
    """
    metric, _, filter_ = (asked.metric or "").partition(",")
    metrics = list(task.aggregation())
    if metric and metric not in metrics:
        raise InputError(f"{name} has no metric {metric!r}{nearest(metric, metrics)}; it has {', '.join(metrics)}")
    filters = [one.name for one in getattr(task, "_filters", ())]
    if filter_ and filters and filter_ not in filters:
        raise InputError(f"{name} has no filter {filter_!r}{nearest(filter_, filters)}; it has {', '.join(filters)}")
    known = [*_LM_EVALS_OWN, *GenerationConfig().to_dict()]
    for setting in asked.gen_kwargs:
        if setting not in known:
            raise InputError(f"gen_kwargs: there is no setting {setting!r}{nearest(setting, known)}; leave it out")


def _digest_of(docs: list[Any]) -> str:
    return digest(json.loads(json.dumps(docs, default=_named)))


def _built(task: Any, docs: list[Any]) -> list[Any]:
    """Of each question what is asked, what is right, and what there is to choose from."""
    names = ["doc_to_text", "doc_to_target", *(["doc_to_choice"] if task.get_config("doc_to_choice") else [])]
    state = random.getstate()
    try:
        random.seed(0)  # what is drawn is the evaluation's
        return [_part(getattr(task, name), doc) for doc in docs for name in names]
    finally:
        random.setstate(state)


def _part(build: Callable[[Any], Any], doc: Any) -> Any:
    try:
        return build(doc)
    except Exception as error:  # not every kind of task has all parts
        return type(error).__name__


def _named(value: Any) -> str:
    """What JSON does not know, without the address where it happens to be."""
    own = type(value) if type(value).__str__ is object.__str__ else None
    return getattr(value, "__qualname__", None) or (own.__qualname__ if own else str(value))


def _first(values: Any, count: int | None) -> Iterator[Any]:
    """The first values."""
    for place in range(len(values) if count is None else min(count, len(values))):
        yield values[place]
