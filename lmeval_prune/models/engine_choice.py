"""The choice between the decoding engine and lm-eval's `hf` for generation requests: the model_arg `engine`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from lmeval_prune.decoding import Engine
from lmeval_prune.decoding.memory import available_memory
from lmeval_prune.decoding.self_check import MAX_CHECKED_WINDOW, is_tested, sliding_window
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation

logger = logging.getLogger(__name__)
AUTO_MEMORY = 8 << 30  # most bytes of the engine under `engine=auto`
AUTO_MIN_REQUESTS = 16  # of a call under `engine=auto`: with 8, `hf` in one batch is as fast
AUTO_MIN_ROWS = 8  # rows that must fit in memory under `engine=auto` with `batch_size=auto`


class EngineChoice:
    """Decide which generation requests of a model the decoding engine answers; `hf` answers the others.

    `engine=batched` means all, `engine=generate` none. `engine=auto` means those with the texts of `hf` for which `hf`
    is not faster: greedy requests that leave the logits unchanged, in float32 or float64 on a CPU, of a model that the
    engine supports. Each reason is logged once.

    Attributes:
        engine: the decoding engine; None if it answers no request.
    """

    def __init__(self, lm: Any) -> None:
        self._lm = ref(lm)  # no reference cycle
        self._is_auto = lm.arguments.engine == "auto"
        self._logged: set[str] = set()
        self._reasons: dict[str, str | None] = {}  # by generation settings: why `hf` answers them
        self._reason = _why_hf(lm) if self._is_auto else None
        self.engine: Engine | None = None
        if self._reason or lm.arguments.engine == "generate":
            return
        if lm.backend != "causal":
            raise InputError("engine=batched is for causal models only; leave engine out for an encoder-decoder")
        options, size = lm.arguments, lm.batch_size
        self.engine = Engine(
            lm.model,
            lm.tokenizer,
            model_map=lm.model_map,
            # lm-eval's default is 1
            max_rows=options.engine_rows or (size if self._is_auto and isinstance(size, int) and size > 1 else None),
            context=lm.max_length,
            deterministic=bool(options.deterministic),
        )
        self.engine.stopping.think_end = lm.think_end_token
        if self._is_auto:  # fewer rows would be slower than `hf`
            self.engine.min_rows = size if isinstance(size, int) else AUTO_MIN_ROWS

    def by_engine(self, requests: Sequence[Any]) -> list[int]:
        """Return the indices of the requests that the engine answers."""
        if not self._is_auto:
            return list(range(len(requests))) if self.engine else []
        if len(requests) < AUTO_MIN_REQUESTS:
            self.log(f"lm-eval's hf answers fewer than {AUTO_MIN_REQUESTS} requests: the engine is not proven faster")
            return []
        chosen = []
        for index, request in enumerate(requests):
            if reason := self._why_hf(*request.args):
                self.log(f"lm-eval's hf answers requests of task {request.task_name}: {reason}", reason)
            else:
                chosen.append(index)
        if chosen and self.engine:
            self.engine.memory = min(AUTO_MEMORY, available_memory(self.engine.device))
            self.log("the decoding engine answers greedy requests: it supports the model in this dtype on a CPU")
        return chosen

    def log(self, decision: str, reason: str = "") -> None:
        """Log a decision and its reason, once for each reason."""
        if (reason or decision) not in self._logged:
            self._logged.add(reason or decision)
            lm: Any = self._lm()
            if lm.rank == 0:
                logger.info("engine=%s: %s", lm.arguments.engine, decision)

    def _why_hf(self, context: str, settings: dict[str, Any]) -> str | None:
        """Return why `hf` answers a request; None if the engine does."""
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
                params, _ = generation.engine_settings(self._lm(), settings)
                self.engine.stopping.check(params)
                self._reasons[key] = None if params.takes_argmax else "their settings change logits"
            except InputError as error:
                self._reasons[key] = error.problem
        return self._reasons[key]


def _why_hf(lm: Any) -> str | None:
    """Return why `hf` answers all requests of a model, whatever its interventions."""
    if lm.backend != "causal":
        return "the model is an encoder-decoder"
    for name in ("mixed_precision_dtype", "tp_plan"):
        if lm.arguments.others.get(name):
            return f"the engine does not support {name}"
    parameters = list(lm.model.parameters())
    is_precise = {parameter.dtype for parameter in parameters} <= {torch.float32, torch.float64}
    is_here = {parameter.device.type for parameter in parameters} == {"cpu"}
    if not (is_precise and is_here) or getattr(lm.model, "is_quantized", False):
        return "the engine is not proven faster except on a CPU in float32 or float64"
    try:
        lm.model_map  # noqa: B018
    except InputError as error:  # of a family that is not mapped
        return error.problem
    return None
