"""Where the decoding engine is not slower than lm-eval's `hf` at its best batch size: the proof of `engine=auto`.

    python benchmarks/engine_matrix.py [--cells dense-1-32,masks-8-300] [--large] [--rounds 2] [--tokens 48]
        [--threads 2] [--again] [--name engine_matrix]

A cell is VARIANT-QUESTIONS-PROMPT: `dense`, `mask` (one mask, applied to the model) or `masks` (dense and 8 masks, `hf`
one at a time), the number of questions, and the tokens of the longest prompt (the shortest has three quarters). No two
prompts begin alike, so that the engine shares nothing between questions. `hf` runs with each batch size of 1, 8, 16, 32
and 64 that makes sense, and the fastest counts. Then both run in turn; the fastest round of each counts. Their texts
are equal, or part where the two largest logits are nearly equal.

The results file is complete after each cell, and cells in it are left out in the next run. `--large` adds 512
questions.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from _record import RESULTS, environment, write
from sweep_speed import SWEEP, Pairs, Work

from lmeval_prune.checkpoints import embedded
from lmeval_prune.interventions import HeadMask
from lmeval_prune.tasks import data

BATCHES = (1, 8, 16, 32, 64)
LARGEST_BATCH = 32_000  # tokens of the prompts of a batch


def texts_of(work: Work, count: int, length: int) -> list[str]:
    """Return texts of 0.75 to 1 times `length` tokens, cut one after another from GSM8K's questions."""
    rng = random.Random(0)
    ids = work.lm.tok_encode("\n\n".join(data.load("gsm8k", "test")["question"]))
    begin, texts = 0, []
    for _ in range(count):
        size = rng.randint(3 * length // 4, length)
        begin = begin if begin + size <= len(ids) else begin + size - len(ids)  # another cut than before
        texts.append(work.lm.tok_decode(ids[begin : begin + size]))
        begin += size
    return texts


def seconds(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a function returns, and its seconds of processor and wall time."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = run()
    return out, {"cpu": round(time.process_time() - cpu, 2), "wall": round(time.perf_counter() - wall, 2)}


class Matrix:
    """Cells of the matrix and the results so far."""

    def __init__(self, work: Work, name: str, rounds: int) -> None:
        self.work, self.name, self.rounds = work, name, rounds
        path = RESULTS / f"{name}.json"
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}}

    def best_batch(self, questions: int, length: int) -> tuple[int, dict[int, float]]:
        """Return the batch size with which `hf` takes the least processor time without masks, and all times."""
        dense: Pairs = [(i, None) for i in range(questions)]
        smallest = 1 if questions == 1 or length >= 2000 else 8  # with short prompts, 1 is never the best
        sizes = [n for n in BATCHES if smallest <= n < 2 * questions and (n == 1 or n * length <= LARGEST_BATCH)]
        times = {size: seconds(lambda size=size: self.work.by_hf(dense, size))[1]["cpu"] for size in sizes}
        return min(times, key=lambda size: times[size]), times

    def run(self, cell: str) -> dict[str, Any]:
        """Time one cell, compare the texts, and write the results."""
        variant, questions, length = cell.split("-")[0], *map(int, cell.split("-")[1:])
        work = self.work
        work.prompts = texts_of(work, questions, length)
        heads = {"dense": [None], "mask": SWEEP[:1], "masks": [None, *SWEEP]}[variant]
        pairs: Pairs = [(i, head) for i in range(questions) for head in heads]
        engine = work.engine()
        batch, times = self.best_batch(questions, length)

        def by_engine() -> dict:
            if variant != "mask":
                return work.by_engine(pairs, engine)
            with HeadMask(SWEEP[0]).applied_to(work.lm.model, work.model_map):  # as `heads=` does
                texts = work.by_engine([(i, None) for i, _ in pairs], engine)
            return {(i, SWEEP[0]): text for (i, _), text in texts.items()}

        with HeadMask(SWEEP[0]).applied_to(work.lm.model, work.model_map) if variant == "mask" else nullcontext():
            assert engine.unsupported is None
        spent: dict[str, list[dict[str, float]]] = {"engine": [], "hf": []}
        for _ in range(self.rounds):
            by_engine_texts, used = seconds(by_engine)
            spent["engine"].append(used)
            by_hf_texts, used = seconds(lambda: work.by_hf(pairs, batch))
            spent["hf"].append(used)
        cpu, wall = (
            round(min(run[kind] for run in spent["hf"]) / min(run[kind] for run in spent["engine"]), 2)
            for kind in ("cpu", "wall")
        )
        row = {
            "ratio_cpu": cpu,
            "ratio_wall": wall,
            "seconds": spent,
            "hf_batch": batch,
            "hf_dense_cpu_seconds_by_batch": times,
            "texts": work.compare(by_engine_texts, by_hf_texts),
            "answer_tokens": work.tokens(by_hf_texts),
            "environment": environment(),
        }
        self.results["cells"][cell] = row
        write(self.name, self.results, quiet=True)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", help="names, separated by commas; default: all")
    parser.add_argument("--large", action="store_true", help="also 512 questions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="run cells that are in the results file")
    parser.add_argument("--name", default="engine_matrix")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    counts = (1, 8, 64, 512) if options.large else (1, 8, 64)
    everything = ["-".join(map(str, cell)) for cell in product(("dense", "mask", "masks"), counts, (32, 300, 2000))]
    cells = options.cells.split(",") if options.cells else everything
    matrix = Matrix(Work(embedded.resolve("smollm2-135m"), [], options.tokens), options.name, options.rounds)
    for cell in cells:
        if cell not in matrix.results["cells"] or options.again:
            row = matrix.run(cell)
            print(cell, row["ratio_cpu"], row["ratio_wall"], row["texts"], flush=True)
    rows = matrix.results["cells"]
    slower = [cell for cell in cells if min(rows[cell]["ratio_cpu"], rows[cell]["ratio_wall"]) < 1]
    print(f"{len(cells)} cells, the engine is slower in: {', '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
