"""Run jobs of a grid in one process: load models, make preparations, and evaluate cells with lm-eval."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import lm_eval
import torch
from torch.utils import collect_env

from lmeval_prune.artefacts import new_folder
from lmeval_prune.distance.texts import RecordingLM, check_tokenizers, record_requests
from lmeval_prune.distance.variants import measure as measure_distances
from lmeval_prune.errors import InputError, disk_error, first_line
from lmeval_prune.grid.cells import Cell, versions
from lmeval_prune.grid.distances import distance_key, to_table
from lmeval_prune.grid.folder import GridFolder, measurement_key
from lmeval_prune.grid.measures import measure
from lmeval_prune.grid.outcomes import write_cell
from lmeval_prune.grid.preparations import make_preparation
from lmeval_prune.interventions import HeadMask, combined
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.checkpoint import Checkpoint
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.server_options import without_server
from lmeval_prune.profiling.speed import peak_memory_of_process

logger = logging.getLogger(__name__)
DONE, FAILED, BUSY = "done", "failed", "busy"


@dataclass(frozen=True)
class Result:
    """Result of a cell, of a preparation, or of a measurement of costs."""

    key: str  # key of the cell or the preparation; `measurement_key(...)` for a measurement
    state: str  # `DONE`, `FAILED`, or `BUSY`: another process holds the lock
    reason: str = ""  # of the failure


@dataclass(frozen=True)
class Job:
    """Work for one process: variants of one model on one task to evaluate, or one cell's preparation."""

    folder: str  # of the grid
    cells: tuple[Cell, ...]
    prepares: bool = False  # make the cell's preparation, do not evaluate it
    measures: bool = False  # measure the costs of variants without costs, also of cells that are done
    distance: int = 0  # if not 0: do not evaluate; measure distances on this number of documents
    origin: Cell | None = None  # cell from whose model distances are measured; None: each from its own

    @property
    def distance_keys(self) -> list[str]:
        """Return the keys of the distances of the job's cells."""
        return [distance_key(cell, self.distance, self.origin or cell) for cell in self.cells]


class VariantLM(RecordingLM):
    """A loaded model whose arguments are changed from variant to variant."""

    # Masks of the job's variants: the first task's requests are answered with each of them, in one run of the engine.
    job_masks: tuple[HeadMask | None, ...] = ()
    store_rank = None  # each process that writes answers of the grid gets the next free file number

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Store the answers under all masks of the job, if there are several; then answer from the store."""
        if self.job_masks and self.answering.store:
            self._applied.close()
            try:
                self.answering.answer_ahead(kind, requests, self.job_masks, disable_tqdm)
            finally:
                self._applied = self._apply()
        return super().answer(kind, requests, disable_tqdm)


class ServedLM(PrunedServerLM):
    """A variant whose answers a server computes; `record_path` is of all served variants of a grid."""

    store_rank = None  # as of `VariantLM`

    def __init__(self, record_path: Path, **arguments: Any) -> None:
        self._record_path = record_path
        super().__init__(**arguments)

    @property
    def record_path(self) -> Path:
        """Return the grid's file."""
        return self._record_path

    @property
    def record_key(self) -> Any:
        """Return what a cell's answers depend on, the name in `model=` too."""
        return [*super().record_key, self.options.model]


class LoadedModel:
    """The model of a process. Loading another one replaces it."""

    def __init__(self) -> None:
        self.lm: VariantLM | ServedLM | None = None
        self._key: Any = None

    def configure(self, arguments: Arguments, identity: dict[str, Any] | None) -> VariantLM:
        """Apply other arguments to the loaded model, or load another one; `identity` is that of its files."""
        key = {name: str(value) for name, value in arguments.loading.items()}, identity
        if isinstance(self.lm, VariantLM) and self._key == key:
            self.lm.job_masks = ()
            self.lm.reconfigure(arguments)
            return self.lm
        self.close()
        self.lm = lm = VariantLM(arguments)
        self._key = key
        return lm

    def connect(self, model_args: dict[str, Any], record_path: Path) -> ServedLM:
        """Connect to the servers of a variant."""
        self.close()
        self.lm = lm = ServedLM(record_path, **model_args)
        return lm

    def close(self) -> None:
        """Free the model."""
        lm, self.lm, self._key = self.lm, None, None
        if lm is not None:
            with suppress(Exception):  # its constructor may have failed
                lm.close()
        del lm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Task:
    cell: Cell
    model_args: dict[str, Any]
    arguments: Arguments

    @classmethod
    def of(cls, cell: Cell, folder: GridFolder) -> _Task:
        model_args = cell.model_args(folder.prepared)
        return cls(cell, model_args, Arguments.of(without_server(model_args)))


