"""Part `choice` of sweep_speed.py: a multiple-choice task, dense and under each head, by the engine and by `hf`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
from _record import timed
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding import Engine
from lmeval_prune.interventions import HeadMask
from lmeval_prune.models.likelihood import loglikelihoods
from lmeval_prune.tasks import compat, data

CHOICES = 4
Values = list[tuple[float, bool]]  # of all choices of all questions


def requests(questions: int, shots: int) -> list[Instance]:
    """GSM8K's test questions; the choices are the last steps of four solutions, one of them the question's own."""
    rows = [dict(row) for row in data.load("gsm8k", "test")]
    steps = [row["answer"].partition("####")[0].strip().splitlines()[-1] for row in rows]
    examples = "".join(f"Question: {rows[-i]['question']}\nAnswer: {steps[-i]}\n\n" for i in range(1, shots + 1))
    rng = random.Random(0)
    instances = []
    for doc in range(questions):
        own = rng.sample([i for i in range(questions + 100) if i != doc], CHOICES - 1)
        own.insert(rng.randrange(CHOICES), doc)
        context = f"{examples}Question: {rows[doc]['question']}\nAnswer:"
        for choice in own:
            arguments = (context, f" {steps[choice]}")
            instances.append(compat.request("loglikelihood", arguments, "choice", doc))
    return instances


def by_hf(lm: HFLM, model_map: ModelMap, work: list[Instance], heads: Sequence[str | None], batch: int) -> list[Values]:
    """lm-eval's `hf`, one mask at a time."""
    lm.batch_size_per_gpu = batch
    values = []
    for head in heads:
        with HeadMask(head).applied_to(lm.model, model_map) if head else nullcontext():
            values.append(lm.loglikelihood(work, disable_tqdm=True))
    return values


def by_engine(lm: HFLM, engine: Engine, work: list[Instance], heads: Sequence[str | None]) -> list[Values]:
    """The engine, all masks in one run."""
    masks = [HeadMask(head) if head else None for head in heads for _ in work]
    repeated = [request for _ in heads for request in work]
    values = loglikelihoods(lm, engine, "loglikelihood", repeated, lambda *_: None, masks, disable_tqdm=True)
    return [values[i : i + len(work)] for i in range(0, len(values), len(work))]


def largest_difference(values: list[Values], expected: list[Values]) -> float:
    differences = [a[0] - b[0] for a, b in zip(flat(values), flat(expected), strict=True)]
    return float(np.abs(differences).max())  # NaN if one is: Python's max can lose it


def flat(values: list[Values]) -> Values:
    return list(itertools.chain.from_iterable(values))


def compare(engine: list[Values], hf: list[Values], tolerance: float) -> dict[str, Any]:
    """Refuse values that differ by more than the tolerance, and another order of choices that are further apart."""
    difference = largest_difference(engine, hf)
    reordered = 0
    for a, b in zip(engine, hf, strict=True):
        for begin in range(0, len(a), CHOICES):
            for i, j in itertools.combinations(range(begin, begin + CHOICES), 2):
                gap = b[i][0] - b[j][0]
                reordered += abs(gap) > tolerance and (a[i][0] > a[j][0]) != (gap > 0)
    greedy = sum(a[1] != b[1] for a, b in zip(flat(engine), flat(hf), strict=True))
    report = {"values": len(flat(hf)), "largest_difference": difference, "tolerance": tolerance}
    report |= {"pairs_in_another_order": reordered, "other_is_greedy": greedy}
    assert difference <= tolerance and not reordered and not greedy, report
    return report


def operations(engine: Engine) -> float:
    """Floating-point operations of the matrix products that the engine ran."""
    model = engine.model
    a_layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    done = engine.statistics
    return 2 * (done.layer_tokens * a_layer + done.head_tokens * model.lm_head.weight.numel())


def choice(
    lm: HFLM,
    model_map: ModelMap,
    heads: Sequence[str | None],
    questions: int,
    shots: int,
    batches: Sequence[int],
    peak: float,
) -> dict[str, Any]:
    """Time the engine and `hf` at its best batch size; refuse values that do not agree."""
    work = requests(questions, shots)
    by_hf(lm, model_map, work[:CHOICES], heads[:2], CHOICES)  # whatever is slow only once
    by_engine(lm, Engine(lm.model, lm.tokenizer, model_map=model_map), work[:CHOICES], heads[:2])
    engine = Engine(lm.model, lm.tokenizer, model_map=model_map)
    assert engine.unscored is None
    dense = {batch: timed(lambda batch=batch: by_hf(lm, model_map, work, [None], batch)) for batch in batches}
    best = min(dense, key=lambda batch: dense[batch][1])
    spread = max(largest_difference(values, dense[best][0]) for values, _ in dense.values())
    values, seconds = timed(lambda: by_engine(lm, engine, work, heads))
    hf, hf_seconds = timed(lambda: by_hf(lm, model_map, work, heads, best))
    return {
        "questions": questions,
        "shots": shots,
        "masks": len(heads),
        "context_tokens": sum(len(lm.tok_encode(request.args[0])) for request in work[::CHOICES]) / questions,
        "agreement": compare(values, hf, max(spread, 1e-3)),
        "largest_difference_between_batches_of_hf": spread,
        "hf_dense_seconds_by_batch": {batch: round(spent, 2) for batch, (_, spent) in dense.items()},
        "hf_batch": best,
        "hf_seconds": hf_seconds,
        "engine_seconds": seconds,
        "ratio": round(hf_seconds / seconds, 2),
        "share_of_peak_in_matrix_products": round(operations(engine) / peak / seconds, 3),
        "statistics": {name: value for name, value in asdict(engine.statistics).items() if value},
    }
