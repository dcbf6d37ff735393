"""What one process does of a grid: it loads models, makes preparations, and evaluates cells with lm-eval itself."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import lm_eval
import torch

from lmeval_prune.artefacts import digest, write_artefact, write_text
from lmeval_prune.errors import InputError, disk_error, first_line
from lmeval_prune.grid.cells import Cell, is_masks, loaded_with, versions
from lmeval_prune.grid.folder import CELL, VERSION, GridFolder, dumped, measuring, samples_file
from lmeval_prune.grid.measures import measure
from lmeval_prune.grid.outcomes import write_tables
from lmeval_prune.grid.preparations import preparation
from lmeval_prune.interventions import HeadMask, combined
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.served import without_server
from lmeval_prune.profiling.speed import highest_memory
from lmeval_prune.tasks.named import task_manager

logger = logging.getLogger(__name__)
DONE, FAILED, BUSY = "done", "failed", "busy"


@dataclass(frozen=True)
class Finished:
    """What became of a cell or a preparation.

    Attributes:
        key: its hash; of costs that were measured later, `measuring(...)` of theirs.
        state: `done`, `failed`, or `busy`: another process has it.
        reason: why it failed.
    """

    key: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """What is handed to a process as one piece.

    Attributes:
        folder: of the grid.
        cells: to evaluate; variants of one model on one task. Of a preparation, one cell that needs it.
        prepares: make what the cell needs, do not evaluate it.
        measures: measure variants that have not been measured, also those of cells that are done.
    """

    folder: str
    cells: tuple[Cell, ...]
    prepares: bool = False
    measures: bool = False

    def do(self) -> Iterator[Finished]:
        """Do it in this process."""
        worker = Worker(GridFolder(self.folder))
        yield from worker.prepare(self.cells[0]) if self.prepares else worker.evaluate(self.cells, self.measures)


class VariantLM(PrunedHFLM):
    """A loaded model that becomes one variant after another.

    Attributes:
        ahead: masks of variants that are still to come: what is generated for one of them is generated for all, in one
            pass of the decoding engine.
    """

    ahead: tuple[HeadMask | None, ...] = ()

    @property
    def store_rank(self) -> int | None:
        """Any number that is free: several processes write answers of one grid."""
        return None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As the base class, after decoding what later variants will ask for, too."""
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
        """Any number that is free."""
        return None


