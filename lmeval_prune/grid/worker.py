"""Make results of a grid in one process: load models, make preparations, evaluate cells by lm-eval, measure, write."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import lm_eval
import pyarrow as pa
import torch
from filelock import Timeout
from lm_eval.loggers import EvaluationTracker
from torch.utils import collect_env

from lmeval_prune.architectures import cache_argument
from lmeval_prune.artefacts import file_lock, file_name, new_folder, write_artefact, write_table
from lmeval_prune.comparison.distance import COLUMNS
from lmeval_prune.comparison.variants import check_tokenizers, record_requests
from lmeval_prune.comparison.variants import measure as measure_distances
from lmeval_prune.errors import InputError, disk_error, first_line
from lmeval_prune.grid.cells import Cell, Item, Job, Made, versions
from lmeval_prune.grid.folder import CELL, MEASURE, VERSION, GridFolder
from lmeval_prune.interventions import HeadMask, combined
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.identity import Checkpoint
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.models.pruned_server import PrunedServerLM
from lmeval_prune.models.servers import RECORD, SERVER_OPTIONS
from lmeval_prune.profiling.costs import flops_of
from lmeval_prune.profiling.speed import decoding_rates

logger = logging.getLogger(__name__)
# lm-eval collects the environment for each results file, which takes seconds of CPU time: once per process is enough
collect_env.get_pretty_env_info = cache(collect_env.get_pretty_env_info)
# Everyday prose of about 250 tokens. The text is fixed because the tokens that a variant skips depend on it.
TEXT = """The ferry to the island leaves at seven, but on windy days the captain waits until the harbour master has
read the gauges twice. Mara carried two crates of apples, a roll of canvas and the clock that her brother had repaired.
She counted the passengers as they came aboard: nine farmers, four pupils on their way home, a doctor with a folded
map, and an old man who asked, as he did every week, whether the lighthouse was still painted white. The crossing takes
fifty minutes when the sea is calm. Halfway, the engine slowed down, and everybody looked up from their newspapers. A
whale, somebody said; a sandbank, said another. In truth a rope had caught the propeller, and it cost them half an hour
and a good knife to cut it loose. When they arrived, the baker had already closed his shop, so Mara sold eleven apples
on the quay for three coins each and gave the rest to the pupils. On the way back she wrote down what she had spent and
what she had earned, added the price of the knife, and found that the day had cost her exactly as much as it had
brought. She laughed, wound the clock, and set it by the bell of the church, which was, as always, four minutes late."""
PREFILL, DECODED, REPEATS = 192, 32, 5


class VariantLM(PrunedHFLM):
    """A loaded model whose arguments are changed from variant to variant."""

    # Masks of the job's variants: the first task's requests are answered with each of them, in one run of the engine.
    job_masks: tuple[HeadMask | None, ...] = ()
    store_rank = None  # each process that writes answers of the grid gets the next free file number

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Store the answers under all masks of the job, if there are several; then answer from the store."""
        if self.job_masks and self.store:
            self._applied.close()
            try:
                self.answer_ahead(kind, requests, self.job_masks, disable_tqdm)
            finally:
                self._applied = self._apply()
        return super().answer(kind, requests, disable_tqdm)


class ServedLM(PrunedServerLM):
    """A variant whose answers a server computes; the record of servers is that of all served variants of a grid."""

    store_rank = None  # as of `VariantLM`

    @property
    def record_path(self) -> Path:
        return Path(str(self.arguments.responses)).parent / RECORD

    @property
    def record_key(self) -> Any:
        """Return what a cell's answers depend on, the name in `model=` too."""
        return [*super().record_key, self.options.model]


