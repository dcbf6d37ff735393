"""Choice of tokens from logits by transformers' logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from transformers import GenerationConfig, LogitsProcessorList

from lmeval_prune.decoding.request import Request
from lmeval_prune.decoding.stopping import Stopping


def near_tied_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return for each line of logits, (lines, vocabulary), whether rounding could change the argmax, (lines,).

    The assumed error of a logit is half of 1e-3, or half of 32 roundings of the largest logit if that is more.
    """
    best, second = logits.float().topk(2).values.double().unbind(-1)
    return best - second < (32 * torch.finfo(logits.dtype).eps * best.abs()).clamp(min=1e-3)


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
        cumulative, point = _draw(scores, request, answer)
        drawn = int(torch.searchsorted(cumulative, point, right=True))
        return min(drawn, scores.shape[-1] - 1)

    def near_tie(self, logits: torch.Tensor, request: Request, answer: Sequence[int]) -> bool:
        """Return whether rounding of the logits could change the chosen token; arguments as in `choose`.

        The assumed error of a logit is that of `near_tied_argmax`. An error e of all logits moves a cumulative
        distribution F by at most 2 e F (1 - F) / temperature (in first order).
        """
        params = request.params
        if params.others != "{}" or (params.do_sample and (params.top_k or params.top_p < 1 or params.min_p)):
            return True  # rounding may change the set of allowed tokens
        scores = self._scores(logits, request, answer)
        best, second = scores.topk(2).values.tolist()
        size = float(logits.abs().max()) if params.do_sample else abs(best)
        error = max(1e-3, 32 * torch.finfo(logits.dtype).eps * size) / 2
        error *= max(params.repetition_penalty, 1 / params.repetition_penalty)
        if not params.do_sample:
            return bool(best - second < 2 * error)
        cumulative, point = _draw(scores, request, answer)
        share = point / float(cumulative[-1])
        allowed = 2 * error * share * (1 - share) / params.temperature
        return bool((cumulative - point).abs().min() < allowed)

    def _scores(self, logits: torch.Tensor, request: Request, answer: Sequence[int]) -> torch.Tensor:
        history: Any = torch.tensor([[*request.prompt, *answer]], device=logits.device)
        as_scores: Any = logits.float().unsqueeze(0)
        scores: torch.Tensor = self._processors(request, logits.device)(history, as_scores)[0]
        return scores

    def _processors(self, request: Request, device: torch.device) -> LogitsProcessorList:
        """Return the logits processors that `generate` applies to this request."""
        params, prompt = request.params, request.prompt
        key = (params, prompt if '"encoder_' in params.others else len(prompt), device)
        if key not in self._by_request:
            config = GenerationConfig(**params.generation_settings())
            config.max_length = len(prompt) + params.max_new_tokens
            ends = self.stopping.ends(params)
            config._eos_token_tensor = torch.tensor(ends, device=device) if ends else None
            ids: Any = torch.tensor([prompt], device=device)
            self._by_request[key] = self._model._get_logits_processor(
                generation_config=config, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device=str(device)
            )
        return self._by_request[key]


def _draw(scores: torch.Tensor, request: Request, answer: Sequence[int]) -> tuple[torch.Tensor, float]:
    """Return the cumulative distribution, and a random point in it."""
    cumulative = scores.double().softmax(-1).cumsum(-1)
    generator = numpy.random.Generator(numpy.random.Philox(key=request.seed, counter=len(answer)))
    return cumulative, generator.random() * float(cumulative[-1])
