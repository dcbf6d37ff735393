"""What is done for families that the engine does not run: transformers' `generate`, each row with its mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lmeval_prune.decoding.requests import Request, Settings
from lmeval_prune.interventions.row_masks import RowMasks

if TYPE_CHECKING:
    from lmeval_prune.decoding.engine import Engine

BATCH = 16


class _Ended(StoppingCriteria):
    """Ends rows where `Stops` does."""

    def __init__(self, engine: Engine, prompt: int, settings: Settings) -> None:
        self.engine, self.prompt, self.settings = engine, prompt, settings
        self.done: list[bool] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        answers = input_ids[:, self.prompt :].tolist()
        self.done = self.done or [False] * len(answers)
        for i, answer in enumerate(answers):
            self.done[i] = self.done[i] or self.engine.stops.ended(answer, self.settings)
        return torch.tensor(self.done, device=input_ids.device)


def generation(settings: Settings) -> dict[str, Any]:
    """`generate`'s arguments for some settings; nothing is left to the model's own generation config."""
    arguments: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": list(settings.eos) or None,
        "do_sample": settings.do_sample,
        "repetition_penalty": settings.repetition_penalty,
        "num_beams": 1,
    }
    if settings.do_sample:
        arguments |= {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return arguments


def decode_plainly(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
    """Answer requests by `generate`: greedy ones in batches of one setting, sampled ones alone by their seed."""
    batches: dict[Any, list[Request]] = {}
    for place, request in enumerate(requests):
        batches.setdefault((request.settings, place if request.settings.do_sample else -1), []).append(request)
    masks = RowMasks()
    with masks.applied_to(engine.model, engine.attention):
        for (settings, _), group in batches.items():
            for begin in range(0, len(group), BATCH):
                batch = group[begin : begin + BATCH]
                with torch.inference_mode(), masks.using([request.mask for request in batch]):
                    answers = _generate(engine, batch, settings)
                engine.statistics.answers += len(batch)
                engine.statistics.answer_tokens += sum(map(len, answers))
                yield from zip(batch, answers, strict=True)


def _generate(engine: Engine, batch: Sequence[Request], settings: Settings) -> list[list[int]]:
    width = max(len(request.prompt) for request in batch)
    room = engine.context - width
    pad = settings.eos[0] if settings.eos else 0
    ids = torch.full((len(batch), width), pad, device=engine.device)
    seen = torch.zeros_like(ids)
    for i, request in enumerate(batch):
        ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
        seen[i, width - len(request.prompt) :] = 1
    with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
        torch.manual_seed(batch[0].seed)
        arguments = generation(settings)
        arguments["max_new_tokens"] = min(arguments["max_new_tokens"], room)
        out = engine.model.generate(
            input_ids=ids,
            attention_mask=seen,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([_Ended(engine, width, settings)]),
            **arguments,
        )
    answers = out[:, width:].tolist()
    return [answer[: _end(engine, answer, settings)] for answer in answers]


def _end(engine: Engine, answer: list[int], settings: Settings) -> int:
    for length in range(1, len(answer) + 1):
        if engine.stops.ended(answer[:length], settings):
            return length
    return len(answer)
