"""Base classes of the package's lm-eval models: requests are answered from the answer store, the others computed."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather_object
from lm_eval.api.model import LM
from tqdm import tqdm

from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.export.manifest import adapter_name
from lmeval_prune.interventions import HeadMask, Intervention, combined, interventions_on
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import (
    AnswerStore,
    Ending,
    PendingRequests,
    answer_requests,
    cut_off_note,
    merge_lengths,
    read_answers,
    repeat_indices,
    summarize_lengths,
)
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.head_router import DENSE, HeadRouter
from lmeval_prune.models.identity import code_versions

logger = logging.getLogger(__name__)


class AnsweringLM(LM):
    """A model with an answer store, or None. It refuses `--use_cache`, which knows an answer by its prompt alone."""

    why_no_cache = "--use_cache does not know what answers depend on; leave it out"
    store: AnswerStore | None = None

    @abstractmethod
    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Answer requests of a kind, the name of lm-eval's method; a subclass changes all kinds here."""

    @print_input_errors
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self.answer("generate_until", requests, disable_tqdm)

    @print_input_errors
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.answer("loglikelihood", requests, disable_tqdm)

    @print_input_errors
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self.answer("loglikelihood_rolling", requests, disable_tqdm)

    @print_input_errors
    def set_cache_hook(self, cache_hook: Any) -> None:
        if getattr(cache_hook, "dbdict", None) is not None:
            raise InputError(self.why_no_cache)
        super().set_cache_hook(cache_hook)

    def close(self) -> None:
        if self.store:
            self.store.close()

    def any_rank(self, flag: bool) -> bool:
        if self.world_size <= 1:
            return flag
        return bool(self.all_gather(torch.tensor([int(flag)], device=self.device)).max())


