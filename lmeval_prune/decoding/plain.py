"""What is done for families that the engine does not run: transformers' `generate`, each row with its mask."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from lmeval_prune.decoding.layers import in_use
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


def _arguments(settings: Settings, ends: tuple[int, ...]) -> dict[str, Any]:
    """`generate`'s arguments for some settings."""
    arguments: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": list(ends) or None,
        "do_sample": settings.do_sample,
        "repetition_penalty": settings.repetition_penalty,
        "num_beams": 1,
    }
    if settings.do_sample:
        arguments |= {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return arguments


def decode_plainly(engine: Engine, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
    """Answer requests by `generate`: greedy ones in batches, sampled ones alone, each by its seed.

    A batch has one setting and prompts of one length: some families (bloom, mpt) give other answers to padded
    prompts.
    """
    batches: dict[Any, list[Request]] = {}
    for place, request in enumerate(requests):
        alone = place if request.settings.do_sample else -1
        batches.setdefault((request.settings, len(request.prompt), alone), []).append(request)
    masks, size = RowMasks(), 1 if engine.deterministic else min(BATCH, engine.max_rows or BATCH)
    with (
        in_use(engine.model, engine.attention),
        masks.applied_to(engine.model, engine.attention),
        _plain_generation(engine.model),
    ):
        for (settings, *_), group in batches.items():
            for begin in range(0, len(group), size):
                batch = group[begin : begin + size]
                with torch.inference_mode(), masks.using([request.mask for request in batch]):
                    answers = _generate(engine, batch, settings)
                engine.statistics.answers += len(batch)
                engine.statistics.answer_tokens += sum(map(len, answers))
                yield from zip(batch, answers, strict=True)


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """No setting comes from the model's own generation config."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


def _generate(engine: Engine, batch: Sequence[Request], settings: Settings) -> list[list[int]]:
    ids = torch.tensor([request.prompt for request in batch], device=engine.device)
    width = ids.shape[1]
    ends = engine.stops.ends(settings)
    arguments = _arguments(settings, ends)
    arguments["max_new_tokens"] = min(settings.max_new_tokens, engine.context - width)
    with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
        torch.manual_seed(batch[0].seed)
        out = engine.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=ends[0] if ends else 0,
            stopping_criteria=StoppingCriteriaList([_Ended(engine, width, settings)]),
            **arguments,
        )
    return [answer[: _end(engine, answer, settings)] for answer in out[:, width:].tolist()]


def _end(engine: Engine, answer: list[int], settings: Settings) -> int:
    ends = (n for n in range(1, len(answer) + 1) if engine.stops.ended(answer[:n], settings))
    return next(ends, len(answer))
