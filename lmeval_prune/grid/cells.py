"""Cells of a grid: evaluations by lm-eval, each identified by a hash of everything that can change its scores.

The hash includes the weights, the interventions, the preparation, the task's configuration, code, questions and
few-shot examples, the chat template, the seed (if the task uses random numbers), and the versions of lm-eval,
transformers and this package. It does not include names, paths, the device, the runner, or the number of variants in a
pass. Batch size and decoding engine are included only in half precision, where a different order of summation can
change the generated text.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyarrow import parquet

from lmeval_prune import __version__
from lmeval_prune.artefacts import digest, read_json
from lmeval_prune.errors import InputError
from lmeval_prune.export.manifest import adapter_name, read_adapters, read_lora
from lmeval_prune.grid.configuration import Grid, GridTask, Variant
from lmeval_prune.grid.folder import Kind
from lmeval_prune.grid.preparations import Preparation, calibration_source, make_preparation
from lmeval_prune.grid.task_identity import TaskIdentity, identify
from lmeval_prune.interventions.applied import combined
from lmeval_prune.interventions.table import METHODS
from lmeval_prune.models.arguments import ROUTER_ARGUMENTS, Arguments
from lmeval_prune.models.head_router import POLICIES
from lmeval_prune.models.identity import SERVED_ANSWERING, Checkpoint, argument_identity, code_versions
from lmeval_prune.models.servers import SERVER_ARGUMENTS, ServerOptions
from lmeval_prune.tasks.loading import included_folder, task_manager

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")  # of `simple_evaluate`


@dataclass(frozen=True, repr=False)
class Cell:
    """One variant on one task, with what was read to name it: files that change afterwards change nothing."""

    key: str  # hash of `identity`; name of the cell's folder
    costs: str  # hash of everything that the measured costs (memory, speed, FLOPs) depend on
    variant: Variant
    task: GridTask
    arguments: Arguments  # model_args but those of a server, without the preparation's result
    preparation: Preparation | None
    loaded: Any  # the task, as lm-eval's task manager has loaded it
    evaluation: dict[str, Any]  # arguments of `simple_evaluate`
    metadata: dict[str, Any]  # of lm-eval's task manager
    identity: dict[str, Any]  # everything that can change answers and scores
    selected: set[str]  # digests of questions that the variant was selected on, see `selected_questions`
    prepared: str  # key of the preparation's result; empty without a preparation
    answers: str  # path of the cell's answers in the grid's folder of answers
    computing: dict[str, Any]  # further arguments of the model: batch size and device
    engine: str
    measurable: bool  # whether the costs of the variant can be measured

    @property
    def model(self) -> str:
        """Return the name of lm-eval's model class."""
        return "pruned-server" if self.variant.served else "pruned-hf"

    def model_args(self, preparations: Path) -> dict[str, Any]:
        """Return all model_args; `preparations` is the folder with the results of preparations."""
        arguments = dict(self.variant.model_args)
        if self.preparation:
            arguments |= self.preparation.model_args(preparations / self.prepared)
        if self.variant.served:
            return {**arguments, "seed": self.variant.seed}
        arguments["engine"] = self.engine
        if self.engine == "batched":
            arguments.setdefault("deterministic", True)  # so that other rows of a batch cannot change an answer
        return arguments

    def parsed(self, preparations: Path) -> Arguments:
        """Return `arguments`, with the preparation's result; files of the variant were read when the cell was named."""
        if not self.preparation:
            return self.arguments
        result = self.preparation.model_args(preparations / self.prepared)
        read = {*METHODS, "mask", *ROUTER_ARGUMENTS} & self.variant.model_args.keys() - result.keys()
        values = {name: value for name, value in self.model_args(preparations).items() if name not in read}
        made = Arguments.of(values)
        router = made.router or self.arguments.router
        return replace(
            made,
            interventions=combined([*self.arguments.interventions, *made.interventions]),
            router=router,
            deterministic=values.get("deterministic") if router else made.deterministic,
        )

    def evaluation_arguments(self, documents: int = 0) -> dict[str, Any]:
        """Return the arguments of `simple_evaluate`, for at most a number of documents of each task if it is not 0."""
        limit = self.evaluation["limit"]
        if documents:
            limit = min(limit, documents) if isinstance(limit, int) else documents
        loaded = copy.deepcopy(self.loaded)  # which an evaluation changes
        return {
            **self.evaluation,
            "gen_kwargs": self.evaluation["gen_kwargs"] or None,
            "limit": limit,
            "task_manager": SimpleNamespace(load=lambda _: loaded, task_index={}),
            **dict.fromkeys(SEEDS, self.variant.seed),
        }

    def command(self, model_args: dict[str, Any]) -> str:
        """Return the `lm_eval` command that evaluates the cell; `model_args` is the result of the method."""
        evaluation = {name: value for name, value in self.evaluation.items() if name != "fewshot_as_multiturn"}
        options: dict[str, Any] = {
            "model": self.model,
            "model_args": model_args,
            **evaluation,
            "tasks": self.task.task,
            "include_path": included_folder(),
            "seed": self.variant.seed,
            **self.computing,
            "metadata": self.metadata,
        }
        words = ["lm_eval"]
        for name, value in options.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None and value is not False and value not in ("", {}):
                words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return shlex.join([*words, "--log_samples", "--output_path", "OUT"])

    def entry(self, model_args: dict[str, Any]) -> dict[str, Any]:
        """Return the cell's entry in `grid.json` and `cell.json`."""
        return {
            "key": self.key,
            "variant": self.variant.name,
            "task": self.task.name,
            "metric": self.task.metric,
            "selected_on": list(self.variant.selected_on),
            "model_args": self.variant.model_args,
            "prepare": self.variant.prepare,
            "prepared": self.prepared,
            "costs": self.costs,
            "command": self.command(model_args),
        }


