"""`lmeval-prune sweep`, `fit`, `questions` and `report sprint`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from lmeval_prune.checkpoints.embedded import ENCODER
from lmeval_prune.config import command
from lmeval_prune.sprint.options import FitOptions, ReportOptions, SweepOptions


@command(resumes=True, takes_tasks=True)
def sweep(**options: Any) -> int:
    """Sweep a task: answer its questions with the unpruned model and with each head of some layers pruned."""
    settings = SweepOptions(**options)
    from lmeval_prune.reporting.quiet import silence_libraries
    from lmeval_prune.sprint.sweep import run_sweep

    silence_libraries()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmeval_prune").setLevel(logging.INFO)
    outcomes = run_sweep(settings)
    if outcomes is None:
        return 0
    print(f"{settings.output}: {len(outcomes.questions)} questions, pool of {len(outcomes.pool)}")
    accuracy = dict(zip(outcomes.pool, outcomes.accuracy().tolist(), strict=True))
    shown = dict.fromkeys(["dense", *sorted(accuracy, key=lambda name: -accuracy[name])[:5]])
    print("accuracy: " + ", ".join(f"{name} {accuracy[name]:.3f}" for name in shown))
    for warning in outcomes.warnings:
        print(warning)
    return 0


def fit(
    outcomes: str,
    output: str,
    encoder: str = ENCODER,
    p: tuple[int, ...] = FitOptions.sizes,
    lambda_: tuple[float, ...] = FitOptions.weights,
    without_dense: bool = False,
    **options: Any,
) -> int:
    """Fit a router to outcomes.

    Args:
        outcomes: folder of the training questions' outcome store
        output: folder for the router; one that was fitted there is replaced
        encoder: name or folder of a sentence-transformers model
        p: of contrastive: length of the embeddings; of several values, validation chooses
        lambda_: of contrastive: weight of diversity; of several values, validation chooses
        without_dense: leave the unpruned model out of the pool
    """
    settings = FitOptions(sizes=p, weights=lambda_, dense=not without_dense, **options)
    settings.method()  # refuses wrong settings before anything is read
    from lmeval_prune.reporting.quiet import silence_libraries
    from lmeval_prune.sprint.outcomes import OutcomeStore
    from lmeval_prune.sprint.router import fit

    silence_libraries()
    training = OutcomeStore(outcomes).read()
    router = fit(training, encoder, settings)
    router.save(output)
    about = router.about
    print(f"{output}: {router.method} router over {len(router.pool)} columns, {about['chosen']}")
    informative = about["questions"] - about["questions_no_head_solves"] - about["questions_all_heads_solve"]
    print(
        f"{about['questions']} questions, {informative} of them distinguish heads; "
        f"{about['validation_questions']} for validation, {about['held_out']} held out for `report sprint`"
    )
    if passes := about["validation_pass"]:
        print("validation: " + ", ".join(f"{k} {v:.3f}" for k, v in passes.items()))
    for warning in training.warnings:
        print(warning)
    return 0


def questions(outcomes: str, task: str, router: str | None = None) -> int:
    """Print the questions of a store as a value of lm_eval --samples.

    Args:
        outcomes: folder of the outcome store
        task: name of the task to evaluate, e.g. prune_asdiv_a_pass8
        router: folder of a fitted router; questions that it was fitted on are left out
    """
    from lmeval_prune.artefacts import digest
    from lmeval_prune.sprint.outcomes import OutcomeStore
    from lmeval_prune.sprint.router import Router

    fitted = set(Router.load(router).about["seen"]) if router else set()
    store = OutcomeStore(outcomes).read()
    rows = [row for row in store.questions if digest(row["question"]) not in fitted]
    ((source, split),) = {(row["task"], row["split"]) for row in rows}  # of a single task and split
    scored = store.tasks[source].get("scored_splits")
    if scored and split not in scored:
        print(
            f"these are numbers of the split {split}, and the task scores {scored[0]}: give lm_eval --metadata "
            f"data_split={split}, or, for a task of your own, one with test_split: {split}",
            file=sys.stderr,
        )
    print(json.dumps({task: [row["doc_id"] for row in rows]}))
    return 0


def report(samples: Sequence[str] = (), **options: Any) -> int:
    """Write SPRINT's tables and figures from outcome stores, a router and samples files.

    Args:
        samples: NAME=FILE: samples file of a pass@N task (lm_eval --log_samples); may be repeated
    """
    pairs = [text.partition("=")[::2] for text in samples]
    settings = ReportOptions(samples=tuple(pairs), **options)
    from lmeval_prune.reporting.quiet import silence_libraries
    from lmeval_prune.sprint.report import write_report

    silence_libraries()
    print(write_report(settings))
    return 0
