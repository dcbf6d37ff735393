"""The dense model, and the texts on which variants are compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval

from lmeval_prune.architectures import position_limit
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.distance.tokens import Text
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import Intervention
from lmeval_prune.models.generation import token_windows
from lmeval_prune.models.identity import Checkpoint
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.pruners.calibration import read_calibration
from lmeval_prune.tasks.loading import check_task_names, task_manager

# answers to requests that are recorded
PLACEHOLDERS = {"generate_until": "", "loglikelihood": (0.0, False), "loglikelihood_rolling": 0.0}


class RecordingLM(PrunedHFLM):
    """A model that can record lm-eval's requests instead of answering them.

    Attributes:
        recorded: requests by kind, while they are recorded; else None.
    """

    recorded: dict[str, list[Any]] | None = None

    def answer(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Answer requests, or record them and return placeholders."""
        if self.recorded is None:
            return super().answer(kind, requests, disable_tqdm)
        self.recorded.setdefault(kind, []).extend(requests)
        return [PLACEHOLDERS[kind]] * len(requests)


def record_requests(lm: RecordingLM, **evaluation: Any) -> dict[str, list[Any]]:
    """Return the requests of an evaluation by kind, each once; `evaluation` are arguments of `simple_evaluate`."""
    lm.recorded = {}
    try:
        lm_eval.simple_evaluate(lm, predict_only=True, bootstrap_iters=0, **evaluation)
        # lm-eval repeats a request for each of its tries
        return {
            kind: list({id(request): request for request in requests}.values())
            for kind, requests in lm.recorded.items()
        }
    finally:
        lm.recorded = None


def load(pretrained: str, settings: DistanceOptions) -> RecordingLM:
    """Load a model that the decoding engine runs."""
    arguments = {"engine": "batched", "deterministic": True, **settings.model_args}
    return RecordingLM(pretrained, **arguments, **({"device": settings.device} if settings.device else {}))


def check_models(
    pretrained: str, settings: DistanceOptions, variants: Sequence[Intervention], checkpoints: Sequence[str]
) -> None:
    """Refuse a task that does not exist and variants that do not fit the model, before weights are loaded."""
    if settings.task:
        check_task_names(task_manager(settings.metadata), [settings.task])
    dense = Checkpoint({**settings.model_args, "pretrained": pretrained})
    for intervention in variants:
        intervention.fit_to(dense.map)
    for name in checkpoints:
        check_tokenizers(dense, Checkpoint({**settings.model_args, "pretrained": name}))
    if settings.text and (limit := position_limit(dense.map.model)) and settings.tokens > limit:
        raise InputError(f"tokens={settings.tokens}: {pretrained} has {limit} positions; give fewer")


def check_tokenizers(dense: Checkpoint, other: Checkpoint) -> None:
    """Refuse a model with another tokenizer than the dense model's."""
    if other.tokenizer.get_vocab() != dense.tokenizer.get_vocab():
        names = [str(checkpoint.loading["pretrained"]) for checkpoint in (other, dense)]
        raise InputError(f"{names[0]} has another tokenizer than {names[1]}")


def read_windows(lm: RecordingLM, settings: DistanceOptions) -> list[Text]:
    """Return the windows of a text file; all tokens but the first are compared."""
    windows, tokens = settings.windows, settings.tokens
    text = read_calibration(lm.tokenizer, settings.text, None, windows, tokens, seed=settings.seed)
    rows = (tuple(row.tolist()) for ids, _ in text.batches for row in ids)
    return [Text(row[:1], row[1:], ("text", number)) for number, row in enumerate(rows)]


def scored_texts(lm: RecordingLM, requests: Mapping[str, list[Any]]) -> list[Text]:
    """Return the texts of log-likelihood requests, divided into windows as by lm-eval's `hf`."""
    texts = []
    for kind in ("loglikelihood", "loglikelihood_rolling"):
        kind_requests = requests.get(kind, [])
        windows = token_windows(lm, kind, kind_requests, disable_tqdm=True)
        texts += [Text(*window, document(request)) for request in kind_requests for window in windows[id(request)]]
    if texts and "generate_until" in requests:
        raise InputError("some of these tasks generate, others score texts; measure them one at a time")
    return texts


def document(request: Any) -> tuple[str, int]:
    """Return the document of a request."""
    return str(request.task_name), int(request.doc_id)
