"""The decoding engine: many answers at once, each under its own head mask. `scheduler.py` tells the idea."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.decoding.fallback import Fallback
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.model_lock import refuse_locked
from lmeval_prune.decoding.model_runner import ModelRunner
from lmeval_prune.decoding.progress import Progress
from lmeval_prune.decoding.request import Request, end_tokens
from lmeval_prune.decoding.sampling import Sampler
from lmeval_prune.decoding.scheduler import Schedule, Scheduler, Statistics
from lmeval_prune.decoding.self_check import why_unsupported
from lmeval_prune.decoding.sequence import PromptGroup, prompt_groups
from lmeval_prune.decoding.stopping import Stopping
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import Intervention, interventions_on

BLOCK = 16  # slots whose attention is computed together on a CPU
FALLBACK_ROWS = 16


class Engine:
    """Decoder of requests with different masks together.

    ```python
    engine = Engine(model, tokenizer)
    for request, tokens in engine.decode([Request(prompt, HeadMask("L5H3")), Request(prompt)]):
        ...
    ```

    Args:
        model: a stock causal model of transformers.
        tokenizer: needed for stop texts.
        model_map: the model's `map_model`, where it is at hand.
        max_rows: answers decoded at once. Default: as many as memory holds, at most 192 (512 on a GPU).
        context: tokens that prompt and answer may have. Default: the model's `max_position_embeddings`.
        memory: bytes for keys, values, what methods remember, and kept hidden states. Default: half of what is free.
        schedule: of the engine's ideas, for measurements. What takes tokens back (`drafts`, `follow`) is off where an
            intervention looks at the tokens before.
        deterministic: decide near-ties (two largest logits closer than 1e-3, or than 32 roundings of them in
            half precision; a draw as close to the next token's share) by running that answer alone, so that a
            result does not depend on what is decoded beside it. Each such token costs a pass over the whole
            answer. With top-k, top-p or min-p, whose cuts may fall either way, that is every token. Near-ties between
            a token filter's similarity and its threshold are not found.
        progress: show a progress bar.

    Attributes:
        statistics: counts of all runs so far.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        model_map: ModelMap | None = None,
        max_rows: int | None = None,
        context: int | None = None,
        memory: int | None = None,
        schedule: Schedule | None = None,
        deterministic: bool = False,
        progress: bool = False,
    ) -> None:
        for name, value, smallest in (("max_rows", max_rows, 1), ("context", context, 2), ("memory", memory, 1)):
            if value is not None and value < smallest:
                raise InputError(f"{name} must be at least {smallest}, not {value}")
        refuse_locked(model)
        self.model = model
        self.model_map = model_map or map_model(model)
        self.stopping = Stopping(tokenizer, end_tokens(getattr(model, "generation_config", None)))
        self.statistics = Statistics()
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context = context or int(positions or 1 << 30)
        self.max_rows, self.memory, self.schedule = max_rows, memory, schedule or Schedule()
        self.deterministic, self.progress = deterministic, progress
        self._reasons: dict[tuple[Intervention, ...], str | None] = {}

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
        """Answer the requests; yield each answer as soon as it is complete, in any order.

        The model is the engine's until the iterator ends or is closed.

        Args:
            requests: most urgent first; equal prompts are decoded together.

        Yields:
            A request and the tokens of its answer, the end token included.

        Raises:
            InputError: a mask does not fit the model, a prompt leaves no room in the model's context, stop
                texts cannot be looked for, or not even one answer fits into memory.
        """
        for params in {request.params for request in requests}:
            self.stopping.check(params)
        for prompt in {request.prompt for request in requests}:
            if len(prompt) >= self.context:
                raise InputError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}")
        # by identity: of two equal masks one may be allowed what the other is not
        for mask in {id(request.mask): request.mask for request in requests if request.mask}.values():
            mask.fit_to(self.model_map)
        if not requests:
            return
        progress = Progress(requests, self.progress)
        answers = self._fall_back(requests) if self.unsupported else self._decode(requests, progress)
        try:
            for request, answer in answers:
                progress.end(len(answer))
                yield request, answer
        finally:
            answers.close()
            progress.close()

    def _decode(self, requests: Sequence[Request], progress: Progress) -> Generator[tuple[Request, list[int]]]:
        longest = max(min(len(r.prompt) + r.params.max_new_tokens, self.context) for r in requests)
        # on a GPU, where launches cost more than reading a few keys in vain, all slots are one block
        block = BLOCK if self.device.type == "cpu" else 1 << 30
        schedule = self._schedule()
        groups, masks = prompt_groups(requests, self.model_map, schedule.share)
        count, leaders = self._fitting(longest, groups)
        budget = schedule.budget
        if budget is None:
            budget = self._measured_budget if schedule.drafts else 0
        cache = KVCache(min(count, len(requests)), longest, block)
        with ModelRunner.on(self.model_map, cache, masks) as runner:
            scheduler = Scheduler(
                runner,
                deque(groups),
                Sampler(self.model, self.stopping),
                self.stopping,
                self.statistics,
                schedule,
                budget,
                self.deterministic,
                leaders,
                progress.step,
            )
            for sequence in scheduler.answers():
                yield sequence.request, sequence.answer

    def _schedule(self) -> Schedule:
        """Return the schedule, without what takes tokens back where an intervention looks at those before."""
        looks_back = any(not intervention.tokenwise for intervention in interventions_on(self.model))
        return replace(self.schedule, follow=0, drafts=0) if looks_back else self.schedule

    def _fall_back(self, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
        rows = 1 if self.deterministic else min(FALLBACK_ROWS, self.max_rows or FALLBACK_ROWS)
        for request, answer in Fallback(self.model_map, self.stopping, self.context, rows).decode(requests):
            self.statistics.answers += 1
            self.statistics.answer_tokens += len(answer)
            yield request, answer

    # ------------------------------------------------------------------ what the model and the machine allow

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def unsupported(self) -> str | None:
        """Reason why this model, as it is now, falls back to `generate`; None if the engine runs it."""
        applied = interventions_on(self.model)
        if applied not in self._reasons:
            self._reasons[applied] = why_unsupported(self.model_map)
        return self._reasons[applied]

    def _fitting(self, length: int, waiting: Sequence[PromptGroup]) -> tuple[int, int]:
        """Return how many answers of `length` tokens memory holds, and how many leaders with what followers need.

        A slot is keys and values, and what methods remember of them. Of each leader a copy of its slot is kept, and the
        inputs of each layer at which a follower starts. There are as many rows as leave room for half of them to be
        leaders (or for one); near-ties that are decided alone need one slot more.

        Raises:
            InputError: memory holds not even one.
        """
        token = length * next(self.model.parameters()).element_size()
        slot = token * sum(layer.kv_heads * (layer.query_dim + layer.head_dim) for layer in self.model_map.attention)
        slot += sum(each.slot_bytes(self.model_map, length) for each in interventions_on(self.model))
        first_layers = max(len({sequence.first_layer for sequence in group.followers}) for group in waiting)
        width = self.model.config.get_text_config().hidden_size
        kept = slot + token * width * first_layers if first_layers else 0
        alone = slot if self.deterministic else 0
        memory = (self.memory or _free_memory(self.device) // 2) - alone
        fitting = max(int(memory / (slot + kept / 2)) // 2 * 2, int(memory >= slot + kept))
        if fitting < 1:
            needed = slot + kept + alone
            raise InputError(f"one answer of {length} tokens needs {needed} bytes, more than memory={memory + alone}")
        count = min(self.max_rows or (512 if self.device.type == "cuda" else 192), fitting)
        return count, (memory - count * slot) // kept if kept else count

    @cached_property
    def _measured_budget(self) -> int:
        """Number of tokens that take a large projection twice as long as a single token, up to 256."""
        module = max((m for m in self.model.modules() if isinstance(m, nn.Linear)), key=lambda m: m.in_features)

        def seconds(tokens: int) -> float:
            x = torch.zeros(tokens, module.in_features, device=self.device, dtype=module.weight.dtype)
            times = []
            for _ in range(4):
                begin = time.perf_counter()
                for _ in range(8):
                    out = module(x)
                out.sum().item()
                times.append(time.perf_counter() - begin)
            return min(times)

        with torch.inference_mode():
            single, tokens = seconds(1), 2
            while tokens <= 256 and seconds(tokens) < 2 * single:
                tokens *= 2
        return tokens // 2


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)
