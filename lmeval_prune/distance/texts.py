"""The dense model, and the texts on which variants are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lm_eval

from lmeval_prune.architectures import position_limit
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.distance.tokens import Text
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import Intervention
from lmeval_prune.models.checkpoint import Checkpoint
from lmeval_prune.models.likelihood import token_windows
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.pruners.calibration import read_calibration
from lmeval_prune.tasks.loading import task_manager


class DistanceLM(PrunedHFLM):
    """A model that records lm-eval's requests and answers none.

    Attributes:
        requests: recorded requests by kind.
    """

    def __init__(self, pretrained: str, settings: DistanceOptions) -> None:
        arguments = {"engine": "batched", "deterministic": True, **settings.model_args}
        super().__init__(pretrained, **arguments, **({"device": settings.device} if settings.device else {}))
        self.requests: dict[str, list[Any]] = {}
        if self.world_size > 1:
            raise InputError("distances are measured by one process; start the command without accelerate")

    def _record(self, kind: str, requests: Sequence[Any], answer: Any) -> list[Any]:
        self.requests.setdefault(kind, []).extend(requests)
        return [answer] * len(requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Record requests."""
        return self._record("generate_until", requests, "")

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Record requests."""
        return self._record("loglikelihood", requests, (0.0, False))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Record requests."""
        return self._record("loglikelihood_rolling", requests, 0.0)


def check_models(
    pretrained: str, settings: DistanceOptions, variants: Sequence[Intervention], checkpoints: Sequence[str]
) -> None:
    """Refuse variants that do not fit the model, and checkpoints with another tokenizer, before weights are loaded."""
    dense = Checkpoint({**settings.model_args, "pretrained": pretrained})
    for intervention in variants:
        intervention.fit_to(dense.map)
    for name in checkpoints:
        other = Checkpoint({**settings.model_args, "pretrained": name})
        if other.tokenizer.get_vocab() != dense.tokenizer.get_vocab():
            raise InputError(f"{name} has another tokenizer than {pretrained}; compare models with the same tokenizer")
    if settings.text and (limit := position_limit(dense.map.model)) and settings.tokens > limit:
        raise InputError(f"tokens={settings.tokens}: {pretrained} has {limit} positions; give fewer")


def texts_of(lm: DistanceLM, settings: DistanceOptions) -> list[Text]:
    """Return the given texts; the requests of a generative task are recorded by the model instead."""
    if settings.text:
        text = read_calibration(
            lm.tokenizer, settings.text, None, settings.windows, settings.tokens, seed=settings.seed
        )
        rows = (tuple(row.tolist()) for ids, _ in text.batches for row in ids)
        return [Text(row[:1], row[1:], ("text", number)) for number, row in enumerate(rows)]
    lm_eval.simple_evaluate(
        lm,
        tasks=[settings.task],
        task_manager=task_manager(settings.metadata),
        predict_only=True,
        bootstrap_iters=0,
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        gen_kwargs=settings.gen_kwargs or None,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.apply_chat_template,  # the default of lm-eval's command
        system_instruction=settings.system_instruction,
    )
    texts = []
    for kind in ("loglikelihood", "loglikelihood_rolling"):
        requests = lm.requests.get(kind, [])
        windows = token_windows(lm, kind, requests, disable_tqdm=True)
        texts += [Text(*window, document(request)) for request in requests for window in windows[id(request)]]
    if texts and "generate_until" in lm.requests:
        raise InputError(f"{settings.task} has generative and log-likelihood tasks; name them one at a time")
    return texts


def document(request: Any) -> tuple[str, int]:
    """Return the document of a request."""
    return str(request.task_name), int(request.doc_id)
