"""Cells: evaluations of lm-eval's, each named by the hash of everything that its answers and scores depend on.

The hash covers the weights (not their path), what is applied to the model, the preparation, the task's configuration,
its questions and exemplars, the chat template, the seed where something is drawn, and the versions of lm-eval, of
transformers and of this package, whose scoring changes. It does not cover names, paths, device, runner, or how many
variants share a pass; and it covers batch size and decoding engine only if the model computes in half precision, where
sums rounded in another order give other texts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.export.manifest import adapter_name, read_adapters
from lmeval_prune.grid.configuration import Grid, GridTask, Variant
from lmeval_prune.grid.preparations import preparation, with_chat_template
from lmeval_prune.grid.task_identity import TaskIdentity
from lmeval_prune.models.arguments import ROUTER_ARGUMENTS, Arguments
from lmeval_prune.models.checkpoint import Checkpoint
from lmeval_prune.models.identity import ModelIdentity, argument_identity, code_versions
from lmeval_prune.models.server_options import ServerOptions, without_server
from lmeval_prune.tasks.loading import task_manager


@dataclass(frozen=True)
class Cell:
    """One variant on one task.

    Attributes:
        variant, task: the two.
        evaluation: arguments of `simple_evaluate`.
        metadata: for lm-eval's task manager.
        identity: all that answers and scores depend on.
        prepared: key of the preparation's result, or empty.
        answers: folder of its answers among those of the grid.
        batch_size, device, engine: how it is computed.
    """

    variant: Variant
    task: GridTask
    evaluation: dict[str, Any]
    metadata: dict[str, Any]
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
    def name(self) -> str:
        """Return its name for people."""
        return f"{self.variant.name} on {self.task.name}"

    @property
    def model(self) -> str:
        """Return the name of lm-eval's model class."""
        return "pruned-server" if self.variant.served else "pruned-hf"

    @property
    def costs(self) -> str:
        """Return a digest of what its model's costs depend on: the model, and what is applied to it."""
        return digest({name: self.identity[name] for name in ("model", "interventions", "preparation", "router")})

    def model_args(self, prepared: Path) -> dict[str, Any]:
        """Return all model_args.

        Args:
            prepared: folder of preparations' results.
        """
        arguments = dict(self.variant.model_args)
        for name, settings in self.variant.prepare.items():
            arguments |= preparation(name, settings).model_args(prepared / self.prepared)
        if self.variant.served:
            return {**arguments, "seed": self.variant.seed}
        arguments.setdefault("engine", self.engine)
        if arguments["engine"] == "batched":
            arguments.setdefault("deterministic", True)  # no answer depends on which others are decoded beside it
        return {name: value for name, value in arguments.items() if (name, value) != ("engine", "generate")}

    def command(self, prepared: Path) -> str:
        """Return the `lm_eval` command that evaluates it."""
        evaluation, template = self.evaluation, self.evaluation["apply_chat_template"]
        options: dict[str, Any] = {
            "model": self.model,
            "model_args": json.dumps(self.model_args(prepared)),
            "tasks": self.task.task,
            "seed": self.variant.seed,
            "batch_size": self.batch_size,
            "device": self.device,
            "limit": evaluation["limit"],
            "num_fewshot": evaluation["num_fewshot"],
            "gen_kwargs": json.dumps(evaluation["gen_kwargs"]) if evaluation["gen_kwargs"] else None,
            "metadata": json.dumps(self.metadata) if self.metadata else None,
            "system_instruction": evaluation["system_instruction"] or None,
            "apply_chat_template": template if isinstance(template, str) and template else None,
        }
        words = ["lm_eval"]
        for name, value in options.items():
            words += [] if value is None else [f"--{name}", str(value)]
        flags = ["--apply_chat_template"] if template is True else []
        return shlex.join([*words, *flags, "--log_samples", "--output_path", "OUT"])

    def entry(self) -> dict[str, Any]:
        """Return the fields that `grid.json` and `cell.json` have of it."""
        return {
            "variant": self.variant.name,
            "task": self.task.name,
            "metric": self.task.metric,
            "selected_on": list(self.variant.selected_on),
            "model_args": self.variant.model_args,
            "prepare": self.variant.prepare,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the fields that `cell.json` has of it."""
        names = ("evaluation", "metadata", "identity", "prepared", "answers", "batch_size", "device", "engine")
        return {**self.entry(), "seed": self.variant.seed, **{name: getattr(self, name) for name in names}}


def versions() -> dict[str, Any]:
    """Return the versions of the code that answers and scores depend on."""
    return {"lmeval-prune": version("lmeval-prune"), **code_versions()}


def cells_of(grid: Grid) -> list[Cell]:
    """Return all cells of a grid, after checking everything that can be known without weights.

    Raises:
        InputError: something is unknown or does not fit, or two cells are the same.
    """
    planner = _Planner(grid)
    cells = [cell for variant in grid.variants for cell in planner.cells(variant)]
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.key, cell)) is not cell:
            variants = " and ".join(dict.fromkeys((repr(other.variant.name), repr(cell.variant.name))))
            tasks = " and ".join(dict.fromkeys((other.task.name, cell.task.name)))
            raise InputError(f"two cells are the same: {variants} on {tasks}; nothing tells them apart, leave one out")
    return cells


class _Planner:
    """Makes cells; reads each model and each task once."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.models: dict[str, tuple[Checkpoint, dict[str, Any]]] = {}
        self.tasks: dict[tuple[str, str], TaskIdentity] = {}

    def cells(self, variant: Variant) -> Iterator[Cell]:
        """Yield a variant's cells."""
        grid, chat = self.grid, bool(self.grid.apply_chat_template)
        prepare = {name: with_chat_template(name, settings, chat) for name, settings in variant.prepare.items()}
        variant = replace(variant, prepare=prepare)
        try:
            arguments = Arguments.of(without_server(variant.model_args))
            checkpoint, model = self._model(arguments.loading)
            engine = _engine(variant, arguments, checkpoint)
            computation = _computation(variant, arguments, checkpoint, engine, grid.batch_size)
            identity = {**_variant_identity(variant, arguments, checkpoint, model), **computation}
            template = checkpoint.chat_template(grid.apply_chat_template)
        except InputError as error:
            raise InputError(f"variant {variant.name!r}: {error}") from None
        answered_by = digest([model, computation] if computation else model)
        for grid_task in grid.tasks:
            task = self._task(grid_task, {**arguments.loading, **grid.metadata})
            drawn: dict[str, Any] = {"seed": variant.seed} if task.draws else {}
            drawn |= {"engine": engine} if task.samples else {}
            prompts = {"system": grid.system_instruction or "", "multiturn": chat}
            answers = (f"{Path(str(arguments.pretrained)).name}-{answered_by[:8]}", grid_task.name)
            yield Cell(
                variant,
                grid_task,
                _evaluation(grid_task, grid),
                dict(grid.metadata),
                {
                    **identity,
                    "task": {"tasks": task.content, **prompts},
                    "template": template,
                    "drawn": drawn,
                    "versions": versions(),
                },
                identity["preparation"].get("key", ""),
                "/".join(re.sub(r"[^\w.-]", "_", part) for part in answers),
                grid.batch_size,
                grid.device,
                engine,
            )

    def _model(self, loading: dict[str, Any]) -> tuple[Checkpoint, dict[str, Any]]:
        key = digest({name: str(value) for name, value in loading.items()})
        if key not in self.models:
            checkpoint = Checkpoint(loading)
            self.models[key] = checkpoint, ModelIdentity.of_checkpoint(checkpoint).to_json()
        return self.models[key]

    def _task(self, grid_task: GridTask, metadata: dict[str, Any]) -> TaskIdentity:
        key = digest(metadata), grid_task.name
        if key not in self.tasks:
            self.tasks[key] = TaskIdentity.of(task_manager(metadata), grid_task)
        return self.tasks[key]


def _evaluation(task: GridTask, grid: Grid) -> dict[str, Any]:
    """Return the arguments of `simple_evaluate`."""
    return {
        "tasks": [task.task],
        "limit": task.limit if task.limit is None or task.limit < 1 else int(task.limit),
        "num_fewshot": task.num_fewshot,
        "gen_kwargs": dict(task.gen_kwargs),
        "system_instruction": grid.system_instruction,
        "apply_chat_template": grid.apply_chat_template,
        "fewshot_as_multiturn": bool(grid.apply_chat_template),  # as lm-eval's command does
    }


def _variant_identity(
    variant: Variant, arguments: Arguments, checkpoint: Checkpoint, model: dict[str, Any]
) -> dict[str, Any]:
    """Identify the model, what is applied to it, and what is prepared."""
    routing = {name: variant.model_args[name] for name in ROUTER_ARGUMENTS if name in variant.model_args}
    applied = [intervention.identity(checkpoint.map) for intervention in arguments.interventions]
    prepared: dict[str, Any] = {}
    for name, settings in variant.prepare.items():
        prepared = {"name": name, **preparation(name, settings).identity()}
        prepared |= {"seed": variant.seed, "versions": versions()}
        prepared["key"] = digest([model, prepared])
    return {
        "model": model,
        "interventions": [*applied, digest(checkpoint.map.signature())] if applied else [],
        "router": {name: argument_identity(name, value) for name, value in routing.items()},
        "preparation": prepared,
    }


def _engine(variant: Variant, arguments: Arguments, checkpoint: Checkpoint) -> str:
    """Return what decodes: a server's kind, the variant's own engine, or the faster way to the same texts."""
    if variant.served:
        return str(variant.model_args.get("server", ServerOptions.server))
    if engine := variant.model_args.get("engine"):
        return str(engine)
    in_batches = all((each.tokenwise or each.by_sequence) and not each.needs_order for each in arguments.interventions)
    return "batched" if in_batches and not checkpoint.config.is_encoder_decoder else "generate"


def _computation(
    variant: Variant, arguments: Arguments, checkpoint: Checkpoint, engine: str, batch_size: int | str
) -> dict[str, Any]:
    """Identify how answers are computed, as far as it changes them."""
    if variant.served:
        return {"computation": {"server": engine, **_adapters(variant, arguments, checkpoint)}}
    computation: dict[str, Any] = {}
    if engine == "batched" and variant.model_args.get("deterministic") is not None and not arguments.deterministic:
        computation = {"deterministic": False}
    if checkpoint.rounds_coarsely:
        computation |= {"engine": engine, "batch_size": str(batch_size)}
        computation |= {"rows": arguments.engine_rows} if engine == "batched" else {}
    return {"computation": computation} if computation else {}


def _adapters(variant: Variant, arguments: Arguments, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the hashes of a served variant's adapters, if their folder is named; with a router, of all in it."""
    if "adapters" not in variant.model_args:
        return {}
    known = read_adapters(str(variant.model_args["adapters"]))
    heads = [
        str(head)
        for mask in arguments.interventions
        for head in mask.heads_of(checkpoint.map)  # type: ignore[attr-defined]
    ]
    names = list(known) if arguments.router else [adapter_name(heads), *heads] if heads else []
    return {"adapters": {name: known[name]["hash"] for name in names if name in known}}
