"""lm-eval's log-likelihood requests on the decoding engine, encoded and divided into windows by lm-eval's `hf`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from lmeval_prune.attributes import replaced
from lmeval_prune.decoding import Engine, Likelihood, LikelihoodRequest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask

logger = logging.getLogger(__name__)
Done = Callable[[int, Any], None]  # request's index, response


def loglikelihoods(
    lm: HFLM,
    engine: Engine,
    kind: str,
    requests: Sequence[Any],
    done: Done,
    masks: Sequence[HeadMask | None] | None = None,
    disable_tqdm: bool = False,
) -> list[Any]:
    """Compute the responses of `hf` to requests of a kind; call `done` for each finished request.

    `masks` are heads to prune for each request.
    """
    windows = token_windows(lm, kind, requests, disable_tqdm)
    results: list[list[Likelihood | None]] = [[None] * len(windows[id(request)]) for request in requests]
    responses: list[Any] = [None] * len(requests)
    bar = tqdm(total=len(requests), desc=f"Running {kind} requests", disable=disable_tqdm or lm.rank > 0)

    def finish(index: int) -> None:
        pairs = [(float(result.logprobs.sum()), result.is_greedy) for result in results[index] if result]
        total = float(sum(value for value, _ in pairs))
        responses[index] = pairs[0] if kind == "loglikelihood" else total
        done(index, responses[index])
        bar.update()

    tokens = []
    for index, request in enumerate(requests):
        mask = masks[index] if masks else None
        tokens += [LikelihoodRequest(*window, mask, (index, i)) for i, window in enumerate(windows[id(request)])]
        if not windows[id(request)]:  # an empty text
            finish(index)
    with bar, closing(engine.score(tokens, lm.softmax_dtype)) as scores:  # frees the model if `done` fails
        for window_request, likelihood in scores:
            index, window = window_request.tag
            results[index][window] = likelihood
            if None not in results[index]:
                finish(index)
    return responses


def check_own_tokens(pair: tuple[str, str] | None, continuation: Sequence[int]) -> None:
    """Raise `InputError` if a choice has no token of its own, which `hf` would end in a bare assertion."""
    if pair and pair[1] and not continuation:
        raise InputError(
            f"{pair[1]!r} has no tokens after {pair[0][-20:]!r}: a token of the context includes it; end the context "
            f"at a space, or set target_delimiter"
        )


def token_windows(
    lm: HFLM, kind: str, requests: Sequence[Any], disable_tqdm: bool
) -> dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the contexts and continuations that `hf` would run for each request, by the request's id."""
    windows: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    cut = 0
    unique = {id(request): request for request in requests}
    with _collecting(lm) as collected:
        for key, request in tqdm(unique.items(), "Tokenizing inputs", disable=disable_tqdm or lm.rank > 0):
            getattr(HFLM, kind)(lm, [request], disable_tqdm=True)
            windows[key] = []
            for pair, context, continuation in collected:
                check_own_tokens(pair, continuation)
                if not context or not 0 < len(continuation) <= lm.max_length:  # spaces at a context's end are counted
                    raise InputError(  # to the continuation
                        f"task {request.task_name}, document {request.doc_id}: the context has {len(context)} tokens, "
                        f"the continuation {len(continuation)}; both need some, and the latter at most {lm.max_length}"
                    )
                room = lm.max_length + 1 - len(continuation)  # the last token is not run
                cut += len(context) > room
                windows[key].append((tuple(context[-room:]), tuple(continuation)))
            collected.clear()
    if cut:
        logger.warning("%d texts are longer than max_length=%d and are cut from the left", cut, lm.max_length)
    return windows


@contextmanager
def _collecting(lm: Any) -> Iterator[list[Any]]:
    """Collect the token requests of `hf` in a list inside the block, instead of running them; no rank waits."""
    collected: list[Any] = []

    def collect(requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        collected.extend(requests)
        return [(0.0, False)] * len(requests)

    hook = SimpleNamespace(add_partial=lambda *_: None)
    with replaced(lm, batch_size_per_gpu=1 << 30, _world_size=1, cache_hook=hook):
        lm._loglikelihood_tokens = collect
        try:
            yield collected
        finally:
            del lm._loglikelihood_tokens
