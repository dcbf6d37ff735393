"""How requests of lm-eval's are answered: from the store, by the decoding engine, or by lm-eval's own model class."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import HeadMask, Intervention, combined, interventions_on
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import (
    Answered,
    AnswerStore,
    Missing,
    Recorder,
    answer,
    in_order,
    occurrences,
)
from lmeval_prune.models.identity import code_versions
from lmeval_prune.models.lengths import Ending, by_task, cut_off, merged, warn_without_template
from lmeval_prune.models.tries import DENSE

logger = logging.getLogger(__name__)
GROUP = 8  # requests that are drawn together under batch_size=auto


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
        self.tries = lm.arguments.router
        self._live: tuple[Intervention, ...] = ()
        self._identities: dict[str, list[Any]] = {}
        self._busy = False
        self._model = ""
        self.lengths: dict[str, dict[str, Any]] = {}
        if self.tries:
            self.tries.fit_to(lm.model_map, lm.weights, self.interventions())
            for head in self.tries.masks:
                self.interventions(head)  # refuses what does not fit together
        folder = lm.arguments.responses
        if folder:
            digest(lm.identity)  # refuses what cannot be told apart, before anything is computed
        self.store = store or (AnswerStore(folder, lm.store_rank) if folder else None)

    @property
    def lm(self) -> Any:
        """The model."""
        return self._lm()

    def close(self) -> None:
        """Release the store."""
        if self.store:
            self.store.close()

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Responses to requests of one kind.

        Raises:
            InputError: tries are to score given texts, or a setting cannot be used.
        """
        if kind == "generate_until" and self.lm.rank == 0:
            warn_without_template(requests, self.lm.tokenizer)
        if self.tries:
            if kind != "generate_until":
                raise InputError("router= answers generative tasks only; leave out tasks that score given texts")
            self.tries.prepare(requests)
        self._look()
        self._model = digest(self.lm.identity) if self.store else ""
        self._busy = True
        try:
            responses, keys, endings = self._answer(kind, requests, disable_tqdm)
        finally:
            self._busy = False
        if kind == "generate_until":
            self._measure(requests, endings)
        if self.tries:
            self._record(requests, keys, endings)
        return responses

    def _measure(self, requests: Sequence[Any], endings: Sequence[Ending | None]) -> None:
        """Keep and say how many answers of each task were cut off, on all ranks together."""
        parts: dict[str, list[dict[str, Any]]] = {}
        for own in self.lm.gathered(by_task(requests, endings, self.lm.max_gen_toks)):
            for name, part in own.items():
                parts.setdefault(name, []).append(part)
        self.lengths = {name: merged(own) for name, own in parts.items()}
        for name, own in self.lengths.items():
            if self.lm.rank == 0 and (said := cut_off(own)):
                logger.warning("%s: %s; give more max_gen_toks", name, said)

    def answer_ahead(
        self, requests: Sequence[Any], masks: Sequence[HeadMask | None], disable_tqdm: bool = False
    ) -> None:
        """Decode generation requests under each of several masks in one pass of the engine, and store the answers.

        A request that comes later, with one of the masks applied, finds its answer.

        Args:
            requests: of lm-eval's, as for `generate_until`.
            masks: each comes to what is applied to the model now; None adds nothing.
            disable_tqdm: show no progress.

        Raises:
            InputError: a mask does not fit, or a setting cannot be used.
        """
        lm, count = self.lm, len(masks)
        assert self.store and lm.engine and not self.tries
        self._look()
        self._model = digest(lm.identity)
        applied = [self._with(mask) for mask in masks]

        def depends_on(request: Any, place: int) -> tuple[dict[str, Any], str]:
            repeat, number = divmod(place, count)
            return self._parts("generate_until", request, repeat, applied[number]), str(masks[number] or DENSE)

        def run(missing: Missing) -> list[Any]:
            def keep(place: int, text: str, tokens: list[int], ending: Ending) -> None:
                missing.record(missing.keys[place], text, tokens=tokens, **ending._asdict())

            repeats = [place // count for place in missing.repeats]
            chosen = [masks[place % count] for place in missing.repeats]
            lm.engine.progress = not disable_tqdm
            return generation.generate_until(lm, lm.engine, missing.requests, repeats, keep, lm.seed, chosen)

        self._busy = True
        try:
            every = [request for request in requests for _ in masks]
            answer(self.store, every, "generate_until", depends_on, run)
        finally:
            self._busy = False

    # ------------------------------------------------------------------ what an answer depends on

    def interventions(self, head: str = DENSE) -> list[Any]:
        """Identities of what is applied to the model now, of a try's head, and of the layers that they name."""
        self._look()
        if head not in self._identities:
            self._identities[head] = self._with(self.tries.masks[head] if self.tries and head != DENSE else None)
        return self._identities[head]

    def _with(self, mask: HeadMask | None) -> list[Any]:
        everything = combined([*self._live, *([mask] if mask else [])])
        found: list[Any] = [one.identity(self.lm.model_map) for one in everything]
        return [*found, digest(self.lm.model_map.signature())] if found else []

    def _look(self) -> None:
        """See what is applied to the model; while it answers, an engine's own masks are, too."""
        live = self._live if self._busy else self._applied()
        if list(map(id, live)) != list(map(id, self._live)):
            self._live, self._identities = live, {}

    def _applied(self) -> tuple[Intervention, ...]:
        """What is applied to the model."""
        return interventions_on(self.lm.model)

    def _drawn(self, request: Any, repeat: int) -> list[Any]:
        """What a drawn answer depends on, too; the engine's draws are others than `generate`'s."""
        return [self.lm.arguments.engine, *generation.draw_of(self.lm.seed, request, repeat)]

    def _depends_on(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        """JSON value of everything that an answer depends on; and the head of the try."""
        head = self.tries.head(request, repeat) if self.tries else DENSE
        return self._parts(kind, request, repeat, self.interventions(head)), head

    def _parts(self, kind: str, request: Any, repeat: int, applied: list[Any]) -> dict[str, Any]:
        """JSON value of everything that an answer depends on, given what is applied."""
        arguments, drawn = list(request.args), []
        if kind == "generate_until":
            if self.tries or not generation.samples(arguments[1]):
                arguments[1] = generation.greedily(arguments[1])
            else:
                drawn = self._drawn(request, repeat)
        methods = [dict(one) if isinstance(one, dict) else one for one in applied]
        versions = {one["method"]: one.pop("version") for one in methods if isinstance(one, dict)}
        depends = {"model": self._model, "interventions": methods, "request": arguments, "drawn": drawn}
        return {**depends, "versions": {**self.versions, **versions}}

    @property
    def versions(self) -> dict[str, Any]:
        """Versions of the code that computes answers, beside the methods."""
        return code_versions()

    # ------------------------------------------------------------------ answering

    def _answer(
        self, kind: str, requests: list[Any], disable_tqdm: bool
    ) -> tuple[list[Any], list[str], list[Ending | None]]:
        """Responses, their keys in the store, if there is one, and of texts how they ended."""
        lm = self.lm
        on_engine = kind == "generate_until" and lm.engine is not None
        if self.store is None:
            endings: list[Ending | None] = [None] * len(requests)
            if on_engine:

                def pass_on(place: int, text: str, _: list[int], ending: Ending) -> None:
                    endings[place] = ending
                    lm.cache_hook.add_partial(kind, requests[place].args, text)

                return self._batched(requests, occurrences(requests), pass_on, disable_tqdm), [], endings
            reported = in_order((request.args, place) for place, request in enumerate(requests))

            def note(attr: str, args: tuple[Any, ...], _: Any, **ending: Any) -> None:
                if attr == "generate_until" and ending and (place := reported(args)) is not None:
                    endings[place] = Ending(**ending)

            with self._watched(note):
                return getattr(HFLM, kind)(lm, requests, disable_tqdm=disable_tqdm), [], endings

        def run(missing: Missing) -> list[Any]:
            if not on_engine:
                with self._watched(missing.answered):
                    return self._plainly(kind, missing, disable_tqdm)

            def keep(place: int, text: str, tokens: list[int], ending: Ending) -> None:
                missing.record(missing.keys[place], text, tokens=tokens, **ending._asdict())

            return self._batched(missing.requests, missing.repeats, keep, disable_tqdm)

        def depends_on(request: Any, repeat: int) -> tuple[dict[str, Any], str]:
            return self._depends_on(kind, request, repeat)

        in_groups = _draws if kind == "generate_until" and not on_engine else lambda _: False
        responses, keys = answer(self.store, requests, kind, depends_on, run, lm.any_rank, in_groups, self._group)
        return responses, keys, [self.store.endings.get(key) for key in keys]

    @contextmanager
    def _watched(self, answered: Answered) -> Iterator[None]:
        """A block in which lm-eval's own class reports each response, and how a text ended."""
        lm, before = self.lm, self.lm.cache_hook
        lm.endings.clear()

        def report(attr: str, args: tuple[Any, ...], response: Any) -> None:
            ending = lm.endings.popleft() if attr == "generate_until" and lm.endings else None
            answered(attr, args, response, **(ending._asdict() if ending else {}))

        lm.cache_hook = Recorder(before, report)
        try:
            yield
        finally:
            lm.cache_hook = before

    def _plainly(self, kind: str, missing: Missing, disable_tqdm: bool) -> list[Any]:
        """By lm-eval's own model class, which reports each answer as it comes."""
        lm = self.lm

        def compute(requests: list[Any], silent: bool = disable_tqdm) -> list[Any]:
            return list(getattr(HFLM, kind)(lm, requests, disable_tqdm=silent))

        before = lm.batch_schedule, lm.batch_size_per_gpu
        lm.batch_schedule = min(lm.batch_schedule, len(missing.requests))  # lm-eval divides the requests by it
        try:
            if kind == "generate_until":
                drawn = [place for place, request in enumerate(missing.requests) if _draws(request)]
                others = [place for place in range(len(missing.requests)) if place not in set(drawn)]
                responses = (
                    dict(zip(others, compute([missing.requests[i] for i in others]), strict=True)) if others else {}
                )
                lm.batch_size_per_gpu = size = self._group
                groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
                for group in tqdm(groups, "sampling", disable=disable_tqdm or lm.rank > 0 or not drawn, unit="batch"):
                    with torch.random.fork_rng([lm.device] if lm.device.type == "cuda" else []):
                        torch.manual_seed(int(digest([lm.seed, [missing.keys[i] for i in group]]), 16) >> 1)
                        responses |= dict(zip(group, compute([missing.requests[i] for i in group], True), strict=True))
                return [responses[place] for place in range(len(missing.requests))]
            if kind != "loglikelihood_rolling" or lm.world_size > 1 or not isinstance(lm.batch_size, int):
                return compute(missing.requests)
            # lm-eval reports rolling requests only at the end of a call: make several calls
            size = 4 * lm.batch_size
            parts = [missing.requests[i : i + size] for i in range(0, len(missing.requests), size)]
            return [response for part in parts for response in compute(part)]
        finally:
            lm.batch_schedule, lm.batch_size_per_gpu = before

    @property
    def _group(self) -> int:
        """How many requests `generate` draws together: a batch, or so many where its size is found out by trying.

        What is found out may be another number the next time, and so would be the answers.
        """
        size = self.lm.batch_size
        return size if isinstance(size, int) else min(GROUP, self.lm.max_batch_size)

    def _batched(
        self, requests: list[Any], repeats: Sequence[int], done: generation.Done, disable_tqdm: bool
    ) -> list[str]:
        lm, masks = self.lm, None
        assert lm.engine is not None
        lm.engine.progress = not disable_tqdm and lm.rank == 0
        if self.tries:
            pairs = zip(requests, repeats, strict=True)
            masks = [self.tries.masks[self.tries.head(request, repeat)] for request, repeat in pairs]
        greedy = self.tries is not None
        return generation.generate_until(lm, lm.engine, requests, repeats, done, lm.seed, masks, greedy)

    def _record(self, requests: list[Any], keys: list[str], endings: Sequence[Ending | None]) -> None:
        """Write what was done into each request's arguments, where `--log_samples` shows it."""
        assert self.tries
        found: dict[int, tuple[Any, list[str], list[Ending | None]]] = {}
        for request, key, ending in zip(requests, keys or [""] * len(requests), endings, strict=True):
            _, own, ended = found.setdefault(id(request), (request, [], []))
            own.append(key)
            ended.append(ending)
        for request, own, ended in found.values():
            context, settings = request.args
            done: dict[str, Any] = {"heads": list(self.tries.order(request)[: request.repeats])}
            done |= {"answers": own[: request.repeats]} if keys else {}
            done["lengths"] = [ending and ending.length for ending in ended[: request.repeats]]
            done["cut_off"] = [ending and ending.cut_off for ending in ended[: request.repeats]]
            request.arguments = (context, {**generation.greedily(settings), **done})


def _draws(request: Any) -> bool:
    """Whether the answer to a generation request is drawn."""
    return generation.samples(request.args[1])
