"""What can be set of a sweep, a fit and a report. Imports nothing, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmeval_prune.errors import InputError

DIVERSITIES = ("ball", "sphere", "unbounded")


@dataclass(frozen=True)
class SweepOptions:
    """What is swept.

    Attributes:
        model_args: as for lm_eval --model pruned-hf (with --server: pruned-server), e.g. pretrained=smollm2-135m
        tasks: generative tasks or groups of them
        output: folder of the outcome store; an interrupted run goes on there, a store is extended
        server: address of a server that answers, e.g. http://localhost:8000; several are joined by +
        split: split of the data, e.g. train (default: the one that the task asks)
        layers: layers whose heads are pruned, one at a time
        heads: instead of layers: heads, e.g. L5H0-3+L10H2
        limit: so many questions, drawn by the seed; a larger limit holds the questions of a smaller one
        seed: of that draw
        metric: METRIC or METRIC,FILTER that decides an outcome (default exact_match)
        question_field: field of a document with the question (default: the task's metadata, else question)
        num_fewshot: as for lm_eval
        gen_kwargs: as for lm_eval, e.g. max_gen_toks=256
        apply_chat_template: as for lm_eval
        system_instruction: as for lm_eval
        metadata: as for lm_eval, e.g. data_dir=FOLDER
    """

    model_args: dict[str, Any]
    tasks: tuple[str, ...]
    output: str
    server: str | None = None
    split: str | None = None
    layers: tuple[int, ...] = (5, 10, 15, 20, 25)
    heads: str | None = None
    limit: int | None = None
    seed: int = 0
    metric: str | None = None
    question_field: str | None = None
    num_fewshot: int | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FitOptions:
    """How a router is fitted.

    Attributes:
        sizes: p, the length of q and v; of several the best on validation is taken
        weights: λ; of several the best on validation is taken (the paper gives no value)
        diversity: ball or sphere: places of heads inside or on one of a radius; unbounded: as printed in the paper
        radius: of the ball or sphere
        dense: whether the unpruned model is a candidate too
        holdout: share of the questions that is not used at all, for `report` to test on
        validation: share of the others that is kept for stopping and choosing
        epochs: at most so many passes over the questions
        patience: stop after so many passes without a better validation loss
        batch: questions a step
        learning_rate: of AdamW
        decay: weight decay of θ
        seed: of the split, the start and the order
    """

    sizes: tuple[int, ...] = (32,)
    weights: tuple[float, ...] = (0.0, 1e-4, 1e-3)
    diversity: str = "ball"
    radius: float = 1.0
    dense: bool = True
    holdout: float = 0.0
    validation: float = 0.2
    epochs: int = 200
    patience: int = 20
    batch: int = 64
    learning_rate: float = 3e-3
    decay: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "p must be whole numbers above 0": not self.sizes or min(self.sizes) < 1,
            "lambda must not be negative": not self.weights or min(self.weights) < 0,
            f"diversity must be one of {', '.join(DIVERSITIES)}": self.diversity not in DIVERSITIES,
            "radius must be above 0": self.radius <= 0,
            "validation must be at least 0 and below 1": not 0 <= self.validation < 1,
            "holdout must be at least 0 and below 1": not 0 <= self.holdout < 1,
            "epochs, patience and batch must be at least 1": min(self.epochs, self.patience, self.batch) < 1,
            "the learning rate must be above 0": self.learning_rate <= 0,
            "several values of lambda or p need a validation split": self.validation == 0
            and len(self.sizes) * len(self.weights) > 1,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise InputError(message)


@dataclass(frozen=True)
class ReportOptions:
    """What is reported.

    Attributes:
        test: outcome store of the questions that are asked; of a store that the router was fitted on, those held out
        output: folder for the report: `report.md`, tables (CSV), figures (PNG, SVG) and `report.json`
        train: another outcome store, of training questions, for the baselines that need one
        router: folder of a fitted router
        samples: name and path of lm-eval's samples files of pass@N tasks on the same questions
        n: tries
        by: attribute of questions to group by, e.g. subject
        shortlist: size of the random baseline's shortlist
        seed: of what is drawn: tests, and what luck would give
    """

    test: str
    output: str
    train: str | None = None
    router: str | None = None
    samples: Sequence[tuple[str, str]] = ()
    n: int = 8
    by: str | None = None
    shortlist: int = 16
    seed: int = 0
