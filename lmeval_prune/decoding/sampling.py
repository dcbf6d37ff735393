"""Choice of tokens from logits by transformers' logits processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from lmeval_prune.architectures.precision import refuse_nan
from lmeval_prune.decoding.request import Request, SamplingParams, Stopping


def near_tied_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return for each line of logits, (lines, vocabulary), whether rounding could change the argmax, (lines,).

    The assumed error of a logit is half of 1e-3, or half of 32 roundings of the largest logit if that is more.
    """
    best, second = logits.float().topk(2).values.double().unbind(-1)
    return best - second < (32 * torch.finfo(logits.dtype).eps * best.abs()).clamp(min=1e-3)


def near_tied_cut(logits: torch.Tensor, scores: torch.Tensor, params: SamplingParams, factor: float) -> bool:
    """Return whether rounding could change which tokens top-k, top-p and min-p allow.

    `scores` are the logits, (vocabulary,), after temperature and repetition penalty. `factor` is by how much these
    multiply the error of a logit, which is that of `near_tied_argmax`.
    """
    error = factor * float(_error_of_differences(logits))
    candidate_count = min(params.top_k or len(scores), len(scores))
    ordered = scores.double().topk(min(candidate_count + 1, len(scores))).values
    edges = [candidate_count]
    distances = [math.inf]
    if params.top_p < 1:
        cumulative = ordered[:candidate_count].softmax(-1).cumsum(-1)
        # at least 1e-5, for `generate` adds up in float32
        share = params.top_p
        distances.append(float((cumulative - share).abs().amin()) / max(error * share * (1 - share), 1e-5))
        candidate_count = min(int((cumulative < share).sum()) + 1, candidate_count)
        edges.append(candidate_count)
    if params.min_p:
        distances.append(float((ordered[:candidate_count] - ordered[0] - math.log(params.min_p)).abs().amin()) / error)
    distances += [float(ordered[edge - 1] - ordered[edge]) / error for edge in edges if edge < len(ordered)]
    return min(distances) < 1


def _error_of_differences(logits: torch.Tensor) -> torch.Tensor:
    return (32 * torch.finfo(logits.dtype).eps * logits.float().abs().amax(-1).double()).clamp(min=1e-3)


class RefuseNaN(LogitsProcessor):
    """Refuse logits of NaN in `generate`, which would take the first token."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        refuse_nan(scores)
        return scores


class Sampler:
    """Choose tokens as `generate` does, by the logits processors of its model."""

    def __init__(self, model: Any, stopping: Stopping) -> None:
        self._model = model
        self.stopping = stopping
        self._by_request: dict[Any, LogitsProcessorList] = {}

    def choose(self, logits: torch.Tensor, request: Request, answer: Sequence[int]) -> int:
        """Choose the next token of `request` after `answer` from logits (vocabulary,).

        A random draw depends on the request's seed, the position in the answer and the logits alone: a uniform number
        from a counter-based generator is mapped by the inverse of the cumulative distribution.
        """
        scores = self._scores(logits, request, answer)
        if not request.params.do_sample:
            return int(scores.argmax())
        cumulative = cumulative_distribution(scores)
        return int(draw(cumulative, cumulative.new_tensor([uniform(request.seed, len(answer))])))

    def near_tie(self, logits: torch.Tensor, request: Request, answer: Sequence[int]) -> bool:
        """Return whether rounding of the logits could change the chosen token; arguments as in `choose`.

        The assumed error of a logit is that of `near_tied_argmax`.
        """
        params = request.params
        if params.others != "{}":
            return True  # rounding may change the set of allowed tokens
        scores = self._scores(logits, request, answer)
        factor = max(params.repetition_penalty, 1 / params.repetition_penalty)
        if params.do_sample:
            factor /= params.temperature
            if params.top_k or params.top_p < 1 or params.min_p:
                uncut = self._scores(logits, request, answer, cuts=False)
                if near_tied_cut(logits, uncut, params, factor):
                    return True
            # an error e of all logits moves a cumulative distribution F by at most 2 e F (1 - F) / temperature
            cumulative, drawn = cumulative_distribution(scores), uniform(request.seed, len(answer))
            distance = (cumulative - drawn * cumulative[-1]).abs().amin()
            return bool(distance < _error_of_differences(logits) * drawn * (1 - drawn) * factor)
        best, second = scores.topk(2).values.tolist()
        return bool(best - second < factor * max(1e-3, 32 * torch.finfo(logits.dtype).eps * abs(best)))

    def _scores(self, logits: torch.Tensor, request: Request, answer: Sequence[int], cuts: bool = True) -> torch.Tensor:
        history: Any = torch.tensor([[*request.prompt, *answer]], device=logits.device)
        as_scores: Any = logits.float().unsqueeze(0)
        scores: torch.Tensor = self._processors(request, logits.device, cuts)(history, as_scores)[0]
        return scores

    def _processors(self, request: Request, device: torch.device, cuts: bool = True) -> LogitsProcessorList:
        """Return the processors that `generate` applies to this request; without `cuts`, not top-k, top-p and min-p."""
        params, prompt = request.params, request.prompt
        key = (params, cuts, prompt if '"encoder_' in params.others else len(prompt), device)
        if key not in self._by_request:
            params = params if cuts else replace(params, top_k=0, top_p=1.0, min_p=0.0)
            config = GenerationConfig(**params.generation_settings())
            config.max_length = len(prompt) + params.max_new_tokens
            ends = self.stopping.ends(params)
            config._eos_token_tensor = torch.tensor(ends, device=device) if ends else None
            ids: Any = torch.tensor([prompt], device=device)
            self._by_request[key] = self._model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=ids,
                device=str(device),
            )
        return self._by_request[key]


def cumulative_distribution(scores: torch.Tensor) -> torch.Tensor:
    """Return the cumulative distribution over the vocabulary, (…, vocabulary), in float64."""
    return scores.double().softmax(-1).cumsum(-1)


def draw(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Map numbers from 0 to 1, (…, draws), to tokens by the inverse of cumulative distributions, (…, vocabulary)."""
    drawn = torch.searchsorted(cumulative, uniforms * cumulative[..., -1:], right=True)
    return drawn.clamp(max=cumulative.shape[-1] - 1)


def uniform(seed: int, position: int) -> float:
    """Return the random number of a token, from 0 to 1: the first of a block of a counter-based generator."""
    block = numpy.random.Philox(key=seed, counter=position).random_raw()
    return (block >> 11) * 2.0**-53
