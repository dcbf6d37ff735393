"""Answers requests of lm-eval's: from the store, by the decoding engine, or by lm-eval's own model class."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import HeadMask, Intervention, combined, interventions_on
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import AnswerStore, PendingRequests, answer, repeat_indices
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.models.identity import code_versions
from lmeval_prune.models.lengths import Ending, cut_off_note, lengths_by_task, merge_lengths, warn_without_template

logger = logging.getLogger(__name__)
GROUP = 8  # requests that are drawn together under batch_size=auto
Answers = tuple[list[Any], list[str], list[Ending | None]]  # responses, keys in the store, endings of texts


class Answering:
    """Answers the requests of one model.

    Args:
        lm: the `PrunedHFLM`.
        store: that is open already; default one is opened where the model's arguments name it.

    Attributes:
        store: of answers, if there is one.
        lengths: of the texts that were generated last, by task; see `models/lengths.py`.

    Raises:
        InputError: the tries' heads do not fit the model, or answers cannot be stored.
    """

    def __init__(self, lm: Any, store: AnswerStore | None = None) -> None:
        self._lm = ref(lm)  # no circle: the model ends, and what it applied, when nobody else holds it
        self.router = lm.arguments.router
        self._live: tuple[Intervention, ...] = ()
        self._identities: dict[str, list[Any]] = {}
        self._is_answering = False
        self._model = ""
        self.lengths: dict[str, dict[str, Any]] = {}
        if self.router:
            self.router.fit_to(lm.model_map, lm.weights, self.interventions())
            for head in self.router.masks:
                self.interventions(head)  # refuses what does not fit together
        folder = lm.arguments.responses
        if folder:
            digest(lm.identity)  # refuses what cannot be told apart, before anything is computed
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
        """Return the responses to requests of one kind; `InputError` if they cannot be answered so."""
        self.lm.check_requests(kind, requests)
        if kind == "generate_until" and self.lm.rank == 0:
            warn_without_template(requests, self.lm.tokenizer)
        if self.router:
            if kind != "generate_until":
                raise InputError("router= answers generative tasks only; leave out tasks that score given texts")
            self.router.prepare(requests)
        with self._answering():
            responses, keys, endings = self._answer(kind, requests, disable_tqdm)
        if kind == "generate_until":
            self._measure(requests, endings)
        if self.router:
            self._log(requests, keys, endings)
        return responses

    def answer_ahead(
        self, requests: Sequence[Any], masks: Sequence[HeadMask | None], disable_tqdm: bool = False
    ) -> None:
        """Decode generation requests under each of several masks in one pass of the engine, and store the answers.

        A request that comes later, with one of the masks applied, finds its answer.

        Each mask comes to what is applied to the model now; None adds nothing.
        """
        count = len(masks)
        assert self.store and self.lm.engine and not self.router
        with self._answering():
            applied = [self._identity(mask) for mask in masks]

            def depends_on(request: Any, index: int) -> tuple[dict[str, Any], str]:
                repeat, number = divmod(index, count)
                return self._key_parts("generate_until", request, repeat, applied[number]), str(masks[number] or DENSE)

            def run(missing: PendingRequests) -> list[Any]:
                row_masks = [masks[index % count] for index in missing.repeats]
                return self._decode(missing, [index // count for index in missing.repeats], row_masks, disable_tqdm)

            answer(self.store, [each for each in requests for _ in masks], "generate_until", depends_on, run)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Fix what is applied for a block, in which an engine's own masks come to it."""
        self._refresh()
        self._model = digest(self.lm.identity) if self.store else ""
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = False

    # ------------------------------------------------------------------ what an answer depends on

    def interventions(self, head: str = DENSE) -> list[Any]:
        """Return the identities of what is applied to the model now, of a try's head, and of the layers they name."""
        self._refresh()
        if head not in self._identities:
            self._identities[head] = self._identity(self.router.masks[head] if self.router and head != DENSE else None)
        return self._identities[head]

    def _identity(self, mask: HeadMask | None) -> list[Any]:
        interventions = combined([*self._live, *([mask] if mask else [])])
        identities: list[Any] = [each.identity(self.lm.model_map) for each in interventions]
        return [*identities, digest(self.lm.model_map.signature())] if identities else []

    def _refresh(self) -> None:
        """Read what is applied to the model, unless it is answering."""
        live = self._live if self._is_answering else self._applied()
        if list(map(id, live)) != list(map(id, self._live)):
            self._live, self._identities = live, {}

    def _applied(self) -> tuple[Intervention, ...]:
        return interventions_on(self.lm.model)

    def _drawn(self, request: Any, repeat: int) -> list[Any]:
        """Return what a drawn answer depends on, too; the engine's draws are others than `generate`'s."""
        return [self.lm.arguments.engine, *generation.sampling_key(self.lm.seed, request, repeat)]

    def _depends_on(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        """Return everything that an answer depends on, as JSON, and the head of the try."""
        head = self.router.head(request, repeat) if self.router else DENSE
        return self._key_parts(kind, request, repeat, self.interventions(head)), head

    def _key_parts(self, kind: str, request: Any, repeat: int, applied: list[Any]) -> dict[str, Any]:
        arguments, drawn = list(request.args), []
        if kind == "generate_until":
            if self.router or not generation.is_sampling(arguments[1]):
                arguments[1] = generation.without_sampling(arguments[1])
            else:
                drawn = self._drawn(request, repeat)
        methods = [dict(each) if isinstance(each, dict) else each for each in applied]
        versions = {each["method"]: each.pop("version") for each in methods if isinstance(each, dict)}
        parts = {"model": self._model, "interventions": methods, "request": arguments, "drawn": drawn}
        return {**parts, "versions": {**self.versions, **versions}}

    @property
    def versions(self) -> dict[str, Any]:
        """Return the versions of the code that computes answers, beside the methods."""
        return code_versions()

    # ------------------------------------------------------------------ answering

    def _answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> Answers:
        run, depends_on = partial(self._run, disable_tqdm=disable_tqdm), partial(self._depends_on, kind)
        if self.store is None:
            endings: list[Ending | None] = [None] * len(requests)

            def add(index: int, _: Any, **columns: Any) -> None:
                if "length" in columns:
                    endings[index] = Ending(columns["length"], columns["cut_off"])

            return (
                run(PendingRequests(kind, add, requests, range(len(requests)), repeat_indices(requests))),
                [],
                endings,
            )
        groups = (self._in_groups(kind), self._group_size)
        responses, keys = answer(self.store, requests, kind, depends_on, run, self.lm.any_rank, *groups)
        return responses, keys, [self.store.endings.get(key) for key in keys]

    def _in_groups(self, kind: str) -> Callable[[Any], bool]:
        """Return whether a request's answer is drawn together with others."""
        return _draws if kind == "generate_until" and self.lm.engine is None else lambda _: False

    def _run(self, missing: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Answer requests that are not stored."""
        kind = missing.kind
        if kind == "generate_until" and self.lm.engine is not None:
            masks = None
            if self.router:
                pairs = zip(missing.requests, missing.repeats, strict=True)
                masks = [self.router.masks[self.router.head(request, repeat)] for request, repeat in pairs]
            return self._decode(missing, missing.repeats, masks, disable_tqdm)
        with self._watched(missing):
            if self.store is None:
                return self._compute(kind, missing.requests, disable_tqdm)
            return self._compute_in_parts(missing, disable_tqdm)

    def _decode(
        self,
        missing: PendingRequests,
        repeats: Sequence[int],
        masks: Sequence[HeadMask | None] | None,
        disable_tqdm: bool,
    ) -> list[str]:
        """Generate texts by the engine."""
        lm = self.lm

        def keep(index: int, text: str, tokens: list[int], ending: Ending) -> None:
            missing.add(missing.keys[index], text, tokens=tokens, **ending._asdict())
            lm.cache_hook.add_partial(missing.kind, missing.requests[index].args, text)

        lm.engine.progress = not disable_tqdm and lm.rank == 0
        greedy = self.router is not None
        return generation.generate_until(lm, lm.engine, missing.requests, repeats, keep, lm.seed, masks, greedy)

    @contextmanager
    def _watched(self, missing: PendingRequests) -> Iterator[None]:
        """Run a block in which lm-eval's own class reports each response, and how a text ended."""
        lm, hook = self.lm, self.lm.cache_hook
        lm.endings.clear()

        def add_partial(attr: str, req: Iterable[Any], res: Any) -> None:
            ending = lm.endings.popleft() if attr == "generate_until" and lm.endings else None
            missing.answered(attr, req, res, **(ending._asdict() if ending else {}))
            hook.add_partial(attr, req, res)

        lm.cache_hook = SimpleNamespace(add_partial=add_partial)
        try:
            yield
        finally:
            lm.cache_hook = hook

    def _compute(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Answer by lm-eval's own model class."""
        return list(getattr(HFLM, kind)(self.lm, requests, disable_tqdm=disable_tqdm))

    def _compute_in_parts(self, missing: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Answer by lm-eval's own model class, so that each answer is reported soon and drawn by a seed of its own."""
        lm, kind, requests = self.lm, missing.kind, missing.requests
        before = lm.batch_schedule, lm.batch_size_per_gpu
        lm.batch_schedule = min(lm.batch_schedule, len(requests))  # lm-eval divides the requests by it
        try:
            if kind == "generate_until":
                return self._draw(missing, disable_tqdm)
            size = len(requests)
            if kind == "loglikelihood_rolling" and lm.world_size == 1 and isinstance(lm.batch_size, int):
                size = 4 * lm.batch_size  # lm-eval reports rolling requests only at the end of a call
            parts = [requests[i : i + size] for i in range(0, len(requests), size)]
            return [response for part in parts for response in self._compute(kind, part, disable_tqdm)]
        finally:
            lm.batch_schedule, lm.batch_size_per_gpu = before

    def _draw(self, missing: PendingRequests, disable_tqdm: bool) -> list[str]:
        """Generate texts; those that are drawn in groups, each by a seed that is made of the group's keys."""
        lm, size = self.lm, self._group_size
        responses: dict[int, str] = {}

        def compute(indices: list[int], silent: bool) -> None:
            texts = self._compute("generate_until", [missing.requests[i] for i in indices], silent)
            responses.update(zip(indices, texts, strict=True))

        drawn = [index for index, request in enumerate(missing.requests) if _draws(request)]
        if others := sorted({*range(len(missing.requests))} - {*drawn}):
            compute(others, disable_tqdm)
        lm.batch_size_per_gpu = size
        groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        for group in tqdm(groups, "sampling", disable=disable_tqdm or lm.rank > 0 or not drawn, unit="batch"):
            with torch.random.fork_rng([lm.device] if lm.device.type == "cuda" else []):
                torch.manual_seed(int(digest([lm.seed, [missing.keys[i] for i in group]]), 16) >> 1)
                compute(group, True)
        return [responses[index] for index in range(len(missing.requests))]

    @property
    def _group_size(self) -> int:
        """Return how many requests `generate` draws together: a batch, or `GROUP` where its size is found by trying.

        A size that is found may be another one the next time, and so would be the answers.
        """
        size = self.lm.batch_size
        return size if isinstance(size, int) else min(GROUP, self.lm.max_batch_size)

    # ------------------------------------------------------------------ what is said of answers

    def _measure(self, requests: Sequence[Any], endings: Sequence[Ending | None]) -> None:
        """Keep and log how many answers of each task were cut off, on all ranks together."""
        parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for lengths in self.lm.gather_from_ranks(lengths_by_task(requests, endings, self.lm.max_gen_toks)):
            for task, part in lengths.items():
                parts[task].append(part)
        self.lengths = {task: merge_lengths(several) for task, several in parts.items()}
        for task, lengths in self.lengths.items():
            if self.lm.rank == 0 and (line := cut_off_note(lengths)):
                logger.warning("%s: %s; give more max_gen_toks", task, line)

    def _log(self, requests: list[Any], keys: list[str], endings: Sequence[Ending | None]) -> None:
        """Write heads, keys and lengths into each request's arguments, where `--log_samples` shows them."""
        tries: dict[int, list[tuple[Any, str, Ending | None]]] = defaultdict(list)
        for request, key, ending in zip(requests, keys or [""] * len(requests), endings, strict=True):
            if len(tries[id(request)]) < request.repeats:
                tries[id(request)].append((request, key, ending))
        for several in tries.values():
            request = several[0][0]
            context, settings = request.args
            columns: dict[str, Any] = {"heads": list(self.router.order(request)[: request.repeats])}
            columns |= {"answers": [key for _, key, _ in several]} if keys else {}
            columns["lengths"] = [ending and ending.length for _, _, ending in several]
            columns["cut_off"] = [ending and ending.cut_off for _, _, ending in several]
            request.arguments = (context, {**generation.without_sampling(settings), **columns})


def _draws(request: Any) -> bool:
    return generation.is_sampling(request.args[1])
