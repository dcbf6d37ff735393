"""Options of `sweep`, `fit` and `report sprint`, and the table of routers. Imports nothing slow: `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen

from lmeval_prune.config import (
    Count,
    Decay,
    LearningRate,
    Natural,
    Scale,
    ScaleOrZero,
    Seed,
    Settings,
    ShareBelowOne,
    Use,
)
from lmeval_prune.errors import InputError
from lmeval_prune.registry import Registry

DEFAULT_LAYERS = (5, 10, 15, 20, 25)  # of the paper
CONTRASTIVE = "contrastive"  # the paper's router, and the default
ROUTERS = Registry(
    group="lmeval_prune.routers",
    setting="router",
    own={
        CONTRASTIVE: "lmeval_prune.sprint.routers.contrastive:Contrastive",
        "knn": "lmeval_prune.sprint.routers.knn:Knn",
    },
)


@dataclass(frozen=True)
class SweepOptions(Settings):
    """Questions, pool and settings of a sweep.

    Attributes:
        model_args: as for lm_eval --model pruned-hf (with --server: pruned-server), e.g. pretrained=smollm2-135m
        tasks: generative tasks or task groups
        output: folder of the outcome store; an interrupted run is resumed, a complete store is extended
        server: URL of a server that generates the answers, e.g. http://localhost:8000; several are joined by +
        split: split of the data, e.g. train (default: the task's own)
        layers: layers whose heads are pruned, one head at a time (default 5,10,15,20,25)
        heads: heads to prune one at a time, e.g. L5H0-3+L10H2 (instead of layers)
        limit: number of questions, drawn by the seed; a larger limit includes the questions of a smaller one
        seed: seed of this draw
        metric: METRIC or METRIC,FILTER that decides an outcome (default exact_match)
        question_field: document field with the question (default: the task's metadata, else question)
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
    layers: tuple[int, ...] | None = None
    heads: str | None = None
    limit: Count | None = None
    seed: Seed = 0
    metric: str | None = None
    question_field: str | None = None
    num_fewshot: Natural | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers and self.heads:
            raise InputError("give layers or heads, not both")


@dataclass(frozen=True)
class ContrastiveOptions(Settings):
    """Settings of the paper's router (eq. 1).

    Attributes:
        sizes: of contrastive: p, the length of the embeddings q and v; of several values, validation chooses
        weights: of contrastive: λ, the weight of diversity; the paper gives no value; of several, validation chooses
        diversity: of contrastive: constraint on the head embeddings: ball, sphere, or unbounded (as in the paper)
        radius: of contrastive: radius of the ball or sphere
        epochs: of contrastive: maximum number of epochs
        patience: of contrastive: epochs without a better validation loss before the fit stops
        batch: of contrastive: questions per step
        learning_rate: of contrastive: learning rate of AdamW
        decay: of contrastive: weight decay of θ
    """

    sizes: Annotated[tuple[Count, ...], MinLen(1)] = (32,)
    weights: Annotated[tuple[ScaleOrZero, ...], MinLen(1)] = (0.0, 1e-4, 1e-3)
    diversity: Literal["ball", "sphere", "unbounded"] = "ball"
    radius: Scale = 1.0
    epochs: Count = 200
    patience: Count = 20
    batch: Count = 64
    learning_rate: LearningRate = 3e-3
    decay: Decay = 1e-2


@dataclass(frozen=True)
class FitOptions(ContrastiveOptions):
    """Settings of a router's fit: those of every router, and those of the paper's.

    Attributes:
        router: contrastive (the paper's), knn or that of another package
        options: settings of another router than the paper's; of several values, validation chooses
        dense: whether the unpruned model is in the pool
        holdout: share of the questions that `report` tests on; the fit does not use them
        validation: share of the other questions that choose settings (of contrastive, the epoch too)
        seed: seed of splits, initial values and order
    """

    uses: ClassVar = (
        Use(
            "router=contrastive (settings of others are --options)",
            lambda options: options.router == CONTRASTIVE,
            tuple(option.name for option in fields(ContrastiveOptions)),
        ),
    )
    router: str = CONTRASTIVE
    options: dict[str, Any] = field(default_factory=dict)
    dense: bool = True
    holdout: ShareBelowOne = 0.0
    validation: ShareBelowOne = 0.2
    seed: Seed = 0

    def method(self) -> Any:
        own = fields(ContrastiveOptions) if self.router == CONTRASTIVE else ()
        settings = {option.name: getattr(self, option.name) for option in own}
        return ROUTERS.load(self.router).from_dict({**settings, **self.options}, f"router {self.router}")


@dataclass(frozen=True)
class ReportOptions(Settings):
    """Stores, router and settings of a report.

    Attributes:
        test: outcome store of the test questions; if the router was fitted on it, its held-out questions are used
        output: folder for the report: `report.md`, tables (CSV), figures (PNG, SVG) and `report.json`
        train: outcome store of the training questions, for the baselines
        router: folder of a fitted router
        samples: name and path of lm-eval's samples files of pass@N tasks on the same questions
        n: number of attempts
        by: attribute of questions to group by, e.g. subject
        shortlist: size of the random baseline's shortlist
        seed: seed of the paired tests and of the shuffled outcomes
    """

    test: str
    output: str
    train: str | None = None
    router: str | None = None
    samples: tuple[tuple[str, str], ...] = ()
    n: Count = 8
    by: str | None = None
    shortlist: Count = 16
    seed: Seed = 0
