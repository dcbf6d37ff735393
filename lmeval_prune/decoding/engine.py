"""The decoding engine: many answers at once, each under its own head mask.

`Engine` checks the requests and sizes the cache, `scheduler.py` has the decoding loop, `model_runner.py` runs the
model, `kv_cache.py` stores keys and values and computes attention, and `sampling.py` chooses tokens. `likelihood.py`
computes log-probabilities of given texts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from tqdm import tqdm

from lmeval_prune.architectures import ModelMap, input_device, map_model
from lmeval_prune.architectures.precision import with_exact_products
from lmeval_prune.decoding.fallback import decoding_differences, generate, likelihood_differences, why_failing
from lmeval_prune.decoding.groups import PromptGroup, prompt_groups, share_prefixes
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.likelihood import ComparisonRun, Likelihood, LikelihoodRequest, LikelihoodRun, Reduce
from lmeval_prune.decoding.memory import InsufficientMemoryError, available_memory
from lmeval_prune.decoding.model_runner import ModelRunner, Statistics, refuse_locked
from lmeval_prune.decoding.request import Request, SamplingParams, Stopping, end_tokens
from lmeval_prune.decoding.sampling import Sampler
from lmeval_prune.decoding.scheduler import Schedule, Scheduler
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import interventions_on

logger = logging.getLogger(__name__)
BLOCK = 16  # slots whose attention is computed together on a CPU
FALLBACK_ROWS = 16  # batch size of `generate`


class Engine:
    """Decode requests with different head masks in one batch.

    ```python
    engine = Engine(model, tokenizer)
    for request, tokens in engine.decode([Request(prompt, HeadMask("L5H3")), Request(prompt)]):
        ...
    ```

    Args:
        model: a stock causal model of transformers.
        tokenizer: needed for stop strings.
        model_map: the model's `map_model`, to save the time of computing it.
        max_rows: answers decoded at once. Default: as many as fit in memory, at most 192 (512 on a GPU).
        context: largest number of tokens of prompt and answer. Default: the model's `max_position_embeddings`.
        memory: bytes for keys, values, states of methods, and kept hidden states. Default: half of the free memory,
            three quarters on a GPU.
        schedule: switches for the engine's optimisations. There are no common prefixes if an intervention depends on
            earlier tokens.
        deterministic: decide near-ties in a batch of one, so that no answer depends on the others. A near-tie is two
            largest logits closer than 1e-3, or than 32 roundings of them in half precision, or a random draw as close
            to another token. Each costs a pass over the whole answer. Products of float32 are exact then.
        progress: show a progress bar.

    Attributes:
        statistics: counters of all runs so far.
        min_rows: answers (or all, if fewer) for which memory must suffice at once.
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
        refuse_locked(model)
        self.model = model
        self.model_map = model_map or map_model(model)
        self.stopping = Stopping(tokenizer, end_tokens(getattr(model, "generation_config", None)))
        self.statistics = Statistics()
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context = context or int(positions or 1 << 30)
        self.max_rows, self.memory, self.schedule = max_rows, memory, schedule or Schedule()
        self.deterministic, self.progress, self.min_rows = deterministic, progress, 1
        self._reasons: dict[Any, str | None] = {}  # results of checks, by check and interventions
        self._logged: set[str | None] = set()  # reasons for which the engine fell back

    def decode(self, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
        """Decode requests; yield each answer as soon as it is complete, in any order.

        Nothing else may use the model until the iterator ends or is closed.

        Args:
            requests: in order of priority; equal prompts are decoded together.

        Yields:
            A request and the tokens of its answer, including the EOS token.
        """
        for prompt in {request.prompt for request in requests}:
            if len(prompt) >= self.context:
                raise InputError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}")
        self._check_masks(requests)
        if not requests:
            return
        answers = self._fall_back(requests) if self.unsupported else self._decode(requests)
        if self.deterministic:
            answers = with_exact_products(answers)
        bar = tqdm(total=len(requests), desc="decoding", unit="answer", disable=not self.progress)
        with bar, closing(answers):
            for answered in answers:
                bar.update()
                yield answered

    def score(
        self, requests: Sequence[LikelihoodRequest], dtype: torch.dtype | None = None
    ) -> Generator[tuple[LikelihoodRequest, Likelihood]]:
        """Compute log-probabilities of continuations; yield each result as soon as it is complete, in any order.

        Tokens that several requests begin with are run once. Nothing else may use the model until the iterator ends or
        is closed.

        Args:
            requests: in any order.
            dtype: of the log-softmax; None: the logits' own.

        Yields:
            A request and its result.
        """
        run = LikelihoodRun(self.model_map, requests, self._memory, self.statistics, dtype)
        return self._scored(requests, run)

    def compare(
        self, requests: Sequence[LikelihoodRequest], reduce: Reduce
    ) -> Generator[tuple[LikelihoodRequest, torch.Tensor]]:
        """Reduce the logits before each token of continuations, of the unpruned model and under masks, side by side.

        Each mask, and the unpruned model, runs all texts. Vocabulary-sized tensors exist for a chunk of tokens only.
        Nothing else may use the model until the iterator ends or is closed.

        Args:
            requests: in any order, each with a mask.
            reduce: called with the tokens of a chunk and with the logits before them, see `likelihood.Reduce`.

        Yields:
            A request and its reduced logits, (tokens of the continuation, columns), on the CPU.
        """
        run = ComparisonRun(self.model_map, requests, self._memory, self.statistics, reduce=reduce)
        return self._scored(requests, run)

    def _scored(self, requests: Sequence[LikelihoodRequest], run: LikelihoodRun) -> Generator[Any]:
        self._check_masks(requests)
        longest = max((len(request.context) + len(request.continuation) - 1 for request in requests), default=0)
        if longest > self.context:
            raise InputError(f"a text of {longest} tokens does not fit in a context of {self.context}")
        if not requests:
            return
        if reason := self.unscored:
            raise InputError(f"the engine computes no log-likelihoods of this model: {reason}")
        for scored in run.results():
            self.statistics.scored += 1
            yield scored

    def _check_masks(self, requests: Sequence[Request] | Sequence[LikelihoodRequest]) -> None:
        # by identity: equal masks may differ in `allow_empty_layer`
        for mask in {id(request.mask): request.mask for request in requests if request.mask}.values():
            mask.fit_to(self.model_map)

    def _decode(self, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
        block = BLOCK if self.device.type == "cpu" else None  # on a GPU, launches cost more than reading unused keys
        schedule, layers = self.schedule, len(self.model_map.attention)
        sizes = self._token_bytes // layers, self._input_bytes
        can_share = schedule.share and all(intervention.tokenwise for intervention in interventions_on(self.model))
        for least in (schedule.prefix if can_share else 0, 0):
            groups, masks = prompt_groups(requests, self.model_map, schedule.share, self.context)
            prefixes = 0
            if least:  # in at most half of the memory
                prefixes = share_prefixes(groups, layers, least, schedule.copied_prefix, sizes, self._memory // 2)
            longest = max(group.longest for group in groups)
            try:
                rows, leaders = self._capacity(longest, groups, prefixes)
                break
            except InsufficientMemoryError:
                if not prefixes:
                    raise
        cache = KVCache(min(rows, len(requests)), longest, block)
        with ExitStack() as stack:
            runner = ModelRunner(self.model_map, cache, masks, self.statistics, stack)
            sampler = Sampler(self.model, self.stopping)
            scheduler = Scheduler(runner, deque(groups), sampler, self.deterministic, leaders)
            for sequence in scheduler.answers():
                yield sequence.request, sequence.answer

    def _fall_back(self, requests: Sequence[Request]) -> Generator[tuple[Request, list[int]]]:
        if self.unsupported not in self._logged:
            self._logged.add(self.unsupported)
            name = self.model_map.model_type or "the model"
            logger.warning("%s is decoded by plain generate, each row with its mask: %s", name, self.unsupported)
        rows = 1 if self.deterministic else min(FALLBACK_ROWS, self.max_rows or FALLBACK_ROWS)
        for request, answer in generate(self.model_map, requests, self.stopping, self.context, rows):
            self.statistics.answers += 1
            yield request, answer

    # ------------------------------------------------------------------ limits of the model and the machine

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    @property
    def unsupported(self) -> str | None:
        """The reason why this model with its interventions falls back to `generate`; None if the engine runs it."""
        return self._checked(decoding_differences)

    @property
    def unscored(self) -> str | None:
        """The reason why `score` refuses this model with its interventions; None if it does not."""
        for intervention in interventions_on(self.model):
            if not intervention.tokenwise:
                return f"the effect of {type(intervention).__name__} on a token depends on other tokens"
        return self.unsupported or self._checked(likelihood_differences)

    def _checked(self, differences: Callable[[ModelMap], tuple[list[float], float]]) -> str | None:
        """Return why the model with its interventions fails a check, which runs once; None if it does not."""
        key = differences, interventions_on(self.model)
        if key not in self._reasons:
            self._reasons[key] = why_failing(differences, self.model_map)
        return self._reasons[key]

    def _capacity(self, length: int, waiting: Sequence[PromptGroup], prefixes: int) -> tuple[int, int]:
        """Return how many rows of `length` tokens fit in memory, and how many of them may be leaders with followers.

        A slot has keys, values, and states of methods. For a leader, memory also holds a copy of its slot with the
        prompt, and there the inputs of each layer at which a follower starts. Half of the rows (at least one) can be
        leaders. Near-ties that are decided alone need one more slot, and `prefixes` bytes are not free.
        """

        def stored(tokens: int) -> int:
            states = (method.slot_bytes(self.model_map, tokens) for method in interventions_on(self.model))
            return tokens * self._token_bytes + sum(states)

        slot, prompt = stored(length), max(len(group.leader.request.prompt) for group in waiting)
        first_layers = max(len({sequence.first_layer for sequence in group.followers}) for group in waiting)
        leader_bytes = stored(prompt) + prompt * self._input_bytes * first_layers if first_layers else 0
        extra = self.deterministic * slot + prefixes
        memory = self._memory - extra
        fitting = max(int(memory / (slot + leader_bytes / 2)) // 2 * 2, int(memory >= slot + leader_bytes))
        fewest = min(self.min_rows, sum(1 + len(group.followers) for group in waiting))
        if fitting < fewest:
            needed = fewest * (slot + leader_bytes) + extra
            raise InsufficientMemoryError(
                f"a batch of {fewest} with {length} tokens each needs {needed} bytes, more than memory={memory + extra}"
            )
        count = min(self.max_rows or (512 if self.device.type == "cuda" else 192), fitting)
        return count, (memory - count * slot) // leader_bytes if leader_bytes else count

    @property
    def _memory(self) -> int:
        return self.memory or available_memory(self.device)

    @property
    def _input_bytes(self) -> int:
        width = self.model.config.get_text_config().hidden_size
        return int(self.model.get_input_embeddings().weight.dtype.itemsize * width)

    @property
    def _token_bytes(self) -> int:
        size = int(self.model.get_input_embeddings().weight.dtype.itemsize)
        return size * sum(layer.kv_heads * (layer.key_dim + layer.head_dim) for layer in self.model_map.attention)


def engine_rate(model: Any, ids: torch.Tensor, new: int, clock: str) -> float | None:
    """Return tokens per second of greedy answers of fixed length to prompts, (batch, tokens).

    None if `generate` would answer.
    """
    engine = Engine(model, max_rows=len(ids))
    if engine.unsupported:  # checked before the clock starts
        return None
    requests = [Request(tuple(row), None, SamplingParams(new, eos=())) for row in ids.tolist()]
    read_clock = time.perf_counter if clock == "wall" else time.process_time
    begin = read_clock()
    tokens = sum(len(answer) for _, answer in engine.decode(requests))
    return tokens / (read_clock() - begin)
