"""Do jobs of a grid in one process: load models, make preparations, and evaluate cells with lm-eval itself."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import lm_eval
import torch

from lmeval_prune.artefacts import digest, write_artefact, write_text
from lmeval_prune.errors import InputError, disk_error, first_line
from lmeval_prune.grid.cells import Cell, versions
from lmeval_prune.grid.folder import CELL, VERSION, GridFolder, dumped, measuring, samples_file
from lmeval_prune.grid.measures import measure
from lmeval_prune.grid.outcomes import write_tables
from lmeval_prune.grid.preparations import preparation
from lmeval_prune.interventions import HeadMask, combined
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.identity import ModelIdentity
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.server_options import without_server
from lmeval_prune.profiling.speed import highest_memory
from lmeval_prune.tasks.loading import task_manager

logger = logging.getLogger(__name__)
DONE, FAILED, BUSY = "done", "failed", "busy"


@dataclass(frozen=True)
class Finished:
    """The end of a cell, of a preparation, or of a later measurement.

    Attributes:
        key: its hash; of a measurement, `measuring(...)` of the costs.
        state: `done`, `failed`, or `busy`: another process has it.
        reason: of the failure.
    """

    key: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """A piece of work for one process.

    Attributes:
        folder: of the grid.
        cells: variants of one model on one task, to evaluate; or one cell whose preparation is made.
        prepares: make what the cell needs, do not evaluate it.
        measures: measure variants that have not been measured, also those of cells that are done.
    """

    folder: str
    cells: tuple[Cell, ...]
    prepares: bool = False
    measures: bool = False


class VariantLM(PrunedHFLM):
    """A loaded model that becomes one variant after another.

    Attributes:
        ahead: masks of variants that are still to come: what is generated for one of them is generated for all, in one
            pass of the decoding engine.
    """

    ahead: tuple[HeadMask | None, ...] = ()

    @property
    def store_rank(self) -> int | None:
        """Return None, for any free number: several processes write answers of one grid."""
        return None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer as the base class, after decoding what later variants will ask for, too."""
        if self.ahead and self.answering.store:
            self._applied.close()
            try:
                self.answering.answer_ahead(requests, self.ahead, disable_tqdm)
            finally:
                self._applied = self._apply()
        return super().generate_until(requests, disable_tqdm=disable_tqdm)


class ServedLM(PrunedServerLM):
    """A variant that servers answer for."""

    ahead: tuple[HeadMask | None, ...] = ()

    @property
    def store_rank(self) -> int | None:
        """Return None, for any free number."""
        return None