class Worker:
    """Makes the items of a grid with the model of this process; loading another model replaces it."""

    def __init__(self, folder: Path) -> None:
        self.folder = GridFolder(folder)
        self.lm: VariantLM | ServedLM | None = None
        self._loaded: Any = None  # what identifies the model

    def run(self, items: Job) -> Iterator[Made]:
        """Make each of a job's items that no other process makes."""
        with ExitStack() as locks:
            open_items: list[Item] = []
            for item in items:
                lock = self.folder.path / "locks" / f"{file_name(item.name)}.lock"
                lock.parent.mkdir(exist_ok=True)
                try:
                    locks.enter_context(file_lock(lock, timeout=0))
                except Timeout:
                    continue
                if self.folder.place(item.kind, item.key).exists():
                    yield item, ""
                else:
                    open_items.append(item)
            kind = items[0].kind
            if kind == "distance":
                yield from self._attempt(open_items, lambda: self._distances(open_items))
                return
            masks = self._masks(open_items) if kind == "evaluate" else ()
            for item in open_items:
                make = {"prepare": self._prepare, "measure": self._measure}.get(kind, partial(self._evaluate, masks))
                yield from self._attempt([item], partial(make, item))
                masks = ()  # the first cell has answered the requests with all masks

    def close(self) -> None:
        lm, self.lm, self._loaded = self.lm, None, None
        if lm is not None:
            with suppress(Exception):  # its constructor may have failed
                lm.close()
        del lm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _attempt(self, items: Sequence[Item], make: Callable[[], None]) -> Iterator[Made]:
        """Make items together; a failure is recorded for each, but a full disk ends the run."""
        try:
            make()
        except Exception as error:
            if full_disk := disk_error(error, self.folder.path):
                raise full_disk from error
            reason = str(error).partition("\n")[0] if isinstance(error, InputError) else first_line(error)
            for item in items:
                self.folder.record_failure(item.name, reason, traceback.format_exc())
                yield item, reason
            self.close()  # its state is unknown
        else:
            for item in items:
                self.folder.clear_failure(item.name)
                yield item, ""

    # ------------------------------------------------------------------ models

    def _load(self, cell: Cell, arguments: Arguments, responses: str | None = None) -> VariantLM | ServedLM:
        """Load a cell's variant; its model must be the one that the cell's hash identifies."""
        torch.manual_seed(cell.variant.seed)
        if cell.variant.served:
            self.close()
            model_args = {**cell.model_args(self.folder.prepared), **cell.computing}
            options = {name: value for name, value in model_args.items() if name in SERVER_OPTIONS}
            others = {name: value for name, value in arguments.others.items() if name not in SERVER_OPTIONS}
            parsed = replace(arguments, pretrained=None, others=others, responses=responses)
            self.lm = ServedLM(parsed=parsed, **options)
            return self.lm
        arguments = replace(arguments, others={**arguments.others, **cell.computing}, responses=responses)
        is_prepared = arguments.pretrained != cell.variant.model_args["pretrained"]
        identity = None if is_prepared else cell.identity["model"]
        key = {name: str(value) for name, value in arguments.loading.items()}, identity
        if isinstance(self.lm, VariantLM) and self._loaded == key:
            self.lm.job_masks = ()
            self.lm.reconfigure(arguments)
        else:
            self.close()
            self.lm = VariantLM(arguments)
            if identity and Checkpoint(arguments.loading).identity() != identity:
                raise InputError("the model's files have changed since the grid began; run it again")
            self._loaded = key
        return self.lm

    def _masks(self, items: Sequence[Item]) -> tuple[HeadMask | None, ...]:
        """Return the masks that can be decoded in one batch (None: no masked head); empty for fewer than two."""
        masks: list[HeadMask | None] = []
        for item in items:
            try:
                arguments = item.cell.parsed(self.folder.prepared)
            except InputError:  # the item fails on its own
                continue
            only_masks = all(isinstance(intervention, HeadMask) for intervention in arguments.interventions)
            if only_masks and not arguments.router and arguments.engine == "batched" and arguments.deterministic:
                (mask,) = combined(arguments.interventions) or (None,)
                masks.append(mask)  # type: ignore[arg-type]
        return tuple(masks) if len(masks) > 1 else ()

    # ------------------------------------------------------------------ what is made

    def _prepare(self, item: Item) -> None:
        assert item.cell.preparation
        lm = self._load(item.cell, Arguments.of(item.cell.arguments.loading))
        with new_folder(self.folder.place("prepare", item.key)) as folder:
            item.cell.preparation.make(lm, folder)

    def _measure(self, item: Item) -> None:
        costs = measure(self._load(item.cell, item.cell.parsed(self.folder.prepared)))
        write_artefact(self.folder.place("measure", item.key), MEASURE, VERSION, costs)

    def _evaluate(self, masks: tuple[HeadMask | None, ...], item: Item) -> None:
        """Evaluate a cell by lm-eval and write its folder; `masks` are those whose answers are computed together."""
        cell = item.cell
        arguments = cell.parsed(self.folder.prepared)
        needs_order = any(intervention.needs_order for intervention in arguments.interventions)
        start = time.perf_counter()
        responses = None if needs_order else str(self.folder.path / "answers" / file_name(cell.answers))
        lm = self._load(cell, arguments, responses)
        loaded = time.perf_counter()
        store = lm.store
        stored_before = len(store.responses) if store else 0
        if isinstance(lm, VariantLM):
            lm.job_masks = masks
        try:
            results = lm_eval.simple_evaluate(model=lm, **cell.evaluation_arguments())
        except InputError:
            if not masks:
                raise
            logger.info("the variants cannot share a pass; each is evaluated alone")
            self._evaluate((), item)
            return
        assert results is not None
        ran = {
            "loading_seconds": loaded - start,
            "seconds": time.perf_counter() - loaded,
            "answers_computed": len(store.responses) - stored_before if store else None,
            "variants_in_this_pass": len(masks) or 1,
            "threads": torch.get_num_threads(),
            "versions": {**versions(cell.variant.served), "torch": torch.__version__},
        }
        model_args, evaluation = cell.model_args(self.folder.prepared), cell.evaluation
        results["config"] |= {"model": cell.model, "model_args": model_args, "batch_size": cell.computing["batch_size"]}
        samples = results.pop("samples")
        template = evaluation["apply_chat_template"]
        with new_folder(self.folder.place("evaluate", cell.key)) as target:
            writer = _Writer(output_path=str(target / "results.json"))
            writer.key = file_name(cell.key)
            writer.general_config_tracker.log_experiment_args(
                model_source=cell.model,
                model_args=model_args,
                system_instruction=evaluation["system_instruction"],
                chat_template=lm.chat_template(template) if template else None,
                fewshot_as_multiturn=evaluation["fewshot_as_multiturn"],
            )
            writer.save_results_aggregated(results=results, samples=samples)
            for task, rows in samples.items():
                writer.save_results_samples(task_name=file_name(task), samples=rows)
            content = cell.entry(model_args) | {
                "selected_questions": sorted(cell.selected),
                "seed": cell.variant.seed,
                **{name: getattr(cell, name) for name in ("evaluation", "metadata", "identity", "answers", "engine")},
                **cell.computing,
                "ran": ran,
            }
            write_artefact(target / "cell.json", CELL, VERSION, content)
            # lm-eval only logs an error of its writer, and leaves what it has written
            lines = {f"samples_{file_name(task)}_{writer.key}.jsonl": len(rows) for task, rows in samples.items()}
            whole = [sum(1 for _ in (target / name).open("rb")) == count for name, count in lines.items()]
            if not all(whole) or not (target / f"results_{writer.key}.json").read_bytes().endswith(b"}"):
                raise RuntimeError("lm-eval could not write the results or the samples")

    def _distances(self, items: Sequence[Item]) -> None:
        """Write the distances of cells of one task from one dense model, by text; those of tokens as float32."""
        if not items:
            return
        origin = items[0].origin or items[0].cell
        loading = origin.arguments.loading
        lm = self._load(origin, _by_engine(Arguments.of(loading)))
        assert isinstance(lm, VariantLM)
        requests = record_requests(lm, **origin.evaluation_arguments(items[0].documents))
        variants, others = {}, {}
        for item in items:
            arguments = item.cell.parsed(self.folder.prepared)
            if arguments.loading == loading:
                variants[item.key] = arguments.interventions
            else:
                others[item.key] = partial(_load_beside, item.cell, arguments, loading)
        frames = measure_distances(lm, requests, variants, others)
        for item in items:
            table = pa.Table.from_pandas(frames[item.key], preserve_index=False)
            for name in COLUMNS:
                column = table[name].cast(pa.list_(pa.float32()))
                table = table.set_column(table.schema.get_field_index(name), name, column)
            write_table(self.folder.place("distance", item.key), table)


