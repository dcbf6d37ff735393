"""Options of `distill`. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from lmeval_prune.config import Count, Divisor, LearningRate, Natural, ScaleOrZero, Seed, Settings, ShareBelowOne, Use
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.options import PruneOptions

PREVIOUS, FIRST = "previous", "first"  # teachers that are no models


@dataclass(frozen=True)
class DistillOptions(Settings):
    """Options of a distillation: pruning, teaching and training.

    Attributes:
        pretrained: a causal language model, as for lm_eval, or a folder of `lmeval-prune athena train`
        output: folder of the distilled model; the same command resumes an interrupted distillation
        ratio: share to remove in total, of all query heads, or as pruning's budget counts; 0: the model is only trained
        method: pruner of `lmeval-prune prune`, e.g. norm_entropy, slimgpt, block_kl or that of another package
        options: options of the method, e.g. alpha=0.5
        pruning: other options of `lmeval-prune prune`, e.g. budget=parameters,parts=layers (default budget: heads), and
            ffn_method, a pruner of channels; steps are those within a stage, p_min and growth the schedule of stages
        stages: number of stages of pruning and training
        calibration: number of training problems that the pruner reads to compute scores
        calibrate_on: (language models) task (problems with their targets) or own (answers of the model that is pruned)
        teacher: previous (the model before each stage, Algorithm 2), first (the unpruned model) or a model with the
            same tokenizer
        terms: what is learned from the teacher: response (its answers), feature (its attention maps)
        normalize: teacher (the feature term is divided by the teacher's squares) or none (as the paper prints it)
        temperature: temperature τ of the response term
        distill_weight: λ₁, weight of the terms; 0 trains without a teacher
        task_weight: λ₂, weight of the task loss
        task: (language models) task with the training problems (default: prune_asdiv_a_equation, or with prompts none)
        test: test split, which is not trained on (default: an ATHENA's own, or the task's; of data in folds, fold0)
        validation: share of the training problems that chooses the best epoch (default: an ATHENA's own, or 0.1)
        limit: number of training problems, and of prompts, drawn with the seed (default: all)
        chat: (language models) use the model's chat template
        answer: (language models) template of the answer; {} is replaced by the task's target
        max_length: (language models) largest number of tokens in a training text; longer ones are left out
        prompts: (language models) file of JSON lines with a `prompt`, whose answers by the teacher (previous: the
            unpruned model) are learned beside the task's problems, or alone
        train_on: (language models) task (targets of the data) or teacher (its answers, where they are right)
        max_gen_toks: (language models) tokens of a model's own answer at most (default: the task's, without one 256)
        epochs: number of epochs of a stage; 0 only prunes
        batch: problems per step
        rate: learning rate
        best_by: what chooses the epoch whose weights are kept: loss (on validation problems) or none (the last)
            (default: loss; for an ATHENA, the number of validation problems that it solves)
        seed: random seed of the order of problems, dropout and the validation split
        trainer: other TrainingArguments of transformers, e.g. bf16=true,weight_decay=0 (defaults that differ from its
            own: weight_decay 0.01, warmup_steps 0.06, max_grad_norm 5; save_steps instead of an epoch)
        data_dir: folder with the data file (default: LMEVAL_PRUNE_DATA, or the public source if it is not set)
    """

    uses: ClassVar[tuple[Use, ...]] = (
        Use(
            "a teacher (distill_weight above 0, prompts or train_on=teacher)",
            lambda options: options.uses_teacher or options.asks_teacher,
            ("teacher",),
        ),
        Use("a validation split", lambda options: options.validation != 0, ("best_by",)),
        Use(
            "the problems of a task",
            lambda options: options.task or not options.prompts,
            ("test", "answer", "train_on"),
        ),
    )
    pretrained: str
    output: str
    ratio: float = 0.25
    method: str = "norm_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    pruning: dict[str, Any] = field(default_factory=dict)
    stages: Count = 3
    calibration: Count = 64
    calibrate_on: Literal["task", "own"] = "task"
    teacher: str = PREVIOUS
    terms: tuple[Literal["response", "feature"], ...] = ("response", "feature")
    normalize: Literal["teacher", "none"] = "teacher"
    temperature: Divisor = 2.0
    distill_weight: ScaleOrZero = 0.5
    task_weight: ScaleOrZero = 0.5
    task: str | None = None
    test: str | None = None
    validation: ShareBelowOne | None = None
    limit: Annotated[int, Ge(2)] | None = None
    chat: bool = False
    answer: str = "{}"
    max_length: Count = 512
    prompts: str | None = None
    train_on: Literal["task", "teacher"] = "task"
    max_gen_toks: Count | None = None
    epochs: Natural = 4
    batch: Count = 8
    rate: LearningRate = 5e-5
    best_by: Literal["loss", "none"] | None = None
    seed: Seed = 0
    trainer: dict[str, Any] = field(default_factory=dict)
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.removal()
        if not (self.uses_teacher or self.task_weight):
            raise InputError("there is nothing to train on: no teacher, and task_weight=0; raise task_weight")
        if "{}" not in self.answer:
            raise InputError("answer must contain {}, which is replaced by the target")

    @property
    def asks_teacher(self) -> bool:
        return self.train_on == "teacher" or self.prompts is not None

    @property
    def uses_teacher(self) -> bool:
        return self.distill_weight > 0 and bool(self.terms)

    @property
    def uses_attention_maps(self) -> bool:
        return self.distill_weight > 0 and "feature" in self.terms

    @property
    def other_teacher(self) -> str | None:
        """The model that teaches all stages; None if the model or its students do."""
        return None if self.teacher in (PREVIOUS, FIRST) else self.teacher

    def removal(self) -> PruneOptions:
        """Return the pruner's options; each stage is one step of its schedule."""
        options = {"budget": "heads", **self.pruning, "steps": self.stages}
        options.pop("ffn_method", None)
        return PruneOptions(ratio=self.ratio, allow_empty_layer=False, **options)

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        others: dict[str, dict[str, Any]] = {self.pruning["ffn_method"]: {}} if "ffn_method" in self.pruning else {}
        return {self.method: self.options} | others
