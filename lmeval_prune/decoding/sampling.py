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
    settings = request.settings
    history: Any = torch.tensor([[*request.prompt, *answer]], device=logits.device)
    as_scores: Any = logits.float().unsqueeze(0)
    scores: torch.Tensor = processors(settings)(history, as_scores)[0]
    if not settings.do_sample:
        return int(scores.argmax())
    cumulative = scores.double().softmax(-1).cumsum(-1)
    generator = numpy.random.Generator(numpy.random.Philox(key=request.seed, counter=len(answer)))
    drawn = int(torch.searchsorted(cumulative, generator.random() * float(cumulative[-1]), right=True))
    return min(drawn, scores.shape[-1] - 1)
