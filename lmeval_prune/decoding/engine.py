"""The decoding engine: many answers at once, each under its own head mask. The idea is told in `run.py`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from lmeval_prune.architectures import AttentionMap, find_attention
from lmeval_prune.decoding.layers import refuse_in_use
from lmeval_prune.decoding.machine import New, machine
from lmeval_prune.decoding.plain import decode_plainly
from lmeval_prune.decoding.requests import Request, end_tokens
from lmeval_prune.decoding.run import Question, Run, Statistics, questions
from lmeval_prune.decoding.slots import Slots, UnsupportedError
from lmeval_prune.decoding.stops import Stops
from lmeval_prune.errors import InputError, first_line

logger = logging.getLogger(__name__)
BLOCK = 16  # slots whose attention is computed together on a CPU


class Engine:
    """Decodes requests with different masks together.

    ```python
    engine = Engine(model, tokenizer)
    for request, tokens in engine.decode([Request(prompt, HeadMask.parse("L5H3")), Request(prompt)]):
        ...
    ```

    Args:
        model: a stock causal model of transformers.
        tokenizer: needed for stop texts.
        attention: the model's `find_attention`, where it is at hand.
        max_rows: answers decoded at once. Default: as many as memory holds, at most 192 (512 on a GPU).
        context: tokens that prompt and answer may have. Default: the model's `max_position_embeddings`.
        memory: bytes for keys, values and kept hidden states. Default: half of what is free.
        share: whether requests with one prompt share what is equal among them.
        follow: tokens of the leader's answer that a follower checks at a time; 0 shares the prompt only.
        refill: whether a waiting request enters as soon as a row is free; else a batch ends as a whole.
        drafts: at most so many tokens are proposed to a row by lookup; 0 for none.
        budget: tokens of a decoding step up to which drafts are proposed. Default: measured, as the number of
            tokens that take twice as long as one.
        deterministic: decide near-ties (two largest logits closer than 1e-3, or than 32 roundings of them in
            half precision; a draw as close to the next token's share) by running that answer alone, so that a
            result does not depend on what is decoded beside it. Each such token costs a pass over the whole
            answer. With top-k, top-p or min-p, whose cuts may fall either way, that is every token.
        progress: show a progress bar.

    Attributes:
        statistics: counts of what was done so far.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        attention: AttentionMap | None = None,
        max_rows: int | None = None,
        context: int | None = None,
        memory: int | None = None,
        share: bool = True,
        follow: int = 16,
        refill: bool = True,
        drafts: int = 8,
        budget: int | None = None,
        deterministic: bool = False,
        progress: bool = False,
    ) -> None:
        least = {"max_rows": 1, "context": 2, "memory": 1, "follow": 0, "drafts": 0, "budget": 0}
        for name, value in zip(least, (max_rows, context, memory, follow, drafts, budget), strict=True):
            if value is not None and value < least[name]:
                raise InputError(f"{name} must be at least {least[name]}, not {value}")
        refuse_in_use(model)
        self.model = model
        self.attention = attention or find_attention(model)
        self.stops = Stops(tokenizer, end_tokens(getattr(model, "generation_config", None)))
        self.statistics = Statistics()
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context = context or int(positions or 1 << 30)
        self.max_rows, self.memory = max_rows, memory
        self.share, self.follow, self.refill = share, follow if share else 0, refill
        self.drafts, self.budget = drafts, budget
        self.deterministic, self.progress = deterministic, progress

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
        """Answer the requests; each answer is yielded as soon as it is there, in any order.

        The model is the engine's until the iterator ends or is closed.

        Args:
            requests: in the order in which questions are wanted; equal prompts are decoded together.

        Yields:
            A request and the tokens of its answer, the end token included.

        Raises:
            InputError: a mask does not fit the model, a prompt leaves no room in the model's context, stop
                texts cannot be looked for, or not even one answer fits into memory.
        """
        for settings in {request.settings for request in requests}:
            self.stops.check(settings)
        for prompt in {request.prompt for request in requests}:
            if len(prompt) >= self.context:
                raise InputError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}")
        for mask in {request.mask for request in requests if request.mask}:
            mask.heads(self.attention)
        if not requests:
            return
        found = decode_plainly(self, requests) if self.unsupported else self._decode(requests)
        with tqdm(total=len(requests), unit="answer", disable=not self.progress, desc="decoding") as bar:
            try:
                for request, answer in found:
                    bar.update()
                    yield request, answer
            finally:
                found.close()

    def _decode(self, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
        longest = max(min(len(r.prompt) + r.settings.max_new_tokens, self.context) for r in requests)
        # on a GPU, where launches cost more than reading a few keys in vain, all slots are one block
        block = BLOCK if self.device.type == "cpu" else 1 << 30
        waiting, masks = questions(requests, self.attention, self.share)
        count, leaders = self._fitting(longest, waiting)
        slots = Slots(min(count, len(requests)), longest, block)
        with machine(self.model, self.attention, slots) as made:
            made.number(masks)
            run = Run(
                made,
                deque(waiting),
                self.stops,
                self.statistics,
                self.follow,
                self.refill,
                self.drafts,
                self._measured_budget if self.budget is None else self.budget,
                self.deterministic,
                leaders,
            )
            for row in run.answers():
                yield row.request, row.answer

    # ------------------------------------------------------------------ what the model and the machine allow

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @cached_property
    def unsupported(self) -> str | None:
        """Why this model falls back to `generate`; None if the engine runs it."""
        refuse_in_use(self.model)
        try:
            self._check_model()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model that works otherwise raises in our hands
            reason = first_line(error).removeprefix("UnsupportedError: ")
            logger.warning(
                "%s is decoded by plain generate, each row with its mask: %s", self.attention.model_type, reason
            )
            return reason
        return None

    def _check_model(self) -> None:
        """Compare the engine's logits with the model's own, on a few tokens in two rows.

        Raises:
            UnsupportedError: they differ, or the model is one that such a check cannot judge.
        """
        if len({parameter.device for parameter in self.model.parameters()}) > 1:
            raise UnsupportedError("its layers are on several devices")
        config = self.model.config.get_text_config()
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others:
            raise UnsupportedError(f"it has layers of type {', '.join(sorted(others))}")
        ropes = getattr(config, "rope_parameters", None) or {}
        for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
            if rope.get("rope_type") in ("dynamic", "longrope"):  # turns every row by the longest one's length
                raise UnsupportedError(f"its positions are scaled by the longest row ({rope['rope_type']})")
        tokens = [7 * i % config.vocab_size for i in range(12)]
        middle = frozenset({len(self.attention) // 2})
        with torch.inference_mode():
            expected = self.model(torch.tensor([tokens], device=self.device), use_cache=False).logits[0].float()
            with machine(self.model, self.attention, Slots(2, 12)) as made:
                made.number([None])

                def both(start: int, stop: int, skip: int = 0, *args: Any, **kwargs: Any) -> torch.Tensor:
                    batch = [New(slot, start, 0, tokens[start:stop], skip, **kwargs) for slot in (0, 1)]
                    logits, kept = made.forward(batch, *args)
                    hidden.append(kept)
                    return logits.unflatten(0, (2, -1)).float() - expected[start + skip : stop]

                hidden: list[Any] = []
                differences = [both(0, 8, keep=middle), both(8, 11, 2), both(11, 12)]
                (layer,) = middle
                again = torch.cat([kept[layer] for kept in hidden[0]])
                differences.append(both(0, 8, 5, layer, again))
        difference = max(float(part.abs().max()) for part in differences)
        share = 0.05 if next(self.model.parameters()).element_size() < 4 else 1e-3
        if not difference <= share * float(expected.abs().max()):  # not-a-number is a difference too
            raise UnsupportedError(f"its logits would differ by {difference:.2g}")

    def _fitting(self, length: int, waiting: Sequence[Question]) -> tuple[int, int]:
        """How many answers of `length` tokens memory holds, and of how many leaders what followers need.

        Of each leader a copy of its slot is kept, and what entered each layer at which a follower starts. There are as
        many rows as leave room for half of them to be leaders (or for one).

        Raises:
            InputError: not even one.
        """
        token = length * next(self.model.parameters()).element_size()
        slot = token * sum(layer.groups * (layer.query_dim + layer.head_dim) for layer in self.attention)
        entered = max(len({row.first for row in question.followers}) for question in waiting)
        width = self.model.config.get_text_config().hidden_size
        kept = slot + token * width * entered if entered else 0
        memory = self.memory or _free_memory(self.device) // 2
        fitting = max(int(memory / (slot + kept / 2)) // 2 * 2, int(memory >= slot + kept))
        if fitting < 1:
            raise InputError(f"one answer of {length} tokens needs {slot + kept} bytes, more than memory={memory}")
        count = min(self.max_rows or (512 if self.device.type == "cuda" else 192), fitting)
        return count, (memory - count * slot) // kept if kept else count

    @cached_property
    def _measured_budget(self) -> int:
        """The number of tokens that take a large projection twice as long as one token, up to 256."""
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
            one, tokens = seconds(1), 2
            while tokens <= 256 and seconds(tokens) < 2 * one:
                tokens *= 2
        return tokens // 2


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)
