"""`--model athena`: answer word problems by expressions, for tasks that score expressions."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.athena import checkpoint
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.solving import answers
from lmeval_prune.checkpoints.loading import checkpoint_columns, removal_summary, skeleton_of, valid_manifest
from lmeval_prune.config import resolve_device
from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.models.answering import AnsweringLM, log_interventions, use_lm_eval_logging
from lmeval_prune.models.arguments import Arguments, unknown_argument
from lmeval_prune.models.identity import interventions_report
from lmeval_prune.training.questions import question_key

eval_logger = logging.getLogger(__name__)
_LANGUAGE_MODEL_ARGUMENTS = ("router", "engine", "responses")


class AthenaLM(AnsweringLM):
    r"""Answers the question of a document with `\boxed{expression}`; the prompt is ignored.

    Args:
        pretrained: folder written by `lmeval-prune athena train`.
        batch_size: problems per batch.
        device: a torch device.
        question_field: field of the documents with the question.
        arguments: methods for the encoder, as for `pruned-hf`: `heads=L5H3+L2H0`, `mask=FILE`, …
    """

    @print_input_errors
    def __init__(
        self,
        pretrained: Any = None,
        batch_size: Any = 32,
        max_batch_size: Any = None,
        device: str | None = None,
        question_field: str = "question",
        **arguments: Any,
    ) -> None:
        super().__init__()
        use_lm_eval_logging()
        for name in _LANGUAGE_MODEL_ARGUMENTS:
            if arguments.get(name) is not None:
                raise InputError(f"{name}= is not for --model athena; leave it out")
        parsed = Arguments.of(arguments)
        for name in parsed.others:
            raise unknown_argument(name, ("pretrained", "batch_size", "device"))
        self.field, self.batch_size = question_field, 32 if str(batch_size).startswith("auto") else int(batch_size)
        target = resolve_device(device)
        self.about = checkpoint.describe(pretrained)
        self.manifest = valid_manifest(f"{pretrained}/{checkpoint.ENCODER}")
        bare = map_model(skeleton_of(f"{pretrained}/{checkpoint.ENCODER}"))
        for intervention in parsed.interventions:
            intervention.fit_to(bare)
        self.host = checkpoint.read(pretrained).to(target)
        with ExitStack() as stack:
            for intervention in parsed.interventions:
                stack.enter_context(intervention.applied_to(self.host.encoder, self.model_map, any_thread=True))
            self._applied = stack.pop_all()
        if self.manifest:
            eval_logger.info("checkpoint: %s", removal_summary(self.manifest))
        log_interventions(self, self.host.encoder)

    def close(self) -> None:
        self._applied.close()

    @cached_property
    def model_map(self) -> ModelMap:
        return map_model(self.host.encoder)

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        r"""Return `\boxed{expression}` for each request's document, or an empty text if it has no numbers."""
        if kind != "generate_until":
            raise InputError(
                "--model athena generates expressions; use a task that scores them (prune_asdiv_a_equation)"
            )
        problems = []
        for request in requests:
            try:
                problems.append(Problem.of_document(request.doc, self.field))
            except ValueError:
                problems.append(Problem.of(request.doc[self.field]))
        trained_on = set(self.about.get("trained_on", ()))
        if leaked := {question_key(request.doc, self.field) for request in requests} & trained_on:
            eval_logger.warning("%d of the questions were in this model's training data: this is no test", len(leaked))
        texts = answers(self.host, problems, self.batch_size)
        return [rf"\boxed{{{text}}}" if text else "" for text in texts]

    def get_model_info(self) -> dict[str, Any]:
        training = {key: self.about.get(key) for key in ("options", "problems", "best_epoch")}
        parameters = sum(parameter.numel() for parameter in self.host.parameters())
        pruning = interventions_report(self, self.host.encoder, self.model_map.weights)
        if self.manifest:
            pruning["checkpoint"] = checkpoint_columns(self.manifest)
        return {"model_num_parameters": parameters, "athena": training, "pruning": pruning}