@dataclass(frozen=True)
class Item:
    """One result in a grid's folder, which one process makes."""

    kind: Kind
    key: str
    cell: Cell  # with this variant
    origin: Cell | None = None  # of distances: the cell from whose model they are measured
    documents: int = 0  # of distances: number of the task's documents

    @property
    def name(self) -> str:
        """Return the name of its lock and of its failure."""
        return f"{self.kind}-{self.key}"

    def __str__(self) -> str:
        if self.kind in ("evaluate", "distance"):
            return f"{'distance ' * (self.kind == 'distance')}{self.cell.variant.name} on {self.cell.task.name}"
        return f"{'costs' if self.kind == 'measure' else 'preparation'} of {self.cell.variant.name}"


Job = Sequence[Item]  # for one process: of one kind, variants of one model on one task, or a single item
Made = tuple[Item, str]  # with the reason why it could not be made, or an empty text


def versions(served: bool) -> dict[str, Any]:
    """Return the versions of all packages, and of the way to answer, that can change answers and scores."""
    answering = {"answering": SERVED_ANSWERING} if served else {}
    return {"lmeval-prune": __version__, **code_versions(), **answering}


Models = dict[str, tuple[Checkpoint, dict[str, Any]]]  # with their identities, by the arguments that load them


def cells_of(grid: Grid, models: Models | None = None) -> list[Cell]:
    """Return all cells of a grid, after every check that needs no weights; each model and each task is read once.

    `models` are those that are known.
    """
    calibration_source.cache_clear()  # of an earlier grid, whose files may have changed
    models = {} if models is None else models
    tasks: dict[tuple[str, str], TaskIdentity] = {}
    cells: dict[str, Cell] = {}
    for variant in grid.variants:
        try:
            own = list(_cells(grid, variant, models, tasks))
        except InputError as error:
            raise InputError(f"variant {variant.name!r}: {error}") from None
        for cell in own:
            if (other := cells.setdefault(cell.key, cell)) is not cell:
                names = f"{other.variant.name!r} on {other.task.name} and {cell.variant.name!r} on {cell.task.name}"
                raise InputError(f"two cells are the same: {names}; leave one out")
    return list(cells.values())


