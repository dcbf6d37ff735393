"""Choosing tokens from logits, by transformers' own logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmeval_prune.decoding.requests import Request, Settings


def processors(settings: Settings) -> LogitsProcessorList:
    """What `generate` would apply to the logits for these settings, in its order."""
    found = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.do_sample:
        if settings.temperature != 1.0:
            found.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_k:
            found.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1.0:
            found.append(TopPLogitsWarper(settings.top_p))
        if settings.min_p:
            found.append(MinPLogitsWarper(settings.min_p))
    return found


def is_plain(settings: Settings) -> bool:
    """Whether the token is simply the one with the largest logit."""
    return not settings.do_sample and settings.repetition_penalty == 1.0


def choose(logits: torch.Tensor, request: Request, answer: Sequence[int]) -> int:
    """The next token of `request` after `answer`.

    A draw depends on the request's seed, the position in the answer and the logits alone: one uniform number
    from a counter-based generator, put through the inverse of the cumulative distribution.

    Args:
        logits: shape (vocabulary,).
        request: the request.
        answer: the tokens chosen so far.
    """
    scores = _scores(logits, request, answer)
    if not request.settings.do_sample:
        return int(scores.argmax())
    cumulative, point = _draw(scores, request, answer)
    drawn = int(torch.searchsorted(cumulative, point, right=True))
    return min(drawn, scores.shape[-1] - 1)


def near_tie(logits: torch.Tensor, request: Request, answer: Sequence[int]) -> bool:
    """Whether logits that differ by their rounding might choose another token; arguments as of `choose`.

    Logits are taken to be right to half of 1e-3, or of 32 roundings of the largest one. An error e of all logits
    moves a cumulative distribution F by at most 2 e F (1 - F) / temperature (in first order).
    """
    settings = request.settings
    if settings.do_sample and (settings.top_k or settings.top_p < 1 or settings.min_p):
        return True  # a cut falls one way or the other
    scores = logits.float() if is_plain(settings) else _scores(logits, request, answer)
    best, second = scores.topk(2).values.tolist()
    size = float(logits.abs().max()) if settings.do_sample else abs(best)
    error = max(1e-3, 32 * torch.finfo(logits.dtype).eps * size) / 2
    error *= max(settings.repetition_penalty, 1 / settings.repetition_penalty)
    if not settings.do_sample:
        return bool(best - second < 2 * error)
    cumulative, point = _draw(scores, request, answer)
    share = point / float(cumulative[-1])
    allowed = 2 * error * share * (1 - share) / settings.temperature
    return bool((cumulative - point).abs().min() < allowed)


def _scores(logits: torch.Tensor, request: Request, answer: Sequence[int]) -> torch.Tensor:
    history: Any = torch.tensor([[*request.prompt, *answer]], device=logits.device)
    as_scores: Any = logits.float().unsqueeze(0)
    scores: torch.Tensor = processors(request.settings)(history, as_scores)[0]
    return scores


def _draw(scores: torch.Tensor, request: Request, answer: Sequence[int]) -> tuple[torch.Tensor, float]:
    """The cumulative distribution, and the point in it that is drawn."""
    cumulative = scores.double().softmax(-1).cumsum(-1)
    generator = numpy.random.Generator(numpy.random.Philox(key=request.seed, counter=len(answer)))
    return cumulative, generator.random() * float(cumulative[-1])