def _load_beside(cell: Cell, arguments: Arguments, dense: dict[str, Any]) -> VariantLM:
    """Load another model than the dense one, which stays in memory; refuse another tokenizer."""
    check_tokenizers(Checkpoint(dense), Checkpoint(arguments.loading))
    return VariantLM(_by_engine(replace(arguments, others={**arguments.others, **cell.computing})))


def _by_engine(arguments: Arguments) -> Arguments:
    return replace(arguments, engine="batched", deterministic=True)


class _Writer(EvaluationTracker):
    """lm-eval's writer, whose files have the cell's key in place of the date: the same names in every run."""

    key = ""
    date_id = property(lambda self: self.key, lambda self, _: None)


# ---------------------------------------------------------------------- costs


def measure(lm: Any) -> dict[str, Any]:
    """Measure a loaded causal `PrunedHFLM` with its interventions, on one fixed text.

    Returns:
        `parameters`; `flops_per_token` of the prefill (torch's counter); `prefill_tokens_per_second`,
        `decode_tokens_per_second` at batch 1 (the median of `REPEATS` runs) and their `ranges` (slowest, fastest);
        `weights_bytes`, `cache_bytes_per_token` after the text; `device`, `threads`.
    """
    model, weights = lm.model, list(lm.model.parameters())
    ids = torch.tensor([lm.tok_encode(TEXT)[:PREFILL]], device=lm.device)
    flops = flops_of(lambda: model(ids, use_cache=False))
    with torch.no_grad():
        (cache,) = cache_argument(model(ids, use_cache=True)).values()
    layers = [getattr(layer, "sequences", None) or layer for layer in getattr(cache, "layers", None) or []]
    kept = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    _, *runs = [decoding_rates(model, ids, DECODED) for _ in range(1 + REPEATS)]  # the first warms up
    speeds = {f"{name}_tokens_per_second": [run[name] for run in runs] for name in ("prefill", "decode")}
    return {
        "parameters": sum(weight.numel() for weight in weights),
        "flops_per_token": flops / ids.shape[1],
        **{name: median(rates) for name, rates in speeds.items()},
        "ranges": {name: [min(rates), max(rates)] for name, rates in speeds.items()},
        "weights_bytes": sum(weight.nbytes for weight in weights),
        "cache_bytes_per_token": sum(x.nbytes for x in kept if isinstance(x, torch.Tensor)) / ids.shape[1],
        "device": torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
