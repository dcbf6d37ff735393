"""Options of `distill`. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from lmeval_prune.errors import InputError
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.settings import Count, Natural, NonNegative, Positive, Seed, Settings, ShareBelowOne


@dataclass(frozen=True)
class DistillOptions(Settings):
    """Options of a distillation: pruning, teaching and training.

    Attributes:
        pretrained: a causal language model, as for lm_eval, or a folder of `lmeval-prune athena train`
        output: folder of the distilled model; the same command resumes an interrupted distillation
        teacher: teacher of the first stage instead of the unpruned model; it must have the same vocabulary
        task: (language models) task with the training problems, e.g. prune_asdiv_a_equation
        train: splits to train on (default: for an ATHENA, those that it was trained on; for a language model, the
            task's training split, or all folds but the test fold)
        test: test split, whose questions are excluded from training (default: for an ATHENA, that of its training; for
            a language model, the task's)
        validation: share of the training problems used to choose the best epoch; 0 takes the last epoch (default: for
            an ATHENA, that of its training; for a language model, 0.1)
        limit: number of training problems, sampled with the seed (default: all)
        chat: (language models) use the model's chat template
        answer: (language models) template of the answer; {} is replaced by the task's target
        answer_field: (language models) document field with the answer, instead of the task's target
        max_length: (language models) largest number of tokens in a training problem; longer problems are left out
        ratio: share of all query heads to remove in total; if ratio and ffn_ratio are 0, the model is only trained
        unit: head (any), group (a key-value head with its query heads) or balanced (a query head of each group)
        ffn_ratio: share of all feed-forward channels to remove
        ffn_multiple: the number of remaining channels in each block is a multiple of this
        allocation: global or uniform (default: the method's)
        p_min: share at which the schedule starts; after stage t of T, p_min + (ratio − p_min)·(t/T)^growth is removed
        growth: exponent of the schedule
        stages: number of stages of pruning and training
        method: pruner of `lmeval-prune prune` that scores heads, e.g. norm_entropy or random; it must score all layers
            at once, unlike slimgpt and wanda_sp
        options: options of the method, e.g. alpha=0.5
        ffn_method: pruner that scores channels (default: the same as `method`)
        ffn_options: options of ffn_method
        calibration: number of training problems that the pruner reads to compute scores
        response: use the response term: the student learns the teacher's answers
        feature: use the feature term: the student learns the teacher's attention maps
        temperature: temperature τ of the response term
        distill_weight: λ₁, weight of the response and feature terms; 0 trains without a teacher
        task_weight: λ₂, weight of the task loss
        epochs: largest number of epochs of a stage; 0 only prunes
        patience: epochs without a better validation metric before a stage ends; 0: no early stopping
        batch: problems per step
        accumulate: steps per update
        save_steps: updates between checkpoints, validations and logs; 0: once per epoch
        rate: learning rate
        decay: weight decay
        warmup: share of the updates with a rising learning rate
        clip: largest norm of the gradient
        seed: random seed of the order of problems, dropout, the validation split and sampling
        trainer: further TrainingArguments of transformers, e.g. bf16=true,gradient_checkpointing=true
        data_dir: folder with the data file (default: LMEVAL_PRUNE_DATA, or the public source if it is not set)
    """

    pretrained: str
    output: str
    teacher: str | None = None
    task: str | None = None
    train: tuple[str, ...] = ()
    test: str | None = None
    validation: ShareBelowOne | None = None
    limit: Annotated[int, Ge(2)] | None = None
    chat: bool = False
    answer: str = "{}"
    answer_field: str | None = None
    max_length: Count = 512
    ratio: float = 0.25
    unit: str = "head"
    ffn_ratio: float = 0.0
    ffn_multiple: int = 1
    allocation: Literal["global", "uniform"] | None = None
    p_min: float = 0.0
    growth: float = 1.0
    stages: Count = 3
    method: str = "norm_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    ffn_method: str | None = None
    ffn_options: dict[str, Any] = field(default_factory=dict)
    calibration: Count = 64
    response: bool = True
    feature: bool = True
    temperature: Positive = 2.0
    distill_weight: NonNegative = 0.5
    task_weight: NonNegative = 0.5
    epochs: Natural = 4
    patience: Natural = 0
    batch: Count = 8
    accumulate: Count = 1
    save_steps: Natural = 0
    rate: Positive = 5e-5
    decay: NonNegative = 0.01
    warmup: ShareBelowOne = 0.06
    clip: Positive = 5.0
    seed: Seed = 0
    trainer: dict[str, Any] = field(default_factory=dict)
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pruning()
        if self.test in self.train:
            raise InputError(f"test={self.test} is also a training split; leave it out of train")
        if not (self.uses_teacher or self.task_weight):
            raise InputError("there is nothing to train on: no teacher, and task_weight=0; raise task_weight")
        if self.patience and self.validation == 0:
            raise InputError("patience needs a validation split; give validation")
        if "{}" not in self.answer:
            raise InputError("answer must contain {}, which is replaced by the target")
        if self.ffn_options and not self.ffn_method:
            raise InputError("ffn_options need ffn_method; give both")

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher is used."""
        return self.distill_weight > 0 and (self.response or self.feature)

    @property
    def uses_attention_maps(self) -> bool:
        """Whether the loss compares the attention maps of student and teacher (the feature term)."""
        return self.distill_weight > 0 and self.feature

    def pruning(self) -> PruneOptions:
        """Return the pruner's options; each stage is one step of its schedule."""
        names = ("ratio", "unit", "ffn_ratio", "ffn_multiple", "allocation", "p_min", "growth")
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        return PruneOptions(**shared, steps=self.stages, budget="heads", compensation="none")
