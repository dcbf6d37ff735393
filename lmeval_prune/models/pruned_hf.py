"""`--model pruned-hf`: lm-eval's Hugging Face model with interventions and an answer store."""

from __future__ import annotations

import atexit
import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from lmeval_prune.architectures import ModelMap, loadable_fingerprints, map_model, weights_fingerprint
from lmeval_prune.architectures.precision import refuse_nan
from lmeval_prune.attributes import replaced
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import (
    CheckedLoader,
    as_input_error,
    check_language_model,
    checkpoint_class,
    has_pruned_layers,
    skeleton,
    with_padded_rows,
)
from lmeval_prune.checkpoints.modeling_pruned import without_warnings_of_layers
from lmeval_prune.checkpoints.pruned import checkpoint_columns, manifest_of, removal_summary, valid_manifest
from lmeval_prune.config import resolve_device
from lmeval_prune.decoding import Engine, SamplingParams
from lmeval_prune.decoding.fallback import Ended
from lmeval_prune.decoding.request import end_tokens, stop_strings
from lmeval_prune.decoding.sampling import RefuseNaN
from lmeval_prune.decoding.stopping import Stopping
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.interventions import METHODS, interventions_on
from lmeval_prune.interventions.applied import preserve_state
from lmeval_prune.models.answer_store import AnswerStore
from lmeval_prune.models.answering import Answering
from lmeval_prune.models.arguments import Arguments, hf_arguments
from lmeval_prune.models.engine_choice import EngineChoice
from lmeval_prune.models.generation import answer_limit, check_settings, prompt_room
from lmeval_prune.models.head_router import FixedOrderRouter
from lmeval_prune.models.identity import ModelIdentity, interventions_report, tokenizer_fingerprint
from lmeval_prune.models.lengths import Ending
from lmeval_prune.models.likelihood import check_own_tokens
from lmeval_prune.models.lm_base import AnsweringLM, log_interventions, use_lm_eval_logging
from lmeval_prune.profiling.costs import cost_columns

eval_logger = logging.getLogger(__name__)
METHODS.reserve({"self", "kwargs", *hf_arguments()})


