"""`--model pruned-hf`: lm-eval's Hugging Face model with interventions and an answer store."""

from __future__ import annotations

import atexit
import logging
from contextlib import ExitStack, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from lmeval_prune.architectures import ModelMap, adapters_of, loadable_fingerprints, map_model, weights_fingerprint
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
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.interventions import METHODS, interventions_on
from lmeval_prune.models.answer_store import AnswerStore
from lmeval_prune.models.answering import log_interventions, use_lm_eval_logging
from lmeval_prune.models.arguments import Arguments, hf_arguments
from lmeval_prune.models.generation import answer_limit, check_settings, prompt_room
from lmeval_prune.models.hf import EngineHFLM
from lmeval_prune.models.identity import identity_of, interventions_report, remote_code, tokenizer_fingerprint
from lmeval_prune.profiling.costs import cost_columns

eval_logger = logging.getLogger(__name__)
METHODS.reserve({"self", "kwargs", *hf_arguments()})


class PrunedHFLM(EngineHFLM):
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

    @print_input_errors
    def __init__(self, pretrained: Any = None, **arguments: Any) -> None:
        use_lm_eval_logging()
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
                check_settings(request.args[1])
                if self.backend == "causal":
                    prompt_room(self, answer_limit(request.args[1], self.max_gen_toks))

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
