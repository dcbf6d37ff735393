"""`--model pruned-hf`: lm-eval's `hf` with interventions, an answer store, and beside it the decoding engine."""

from __future__ import annotations

import atexit
import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from torch import distributed
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lmeval_prune.architectures import ModelMap, adapters_of, loadable_fingerprints, map_model, weights_fingerprint
from lmeval_prune.architectures.precision import refuse_nan
from lmeval_prune.artefacts import digest
from lmeval_prune.attributes import replaced
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import (
    as_input_error,
    check_language_model,
    checkpoint_class,
    checkpoint_columns,
    has_pruned_layers,
    load_weights,
    manifest_of,
    removal_summary,
    skeleton,
    valid_manifest,
    with_padded_rows,
)
from lmeval_prune.checkpoints.modeling_pruned import without_warnings_of_layers
from lmeval_prune.config import resolve_device
from lmeval_prune.decoding import Engine, Likelihood, LikelihoodRequest, SamplingParams
from lmeval_prune.decoding.fallback import MAX_CHECKED_WINDOW, Ended, is_tested, sliding_window
from lmeval_prune.decoding.memory import InsufficientMemoryError, available_memory
from lmeval_prune.decoding.request import Stopping, end_tokens, stop_strings
from lmeval_prune.decoding.sampling import RefuseNaN
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.interventions import METHODS, HeadMask, Intervention, interventions_on
from lmeval_prune.interventions.applied import preserve_state
from lmeval_prune.models import generation
from lmeval_prune.models.answer_store import AnswerStore, Ending, PendingRequests, answer_requests
from lmeval_prune.models.answering import PrunedLM, compute_in_parts, log_interventions, use_lm_eval_logging
from lmeval_prune.models.arguments import Arguments, hf_arguments
from lmeval_prune.models.identity import identity_of, interventions_report, remote_code, tokenizer_fingerprint
from lmeval_prune.profiling.costs import cost_columns

eval_logger = logging.getLogger(__name__)
METHODS.reserve({"self", "kwargs", *hf_arguments()})
AUTO_MEMORY = 8 << 30  # most bytes of the engine under `engine=auto`
AUTO_MIN_REQUESTS = 16  # of a call under `engine=auto`: with 8, `hf` in one batch is as fast
AUTO_MIN_ROWS = 8  # rows that must fit in memory under `engine=auto` with `batch_size=auto`
AUTO_GROUP_SIZE = 8  # requests that are sampled together under batch_size=auto


