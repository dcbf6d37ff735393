"""Measure the speed of the engine."""

from __future__ import annotations

import time
from typing import Any

import torch

from lmeval_prune.decoding.engine import Engine
from lmeval_prune.decoding.request import Request, SamplingParams


class EngineSpeed:
    """Tokens per second of the engine for greedy answers of fixed length, by model."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}

    def __call__(self, model: Any, ids: torch.Tensor, new: int, clock: str) -> float | None:
        """Return the tokens per second of answers to prompts, (batch, tokens); None if `generate` would answer."""
        engine = self._engines.setdefault(id(model), Engine(model))
        if engine.unsupported:  # checked, and measured, before the clock starts
            return None
        requests = [Request(tuple(row), None, SamplingParams(new, eos=())) for row in ids.tolist()]
        engine.max_rows = len(requests)
        read_clock = time.perf_counter if clock == "wall" else time.process_time
        begin = read_clock()
        tokens = sum(len(answer) for _, answer in engine.decode(requests))
        return tokens / (read_clock() - begin)