class PrunedLM(AnsweringLM):
    """A model with heads pruned, and under the head masks of a router, if it has one."""

    arguments: Arguments
    model_map: ModelMap
    weights: Any = None  # fingerprint, or None
    identity: Any  # what answers depend on of the model, without interventions, as JSON
    seed: Any  # of sampled answers
    max_gen_toks: Any
    router: HeadRouter | None = None
    masks: dict[str, HeadMask | None]  # by the attempt's name
    lengths: dict[str, Any]  # of the texts that were generated last, by task; see `summarize_lengths`
    store_rank: Any = 0  # number of this process in an answer store; see `AnswerStore`
    group_size: Any = 1  # requests that are sampled from one stream of random numbers

    def begin_answering(self) -> None:
        """Fit the router and open the store; `InputError` if answers cannot be routed or stored."""
        self.router, self.lengths, self.masks = self.arguments.router, {}, {DENSE: None}
        if self.router:
            self.router.fit_to(self.model_map, self.weights, self.intervention_identities())
            for name in self.router.pool:
                if name != DENSE:
                    mask = HeadMask(heads=name, allow_empty_layer=bool(self.arguments.allow_empty_layer))
                    self.masks[name] = mask.fit_to(self.model_map)
                    self.intervention_identities(mask)  # raises if it does not fit together with the model's own
        if self.arguments.responses:
            digest(self.identity)  # raises if the model has no identity
            self.store = self.store or AnswerStore(self.arguments.responses, self.store_rank)

    @abstractmethod
    def compute(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Compute answers; each may be stored by `pending` as soon as it is there."""

    @abstractmethod
    def sampling_key(self, request: Any, repeat: int) -> list[Any]:
        """Return what determines the random numbers of a sampled answer."""

    @abstractmethod
    def applied(self) -> tuple[Intervention, ...]:
        """Return the interventions under which the model answers."""

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse requests that the model cannot answer."""

    def gather_from_ranks(self, value: Any) -> list[Any]:
        return list(gather_object([value])) if self.world_size > 1 else [value]

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        self.check_requests(kind, requests)
        if router := self.router:
            if kind != "generate_until":
                raise InputError("router= is for generative tasks only; leave out tasks that score given texts")
            router.prepare(requests, self)
        keys: list[str] = []
        endings: list[Ending | None] = [None] * len(requests)
        if self.store is None:

            def add(index: int, _: Any, **columns: Any) -> None:
                if "length" in columns:
                    endings[index] = Ending(columns["length"], columns["cut_off"])

            indices, repeats = range(len(requests)), repeat_indices(requests)
            responses = self.compute(PendingRequests(kind, add, requests, indices, repeats), disable_tqdm)
        else:
            parts = self.key_parts(kind, self.masks)
            responses, keys = answer_requests(
                self.store,
                requests,
                kind,
                lambda request, repeat: parts(request, repeat, self.attempt(request, repeat)),
                partial(self.compute, disable_tqdm=disable_tqdm),
                self.any_rank,
                lambda request: kind == "generate_until" and generation.is_sampling(request.args[1]),
                self.group_size if kind == "generate_until" else 1,
            )
            endings = [self.store.endings.get(key) for key in keys]
        if kind == "generate_until":
            self._report_lengths(requests, endings)
        if router:
            # lm-eval writes a request's arguments with its sample (`--log_samples`): there `sweep` and `report sprint`
            # read which head an attempt pruned, the key of its stored answer, its length and whether it was cut off
            attempts: dict[int, list[tuple[Any, str, Ending | None]]] = defaultdict(list)
            for request, key, ending in zip(requests, keys or [""] * len(requests), endings, strict=True):
                if len(attempts[id(request)]) < request.repeats:
                    attempts[id(request)].append((request, key, ending))
            for tries in attempts.values():
                request = tries[0][0]
                context, settings = request.args
                columns: dict[str, Any] = {"attempts": list(router.order(request)[: request.repeats])}
                columns |= {"answers": [key for _, key, _ in tries]} if keys else {}
                columns["lengths"] = [ending and ending.length for _, _, ending in tries]
                columns["cut_off"] = [ending and ending.cut_off for _, _, ending in tries]
                request.arguments = (context, {**generation.without_sampling(settings), **columns})
        return responses

    def stored_records(self, kind: str, requests: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the records of answered requests in the store, with the tokens that the engine generated."""
        assert self.store
        parts = self.key_parts(kind, {DENSE: None})
        _, keys = answer_requests(
            self.store, requests, kind, lambda request, repeat: parts(request, repeat, DENSE), lambda pending: []
        )
        records = {record["key"]: record for record in read_answers(self.store.folder)}
        return [records[key] for key in keys]

    # ------------------------------------------------------------------ keys

    def attempt(self, request: Any, repeat: int) -> str:
        """Return the name of the router's attempt at a request; of the unpruned model without a router."""
        return self.router.attempt(request, repeat) if self.router else DENSE

    def intervention_identities(self, mask: HeadMask | None = None) -> list[Any]:
        """Return the identities of the model's interventions, with a further mask, and of the layers."""
        interventions = combined([*self.applied(), *([mask] if mask else [])])
        identities: list[Any] = [intervention.identity(self.model_map) for intervention in interventions]
        return [*identities, digest(self.model_map.signature())] if identities else []

    @property
    def versions(self) -> dict[str, Any]:
        """Return the versions of the code that computes answers, without the methods' versions."""
        return code_versions()

    def key_parts(
        self, kind: str, masks: Mapping[Any, HeadMask | None]
    ) -> Callable[[Any, int, Hashable], tuple[dict[str, Any], str]]:
        """Return a function of a request, its repeat and the name of a mask, for `answer_requests`.

        It returns everything that determines an answer, as JSON, and the names of the pruned heads (`dense`: none).
        Model and interventions are read now, before the engine applies masks of its own.
        """
        model = digest(self.identity)
        identities = {name: self.intervention_identities(mask) for name, mask in masks.items()}

        def parts(request: Any, repeat: int, name: Hashable) -> tuple[dict[str, Any], str]:
            arguments, drawn = list(request.args), []
            if kind == "generate_until":
                if generation.is_sampling(arguments[1]) and not self.router:
                    drawn = self.sampling_key(request, repeat)
                else:
                    arguments[1] = generation.without_sampling(arguments[1])
            methods = [dict(item) if isinstance(item, dict) else item for item in identities[name]]
            versions = {method["method"]: method.pop("version") for method in methods if isinstance(method, dict)}
            heads = [method.get("heads", ()) for method in methods if isinstance(method, dict)]
            names = [head for masked in heads if isinstance(masked, list | tuple) for head in masked]
            return {
                **{"model": model, "interventions": methods, "request": arguments, "drawn": drawn},
                "versions": {**self.versions, **versions},
            }, adapter_name(names) if names else DENSE

        return parts

    # ------------------------------------------------------------------ reports

    def _report_lengths(self, requests: Sequence[Any], endings: Sequence[Ending | None]) -> None:
        """Keep the lengths of each task's answers on all ranks, and warn if many answers were cut off."""
        ended: dict[str, list[Ending | None]] = defaultdict(list)
        limits: dict[str, int] = defaultdict(int)
        for request, ending in zip(requests, endings, strict=True):
            task, settings = str(request.task_name), request.args[1]
            ended[task].append(ending)
            if "max_length" not in settings:  # which counts the prompt, too
                limits[task] = max(limits[task], generation.answer_limit(settings, self.max_gen_toks))
        own = {task: summarize_lengths(ended[task], limits[task] or None) for task in ended}
        parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for lengths in self.gather_from_ranks(own):
            for task, part in lengths.items():
                parts[task].append(part)
        self.lengths = {task: merge_lengths(task_parts) for task, task_parts in parts.items()}
        for task, lengths in self.lengths.items():
            if self.rank == 0 and (line := cut_off_note(lengths)):
                more = "more max_gen_toks" if lengths["max_gen_toks"] else "max_gen_toks in place of max_length"
                logger.warning("%s: %s; give %s", task, line, more)


def compute_in_parts(
    lm: Any,
    pending: PendingRequests,
    compute: Callable[[list[Any], bool], list[Any]],
    size: int,
    grouped: Sequence[int],
    group_size: int,
    seed: int,
    report: Callable[..., None] | None = None,
    silent: bool = True,
) -> list[Any]:
    """Compute answers some at a time by lm-eval's own class, and store each as soon as it is reported or returned.

    `compute` answers `size` requests; or, with True, `group_size` of those with the indices `grouped`, which draw from
    torch's random numbers, each group by a seed of its own. `report` is called with what lm-eval reports to its cache
    hook; default `pending.answered`.
    """
    others = sorted({*range(len(pending.requests))} - {*grouped})
    parts = [others[start : start + size] for start in range(0, len(others), size or 1)]
    first_group = len(parts)
    parts += [list(grouped[start : start + group_size]) for start in range(0, len(grouped), group_size)]
    responses: dict[int, Any] = {}
    devices = [lm.device] if getattr(getattr(lm, "device", None), "type", "") == "cuda" else []
    with report_answers(lm, report or pending.answered):
        for number, part in enumerate(tqdm(parts, "sampling", disable=silent or not grouped, unit="batch")):
            keys, is_group = [pending.keys[index] for index in part], number >= first_group
            with torch.random.fork_rng(devices, enabled=is_group):
                if is_group:
                    torch.manual_seed(int(digest([seed, keys]), 16) >> 1)
                computed = compute([pending.requests[index] for index in part], is_group)
            for index, key, response in zip(part, keys, computed, strict=True):
                responses[index] = response
                pending.add(key, response)
    return [responses[index] for index in range(len(responses))]


@contextmanager
def report_answers(lm: LM, report: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call a function with the kind, arguments and response of each request that a model reports to its cache hook."""
    hook = lm.cache_hook

    def add_partial(attr: str, req: Any, res: Any) -> None:
        report(attr, req, res)
        hook.add_partial(attr, req, res)

    with replaced(lm, cache_hook=SimpleNamespace(add_partial=add_partial)):
        yield


def use_lm_eval_logging() -> None:
    """Log at lm-eval's level and with its handlers, unless the program has set up logging itself."""
    package, lm_eval = logging.getLogger("lmeval_prune"), logging.getLogger("lm_eval")
    if logging.getLogger().handlers or package.handlers or not lm_eval.handlers:
        return
    package.setLevel(lm_eval.level)
    for handler in lm_eval.handlers:
        package.addHandler(handler)


def log_interventions(lm: Any, model: torch.nn.Module) -> None:
    for intervention in interventions_on(model):
        logger.info("applied: %s", intervention.summary(lm.model_map))
