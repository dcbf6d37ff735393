"""The fallback for models that the engine cannot run: transformers' `generate`, with a mask for each row."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from lmeval_prune.architectures import ModelMap, input_device
from lmeval_prune.attributes import replaced
from lmeval_prune.decoding.model_runner import lock_model
from lmeval_prune.decoding.request import Request, SamplingParams
from lmeval_prune.decoding.sampling import RefuseNaN
from lmeval_prune.decoding.stopping import Stopping
from lmeval_prune.interventions.base import interventions_on
from lmeval_prune.interventions.head_mask import RowMasks


class Ended(StoppingCriteria):
    """Ends rows by `Stopping`; `generate` keeps an ended row ended."""

    def __init__(self, stopping: Stopping, prompt: int, params: SamplingParams) -> None:
        self.stopping, self.prompt, self.params = stopping, prompt, params

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return which rows have ended, (rows,)."""
        answers = input_ids[:, self.prompt :].tolist()
        return torch.tensor([self.stopping.ended(answer, self.params) for answer in answers], device=input_ids.device)


@dataclass(frozen=True)
class Fallback:
    """Decode by `generate`: greedy requests in batches, sampled requests alone, each with its seed."""

    model_map: ModelMap
    stopping: Stopping
    context: int  # largest number of tokens of prompt and answer
    rows: int  # batch size

    def decode(self, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
        """Yield requests and answers, batch by batch.

        The prompts of a batch have equal parameters and lengths: padding changes the answers of some families (bloom,
        mpt). They also have the same mask if a method on the model is not `tokenwise`: it may depend on which heads are
        pruned, as Probe Pruning does, so the mask is an intervention beside it.
        """
        model, masks = self.model_map.model, RowMasks()
        is_tokenwise = all(intervention.tokenwise for intervention in interventions_on(model))
        batches: dict[Any, list[Request]] = {}
        for number, request in enumerate(requests):
            own_batch = number if request.params.do_sample else -1
            common_mask = None if is_tokenwise else request.mask
            batches.setdefault((request.params, len(request.prompt), own_batch, common_mask), []).append(request)
        plain = replaced(model, generation_config=GenerationConfig())  # not with settings of the model's own
        with lock_model(self.model_map), masks.applied_to(model, self.model_map), plain:
            for (params, *_, common_mask), group in batches.items():
                for begin in range(0, len(group), self.rows):
                    batch = group[begin : begin + self.rows]
                    rows = masks.using([request.mask for request in batch])
                    with torch.inference_mode(), common_mask.applied_to(model, self.model_map) if common_mask else rows:
                        answers = self._generate(batch, params)
                    yield from zip(batch, answers, strict=True)

    def _generate(self, batch: Sequence[Request], params: SamplingParams) -> list[list[int]]:
        model: Any = self.model_map.model
        device = input_device(model)
        ids = torch.tensor([request.prompt for request in batch], device=device)
        width = ids.shape[1]
        ends = self.stopping.ends(params)
        arguments = {**params.generation_settings(), "eos_token_id": list(ends) or None}
        arguments["max_new_tokens"] = min(params.max_new_tokens, self.context - width)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(batch[0].seed)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pad_token_id=ends[0] if ends else 0,
                stopping_criteria=StoppingCriteriaList([Ended(self.stopping, width, params)]),
                logits_processor=LogitsProcessorList([RefuseNaN()]),
                **arguments,
            )
        return [self._cut(answer, params) for answer in out[:, width:].tolist()]

    def _cut(self, answer: list[int], params: SamplingParams) -> list[int]:
        lengths = range(1, len(answer) + 1)
        return next((answer[:n] for n in lengths if self.stopping.ended(answer[:n], params)), answer)
