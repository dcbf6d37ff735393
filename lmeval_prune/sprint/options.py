"""Options of a sweep, a fit and a report. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from lmeval_prune.errors import InputError
from lmeval_prune.settings import Count, Natural, NonNegative, Positive, Settings, ShareBelowOne


@dataclass(frozen=True)
class SweepOptions(Settings):
    """Questions, heads and settings of a sweep.

    Attributes:
        model_args: as for lm_eval --model pruned-hf (with --server: pruned-server), e.g. pretrained=smollm2-135m
        tasks: generative tasks or groups of them
        output: folder of the outcome store; an interrupted run goes on there, a store is extended
        server: address of a server that answers, e.g. http://localhost:8000; several are joined by +
        split: split of the data, e.g. train (default: the one that the task uses)
        layers: layers whose heads are pruned, one at a time
        heads: instead of layers: heads, e.g. L5H0-3+L10H2
        limit: number of questions, drawn by the seed; a larger limit holds the questions of a smaller one
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
    limit: Count | None = None
    seed: int = 0
    metric: str | None = None
    question_field: str | None = None
    num_fewshot: Natural | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FitOptions(Settings):
    """Settings of a router's fit.

    Attributes:
        sizes: p, the length of q and v; of several the best on validation is taken
        weights: λ; of several the best on validation is taken (the paper gives no value)
        diversity: ball or sphere: head embeddings inside or on one of a radius; unbounded: as printed in the paper
        radius: of the ball or sphere
        dense: whether the unpruned model is a candidate too
        holdout: share of the questions that is not used at all, for `report` to test on
        validation: share of the others that is kept for stopping and choosing
        epochs: maximum number of passes over the questions
        patience: stop after so many passes without a better validation loss
        batch: questions a step
        learning_rate: of AdamW
        decay: weight decay of θ
        seed: of the split, the start and the order
    """

    sizes: Annotated[tuple[Count, ...], MinLen(1)] = (32,)
    weights: Annotated[tuple[NonNegative, ...], MinLen(1)] = (0.0, 1e-4, 1e-3)
    diversity: Literal["ball", "sphere", "unbounded"] = "ball"
    radius: Positive = 1.0
    dense: bool = True
    holdout: ShareBelowOne = 0.0
    validation: ShareBelowOne = 0.2
    epochs: Count = 200
    patience: Count = 20
    batch: Count = 64
    learning_rate: Positive = 3e-3
    decay: NonNegative = 1e-2
    seed: int = 0

    @classmethod
    def label(cls, message: str) -> str:
        """Return a message that begins with the option's name, which differs from the field's for two of them."""
        field_name, _, rest = message.partition("=")
        return "=".join([{"sizes": "p", "weights": "lambda"}.get(field_name, field_name), rest])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation == 0 and len(self.sizes) * len(self.weights) > 1:
            raise InputError("several values of lambda or p need a validation split: set validation above 0")


@dataclass(frozen=True)
class ReportOptions(Settings):
    """Stores, router and settings of a report.

    Attributes:
        test: outcome store of the test questions; of a store that the router was fitted on, those held out
        output: folder for the report: `report.md`, tables (CSV), figures (PNG, SVG) and `report.json`
        train: another outcome store, of training questions, for the baselines that need one
        router: folder of a fitted router
        samples: name and path of lm-eval's samples files of pass@N tasks on the same questions
        n: number of tries
        by: attribute of questions to group by, e.g. subject
        shortlist: size of the random baseline's shortlist
        seed: of what is drawn: tests, and what luck would give
    """

    test: str
    output: str
    train: str | None = None
    router: str | None = None
    samples: tuple[tuple[str, str], ...] = ()
    n: Count = 8
    by: str | None = None
    shortlist: Count = 16
    seed: int = 0
