"""lm-eval's `hf` beside the decoding engine: which of them answers, and what `hf` does not do by itself."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import torch
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lmeval_prune.architectures.precision import refuse_nan
from lmeval_prune.attributes import replaced
from lmeval_prune.decoding import Engine, Likelihood, LikelihoodRequest, SamplingParams
from lmeval_prune.decoding.fallback import MAX_CHECKED_WINDOW, Ended, is_tested, sliding_window
from lmeval_prune.decoding.memory import InsufficientMemoryError, available_memory
from lmeval_prune.decoding.request import Stopping, end_tokens, stop_strings
from lmeval_prune.decoding.sampling import RefuseNaN
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import HeadMask, Intervention, interventions_on
from lmeval_prune.interventions.applied import preserve_state
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import Ending, PendingRequests, answer_requests
from lmeval_prune.models.answering import PrunedLM, compute_in_parts

logger = logging.getLogger(__name__)
AUTO_MEMORY = 8 << 30  # most bytes of the engine under `engine=auto`
AUTO_MIN_REQUESTS = 16  # of a call under `engine=auto`: with 8, `hf` in one batch is as fast
AUTO_MIN_ROWS = 8  # rows that must fit in memory under `engine=auto` with `batch_size=auto`
AUTO_GROUP_SIZE = 8  # requests that are sampled together under batch_size=auto


class EngineHFLM(PrunedLM, HFLM):
    """lm-eval's `hf`, whose requests the decoding engine answers where `engine=` says so.

    `engine=batched` means all, `engine=generate` none. `engine=auto` means those with the texts of `hf` for which `hf`
    is not faster: greedy requests that leave the logits unchanged, in float32 or float64 on a CPU, of a model that the
    engine supports. Each reason is logged once.
    """

    engine: Engine | None = None  # None if it answers no request
    _asked: Sequence[Any] = ()  # arguments of the requests that `hf` answers
    _unpadded: Counter[tuple[int, ...]] = Counter()  # noqa: RUF012 - token sequences to score, if padding matters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.endings: deque[Ending] = deque()  # of texts that `hf` has generated and not reported yet
        super().__init__(*args, **kwargs)

    def applied(self) -> tuple[Intervention, ...]:
        return interventions_on(self.model)

    @property
    def group_size(self) -> int:
        """Return how many requests are sampled from one stream of random numbers: 1 for the engine, a batch for `hf`.

        An automatic batch size may differ in the next run, and the answers with it: `AUTO_GROUP_SIZE` replaces it.
        """
        if self.arguments.engine == "batched":
            return 1
        return self.batch_size if isinstance(self.batch_size, int) else min(AUTO_GROUP_SIZE, self.max_batch_size)

    def sampling_key(self, request: Any, repeat: int) -> list[Any]:
        """Return what determines the random numbers of a sampled answer; the engine's differ from `generate`'s."""
        engine = "batched" if self.arguments.engine == "batched" else "generate"  # `auto` samples by `generate`
        return [engine, *generation.sampling_key(self.seed, request, repeat)]

    # ------------------------------------------------------------------ the engine, or `hf`

    def choose_engine(self) -> None:
        options, size = self.arguments, self.batch_size
        is_auto = options.engine == "auto"
        self._logged: set[str] = set()
        self._reasons: dict[str, str | None] = {}  # by generation settings: why `hf` answers them
        self._reason = self._why_always_hf() if is_auto else None
        self.engine = None
        if self._reason or options.engine == "generate":
            return
        if self.backend != "causal":
            raise InputError("engine=batched is for causal models only; leave engine out for an encoder-decoder")
        self.engine = Engine(
            self.model,
            self.tokenizer,
            model_map=self.model_map,
            # lm-eval's default is 1
            max_rows=options.engine_rows or (size if is_auto and isinstance(size, int) and size > 1 else None),
            context=self.max_length,
            deterministic=bool(options.deterministic),
        )
        self.engine.stopping.think_end = self.think_end_token
        if is_auto:  # fewer rows would be slower than `hf`
            self.engine.min_rows = size if isinstance(size, int) else AUTO_MIN_ROWS

    def by_engine(self, requests: Sequence[Any]) -> list[int]:
        if self.arguments.engine != "auto":
            return list(range(len(requests))) if self.engine else []
        if len(requests) < AUTO_MIN_REQUESTS:
            self._log(f"lm-eval's hf answers fewer than {AUTO_MIN_REQUESTS} requests: the engine is not proven faster")
            return []
        chosen = []
        for index, request in enumerate(requests):
            if reason := self._why_hf(*request.args):
                self._log(f"lm-eval's hf answers requests of task {request.task_name}: {reason}", reason)
            else:
                chosen.append(index)
        if chosen and self.engine:
            self.engine.memory = min(AUTO_MEMORY, available_memory(self.engine.device))
            self._log("the decoding engine answers greedy requests: it supports the model in this dtype on a CPU")
        return chosen

    def _log(self, decision: str, reason: str = "") -> None:
        if (reason or decision) not in self._logged:
            self._logged.add(reason or decision)
            if self.rank == 0:
                logger.info("engine=%s: %s", self.arguments.engine, decision)

    def _why_always_hf(self) -> str | None:
        """Return why `hf` answers all requests under `engine=auto`, whatever the interventions."""
        if self.backend != "causal":
            return "the model is an encoder-decoder"
        for name in ("mixed_precision_dtype", "tp_plan"):
            if self.arguments.others.get(name):
                return f"the engine does not support {name}"
        parameters = list(self.model.parameters())
        is_precise = {parameter.dtype for parameter in parameters} <= {torch.float32, torch.float64}
        is_here = {parameter.device.type for parameter in parameters} == {"cpu"}
        if not (is_precise and is_here) or getattr(self.model, "is_quantized", False):
            return "the engine is not proven faster except on a CPU in float32 or float64"
        try:
            self.model_map  # noqa: B018
        except InputError as error:  # of a family that is not mapped
            return error.problem
        return None

    def _why_hf(self, context: str, settings: dict[str, Any]) -> str | None:
        """Return why `hf` answers a request under `engine=auto`; None if the engine does."""
        if self._reason or not context:
            return self._reason or "its prompt is empty"
        assert self.engine
        window = sliding_window(self.engine.model_map)
        if window > MAX_CHECKED_WINDOW and not is_tested(self.engine.model_map):
            return f"the model's family is not tested, and its sliding window of {window} tokens is too large to check"
        if self.engine.unsupported:
            return self.engine.unsupported
        if generation.is_sampling(settings):
            return "they are sampled, and the engine would draw other random numbers"
        key = repr(settings)
        if key not in self._reasons:
            try:
                params, _ = generation.engine_settings(self, settings)
                self._reasons[key] = None if params.takes_argmax else "their settings change logits"
            except InputError as error:
                self._reasons[key] = error.problem
        return self._reasons[key]

    def _scores_by_engine(self) -> bool:
        """Return whether the engine computes log-likelihoods; log once why it does not."""
        if self.engine is None or self.arguments.engine != "batched":
            return False
        if self.engine.unscored:
            self._log(f"lm-eval's hf computes the log-likelihoods: {self.engine.unscored}")
        return self.engine.unscored is None

    def compute(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Answer by the engine or by `hf`: texts as `by_engine` decides for each request."""
        if pending.kind != "generate_until":
            compute = self._compute_by_engine if self._scores_by_engine() else self._compute_by_hf
            return compute(pending, disable_tqdm)
        texts: dict[int, str] = {}
        if indices := self.by_engine(pending.requests):
            part = pending.part(indices)
            masks = [self.masks[name] for name in map(self.attempt, part.requests, part.repeats)]
            try:
                texts = dict(zip(indices, self._compute_by_engine(part, disable_tqdm, masks), strict=True))
            except InsufficientMemoryError as error:
                if self.arguments.engine != "auto":
                    raise
                self._log(f"lm-eval's hf answers greedy requests: {error}")
        others = [index for index in range(len(pending.requests)) if index not in texts]
        if self.any_rank(bool(others)):  # `hf` synchronises the ranks, so all run it
            others = others or [0]
            texts = dict(zip(others, self._compute_by_hf(pending.part(others), disable_tqdm), strict=True)) | texts
        return [texts[index] for index in range(len(pending.requests))]

    def answer_ahead(
        self, kind: str, requests: Sequence[Any], masks: Sequence[HeadMask | None], disable_tqdm: bool = False
    ) -> None:
        """Answer requests under each of several masks in one run of the engine, and store the answers.

        A later request with one of the masks applied is answered from the store. Each mask is combined with the
        model's interventions; None adds no mask. Log-likelihoods that the engine does not compute are left to the
        later requests.
        """
        count = len(masks)
        assert self.store and self.engine and not self.router
        if kind != "generate_until" and not self._scores_by_engine():
            return
        parts = self.key_parts(kind, dict(enumerate(masks)))

        def run(pending: PendingRequests) -> list[Any]:
            row_masks, repeats = zip(*((masks[i % count], i // count) for i in pending.repeats), strict=True)
            pending = PendingRequests(kind, pending.add, pending.requests, pending.keys, repeats)
            return self._compute_by_engine(pending, disable_tqdm, row_masks)

        repeated = [request for request in requests for _ in masks]
        answer_requests(self.store, repeated, kind, lambda request, i: parts(request, i // count, i % count), run)

    def _compute_by_engine(
        self, pending: PendingRequests, disable_tqdm: bool, masks: Sequence[HeadMask | None] | None = None
    ) -> list[Any]:
        engine, kind, requests = self.engine, pending.kind, pending.requests
        assert engine

        def done(index: int, response: Any, **columns: Any) -> None:
            pending.add(pending.keys[index], response, **columns)
            self.cache_hook.add_partial(kind, requests[index].args, response)

        if kind == "generate_until":

            def decoded(index: int, text: str, tokens: list[int], ending: Ending) -> None:
                done(index, text, tokens=tokens, **ending._asdict())

            engine.progress = not disable_tqdm and self.rank == 0
            settings = pending.repeats, decoded, self.seed, masks, bool(self.router)
            return generation.generate_until(self, engine, requests, *settings)

        windows = generation.token_windows(self, kind, requests, disable_tqdm)
        results: list[list[Likelihood | None]] = [[None] * len(windows[id(request)]) for request in requests]
        responses: list[Any] = [None] * len(requests)
        bar = tqdm(total=len(requests), desc=f"Running {kind} requests", disable=disable_tqdm or self.rank > 0)

        def finish(index: int) -> None:
            pairs = [(float(result.logprobs.sum()), result.is_greedy) for result in results[index] if result]
            total = float(sum(value for value, _ in pairs))
            responses[index] = pairs[0] if kind == "loglikelihood" else total
            done(index, responses[index])
            bar.update()

        tokens = []
        for index, request in enumerate(requests):
            mask = masks[index] if masks else None
            tokens += [LikelihoodRequest(*window, mask, (index, i)) for i, window in enumerate(windows[id(request)])]
            if not windows[id(request)]:  # an empty text
                finish(index)
        with bar, closing(engine.score(tokens, self.softmax_dtype)) as scores:  # frees the model if `done` fails
            for window_request, likelihood in scores:
                index, window = window_request.tag
                results[index][window] = likelihood
                if None not in results[index]:
                    finish(index)
        return responses

    def _compute_by_hf(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        """Answer by lm-eval's `hf`; with a store in parts, so that answers are stored soon and sampled by own seeds."""
        kind, requests, grouped, size = pending.kind, pending.requests, [], len(pending.requests)
        if self.store and kind == "generate_until":
            grouped = [i for i, request in enumerate(requests) if generation.is_sampling(request.args[1])]
        if self.store and kind == "loglikelihood_rolling" and self.world_size == 1 and isinstance(self.batch_size, int):
            size = 4 * self.batch_size  # lm-eval reports rolling requests only at the end of a call
        self.endings.clear()

        def compute(chosen: list[Any], is_group: bool) -> list[Any]:
            changed = {"batch_size_per_gpu": self.group_size} if is_group else {}
            with replaced(self, _asked=[request.args for request in chosen], **changed):
                return list(getattr(HFLM, kind)(self, chosen, disable_tqdm=disable_tqdm or is_group))

        def report(attr: str, req: Iterable[Any], res: Any) -> None:
            ending = self.endings.popleft() if attr == "generate_until" and self.endings else None
            pending.answered(attr, req, res, **(ending._asdict() if ending else {}))

        # lm-eval divides the requests by it
        schedule = min(self.batch_schedule, len(requests)) if self.store else self.batch_schedule
        silent = disable_tqdm or self.rank > 0
        with replaced(self, batch_schedule=schedule):
            return compute_in_parts(self, pending, compute, size, grouped, self.group_size, self.seed, report, silent)

    # ------------------------------------------------------------------ what `hf` generates

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> torch.Tensor:
        """Generate as `hf` does, but up to the task's limit of tokens, and record the ending of each row."""
        settings["max_new_tokens"] = None  # transformers prefers that of the model's generation config to `max_length`
        if not context.shape[1]:
            raise InputError("a prompt is empty, and the tokenizer adds no token to it; leave such documents out")
        settings["return_dict_in_generate"] = False
        start = context.shape[1] if self.backend == "causal" else 1
        config = GenerationConfig(
            eos_token_id=settings.get("eos_token_id"),
            stop_strings=settings.get("stop_strings") or getattr(self.model.generation_config, "stop_strings", None),
        )
        ends = None if config.eos_token_id is None else end_tokens(config)
        stop = [*filter(None, stop), *stop_strings(config)]
        settings["stop_strings"] = None  # which `generate` would end a thought by, too
        params = SamplingParams(max_new_tokens=1 << 30, eos=ends, stop=tuple(stop))
        settings["logits_processor"] = LogitsProcessorList([*(settings.get("logits_processor") or ()), RefuseNaN()])
        thoughts: dict[str, Any] = {}
        if self.think_end_token is not None:  # `hf` ends them by stop strings
            criteria = StoppingCriteriaList([Ended(self._stopping, start, params)])
            thoughts["stop_sequences_criteria"] = lambda *_: criteria
        with replaced(huggingface, **thoughts):
            rows: torch.Tensor = super()._model_generate(context, max_length, stop, **settings)
        for row in rows:
            self.endings.append(self._ending(row[start:].tolist(), params))
            row[start + self.endings[-1].length :] = self.tokenizer.pad_token_id  # what it generated for longer rows
        return rows

    def _ending(self, tokens: list[int], params: SamplingParams) -> Ending:
        """Return the ending of an answer that padding, or tokens until the end of a longer row, may follow."""
        ends = self._stopping.ends(params)
        last = next((count for count, token in enumerate(tokens, 1) if token in ends), 0)
        text = self.tokenizer.decode(tokens[: last or None])
        if any(stop in text for stop in params.stop):
            stopped = (n for n in range(1, len(tokens) + 1) if self._stopping.stopped(tokens[:n], params))
            last = next(stopped, last)
        return Ending(last or len(tokens), not last)

    @cached_property
    def _stopping(self) -> Stopping:
        ends = end_tokens(getattr(self.model, "generation_config", None))
        return Stopping(self.tokenizer, ends, self.think_end_token)

    # ------------------------------------------------------------------ padding

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Score as `hf` does, with a padding mask for interventions that read several tokens: `hf` passes none."""
        unpadded: Counter[tuple[int, ...]] = Counter()
        if any(not intervention.tokenwise for intervention in self.applied()):
            texts = [(*context, *continuation[:-1]) for _, context, continuation in requests]
            texts = list(set(texts)) if self.logits_cache else texts
            unpadded.update(text[-self.max_length :] for text in texts)
        with replaced(self, _unpadded=unpadded):
            scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **kwargs)
        return scores

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Probe as `hf` does, but no more rows than requests, and none longer than the longest request."""
        if not requests:  # of generation, or whole texts, which `hf` divides into windows
            counts = [len(self.tok_encode(arguments[0])) for arguments in self._asked]
            limits = [generation.answer_limit(rest[0], self.max_gen_toks) for _, *rest in self._asked if rest]
            limit = max(limits, default=0)
            rows = len(counts) if limit else sum(-(-count // self.max_length) for count in counts)
            requests = [(None, [0] * (max(counts, default=0) + limit), [0])] * rows
        rows = min(self.max_batch_size, len(requests))
        with preserve_state(self.model), replaced(self, max_batch_size=rows):
            return int(super()._detect_batch_size(requests, pos))

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = self._padding_mask(inps) if self._unpadded and not (args or kwargs) else None
        if mask is None or mask.all():
            logits: torch.Tensor = super()._model_call(inps, *args, **kwargs)
        else:
            dtype = self.mixed_precision_dtype
            with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                logits = self.model(inps, attention_mask=mask).logits
        refuse_nan(logits[..., 0])
        return logits

    def _padding_mask(self, inps: torch.Tensor) -> torch.Tensor:
        """Return the attention mask of a batch, shape (rows, tokens): `hf` pads with token 0, longest texts first."""
        mask = torch.ones_like(inps)
        for row, tokens in enumerate(inps.tolist()):
            shortest = max((index for index, token in enumerate(tokens) if token), default=-1) + 1
            lengths = [n for n in range(len(tokens), shortest - 1, -1) if tuple(tokens[:n]) in self._unpadded]
            length = next((n for n in lengths if self._unpadded[tuple(tokens[:n])] > 0), len(tokens))
            self._unpadded[tuple(tokens[:length])] -= 1
            mask[row, length:] = 0
        return mask