class PrunedHFLM(AnsweringLM, HFLM):
    """lm-eval's `hf` with interventions and stored answers; accepts all arguments of `hf`.

    Args:
        pretrained: as for `hf`, or the name of an embedded model (`lmeval-prune models`), or parsed `Arguments`.
        arguments: arguments of `hf`; methods by name, e.g. `heads=L5H3+L15H0`, with the value of the method's first
            field or a dictionary of its fields; and the fields of `Arguments`, e.g. `mask=FILE`, `responses=FOLDER`.

    Attributes:
        fixed_seed: seed of sampled answers in place of torch's.
    """

    why_no_cache = "--use_cache does not know masks: use responses=FOLDER among the model_args"
    fixed_seed: int | None = None
    asked: Sequence[Any] = ()  # arguments of the requests that `hf` answers

    @print_input_errors
    def __init__(self, pretrained: Any = None, **arguments: Any) -> None:
        use_lm_eval_logging()
        parsed = isinstance(pretrained, Arguments)
        self.arguments = pretrained if parsed else Arguments.of({"pretrained": pretrained, **arguments})
        own, others = self.arguments, dict(self.arguments.others)
        model, interventions = own.pretrained, own.interventions
        if model == "" or not isinstance(model, str | PathLike | torch.nn.Module):
            raise InputError("name a model: --model_args pretrained=NAME_OR_FOLDER")
        if isinstance(model, torch.nn.Module):
            own.refuse_misspelt(None)
            self.manifest = manifest_of(model)
            interventions = (*interventions_on(model), *interventions)
        else:
            if others.get("device") is not None:
                resolve_device(others["device"])
            model = embedded.resolve(str(model))
            embedded.check_name(model, others)
            self.manifest = valid_manifest(Path(model, others.get("subfolder") or ""))
        if own.responses and any(intervention.needs_order for intervention in interventions):
            raise InputError("answers that depend on their order (state=run) cannot be stored; leave out responses")
        if others.get("device") is None and not torch.cuda.is_available():
            others["device"] = "mps" if torch.backends.mps.is_available() else "cpu"
        self._unpadded: Counter[tuple[int, ...]] = Counter()  # token sequences to score, if padding matters
        self.endings: deque[Ending] = deque()  # of generated texts that lm-eval has not reported yet
        self._store: AnswerStore | None = None  # opened before the weights are loaded
        try:
            with as_input_error(f"the model {getattr(model, 'name_or_path', model)} cannot be loaded"):
                super().__init__(model, **others)
            accelerator = getattr(self, "accelerator", None)
            if accelerator is not None and accelerator.num_processes > 1 and self.device.type == "cpu":
                # `hf` leaves each process at rank 0 with all requests
                self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
                atexit.register(_destroy_process_group)
            if self.manifest:
                eval_logger.info("checkpoint: %s", removal_summary(self.manifest))
            self._prepare(self._store)
        except BaseException:
            if self._store:
                self._store.close()
            raise

    @property
    def seed(self) -> int:
        """Seed of sampled answers: torch's, which lm-eval sets at the beginning of an evaluation."""
        return torch.initial_seed() if self.fixed_seed is None else self.fixed_seed

    def _prepare(self, store: AnswerStore | None = None) -> None:
        """Apply interventions and create the engine and the answering; `store` is an open store or None."""
        with self._apply() as stack:  # undoes the interventions if the rest fails
            self.engine_choice = EngineChoice(self)
            self.answering = Answering(self, store)
            log_interventions(self, self.model)
            self._applied = stack.pop_all()

    def _apply(self) -> ExitStack:
        """Apply interventions to the model; closing the returned stack undoes them."""
        with ExitStack() as stack:
            for intervention in self.arguments.interventions:
                stack.enter_context(intervention.applied_to(self.model, self.model_map, any_thread=True))
            return stack.pop_all()

    def close(self) -> None:
        """Undo the interventions and release the answer store; garbage collection does the same."""
        self._applied.close()
        self.answering.close()

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
        store = self.answering.store if parsed.responses == self.arguments.responses else None
        if store is None:
            self.answering.close()
        self.arguments = parsed
        self._prepare(store)

    # ------------------------------------------------------------------ loading

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        with as_input_error(f"cannot read the model {pretrained}"), without_warnings_of_layers():
            super()._get_config(pretrained, **kwargs)

    def _create_model(self, *args: Any, gguf_file: str | None = None, **kwargs: Any) -> None:
        self.arguments.refuse_misspelt(self.config)
        self._check_before_loading(bool(kwargs.get("trust_remote_code")))
        if self.arguments.responses:
            self._store = AnswerStore(self.arguments.responses, self.store_rank)
        if gguf_file:
            from transformers import GgufConfig

            kwargs["quantization_config"] = GgufConfig(dequantize=True)
        # checkpoints with layers of different sizes are loaded by this package, not by code in their folder
        kind = checkpoint_class(self.config) if has_pruned_layers(self.config) else self.AUTO_MODEL_CLASS
        name = args[0] if args else kwargs["pretrained"]
        peft, revision = kwargs.get("peft"), kwargs.get("revision")
        with (
            replaced(self, AUTO_MODEL_CLASS=CheckedLoader(kind)),
            as_input_error(f"the model {name} cannot be loaded"),
            with_padded_rows(peft, revision=revision) if peft else nullcontext(),
        ):
            super()._create_model(*args, gguf_file=gguf_file, **kwargs)

    def _check_before_loading(self, trust_remote_code: bool) -> None:
        """Check the model class and the interventions on a model without weights, before minutes of loading."""
        try:
            bare = skeleton(self.config, self.AUTO_MODEL_CLASS, trust_remote_code)
        except Exception:  # some models cannot be built without weights; the loaded model is checked later
            return
        check_language_model(self.config, bare)
        router = self.arguments.router
        if self.arguments.interventions or isinstance(router, FixedOrderRouter):
            model_map = map_model(bare, **self.arguments.description)
            for intervention in self.arguments.interventions:
                intervention.fit_to(model_map)
            if isinstance(router, FixedOrderRouter):
                router.fit_to(model_map, None, [])

    # ------------------------------------------------------------------ identity

    @property
    def store_rank(self) -> int | None:
        """Return the number of this process in an answer store; see `AnswerStore`."""
        accelerator = getattr(self, "accelerator", None)
        if accelerator is None:
            return 0
        return int(accelerator.process_index if self.device.type == "cpu" else accelerator.local_process_index)

    @property
    def engine(self) -> Engine | None:
        """Return the decoding engine; None if it answers no requests."""
        return self.engine_choice.engine

    @cached_property
    def model_map(self) -> ModelMap:
        """Return the model's layers and heads."""
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
        """Return the tokenizer's fingerprint."""
        return tokenizer_fingerprint(self.tokenizer)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the properties of the model that answers depend on, without interventions, as JSON."""
        return ModelIdentity.of_model(self).to_json()

    @property
    def outcome_identity(self) -> dict[str, Any]:
        """Return the properties that outcomes depend on besides `identity`."""
        assert self.engine is not None
        _, *rounded = loadable_fingerprints(self.model, self.weights)
        return {"deterministic": self.engine.deterministic, "rounded": rounded}

    # ------------------------------------------------------------------ answering

    def check_requests(self, kind: str, requests: list[Any]) -> None:
        """Refuse wrong settings of generation."""
        if kind == "generate_until" and not self.arguments.router:  # which sets the temperature of each try
            for request in requests:
                check_settings(request.args[1])
                if self.backend == "causal":
                    prompt_room(self, answer_limit(request.args[1], self.max_gen_toks))

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
        if self.think_end_token is not None:  # `hf` ends them by stop texts
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
        for pair, _, continuation in requests:
            check_own_tokens(pair, continuation)
        unpadded: Counter[tuple[int, ...]] = Counter()
        if any(not intervention.tokenwise for intervention in interventions_on(self.model)):
            texts = [(*context, *continuation[:-1]) for _, context, continuation in requests]
            texts = list(set(texts)) if self.logits_cache else texts
            unpadded.update(text[-self.max_length :] for text in texts)
        with replaced(self, _unpadded=unpadded):
            scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **kwargs)
        return scores

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Probe as `hf` does, but no more rows than requests, and none longer than the longest request."""
        if not requests:  # of generation, or whole texts, which `hf` divides into windows
            counts = [len(self.tok_encode(arguments[0])) for arguments in self.asked]
            limit = max((answer_limit(rest[0], self.max_gen_toks) for _, *rest in self.asked if rest), default=0)
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

    def gather_from_ranks(self, value: Any) -> list[Any]:
        """Return the value of each process, in the order of ranks."""
        return list(gather_object([value])) if self.world_size > 1 else [value]

    # ------------------------------------------------------------------ reporting

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's model information with a section `pruning`."""
        return {**super().get_model_info(), "pruning": self.pruning_info()}

    def pruning_info(self) -> dict[str, Any]:
        """Report the interventions and their realised figures for the results file."""
        info = interventions_report(self, self.model, self.weights)
        if self.arguments.router:
            info["router"] = self.arguments.router.info
        if self.answering.lengths:
            info["answers"] = self.answering.lengths
        if self.manifest:
            info["checkpoint"] = {**checkpoint_columns(self.manifest), **cost_columns(self.model)}
        return info


def _destroy_process_group() -> None:
    """End gloo's threads: a process that exits while they run may abort, and its launcher kills the others."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