class Loaded:
    """The model that this process has loaded last; another one takes its place."""

    key: str = ""
    lm: VariantLM | ServedLM | None = None

    @classmethod
    def become(cls, arguments: dict[str, Any], seed: int) -> VariantLM | ServedLM:
        """The loaded model under other arguments; loaded, if it is another one.

        Args:
            arguments: model_args.
            seed: of what is drawn.
        """
        torch.manual_seed(seed)
        if "base_url" in arguments:
            cls.release()
            cls.lm = ServedLM(**arguments)
            return cls.lm
        ours = dict(arguments)
        pretrained = ours.pop("pretrained")
        key = digest([pretrained, {k: str(v) for k, v in loaded_with(Arguments.of(ours)).items()}])
        if isinstance(cls.lm, VariantLM) and cls.key == key:
            cls.lm.ahead = ()
            cls.lm.again(**ours)
            return cls.lm
        cls.release()
        cls.lm, cls.key = VariantLM(pretrained=pretrained, **ours), key
        return cls.lm

    @classmethod
    def release(cls) -> None:
        """Let the model go."""
        lm, cls.lm, cls.key = cls.lm, None, ""
        if lm is not None:
            with suppress(Exception):  # it may be half begun
                lm.close()
        del lm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Worker:
    """Does jobs of a grid in this process.

    Args:
        folder: of the grid.
    """

    def __init__(self, folder: GridFolder) -> None:
        self.folder = folder

    # ------------------------------------------------------------------ preparations

    def prepare(self, cell: Cell) -> Iterator[Finished]:
        """Make what a cell needs, unless it is there."""
        key = cell.prepared
        with self.folder.lock(key) as mine:
            if not mine:
                yield Finished(key, BUSY)
                return
            if self.folder.is_prepared(key):
                self.folder.forget_failure(key)
                yield Finished(key, DONE)
                return
            ((name, settings),) = cell.prepare.items()
            try:
                base = loaded_with(Arguments.of(dict(cell.model_args)))
                lm = Loaded.become({**base, **self._how(cell)}, cell.seed)
                with self.folder.preparing(key) as folder:
                    preparation(name, settings).make(lm, folder)
            except Exception as error:
                yield self._failed(key, error)
                return
            self.folder.forget_failure(key)
            yield Finished(key, DONE)

    def _how(self, cell: Cell) -> dict[str, Any]:
        """Model_args that say how it is computed."""
        device = {"device": cell.device} if cell.device else {}
        return {"batch_size": cell.batch_size, **device}

    # ------------------------------------------------------------------ cells

    def evaluate(self, cells: Sequence[Cell], measures: bool = False) -> Iterator[Finished]:
        """Evaluate cells of one model on one task, those that nobody else has and that are not there."""
        with ExitStack() as locks:
            mine: list[Cell] = []
            for cell in cells:
                if not locks.enter_context(self.folder.lock(cell.key)):
                    yield Finished(cell.key, BUSY)
                elif not self.folder.done(cell.key):
                    mine.append(cell)
                elif measures and self.folder.needs_measure(cell.costs):
                    yield self._measured_later(cell)
                else:
                    yield Finished(cell.key, DONE)
            ahead = self._masks(mine)
            for number, cell in enumerate(mine):
                try:
                    self._evaluate(cell, ahead if number == 0 else ())
                    self.folder.forget_failure(cell.key)
                    if measures:
                        self._measure(cell)
                except Exception as error:
                    yield self._failed(cell.key, error)
                else:
                    yield Finished(cell.key, DONE)

    def _masks(self, cells: Sequence[Cell]) -> tuple[HeadMask | None, ...]:
        """The masks of cells that can share a pass; none, if it is no use."""
        found: list[HeadMask | None] = []
        for cell in cells:
            try:
                given = Arguments.of(without_server(cell.arguments(self.folder.prepared)))
            except InputError:  # it will fail by itself
                continue
            if is_masks(given) and given.engine.engine == "batched" and given.engine.deterministic:
                (mask,) = combined(given.interventions) or (None,)
                found.append(mask)  # type: ignore[arg-type]
        return tuple(found) if len(found) > 1 else ()

    def _evaluate(self, cell: Cell, ahead: tuple[HeadMask | None, ...]) -> None:
        arguments = cell.arguments(self.folder.prepared)
        given = Arguments.of(without_server(arguments))
        ordered = any(one.needs_order for one in given.interventions)
        stored = {} if ordered else {"responses": str(self.folder.answers(cell.answers))}
        begin = time.perf_counter()
        lm = Loaded.become({**arguments, **self._how(cell), **stored}, cell.seed)
        loaded = time.perf_counter()
        known = set(lm.answering.store.known) if lm.answering.store else set()
        lm.ahead = ahead
        try:
            results = lm_eval.simple_evaluate(
                model=lm,
                **{**cell.evaluation, "gen_kwargs": cell.evaluation["gen_kwargs"] or None},
                task_manager=task_manager({**loaded_with(given), **cell.metadata}),
                random_seed=cell.seed,
                numpy_random_seed=cell.seed,
                torch_random_seed=cell.seed,
                fewshot_random_seed=cell.seed,
            )
        except InputError:
            if not ahead:
                raise
            logger.info("variants cannot share a pass here; each is evaluated alone")
            self._evaluate(cell, ())
            return
        assert results is not None
        ended = time.perf_counter()
        samples = results.pop("samples")
        results["config"] |= {"model": cell.model, "model_args": arguments, "batch_size": cell.batch_size}
        new = len(lm.answering.store.known.keys() - known) if lm.answering.store else None
        ran = {
            "loading_seconds": loaded - begin,
            "seconds": ended - loaded,
            "answers_computed": new,
            "variants_in_this_pass": len(ahead) or 1,
            "peak_rss_bytes_of_the_process": highest_memory(),
            "threads": torch.get_num_threads(),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {**versions(), "torch": torch.__version__},
        }
        about = {**cell.to_json(), "key": cell.key, "command": cell.command(self.folder.prepared), "ran": ran}
        with self.folder.making(cell.key) as folder:
            write_text(folder / "results.json", dumped(results))
            for name, rows in samples.items():
                write_text(samples_file(folder, name), "".join(dumped(row) + "\n" for row in rows))
            write_tables(folder, samples, results["configs"])
            write_artefact(folder / "cell.json", CELL, VERSION, about)

    def _measured_later(self, cell: Cell) -> Finished:
        """Measure the variant of a cell that is done: the run that evaluated it did not, or was killed before."""
        key = measuring(cell.costs)
        try:
            Loaded.become({**cell.arguments(self.folder.prepared), **self._how(cell)}, cell.seed)
            return Finished(key, self._measure(cell), self.folder.failure(key) or "")
        except Exception as error:
            return self._failed(key, error)

    def _measure(self, cell: Cell) -> str:
        """Measure the loaded variant, unless that is done; a figure that is missing spoils no cell."""
        key, lm = cell.costs, Loaded.lm
        assert lm is not None
        with self.folder.lock(measuring(key)) as mine:
            if not mine:
                return BUSY
            if not self.folder.needs_measure(key):
                return DONE
            if isinstance(lm, ServedLM) or lm.backend != "causal" or lm.given.tries:
                why = "a router's variant is as many models as it has heads" if lm.given.tries else "it is not causal"
                why = "it is not here, but on a server" if isinstance(lm, ServedLM) else why
                self.folder.fail(measuring(key), f"its costs are not measured: {why}", "")
                return FAILED
            try:
                self.folder.write_measure(key, measure(lm))
            except Exception as error:
                self._refuse_disk(error)
                logger.warning("%s cannot be measured (%s)", cell.variant, first_line(error))
                self.folder.fail(measuring(key), first_line(error), traceback.format_exc())
                return FAILED
        return DONE

    def _refuse_disk(self, error: Exception) -> None:
        """Let an error that means a full disk end the run: no cell has failed, and all go on when there is room."""
        if refusal := disk_error(error, self.folder.path):
            raise refusal from error

    def _failed(self, key: str, error: Exception) -> Finished:
        self._refuse_disk(error)
        reason = str(error).partition("\n")[0] if isinstance(error, InputError) else first_line(error)
        self.folder.fail(key, reason, traceback.format_exc())
        Loaded.release()  # whatever state the model is in
        return Finished(key, FAILED, reason)