class Worker:
    """Runs a job with the model of this process."""

    def __init__(self, job: Job, loaded: LoadedModel) -> None:
        self.job, self.loaded, self.folder = job, loaded, GridFolder(job.folder)

    def run(self) -> Iterator[Result]:
        """Yield the result of each of the job's cells."""
        if self.job.prepares:
            yield self._prepare(self.job.cells[0])
        elif self.job.distance:
            yield from self._measure_distances()
        else:
            yield from self._evaluate_all()

    # ------------------------------------------------------------------ models

    def _load(self, task: _Task, responses: str | None = None) -> VariantLM | ServedLM:
        """Load a cell's variant; its model must be the one that the cell's hash identifies."""
        cell = task.cell
        computing = _computing(cell)
        torch.manual_seed(cell.variant.seed)
        if cell.variant.served:
            stored = {"responses": responses} if responses else {}
            return self.loaded.connect({**task.model_args, **computing, **stored}, self.folder.servers)
        arguments = replace(task.arguments, others={**task.arguments.others, **computing}, responses=responses)
        is_prepared = arguments.pretrained != cell.variant.model_args["pretrained"]
        return self.loaded.configure(arguments, None if is_prepared else cell.identity["model"])

    # ------------------------------------------------------------------ preparations

    def _prepare(self, cell: Cell) -> Result:
        key = cell.prepared
        with self.folder.lock(key) as is_held:
            if not is_held:
                return Result(key, BUSY)
            try:
                if not self.folder.preparation(key).is_dir():
                    ((name, settings),) = cell.variant.prepare.items()
                    unpruned = Arguments.of(Arguments.of(cell.variant.model_args).loading)
                    lm = self._load(_Task(cell, {}, unpruned))
                    with new_folder(self.folder.preparation(key)) as folder:
                        make_preparation(name, settings).make(lm, folder)
            except Exception as error:
                return self._failed(key, error)
            self.folder.clear_failure(key)
            return Result(key, DONE)

    # ------------------------------------------------------------------ cells

    def _evaluate_all(self) -> Iterator[Result]:
        with ExitStack() as locks:
            tasks: list[_Task] = []
            for cell in self.job.cells:
                if not locks.enter_context(self.folder.lock(cell.key)):
                    yield Result(cell.key, BUSY)
                elif self.folder.has_cell(cell.key):
                    yield self._measure_done(cell)
                else:
                    try:
                        tasks.append(_Task.of(cell, self.folder))
                    except Exception as error:
                        yield self._failed(cell.key, error)
            masks = _masks([task.arguments for task in tasks])
            for task in tasks:
                key = task.cell.key
                try:
                    self._evaluate(task, masks)
                    self.folder.clear_failure(key)
                    if self.job.measures:
                        self._measure(task.cell)
                except Exception as error:
                    yield self._failed(key, error)
                else:
                    yield Result(key, DONE)
                masks = ()  # the first cell has answered the requests with all masks

    def _evaluate(self, task: _Task, masks: tuple[HeadMask | None, ...]) -> None:
        """Evaluate a cell by lm-eval and write its folder; `masks` are those whose answers are computed together."""
        cell, arguments = task.cell, task.arguments
        needs_order = any(intervention.needs_order for intervention in arguments.interventions)
        start = time.perf_counter()
        lm = self._load(task, None if needs_order else str(self.folder.answers(cell.answers)))
        loaded = time.perf_counter()
        store = lm.answering.store
        stored_before = len(store.responses) if store else 0
        if isinstance(lm, VariantLM):
            lm.job_masks = masks
        try:
            with _environment_collected_once():
                results = lm_eval.simple_evaluate(model=lm, **cell.evaluation_arguments(arguments.loading))
        except InputError:
            if not masks:
                raise
            logger.info("the variants cannot share a pass; each is evaluated alone")
            self._evaluate(task, ())
            return
        assert results is not None
        results["config"] |= {"model": cell.model, "model_args": task.model_args, "batch_size": cell.batch_size}
        ran = {
            "loading_seconds": loaded - start,
            "seconds": time.perf_counter() - loaded,
            "answers_computed": len(store.responses) - stored_before if store else None,
            "variants_in_this_pass": len(masks) or 1,
            "peak_rss_bytes_of_the_process": peak_memory_of_process(),
            "threads": torch.get_num_threads(),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {**versions(cell.variant.served), "torch": torch.__version__},
        }
        with self.folder.new_cell(cell.key) as folder:
            write_cell(folder, {**cell.to_json(task.model_args), "ran": ran}, results)

    # ------------------------------------------------------------------ costs

    def _measure_done(self, cell: Cell) -> Result:
        """Measure the variant of a done cell if its costs are missing, e.g. because an earlier run was killed."""
        if not (self.job.measures and self.folder.needs_costs(cell.costs)):
            return Result(cell.key, DONE)
        key = measurement_key(cell.costs)
        try:
            self._load(_Task.of(cell, self.folder))
            return Result(key, self._measure(cell), self.folder.failure(key) or "")
        except Exception as error:
            return self._failed(key, error)

    def _measure(self, cell: Cell) -> str:
        """Measure the loaded variant unless its costs are known; a failure is recorded for the costs, not the cell."""
        key, lm = cell.costs, self.loaded.lm
        assert isinstance(lm, VariantLM)
        with self.folder.lock(measurement_key(key)) as is_held:
            if not is_held:
                return BUSY
            if not self.folder.needs_costs(key):
                return DONE
            if lm.arguments.router or lm.backend != "causal":
                reason = "a router applies several models" if lm.arguments.router else "the model is not causal"
                self.folder.record_failure(measurement_key(key), f"its costs are not measured: {reason}", "")
                return FAILED
            try:
                self.folder.write_costs(key, measure(lm))
            except Exception as error:
                self._raise_disk_error(error)
                logger.warning("%s cannot be measured (%s)", cell.variant.name, first_line(error))
                self.folder.record_failure(measurement_key(key), first_line(error), traceback.format_exc())
                return FAILED
        return DONE

    # ------------------------------------------------------------------ distances

    def _measure_distances(self) -> Iterator[Result]:
        with ExitStack() as locks:
            cells: dict[str, Cell] = {}
            for key, cell in zip(self.job.distance_keys, self.job.cells, strict=True):
                if not locks.enter_context(self.folder.lock(key)):
                    yield Result(key, BUSY)
                elif self.folder.has_distances(key):
                    yield Result(key, DONE)
                else:
                    cells[key] = cell
            try:
                self._write_distances(cells)
            except Exception as error:
                yield from [self._failed(key, error) for key in cells]
            else:
                yield from [Result(key, DONE) for key in cells]

    def _write_distances(self, cells: dict[str, Cell]) -> None:
        """Write the distances of cells of one task, by their keys, from one dense model."""
        if not cells:
            return
        tasks = {key: _Task.of(cell, self.folder) for key, cell in cells.items()}
        origin = self.job.origin or next(iter(cells.values()))
        loading = Arguments.of(origin.variant.model_args).loading
        lm = self._load(_Task(origin, {}, _by_engine(loading)))
        assert isinstance(lm, VariantLM)
        with _environment_collected_once():
            requests = record_requests(lm, **origin.evaluation_arguments(loading, self.job.distance))
        same_model = {key: task.arguments for key, task in tasks.items() if task.arguments.loading == loading}
        others = {key: partial(_load_beside, task, loading) for key, task in tasks.items() if key not in same_model}
        variants = {key: arguments.interventions for key, arguments in same_model.items()}
        distances = measure_distances(lm, requests, variants, others)
        for key in tasks:
            self.folder.write_distances(key, to_table(distances.frame(key)))

    # ------------------------------------------------------------------ failures

    def _raise_disk_error(self, error: Exception) -> None:
        """Raise a `DiskError` on a full disk: it ends the run, and no cell is recorded as failed."""
        if full_disk := disk_error(error, self.folder.path):
            raise full_disk from error

    def _failed(self, key: str, error: Exception) -> Result:
        self._raise_disk_error(error)
        reason = str(error).partition("\n")[0] if isinstance(error, InputError) else first_line(error)
        self.folder.record_failure(key, reason, traceback.format_exc())
        self.loaded.close()  # its state is unknown
        return Result(key, FAILED, reason)