def _cells(grid: Grid, variant: Variant, models: Models, tasks: dict[tuple[str, str], TaskIdentity]) -> Iterator[Cell]:
    """Yield a variant's cells; `models` and `tasks` are those that are known, by the arguments that load the model."""
    chat = bool(grid.apply_chat_template)
    given, computation = variant.model_args, dict[str, Any]()  # settings of the computation that can change answers
    own = {name: x for name, x in given.items() if not (variant.served and name in SERVER_ARGUMENTS)}
    arguments = Arguments.of(own)
    loading = arguments.loading
    loading_key = digest({name: str(value) for name, value in loading.items()})
    if loading_key not in models:
        checkpoint = Checkpoint(loading)
        models[loading_key] = checkpoint, checkpoint.identity()
    checkpoint, model = models[loading_key]
    is_encoder_decoder = checkpoint.config.is_encoder_decoder
    engine = str(given.get("engine", "auto"))
    if variant.served:
        engine = str(given.get("server", ServerOptions.server))
        computation |= {"server": engine} | ({"model": str(given["model"])} if "model" in given else {})
        if "lora" in given:
            computation["lora"] = read_lora(given["lora"])
        elif "adapters" in given:
            adapters, masks = read_adapters(str(given["adapters"])), arguments.interventions
            heads = [str(head) for mask in masks for head in mask.heads_of(checkpoint.map)]  # type: ignore[attr-defined]
            names = list(adapters) if arguments.router else [adapter_name(heads), *heads] if heads else []
            computation["adapters"] = {name: adapters[name]["hash"] for name in names if name in adapters}
    else:
        if engine == "auto":  # the fastest engine that generates the same texts
            can_batch = all((x.tokenwise or x.by_sequence) and not x.needs_order for x in arguments.interventions)
            can_batch = can_batch and not (is_encoder_decoder or arguments.others.get("mixed_precision_dtype"))
            engine = "batched" if can_batch else "generate"
        if engine == "batched" and given.get("deterministic") is not None and not arguments.deterministic:
            computation = {"deterministic": False}
        if checkpoint.depends_on_batch:
            computation |= {"engine": engine, "batch_size": str(grid.batch_size)}
            computation |= {"rows": arguments.engine_rows} if engine == "batched" else {}
        is_exact: Any = given.get("deterministic", engine == "batched")
        arguments = replace(arguments, engine=engine, deterministic=is_exact)  # type: ignore[arg-type]
    computed = {"computation": computation} if computation else {}
    prepared: dict[str, Any] = {}
    preparation = None
    for name, settings in variant.prepare.items():
        preparation = make_preparation(name, settings, chat)
        preparation.check(checkpoint.map)
        prepared = {"name": name, **preparation.identity(), "seed": variant.seed, "versions": versions(served=False)}
        prepared["key"] = digest([model, prepared])
    interventions: list[Any] = [intervention.identity(checkpoint.map) for intervention in arguments.interventions]
    if interventions:
        interventions.append(digest(checkpoint.map.signature()))
    routed = {name: given[name] for name in ROUTER_ARGUMENTS if name in given}
    identity = {
        "model": model,
        "interventions": interventions,
        "router": {name: argument_identity(name, value) for name, value in routed.items()},
        "preparation": prepared,
    }
    selected = selected_questions(given)
    template = checkpoint.chat_template(grid.apply_chat_template)
    model_digest = digest([model, computed] if computed else model)
    answers = f"{Path(str(arguments.pretrained)).name}-{model_digest[:8]}"
    for grid_task in grid.tasks:
        if (loading_key, grid_task.name) not in tasks:
            tasks[loading_key, grid_task.name] = identify(task_manager({**loading, **grid.metadata}), grid_task)
        task = tasks[loading_key, grid_task.name]
        random: dict[str, Any] = {"seed": variant.seed} if task.draws else {}
        random |= {"engine": engine} if task.samples else {}  # engines draw different random numbers
        prompts = {"system": grid.system_instruction or "", "multiturn": chat}
        cell_identity = {
            **identity,
            **computed,
            "task": {"tasks": task.content, **prompts},
            "template": template,
            "drawn": random,
            "versions": versions(variant.served),
        }
        limit = grid_task.limit
        yield Cell(
            key=digest(cell_identity),
            costs=digest({**identity, **computed} if variant.served else identity),  # a server's are unknown
            variant=variant,
            task=grid_task,
            arguments=replace(arguments, router=copy.deepcopy(arguments.router)),  # which counts a run's questions
            preparation=preparation,
            loaded=task.loaded,
            selected=selected,
            evaluation={
                "tasks": [grid_task.task],
                "limit": limit if limit is None or limit < 1 else int(limit),
                "num_fewshot": grid_task.num_fewshot,
                "gen_kwargs": dict(grid_task.gen_kwargs),
                "system_instruction": grid.system_instruction,
                "apply_chat_template": grid.apply_chat_template,
                "fewshot_as_multiturn": chat,  # the default of lm-eval's command
            },
            metadata=dict(grid.metadata),
            identity=cell_identity,
            prepared=prepared.get("key", ""),
            answers="/".join(re.sub(r"[^\w.-]", "_", part) for part in (answers, grid_task.name)),
            computing={"batch_size": grid.batch_size, **({"device": grid.device} if grid.device else {})},
            engine=engine,
            measurable=not (variant.served or arguments.router or is_encoder_decoder),
        )


def selected_questions(model_args: dict[str, Any]) -> set[str]:
    """Return digests of the questions by which a variant was selected: those of its router and of its outcome store."""
    questions: set[str] = set()
    for name in ("router", "router_store"):
        if isinstance(value := model_args.get(name), str) and value not in POLICIES:
            folder = Path(value).expanduser()
            if (table := folder / "questions.parquet").is_file():
                texts = parquet.read_table(table, columns=["question"])["question"].to_pylist()
                questions |= {digest(text) for text in texts}
            elif (router := folder / "router.json").is_file():
                questions |= set(read_json(router).get("seen", ()))
    return questions
