"""Time work in float32 on a CPU with `fast_products` and without: answers, scores of heads, training.

    OMP_NUM_THREADS=1 python benchmarks/float32_products.py

Each kind of work runs in turn with and without, on the embedded model, after a round that does not count. Answers must
be the same, other results nearly. On machines where `fast_precision` is `highest` both are the same.
"""

# ruff: noqa: E402 - a checkout that is not installed will do
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from _record import environment, seconds_in_turn, write
from transformers import AutoTokenizer

from lmeval_prune import map_model
from lmeval_prune.architectures import precision
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.pruners.base import PRUNERS
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages

ROUNDS, PROMPT, NEW = 3, 96, 32
AGREEMENT = 1e-3  # relative difference of results that are numbers
MODEL = "smollm2-135m"
FAST = precision.fast_precision()


class Work:
    """Kinds of work on a model, each with a result that can be compared."""

    def __init__(self) -> None:
        self.model: Any = load_pretrained(MODEL).float()
        self.model_map = map_model(self.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model.config._name_or_path)
        self.ids = torch.randint(10, 40000, (32, PROMPT), generator=torch.Generator().manual_seed(0))

    def engine(self, rows: int) -> list[list[int]]:
        """Decode greedy answers by the engine; return them in the order of the prompts."""
        params = SamplingParams(max_new_tokens=NEW, eos=())
        requests = [Request(tuple(row), params=params, tag=n) for n, row in enumerate(self.ids[:rows].tolist())]
        answers = Engine(self.model, self.tokenizer, deterministic=True).decode(requests)
        return [tokens for _, tokens in sorted(answers, key=lambda pair: pair[0].tag)]

    def scores(self) -> list[float]:
        """Score heads and channels by FLAP."""
        text = CalibrationText.from_windows("random", self.ids[:16])
        options = PruneOptions(ratio=0.3)
        (plan,) = stages(PRUNERS.load("flap")(), self.model_map, options, text)
        return [float(values.double().mean()) for values in plan.scores.values()]

    def training(self) -> list[float]:
        """Return the loss and a gradient of a training step."""
        with precision.fast_products():
            loss = self.model(input_ids=self.ids[:8], labels=self.ids[:8]).loss
            loss.backward()
        gradient = float(self.model.get_input_embeddings().weight.grad.double().norm())
        self.model.zero_grad()
        return [float(loss.detach()), gradient]


def measured(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the seconds of a kind of work with and without, in turn, after comparing the results."""

    def timed(is_fast: bool) -> tuple[Any, float]:
        chosen = FAST if is_fast else "highest"
        begin = time.perf_counter()
        with patch.object(precision, "fast_precision", lambda: chosen):
            result = run()
        return result, time.perf_counter() - begin

    (fast, _), (plain, _) = timed(True), timed(False)
    same = fast == plain
    if not same and isinstance(fast[0], list):
        raise SystemExit(f"{sum(a != b for a, b in zip(fast, plain, strict=True))} answers differ")
    if not same and any(abs(a / b - 1) > AGREEMENT for a, b in zip(fast, plain, strict=True) if b):
        raise SystemExit("the results differ")
    return {
        **seconds_in_turn({"fast": lambda: timed(True)[1], "plain": lambda: timed(False)[1]}, ROUNDS),
        "equal": same,
    }


def main() -> None:
    """Measure each kind of work and write the results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = Work()
    kinds: dict[str, Callable[[], Any]] = {
        **{f"engine, {rows} answers": partial(work.engine, rows) for rows in (1, 8, 32)},
        "scores of heads by FLAP": work.scores,
        "training step": work.training,
    }
    results = {}
    for name, run in kinds.items():
        results[name] = entry = measured(run)
        spread = f"{min(entry['ratios']):.2f} to {max(entry['ratios']):.2f}"
        print(f"{name}: {entry['ratio']:.2f} times as fast ({spread})", flush=True)
    write("float32_products", {**environment(), "model": MODEL, "precision": FAST, "work": results})


if __name__ == "__main__":
    main()