class PrunedHFLM(PrunedLM, HFLM):
    """lm-eval's `hf` with interventions and stored answers; accepts all arguments of `hf`.

    `engine=batched` means that the decoding engine answers all requests, `engine=generate` none, `engine=auto` those
    with the texts of `hf` for which `hf` is not faster: greedy requests that leave the logits unchanged, in float32 or
    float64 on a CPU, of a model that the engine supports. Each reason is logged once.

    Args:
        pretrained: as for `hf`, or the name of an embedded model (`lmeval-prune models`), or parsed `Arguments`.
        arguments: arguments of `hf`; methods by name, e.g. `heads=L5H3+L15H0`, with the value of the method's first
            field or a dictionary of its fields; and the fields of `Arguments`, e.g. `mask=FILE`, `responses=FOLDER`.

    Attributes:
        fixed_seed: seed of sampled answers in place of torch's.
    """

    why_no_cache = "--use_cache does not know masks: use responses=FOLDER among the model_args"
    fixed_seed: int | None = None
    engine: Engine | None = None  # None if it answers no request
    _asked: Sequence[Any] = ()  # arguments of the requests that `hf` answers
    _unpadded: Counter[tuple[int, ...]] = Counter()  # noqa: RUF012 - token sequences to score, if padding matters

    @print_input_errors
    def __init__(self, pretrained: Any = None, **arguments: Any) -> None:
        use_lm_eval_logging()
        self.endings: deque[Ending] = deque()  # of texts that `hf` has generated and not reported yet
        parsed = isinstance(pretrained, Arguments)
        self.arguments = pretrained if parsed else Arguments.of({"pretrained": pretrained, **arguments})
        own, others = self.arguments, dict(self.arguments.others)
        model, interventions = own.pretrained, own.interventions
        if isinstance(model, torch.nn.Module):
            own.refuse_misspelt(None)
            self.manifest = manifest_of(model)
            interventions = (*interventions_on(model), *interventions)
        else:
            if others.get("device") is not None:
                resolve_device(others["device"])
            model = embedded.resolve(str(model))
            embedded.check_name(model)
            self.manifest = valid_manifest(Path(model, others.get("subfolder") or ""))
        if own.responses and any(intervention.needs_order for intervention in interventions):
            raise InputError("answers that depend on their order (state=run) cannot be stored; leave out responses")
        if others.get("device") is None and not torch.cuda.is_available():
            others["device"] = "mps" if torch.backends.mps.is_available() else "cpu"
        try:
            with as_input_error(f"the model {getattr(model, 'name_or_path', model)} cannot be loaded"):
                super().__init__(model, **others)
            accelerator = getattr(self, "accelerator", None)
            if accelerator is not None and accelerator.num_processes > 1 and self.device.type == "cpu":
                # `hf` leaves each process at rank 0 with all requests
                self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
                # ends gloo's threads: a process that exits while they run may abort, and its launcher kills the others
                atexit.register(lambda: distributed.is_initialized() and distributed.destroy_process_group())
            if self.manifest:
                eval_logger.info("checkpoint: %s", removal_summary(self.manifest))
            self._prepare()
        except BaseException:
            super().close()
            raise

    @property
    def seed(self) -> int:
        """Seed of sampled answers: torch's, which lm-eval sets at the beginning of an evaluation."""
        return torch.initial_seed() if self.fixed_seed is None else self.fixed_seed

    def _prepare(self) -> None:
        with self._apply() as stack:  # undoes the interventions if the rest fails
            self.choose_engine()
            self.begin_answering()
            log_interventions(self, self.model)
            self._applied = stack.pop_all()

    def _apply(self) -> ExitStack:
        """Apply interventions to the model; closing the returned stack undoes them."""
        with ExitStack() as stack:
            for intervention in self.arguments.interventions:
                stack.enter_context(intervention.applied_to(self.model, self.model_map, any_thread=True))
            return stack.pop_all()

    def close(self) -> None:
        self._applied.close()
        super().close()

    @print_input_errors
    def reconfigure(self, parsed: Arguments | None = None, **arguments: Any) -> None:
        """Change the arguments of this package and keep the loaded weights.

        Args:
            parsed, arguments: as for the constructor, without `pretrained`; arguments of `hf` must not change.
        """
        parsed = parsed or Arguments.of(arguments)
        if parsed.others != self.arguments.others or parsed.description != self.arguments.description:
            raise InputError("the model was loaded with other arguments of hf; load it again")
        self._applied.close()
        if self.store and parsed.responses != self.arguments.responses:
            self.store.close()
            self.store = None
        self.arguments = parsed
        self._prepare()

    # ------------------------------------------------------------------ loading

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        with as_input_error(f"cannot read the model {pretrained}"), without_warnings_of_layers():
            super()._get_config(pretrained, **kwargs)

    def _create_model(self, *args: Any, gguf_file: str | None = None, **kwargs: Any) -> None:
        self.arguments.refuse_misspelt(self.config)
        own, bare = self.arguments, None
        with suppress(Exception):  # some models cannot be built without weights; the loaded model is checked later
            bare = skeleton(self.config, self.AUTO_MODEL_CLASS, bool(kwargs.get("trust_remote_code")))
        if bare is not None:  # before minutes of loading
            check_language_model(self.config, bare)
            router = None if own.router is None or own.router.needs_weights else own.router
            model_map: Any = map_model(bare, **own.description) if own.interventions or router else None
            for intervention in own.interventions:
                intervention.fit_to(model_map)
            if router:
                router.fit_to(model_map, None, [])
        if self.arguments.responses:
            self.store = AnswerStore(self.arguments.responses, self.store_rank)
        if gguf_file:
            from transformers import GgufConfig

            kwargs["quantization_config"] = GgufConfig(dequantize=True)
        # checkpoints with layers of different sizes are loaded by this package, not by code in their folder
        kind = checkpoint_class(self.config) if has_pruned_layers(self.config) else self.AUTO_MODEL_CLASS
        name = args[0] if args else kwargs["pretrained"]
        peft, revision = kwargs.get("peft"), kwargs.get("revision")
        with (
            replaced(self, AUTO_MODEL_CLASS=SimpleNamespace(from_pretrained=partial(load_weights, kind))),
            as_input_error(f"the model {name} cannot be loaded"),
            with_padded_rows(peft, revision=revision) if peft else nullcontext(),
        ):
            super()._create_model(*args, gguf_file=gguf_file, **kwargs)

    # ------------------------------------------------------------------ identity

    @property
    def store_rank(self) -> int | None:
        """Return the number of this process in an answer store; see `AnswerStore`."""
        accelerator = getattr(self, "accelerator", None)
        if accelerator is None:
            return 0
        return int(accelerator.process_index if self.device.type == "cpu" else accelerator.local_process_index)

    @cached_property
    def model_map(self) -> ModelMap:  # type: ignore[override]
        return map_model(self.model, **self.arguments.description)

    @property
    def weights(self) -> str | None:
        """Return the weights' fingerprint, a new one after training; None if offloaded weights cannot be read."""
        try:
            return self.model_map.weights
        except InputError:  # of a family that is not mapped
            return weights_fingerprint(self.model)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def identity(self) -> dict[str, Any]:
        """Return what answers depend on of the model, without interventions; `InputError` if that cannot be known."""
        if self.weights is None:
            raise InputError(
                "the weights are offloaded and cannot be identified, as stored answers require; leave out responses"
            )
        model, adapters = self.model, adapters_of(self.model)
        generation = model.generation_config.to_dict() if getattr(model, "generation_config", None) else {}
        dtype, arguments = str(model.dtype).removeprefix("torch."), self.arguments.others
        return identity_of(
            *(self.config, self.tokenizer, self.tokenizer_fingerprint, generation, dtype, arguments),
            weights=self.weights,
            adapters=digest(adapters) if adapters else None,  # of PEFT
            code=remote_code([*model.modules(), self.config, self.tokenizer]),
        )

    @property
    def outcome_identity(self) -> dict[str, Any]:
        """Return the properties that outcomes depend on besides `identity`."""
        assert self.engine is not None
        _, *rounded = loadable_fingerprints(self.model, self.weights)
        return {"deterministic": self.engine.deterministic, "rounded": rounded}

    # ------------------------------------------------------------------ requests and reports

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        if kind == "generate_until" and not self.arguments.router:  # which sets the temperature of each try
            for request in requests:
                generation.check_settings(request.args[1])
                if self.backend == "causal":
                    generation.prompt_room(self, generation.answer_limit(request.args[1], self.max_gen_toks))

    def get_model_info(self) -> dict[str, Any]:
        return {**super().get_model_info(), "pruning": self.pruning_info()}

    def pruning_info(self) -> dict[str, Any]:
        """Report the interventions and their realised figures for the results file."""
        info = interventions_report(self, self.model, self.weights)
        if self.router:
            info["router"] = self.router.info
        if self.lengths:
            info["answers"] = self.lengths
        if self.manifest:
            info["checkpoint"] = {**checkpoint_columns(self.manifest), **cost_columns(self.model)}
        return info

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
                eval_logger.info("engine=%s: %s", self.arguments.engine, decision)

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
                self.engine.stopping.check(params)
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
            return self._compute_by_engine(replace(pending, repeats=repeats), disable_tqdm, row_masks)

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
