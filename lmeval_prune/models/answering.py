"""Answers lm-eval's requests from the answer store, by the decoding engine, or by lm-eval's `hf`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from lmeval_prune.artefacts import digest
from lmeval_prune.attributes import replaced
from lmeval_prune.decoding.memory import InsufficientMemoryError
from lmeval_prune.errors import InputError
from lmeval_prune.export.manifest import adapter_name
from lmeval_prune.interventions import HeadMask, Intervention, combined, interventions_on
from lmeval_prune.models import generation, likelihood
from lmeval_prune.models.answer_store import (
    AnswerStore,
    PendingRequests,
    answer_requests,
    look_up,
    read_answers,
    repeat_indices,
)
from lmeval_prune.models.attempts import DENSE
from lmeval_prune.models.identity import code_versions
from lmeval_prune.models.lengths import Ending, cut_off_note, merge_lengths, summarize_lengths
from lmeval_prune.models.lm_base import report_answers

logger = logging.getLogger(__name__)
AUTO_GROUP_SIZE = 8  # requests that are sampled together under batch_size=auto


class Answering:
    """Answers the requests of one model from its store and, if it has a router, under the router's head masks.

    Attributes:
        store: the answer store, or None.
        router: the `HeadRouter`, or None.
        lengths: lengths of the texts that were generated last, by task; see `models/lengths.py`.
    """

    def __init__(self, lm: Any, store: AnswerStore | None = None) -> None:
        self._lm = ref(lm)  # no reference cycle: the model is freed with its last user
        self.router = lm.arguments.router
        self.lengths: dict[str, dict[str, Any]] = {}
        self._identities: dict[str, list[Any]] = {}  # `interventions` by attempt, as of the call that is answered
        self._model_digest = ""
        if self.router:
            self.router.fit_to(lm.model_map, lm.weights, self.interventions())
            for name in self.router.masks:
                self.interventions(name)  # raises if it and the model's interventions do not fit together
        folder = lm.arguments.responses
        if folder:
            digest(lm.identity)  # raises if the model has no identity
        self.store = store or (AnswerStore(folder, lm.store_rank) if folder else None)

    @property
    def lm(self) -> Any:
        """Return the model."""
        return self._lm()

    def close(self) -> None:
        """Release the store."""
        if self.store:
            self.store.close()

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Return the responses to requests of one kind; `InputError` if the model cannot answer them."""
        self.lm.check_requests(kind, requests)
        if self.router:
            if kind != "generate_until":
                raise InputError("router= is for generative tasks only; leave out tasks that score given texts")
            self.router.prepare(requests, self.lm)
        self._begin()
        run, repeats = partial(self._run, disable_tqdm=disable_tqdm), repeat_indices(requests)
        keys: list[str] = []
        endings: list[Ending | None] = [None] * len(requests)
        if self.store is None:

            def add(index: int, _: Any, **columns: Any) -> None:
                if "length" in columns:
                    endings[index] = Ending(columns["length"], columns["cut_off"])

            responses = run(PendingRequests(kind, add, requests, range(len(requests)), repeats))
        else:
            groups = (_is_sampled, self._group_size) if kind == "generate_until" else ()
            key_parts = partial(self._key_parts, kind)
            responses, keys = answer_requests(self.store, requests, kind, key_parts, run, self.lm.any_rank, *groups)
            endings = [self.store.endings.get(key) for key in keys]
        if kind == "generate_until":
            self._report_lengths(requests, endings)
        if self.router:
            self._write_samples(requests, keys, endings)
        return responses

    def answer_ahead(
        self, kind: str, requests: Sequence[Any], masks: Sequence[HeadMask | None], disable_tqdm: bool = False
    ) -> None:
        """Answer requests under each of several masks in one run of the engine, and store the answers.

        A later request with one of the masks applied is answered from the store. Each mask is combined with the
        model's interventions; None adds no mask. Log-likelihoods that the engine does not compute are left to the
        later requests.
        """
        count = len(masks)
        assert self.store and self.lm.engine and not self.router
        if not self._is_on_engine(kind):
            return
        self._begin()
        identities = [self._identity(mask) for mask in masks]

        def key_parts(request: Any, index: int) -> tuple[dict[str, Any], str]:
            return self._parts(kind, request, index // count, identities[index % count])

        def run(pending: PendingRequests) -> list[Any]:
            row_masks = [masks[index % count] for index in pending.repeats]
            return self._decode(pending, [index // count for index in pending.repeats], row_masks, disable_tqdm)

        answer_requests(self.store, [request for request in requests for _ in masks], kind, key_parts, run)

    def stored(self, kind: str, requests: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the records of answered requests in the store, with the tokens that the engine generated."""
        assert self.store
        self._begin()
        keys, _ = look_up(self.store, requests, repeat_indices(requests), kind, partial(self._key_parts, kind))
        records = {record["key"]: record for record in read_answers(self.store.folder)}
        return [records[key] for key in keys]

    def _begin(self) -> None:
        """Read the model's interventions anew, before the engine applies masks of its own."""
        if self.store:
            names = self.router.masks if self.router else [DENSE]
            self._identities = {name: self.interventions(name) for name in names}
            self._model_digest = digest(self.lm.identity)

    # ------------------------------------------------------------------ keys

    def interventions(self, attempt: str = DENSE) -> list[Any]:
        """Return the identities of the model's interventions, with a router's mask, and of the layers."""
        return self._identity(self.router.masks[attempt] if self.router else None)

    def attempt(self, request: Any, repeat: int) -> str:
        """Return the name of the router's attempt at a request; of the unpruned model without a router."""
        return self.router.attempt(request, repeat) if self.router else DENSE

    def _identity(self, mask: HeadMask | None) -> list[Any]:
        interventions = combined([*self._applied(), *([mask] if mask else [])])
        identities: list[Any] = [intervention.identity(self.lm.model_map) for intervention in interventions]
        return [*identities, digest(self.lm.model_map.signature())] if identities else []

    def _applied(self) -> tuple[Intervention, ...]:
        return interventions_on(self.lm.model)

    def _sampling_key(self, request: Any, repeat: int) -> list[Any]:
        """Return what determines the random numbers of a sampled answer; the engine's differ from `generate`'s."""
        engine = "batched" if self.lm.arguments.engine == "batched" else "generate"  # `auto` samples by `generate`
        return [engine, *generation.sampling_key(self.lm.seed, request, repeat)]

    def _key_parts(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        return self._parts(kind, request, repeat, self._identities[self.attempt(request, repeat)])

    def _parts(self, kind: str, request: Any, repeat: int, identities: list[Any]) -> tuple[dict[str, Any], str]:
        """Return everything that determines an answer, as JSON, and the names of the pruned heads (`dense`: none)."""
        arguments, sampling_key = list(request.args), []
        if kind == "generate_until":
            if generation.is_sampling(arguments[1]) and not self.router:
                sampling_key = self._sampling_key(request, repeat)
            else:
                arguments[1] = generation.without_sampling(arguments[1])
        methods = [dict(identity) if isinstance(identity, dict) else identity for identity in identities]
        versions = {method["method"]: method.pop("version") for method in methods if isinstance(method, dict)}
        parts = {"model": self._model_digest, "interventions": methods, "request": arguments, "drawn": sampling_key}
        heads = [method.get("heads", ()) for method in methods if isinstance(method, dict)]
        names = [name for masked in heads if isinstance(masked, list | tuple) for name in masked]
        return {**parts, "versions": {**self.versions, **versions}}, adapter_name(names) if names else DENSE

    @property
    def versions(self) -> dict[str, Any]:
        """Return the versions of the code that computes answers, without the methods' versions."""
        return code_versions()

    # ------------------------------------------------------------------ answering

    def _run(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Answer by the engine or by `hf`: texts as `EngineChoice` decides for each request."""
        if pending.kind != "generate_until":
            if self._is_on_engine(pending.kind):
                return self._decode(pending, silent=disable_tqdm)
            return self._run_by_hf(pending, disable_tqdm)
        choice, texts = self.lm.engine_choice, {}
        if indices := choice.by_engine(pending.requests):
            part, masks = pending.part(indices), None
            if self.router:
                masks = [self.router.masks[name] for name in map(self.attempt, part.requests, part.repeats)]
            try:
                decoded = self._decode(part, None, masks, disable_tqdm, is_greedy=bool(self.router))
                texts = dict(zip(indices, decoded, strict=True))
            except InsufficientMemoryError as error:
                if self.lm.arguments.engine != "auto":
                    raise
                choice.log(f"lm-eval's hf answers greedy requests: {error}")
        others = [index for index in range(len(pending.requests)) if index not in texts]
        if self.lm.any_rank(bool(others)):  # `hf` synchronises the ranks, so all run it
            others = others or [0]
            texts = dict(zip(others, self._run_by_hf(pending.part(others), disable_tqdm), strict=True)) | texts
        return [texts[index] for index in range(len(pending.requests))]

    def _run_by_hf(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Answer by lm-eval's `hf`; with a store in parts, so that answers are stored soon and sampled by own seeds."""
        lm, kind, requests, every = self.lm, pending.kind, pending.requests, range(len(pending.requests))
        sampled = [i for i in every if self.store and kind == "generate_until" and _is_sampled(requests[i])]
        others = sorted({*every} - {*sampled})
        size = max(len(others), 1)
        if self.store and kind == "loglikelihood_rolling" and lm.world_size == 1 and isinstance(lm.batch_size, int):
            size = 4 * lm.batch_size  # lm-eval reports rolling requests only at the end of a call
        parts = [others[start : start + size] for start in range(0, len(others), size)]
        group_size, seeded = self._group_size, len(parts)
        parts += [sampled[start : start + group_size] for start in range(0, len(sampled), group_size)]
        schedule = min(lm.batch_schedule, len(requests)) if self.store else lm.batch_schedule  # lm-eval divides by it
        responses: dict[int, Any] = {}
        devices = [lm.device] if lm.device.type == "cuda" else []
        with self._hooked(pending), replaced(lm, batch_schedule=schedule, batch_size_per_gpu=lm.batch_size_per_gpu):
            bar = tqdm(parts, "sampling", disable=disable_tqdm or lm.rank > 0 or not sampled, unit="batch")
            for number, part in enumerate(bar):
                with torch.random.fork_rng(devices, enabled=number >= seeded):
                    if number >= seeded:
                        lm.batch_size_per_gpu = group_size
                        torch.manual_seed(int(digest([lm.seed, [pending.keys[i] for i in part]]), 16) >> 1)
                    chosen, silent = [requests[i] for i in part], disable_tqdm or number >= seeded
                    with replaced(lm, asked=[request.args for request in chosen]):
                        computed = getattr(HFLM, kind)(lm, chosen, disable_tqdm=silent)
                responses.update(zip(part, computed, strict=True))
        return [responses[index] for index in every]

    def _is_on_engine(self, kind: str) -> bool:
        """Return whether the engine answers requests of a kind; log once why it computes no log-likelihoods."""
        engine = self.lm.engine if self.lm.arguments.engine == "batched" else None
        if engine is None or kind == "generate_until":
            return engine is not None
        if engine.unscored:
            self.lm.engine_choice.log(f"lm-eval's hf computes the log-likelihoods: {engine.unscored}")
        return engine.unscored is None

    def _decode(
        self,
        pending: PendingRequests,
        repeats: Sequence[int] | None = None,
        masks: Sequence[HeadMask | None] | None = None,
        silent: bool = False,
        is_greedy: bool = False,
    ) -> list[Any]:
        """Answer by the engine; `repeats` are by default those of the pending requests."""
        lm, kind = self.lm, pending.kind

        def done(index: int, response: Any, **columns: Any) -> None:
            pending.add(pending.keys[index], response, **columns)
            lm.cache_hook.add_partial(kind, pending.requests[index].args, response)

        if kind != "generate_until":
            return likelihood.loglikelihoods(lm, lm.engine, kind, pending.requests, done, masks, silent)

        def decoded(index: int, text: str, tokens: list[int], ending: Ending) -> None:
            done(index, text, tokens=tokens, **ending._asdict())

        lm.engine.progress = not silent and lm.rank == 0
        repeats = pending.repeats if repeats is None else repeats
        return generation.generate_until(lm, lm.engine, pending.requests, repeats, decoded, lm.seed, masks, is_greedy)

    @contextmanager
    def _hooked(self, pending: PendingRequests) -> Iterator[None]:
        """Store each response that lm-eval's `hf` reports to its cache hook during a block."""
        lm = self.lm
        lm.endings.clear()

        def report(attr: str, req: Iterable[Any], res: Any) -> None:
            ending = lm.endings.popleft() if attr == "generate_until" and lm.endings else None
            pending.answered(attr, req, res, **(ending._asdict() if ending else {}))

        with report_answers(lm, report):
            yield

    @property
    def _group_size(self) -> int:
        """Return how many requests are sampled from one stream of random numbers: 1 for the engine, a batch for `hf`.

        An automatic batch size may differ in the next run, and the answers with it: `AUTO_GROUP_SIZE` replaces it.
        """
        if self.lm.arguments.engine == "batched":
            return 1
        size = self.lm.batch_size
        return size if isinstance(size, int) else min(AUTO_GROUP_SIZE, self.lm.max_batch_size)

    # ------------------------------------------------------------------ reports

    def _report_lengths(self, requests: Sequence[Any], endings: Sequence[Ending | None]) -> None:
        """Keep the lengths of each task's answers on all ranks, and warn if many answers were cut off."""
        ended: dict[str, list[Ending | None]] = defaultdict(list)
        limits: dict[str, int] = defaultdict(int)
        for request, ending in zip(requests, endings, strict=True):
            task, settings = str(request.task_name), request.args[1]
            ended[task].append(ending)
            if "max_length" not in settings:  # which counts the prompt, too
                limits[task] = max(limits[task], generation.answer_limit(settings, self.lm.max_gen_toks))
        own = {task: summarize_lengths(ended[task], limits[task] or None) for task in ended}
        parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for lengths in self.lm.gather_from_ranks(own):
            for task, part in lengths.items():
                parts[task].append(part)
        self.lengths = {task: merge_lengths(task_parts) for task, task_parts in parts.items()}
        for task, lengths in self.lengths.items():
            if self.lm.rank == 0 and (line := cut_off_note(lengths)):
                more = "more max_gen_toks" if lengths["max_gen_toks"] else "max_gen_toks in place of max_length"
                logger.warning("%s: %s; give %s", task, line, more)

    def _write_samples(self, requests: list[Any], keys: list[str], endings: Sequence[Ending | None]) -> None:
        """Write attempts, keys and lengths into the requests' arguments, which `--log_samples` writes."""
        attempts: dict[int, list[tuple[Any, str, Ending | None]]] = defaultdict(list)
        for request, key, ending in zip(requests, keys or [""] * len(requests), endings, strict=True):
            if len(attempts[id(request)]) < request.repeats:
                attempts[id(request)].append((request, key, ending))
        for tries in attempts.values():
            request = tries[0][0]
            context, settings = request.args
            columns: dict[str, Any] = {"attempts": list(self.router.order(request)[: request.repeats])}
            columns |= {"answers": [key for _, key, _ in tries]} if keys else {}
            columns["lengths"] = [ending and ending.length for _, _, ending in tries]
            columns["cut_off"] = [ending and ending.cut_off for _, _, ending in tries]
            request.arguments = (context, {**generation.without_sampling(settings), **columns})


def _is_sampled(request: Any) -> bool:
    return generation.is_sampling(request.args[1])
