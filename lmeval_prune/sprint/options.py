"""Options of `sweep`, `fit` and `report sprint`. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from lmeval_prune.errors import InputError
from lmeval_prune.settings import Count, Natural, Seed, Settings, ShareBelowOne, Use
from lmeval_prune.sprint.routers.contrastive_options import ContrastiveOptions
from lmeval_prune.sprint.routers.table import CONTRASTIVE, ROUTERS

DEFAULT_LAYERS = (5, 10, 15, 20, 25)  # of the paper


@dataclass(frozen=True)
class SweepOptions(Settings):
    """Questions, pool and settings of a sweep.

    Attributes:
        model_args: as for lm_eval --model pruned-hf (with --server: pruned-server), e.g. pretrained=smollm2-135m
        tasks: generative tasks or task groups
        output: folder of the outcome store; an interrupted run is resumed, a complete store is extended
        server: URL of a server that generates the answers, e.g. http://localhost:8000; several are joined by +
        split: split of the data, e.g. train (default: the task's own)
        layers: layers whose heads are pruned, one head at a time (default 5,10,15,20,25, if nothing else is named)
        heads: heads to prune one at a time, e.g. L5H0-3+L10H2 (instead of layers)
        variants: other variants by label, each with model_args of methods, e.g. {"filter": {"token_filter": 0.2}}
        random_sets: random sets of heads, HEADSxSETS, e.g. 4x10,16x10 for ten sets each of 4 and of 16 heads
        random_seed: seed of these sets
        cover: outcome store of training questions; the variants that together solve most of them, chosen greedily
        cover_size: number of these variants
        sampled: samples, VARIANT@TEMPERATURE#FIRST-LAST, e.g. dense@0.6#0-15, or each@0.6#0 for every variant
        attempts: those at each question, by its text: {QUESTION: [ATTEMPT, …]}, an empty list for the whole pool; other
            questions are left out
        likelihood: compute the mean log-probability of each answer under the unpruned model, too
        limit: number of questions, drawn by the seed; a larger limit includes the questions of a smaller one
        seed: seed of this draw
        metric: METRIC or METRIC,FILTER that decides an outcome (default exact_match)
        question_field: document field with the question (default: the task's metadata, else question)
        num_fewshot: as for lm_eval
        gen_kwargs: as for lm_eval, e.g. max_gen_toks=256
        apply_chat_template: as for lm_eval
        system_instruction: as for lm_eval
        metadata: as for lm_eval, e.g. data_dir=FOLDER
        hidden_states: store the model's last hidden state of each prompt, too, for fit --encoder last_hidden_state
    """

    uses: ClassVar[tuple[Use, ...]] = (Use("a cover (--cover)", lambda options: options.cover, ("cover_size",)),)
    model_args: dict[str, Any]
    tasks: tuple[str, ...]
    output: str
    server: str | None = None
    split: str | None = None
    layers: tuple[int, ...] | None = None
    heads: str | None = None
    variants: dict[str, Any] = field(default_factory=dict)
    random_sets: tuple[str, ...] = ()
    random_seed: Seed = 0
    cover: str | None = None
    cover_size: Count = 16
    sampled: tuple[str, ...] = ()
    attempts: dict[str, Any] = field(default_factory=dict)
    likelihood: bool = False
    limit: Count | None = None
    seed: Seed = 0
    metric: str | None = None
    question_field: str | None = None
    num_fewshot: Natural | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    hidden_states: bool = False

    @property
    def pool_layers(self) -> tuple[int, ...]:
        """Return the layers whose heads are in the pool one at a time."""
        if self.layers is None and not (self.heads or self.variants or self.random_sets or self.cover or self.sampled):
            return DEFAULT_LAYERS
        return () if self.heads else self.layers or ()


@dataclass(frozen=True)
class FitOptions(ContrastiveOptions):
    """Settings of a router's fit: those of every router, and those of the paper's.

    Attributes:
        router: contrastive (the paper's), knn, logistic, sequential, sequential_knn or that of another package
        options: settings of another router than the paper's; of several values, validation chooses
        dense: whether the unpruned model is in the pool
        guard: whether the unpruned model is tried first if the router's first try is worse than it on the validation
            questions (default: yes, but not for contrastive)
        holdout: share of the questions that `report` tests on; the fit does not use them
        validation: share of the other questions that choose settings (of contrastive, the epoch too)
        seed: seed of splits, initial values and order
    """

    router: str = CONTRASTIVE
    options: dict[str, Any] = field(default_factory=dict)
    dense: bool = True
    guard: bool | None = None
    holdout: ShareBelowOne = 0.0
    validation: ShareBelowOne = 0.2
    seed: Seed = 0

    def method(self) -> Any:
        """Create the router's method."""
        kind = ROUTERS.load(self.router)
        settings = {option.name: getattr(self, option.name) for option in fields(ContrastiveOptions)}
        if not issubclass(kind, ContrastiveOptions):
            changed = [option.name for option in fields(ContrastiveOptions) if settings[option.name] != option.default]
            if changed:
                name = self.label(f"{changed[0]}=").rstrip("=")
                raise InputError(f"{name} is a setting of router={CONTRASTIVE}; settings of {self.router} are options")
            settings = {}
        method = kind.from_dict({**settings, **self.options}, f"router {self.router}")
        if self.validation == 0:
            method.check_single()
        return method


@dataclass(frozen=True)
class ReportOptions(Settings):
    """Stores, router and settings of a report.

    Attributes:
        test: outcome store of the test questions; if the router was fitted on it, its held-out questions are used
        output: folder for the report: `report.md`, tables (CSV), figures (PNG, SVG) and `report.json`
        train: outcome store of the training questions, for the baselines
        router: folder of a fitted router
        samples: name and path of lm-eval's samples files of pass@N tasks on the same questions
        n: number of tries
        mixes: further ways to make tries of an order, e.g. dense|next,next+dense@0.6, if the test store has these tries
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
    mixes: tuple[str, ...] = ()
    by: str | None = None
    shortlist: Count = 16
    seed: Seed = 0