class LoadedModel:
    """The model that a process has loaded last; another one takes its place.

    Attributes:
        lm: the model, or None.
    """

    def __init__(self) -> None:
        self.lm: VariantLM | ServedLM | None = None
        self._key = ""

    def become(self, arguments: Arguments) -> VariantLM:
        """Put the loaded model under other arguments, or load another one."""
        key = digest({name: str(value) for name, value in arguments.loading.items()})
        if isinstance(self.lm, VariantLM) and self._key == key:
            self.lm.ahead = ()
            self.lm.reconfigure(arguments)
            return self.lm
        self.close()
        self.lm = lm = VariantLM(arguments)
        self._key = key
        return lm

    def become_served(self, model_args: dict[str, Any]) -> ServedLM:
        """Connect to the servers of a variant."""
        self.close()
        self.lm = lm = ServedLM(**model_args)
        return lm

    def close(self) -> None:
        """Free the model."""
        lm, self.lm, self._key = self.lm, None, ""
        if lm is not None:
            with suppress(Exception):  # it may be half begun
                lm.close()
        del lm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Worker:
    """Does a job.

    Args:
        job: the job.
        loaded: the model of this process, which goes from job to job.
    """

    def __init__(self, job: Job, loaded: LoadedModel) -> None:
        self.job, self.loaded, self.folder = job, loaded, GridFolder(job.folder)

    def run(self) -> Iterator[Finished]:
        """Yield the end of each of the job's cells."""
        if self.job.prepares:
            yield self._prepare(self.job.cells[0])
        else:
            yield from self._evaluate_all()

    # ------------------------------------------------------------------ models

    def _arguments(self, cell: Cell) -> Arguments:
        return Arguments.of(without_server(cell.model_args(self.folder.prepared)))

    def _how(self, cell: Cell) -> dict[str, Any]:
        device = {"device": cell.device} if cell.device else {}
        return {"batch_size": cell.batch_size, **device}

    def _become(self, cell: Cell, arguments: Arguments, responses: str | None = None) -> VariantLM | ServedLM:
        """Load a cell's variant, and check that its model is the one that the cell's hash names."""
        torch.manual_seed(cell.variant.seed)
        if cell.variant.served:
            stored = {"responses": responses} if responses else {}
            return self.loaded.become_served({**cell.model_args(self.folder.prepared), **self._how(cell), **stored})
        others = {**arguments.others, **self._how(cell)}
        lm = self.loaded.become(replace(arguments, others=others, responses=responses))
        if arguments.pretrained == cell.variant.model_args["pretrained"]:  # no checkpoint was prepared
            ModelIdentity(**cell.identity["model"]).check_loaded(lm)
        return lm

    # ------------------------------------------------------------------ preparations

    def _prepare(self, cell: Cell) -> Finished:
        """Make what a cell needs, unless it is there."""
        key = cell.prepared
        with self.folder.lock(key) as is_held:
            if not is_held:
                return Finished(key, BUSY)
            try:
                if not self.folder.is_prepared(key):
                    ((name, settings),) = cell.variant.prepare.items()
                    unpruned = Arguments.of(Arguments.of(cell.variant.model_args).loading)
                    lm = self._become(cell, unpruned)
                    with self.folder.preparing(key) as folder:
                        preparation(name, settings).make(lm, folder)
            except Exception as error:
                return self._failed(key, error)
            self.folder.forget_failure(key)
            return Finished(key, DONE)

    # ------------------------------------------------------------------ cells

    def _evaluate_all(self) -> Iterator[Finished]:
        """Evaluate the cells that are not done and that no other process has."""
        with ExitStack() as locks:
            plans: list[tuple[Cell, Arguments]] = []
            for cell in self.job.cells:
                if not locks.enter_context(self.folder.lock(cell.key)):
                    yield Finished(cell.key, BUSY)
                elif self.folder.done(cell.key):
                    yield self._measured_later(cell) if self._needs_measure(cell) else Finished(cell.key, DONE)
                else:
                    try:
                        plans.append((cell, self._arguments(cell)))
                    except Exception as error:
                        yield self._failed(cell.key, error)
            ahead = _masks([arguments for _, arguments in plans])
            for cell, arguments in plans:
                try:
                    self._evaluate(cell, arguments, ahead)
                    self.folder.forget_failure(cell.key)
                    if self.job.measures:
                        self._measure(cell)
                except Exception as error:
                    yield self._failed(cell.key, error)
                else:
                    yield Finished(cell.key, DONE)
                ahead = ()  # the first pass has answered for all

    def _evaluate(self, cell: Cell, arguments: Arguments, ahead: tuple[HeadMask | None, ...]) -> None:
        ordered = any(intervention.needs_order for intervention in arguments.interventions)
        begin = time.perf_counter()
        lm = self._become(cell, arguments, None if ordered else str(self.folder.answers(cell.answers)))
        loaded = time.perf_counter()
        stored = set(lm.answering.store.known) if lm.answering.store else set()
        lm.ahead = ahead
        seed = cell.variant.seed
        try:
            results = lm_eval.simple_evaluate(
                model=lm,
                **{**cell.evaluation, "gen_kwargs": cell.evaluation["gen_kwargs"] or None},
                task_manager=task_manager({**arguments.loading, **cell.metadata}),
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        except InputError:
            if not ahead:
                raise
            logger.info("variants cannot share a pass here; each is evaluated alone")
            self._evaluate(cell, arguments, ())
            return
        assert results is not None
        ran = {
            "loading_seconds": loaded - begin,
            "seconds": time.perf_counter() - loaded,
            "answers_computed": len(lm.answering.store.known.keys() - stored) if lm.answering.store else None,
            "variants_in_this_pass": len(ahead) or 1,
        }
        self._write(cell, results, ran)

    def _write(self, cell: Cell, results: dict[str, Any], ran: dict[str, Any]) -> None:
        """Write a cell's folder."""
        samples = results.pop("samples")
        model_args = cell.model_args(self.folder.prepared)
        results["config"] |= {"model": cell.model, "model_args": model_args, "batch_size": cell.batch_size}
        ran |= {
            "peak_rss_bytes_of_the_process": highest_memory(),
            "threads": torch.get_num_threads(),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {**versions(), "torch": torch.__version__},
        }
        content = {**cell.to_json(), "key": cell.key, "command": cell.command(self.folder.prepared), "ran": ran}
        with self.folder.making(cell.key) as folder:
            write_text(folder / "results.json", dumped(results))
            for name, rows in samples.items():
                write_text(samples_file(folder, name), "".join(dumped(row) + "\n" for row in rows))
            write_tables(folder, samples, results["configs"])
            write_artefact(folder / "cell.json", CELL, VERSION, content)

    # ------------------------------------------------------------------ costs

    def _needs_measure(self, cell: Cell) -> bool:
        return self.job.measures and self.folder.needs_measure(cell.costs)

    def _measured_later(self, cell: Cell) -> Finished:
        """Measure the variant of a cell that is done: the run that evaluated it did not, or was killed before."""
        key = measuring(cell.costs)
        try:
            self._become(cell, self._arguments(cell))
            return Finished(key, self._measure(cell), self.folder.failure(key) or "")
        except Exception as error:
            return self._failed(key, error)

    def _measure(self, cell: Cell) -> str:
        """Measure the loaded variant, unless that is done; a figure that is missing spoils no cell."""
        key, lm = cell.costs, self.loaded.lm
        assert lm is not None
        with self.folder.lock(measuring(key)) as is_held:
            if not is_held:
                return BUSY
            if not self.folder.needs_measure(key):
                return DONE
            if reason := _not_measurable(lm):
                self.folder.fail(measuring(key), f"its costs are not measured: {reason}", "")
                return FAILED
            try:
                self.folder.write_measure(key, measure(lm))
            except Exception as error:
                self._raise_disk_error(error)
                logger.warning("%s cannot be measured (%s)", cell.variant.name, first_line(error))
                self.folder.fail(measuring(key), first_line(error), traceback.format_exc())
                return FAILED
        return DONE

    # ------------------------------------------------------------------ failures

    def _raise_disk_error(self, error: Exception) -> None:
        """Let a full disk end the run: no cell has failed, and all go on when there is room."""
        if refusal := disk_error(error, self.folder.path):
            raise refusal from error

    def _failed(self, key: str, error: Exception) -> Finished:
        self._raise_disk_error(error)
        reason = str(error).partition("\n")[0] if isinstance(error, InputError) else first_line(error)
        self.folder.fail(key, reason, traceback.format_exc())
        self.loaded.close()  # whatever state the model is in
        return Finished(key, FAILED, reason)


def _masks(variants: Sequence[Arguments]) -> tuple[HeadMask | None, ...]:
    """Return the masks of variants that can share a pass (None: no head is masked); none, if there is only one."""
    masks: list[HeadMask | None] = []
    for arguments in variants:
        only_masks = arguments.router is None and all(isinstance(each, HeadMask) for each in arguments.interventions)
        if only_masks and arguments.engine == "batched" and arguments.deterministic:
            (mask,) = combined(arguments.interventions) or (None,)
            masks.append(mask)  # type: ignore[arg-type]
    return tuple(masks) if len(masks) > 1 else ()


def _not_measurable(lm: VariantLM | ServedLM) -> str:
    if isinstance(lm, ServedLM):
        return "it is not here, but on a server"
    if lm.arguments.router:
        return "a router's variant is as many models as it has heads"
    return "" if lm.backend == "causal" else "it is not causal"
