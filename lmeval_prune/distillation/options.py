"""Options of distillation. Imports nothing heavy, so that `--help` is quick."""

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
        pretrained: the model: a causal language model, as for lm_eval, or a folder of `lmeval-prune athena train`
        output: folder of the pruned, distilled model; an interrupted distillation goes on beside it
        teacher: teaches the first stage instead of the unpruned model; it must have the same vocabulary
        task: (language models) task whose training problems are learned, e.g. prune_asdiv_a_equation
        train: splits to train on (default: of an ATHENA its own; else the task's own, or the other folds)
        test: split that is kept for the test; nothing of it is looked at (default: the host's own, or the task's)
        validation: share of the training problems that chooses the best epoch; 0 takes the last one (default: the
            host's own, or 0.1)
        limit: so many training problems, drawn by the seed
        chat: (language models) ask in the model's chat template
        answer: (language models) how an answer is written; {} stands for the task's target
        answer_field: (language models) field of the documents that is the answer, instead of the task's target
        max_length: (language models) problems of more tokens are left out
        ratio: share of all query heads that is removed in the end; 0 with ffn_ratio 0: only distilled, or fine-tuned
        unit: head (any), group (a key-value head with its query heads) or balanced (a query head of each group)
        ffn_ratio: share of all feed-forward channels that is removed
        ffn_multiple: as many channels stay in each block as make a multiple of this
        allocation: global or uniform; default: the method's
        p_min: share that the first stage starts from
        growth: exponent of the schedule
        stages: how many times something is removed and the rest is trained
        method: scores heads: a pruner of `lmeval-prune prune` that scores all layers at once, e.g. norm_entropy or
            random; slimgpt and wanda_sp do not
        options: of the method, e.g. alpha=0.5
        ffn_method: scores channels (default: the same)
        ffn_options: of that method
        calibration: so many training problems that scores are measured on
        response: the student is to give the teacher's answers
        feature: its heads are to attend as the teacher's do
        temperature: of the answers that are compared
        distill_weight: λ₁, of response and feature together; 0: nobody teaches
        task_weight: λ₂, of the answers themselves
        epochs: of a stage at most; 0 removes only
        patience: end a stage after so many epochs without a better validation; 0 never
        batch: problems a step
        accumulate: steps that make one update
        save_steps: keep, validate and log after so many updates instead of after each epoch
        rate: learning rate
        decay: weight decay
        warmup: share of the updates in which the rate rises
        clip: largest norm of a gradient
        seed: of order, dropout, validation split and what is drawn
        trainer: further TrainingArguments of transformers, e.g. bf16=true,gradient_checkpointing=true
        data_dir: folder with the data file (default LMEVAL_PRUNE_DATA, else the public source)
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
            raise InputError(f"the training split {self.test} is the test split; leave it out of train")
        if not (self.taught or self.task_weight):
            raise InputError("nothing would be learned: nobody teaches and task_weight is 0; raise task_weight")
        if self.patience and self.validation == 0:
            raise InputError("patience needs a validation split; give validation")
        if "{}" not in self.answer:
            raise InputError("answer must have {} where the target stands")
        if self.ffn_options and not self.ffn_method:
            raise InputError("ffn_options are those of a method for channels; give ffn_method, too")

    @property
    def taught(self) -> bool:
        """Return whether there is a teacher."""
        return self.distill_weight > 0 and (self.response or self.feature)

    @property
    def compares_maps(self) -> bool:
        """Return whether attention maps are compared."""
        return self.distill_weight > 0 and self.feature

    def pruning(self) -> PruneOptions:
        """Return what all stages remove together; training makes up for the loss.

        Raises:
            InputError: it cannot be removed.
        """
        names = ("ratio", "unit", "ffn_ratio", "ffn_multiple", "allocation", "p_min", "growth")
        shares: dict[str, Any] = {name: getattr(self, name) for name in names}
        return PruneOptions(**shares, steps=self.stages, budget="heads", compensation="none")