def _by_engine(model_args: dict[str, Any]) -> Arguments:
    return Arguments.of({**model_args, "engine": "batched", "deterministic": True})


def _load_beside(task: _Task, dense: dict[str, Any]) -> VariantLM:
    """Load another model than the dense one, which stays in memory; refuse another tokenizer."""
    check_tokenizers(Checkpoint(dense), Checkpoint(task.arguments.loading))
    return VariantLM(_by_engine({**task.model_args, **_computing(task.cell)}))


def _computing(cell: Cell) -> dict[str, Any]:
    return {"batch_size": cell.batch_size, **({"device": cell.device} if cell.device else {})}


_environment = cache(collect_env.get_pretty_env_info)


@contextmanager
def _environment_collected_once() -> Iterator[None]:
    """Collect the environment of the results file once per process, not for each cell: it takes seconds of CPU time."""
    collect = collect_env.get_pretty_env_info
    collect_env.get_pretty_env_info = _environment
    try:
        yield
    finally:
        collect_env.get_pretty_env_info = collect


def _masks(variants: Sequence[Arguments]) -> tuple[HeadMask | None, ...]:
    """Return the masks that can be decoded in one batch (None: no masked head); empty for fewer than two."""
    masks: list[HeadMask | None] = []
    for arguments in variants:
        only_masks = arguments.router is None and all(
            isinstance(intervention, HeadMask) for intervention in arguments.interventions
        )
        if only_masks and arguments.engine == "batched" and arguments.deterministic:
            (mask,) = combined(arguments.interventions) or (None,)
            masks.append(mask)  # type: ignore[arg-type]
    return tuple(masks) if len(masks) > 1 else ()
