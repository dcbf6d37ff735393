"""Options of `distill`. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from lmeval_prune.errors import InputError
from lmeval_prune.pruners.options import Allocation, Compensation, Parts, PruneOptions, Unit, check_samples
from lmeval_prune.settings import (
    Count,
    Decay,
    Divisor,
    LearningRate,
    Natural,
    NonNegative,
    Positive,
    Scale,
    ScaleOrZero,
    Seed,
    Settings,
    Share,
    ShareBelowOne,
    Use,
)

CORPUS = ("corpus_field", "corpus_prompt", "corpus_answers", "corpus_options", "corpus_texts", "corpus_tokens")
PROBLEMS = ("train", "test", "answer", "answer_field", "limit")
SAMPLES = ("samples", "sample_temperature", "responses")
BestBy = Literal["accuracy", "loss", "none"]


@dataclass(frozen=True)
class DistillOptions(Settings):
    """Options of a distillation: pruning, teaching and training.

    Attributes:
        pretrained: a causal language model, as for lm_eval, or a folder of `lmeval-prune athena train`
        output: folder of the distilled model; the same command resumes an interrupted distillation
        teacher: teacher of the first stage instead of the unpruned model; it must have the same tokenizer
        teachers: teacher of the later stages: previous (the student of the stage before, Algorithm 2) or first (the
            teacher of the first stage)
        task: (language models) task with the training problems, e.g. prune_asdiv_a_equation
        train: splits to train on (default: for an ATHENA, those that it was trained on; for a language model, the
            task's training split, or all folds but the test fold)
        test: test split, whose questions are excluded from training (default: for an ATHENA, that of its training; for
            a language model, the task's; of data in folds, fold0)
        validation: share of the training problems used to choose the best epoch; 0 takes the last epoch (default: for
            an ATHENA, that of its training; for a language model, 0.1)
        best_by: what chooses the epoch whose weights are kept: accuracy (validation problems solved by greedy answers,
            and of equal epochs the loss), loss (the task loss) or none (the last epoch is kept) (default: for an
            ATHENA, accuracy; for a language model, loss)
        limit: number of training problems, sampled with the seed (default: all)
        chat: (language models) use the model's chat template
        answer: (language models) template of the answer; {} is replaced by the task's target
        answer_field: (language models) document field with the answer, instead of the task's target
        max_length: (language models) largest number of tokens in a training problem, at most the positions of model and
            teacher; longer problems are left out
        corpus: (language models) train also on a text corpus, or on it alone without a task: a file or folder of .txt
            and .jsonl files, or the name of a data set for `datasets.load_dataset`
        corpus_field: field of the documents with the text
        corpus_prompt: field of the documents with a prompt; then corpus_field is its answer, which alone is learned
        corpus_answers: with corpus_prompt, data (corpus_field has the answers) or teacher (the first teacher's answers;
            those that were cut off are left out)
        corpus_options: arguments of load_dataset, e.g. name=wikitext-2-raw-v1,split=train
        corpus_texts: number of texts from the corpus, drawn with the seed
        corpus_tokens: tokens of a text that is cut out of the corpus, at most the positions of model and teacher;
            prompts with answers have up to max_length
        ratio: share to remove in total, of all query heads, or with budget=parameters of the parameters of heads and
            channels; if ratio and ffn_ratio are 0, the model is only trained
        unit: head (any), group (a key-value head with its query heads) or balanced (a query head of each group);
            default: what can be cut
        ffn_ratio: share of all feed-forward channels to remove
        ffn_multiple: the number of remaining channels in each block is a multiple of this
        allocation: as for `lmeval-prune prune` (default: the method's)
        p_min: share at which the schedule starts; after stage t of T, p_min + (ratio − p_min)·(t/T)^growth is removed
        growth: exponent of the schedule
        stages: number of stages of pruning and training
        method: pruner of `lmeval-prune prune` that scores heads, e.g. norm_entropy, slimgpt or that of another package
        options: options of the method, e.g. alpha=0.5
        ffn_method: pruner that scores channels (default: the same as `method`)
        ffn_options: options of ffn_method
        budget: heads (ratio counts query heads, ffn_ratio channels) or parameters (ratio counts those of heads and
            channels; needed by slimgpt and wanda_sp)
        parts: with budget=parameters, what is removed: both, heads or channels, or whole layers or blocks: layers,
            attention, feed_forward or blocks (default: what the method's paper removes)
        skip_first: with budget=parameters, number of first layers that are not pruned and do not count in the ratio
        skip_last: the same for the last layers
        log_start: with allocation=log, share that the first layer loses, divided by the ratio
        compensation: of each stage for what it removes: none, bias or least_squares (default: the method's)
        damping: of least squares
        steps: steps of the removal in a stage, each with new scores and no training
        calibrate_on: (language models) task (training problems with the answers of the data) or own (with the model's
            own answers)
        train_on: (language models) task (targets of the data) or teacher (sampled answers of the first teacher)
        keep_answers: with train_on=teacher, right (answers that the task's scorer finds right) or all
        unsolved: with train_on=teacher, what becomes of a question without an answer that is kept: target (its target
            is learned) or drop
        answer_metric: (language models) METRIC or METRIC,FILTER of the task that decides what is right, for
            keep_answers and best_by=accuracy (default: exact_match or its first)
        samples: own answers, or the teacher's, to each question or prompt; several need a sample_temperature
        sample_temperature: temperature of these answers; 0: greedy
        max_gen_toks: (language models) tokens of such an answer, or of one for best_by=accuracy, at most (default: the
            task's, without one 256)
        prompts_count: measure prompts of own answers, too; false: only the tokens of the answers
        regenerate: stages after which the model pruned so far answers again for the calibration; 0: the unpruned
            model's answers are used throughout
        responses: folder of the answer store, which other runs can share (default: OUTPUT.responses)
        calibration: number of training problems that the pruner reads to compute scores
        response: use the response term: the student learns the teacher's answers
        top_k: (language models) likeliest tokens of the teacher that the response term compares; 0: all tokens
        top_k_rest: with top_k, what happens to the other tokens: bucket (they are one outcome) or none (both
            distributions are renormalised without them)
        feature: use the feature term: the student learns the teacher's attention maps
        feature_weight: weight of the feature term beside the response term
        hidden: use the hidden-state term: the student learns the outputs of the teacher's layers
        hidden_weight: weight of the hidden-state term beside the response term
        normalize: teacher (the feature and hidden-state terms are divided by the teacher's squares, query by query and
            token by token) or none (as the paper prints them)
        layer_map: teacher's layer for each layer of the student that the hidden-state term compares, e.g.
            L5=L7,L11=L15 (default: each layer that is left, with the same layer of the teacher)
        temperature: temperature τ of the response term
        distill_weight: λ₁, weight of the response, feature and hidden-state terms; 0 trains without a teacher
        task_weight: λ₂, weight of the task loss
        epochs: largest number of epochs of a stage; 0 only prunes
        patience: epochs without a better validation metric before a stage ends; 0: no early stopping
        batch: problems per step
        accumulate: steps per update
        save_steps: updates between checkpoints, validations and logs; 0: once per epoch
        resumable: false keeps no optimizer states: checkpoints are a third as large, and a killed training begins its
            stage again
        lora: train LoRA updates of the projections instead of all weights, and add them to the written weights:
            arguments of peft's LoraConfig, e.g. r=16,lora_dropout=0.05 (default of r: 8, of lora_alpha: 2·r)
        rate: learning rate
        decay: weight decay
        warmup: share of the updates with a rising learning rate
        clip: largest norm of the gradient
        seed: random seed of the order of problems, dropout, the validation split and sampling
        trainer: further TrainingArguments of transformers, e.g. bf16=true,gradient_checkpointing=true
        data_dir: folder with the data file (default: LMEVAL_PRUNE_DATA, or the public source if it is not set)
    """

    uses: ClassVar[tuple[Use, ...]] = (
        Use("a corpus", lambda options: bool(options.corpus), CORPUS),
        Use("a corpus without corpus_prompt", lambda options: not options.corpus_prompt, ("corpus_tokens",)),
        Use("a corpus with corpus_prompt", lambda options: bool(options.corpus_prompt), ("corpus_answers",)),
        Use("corpus_answers=data", lambda options: options.corpus_answers == "data", ("corpus_field",)),
        Use("the problems of a task", lambda options: options.task or not options.corpus, PROBLEMS),
        Use(
            "problems with answers (a task, or corpus_prompt)",
            lambda options: options.task or options.corpus_prompt or not options.corpus,
            ("chat", "max_length"),
        ),
        Use("several stages", lambda options: options.stages > 1, ("p_min", "growth")),
        Use("ffn_method", lambda options: bool(options.ffn_method), ("ffn_options",)),
        Use("channels (ffn_ratio, or parts=both)", lambda options: options.removes_channels, ("ffn_method",)),
        Use("calibrate_on=own", lambda options: options.calibrate_on == "own", ("prompts_count", "regenerate")),
        Use("several stages", lambda options: options.stages > 1, ("regenerate",)),
        Use("train_on=teacher", lambda options: options.train_on == "teacher", ("keep_answers", "unsolved")),
        Use(
            "train_on=teacher or best_by=accuracy",
            lambda options: options.train_on == "teacher" or options.best_by == "accuracy",
            ("answer_metric",),
        ),
        Use(
            "calibrate_on=own, train_on=teacher or corpus_answers=teacher", lambda options: options.asks_models, SAMPLES
        ),
        Use(
            "calibrate_on=own, train_on=teacher, corpus_answers=teacher or best_by=accuracy",
            lambda options: options.asks_models or options.best_by == "accuracy",
            ("max_gen_toks",),
        ),
        Use("a validation split", lambda options: options.validation != 0, ("best_by",)),
        Use("a distill_weight above 0", lambda options: options.distill_weight > 0, ("hidden",)),
        Use(
            "the response term",
            lambda options: options.distill_weight > 0 and options.response,
            ("top_k", "temperature"),
        ),
        Use("top_k", lambda options: options.top_k > 0, ("top_k_rest",)),
        Use("the feature term", lambda options: options.uses_attention_maps, ("feature_weight",)),
        Use(
            "the hidden-state term (hidden=true)",
            lambda options: options.uses_hidden_states,
            ("hidden_weight", "layer_map"),
        ),
        Use(
            "the feature or the hidden-state term",
            lambda options: options.uses_attention_maps or options.uses_hidden_states,
            ("normalize",),
        ),
        Use(
            "a term that needs a teacher, train_on=teacher or corpus_answers=teacher",
            lambda options: options.uses_teacher or options.asks_teacher,
            ("teacher",),
        ),
        Use("a term that needs a teacher", lambda options: options.uses_teacher, ("teachers",)),
        Use(
            "a term that needs a teacher",
            lambda options: options.uses_teacher or not options.distill_weight,
            ("distill_weight",),
        ),
    )
    pretrained: str
    output: str
    teacher: str | None = None
    teachers: Literal["previous", "first"] = "previous"
    task: str | None = None
    train: tuple[str, ...] = ()
    test: str | None = None
    validation: ShareBelowOne | None = None
    best_by: BestBy | None = None
    limit: Annotated[int, Ge(2)] | None = None
    chat: bool = False
    answer: str = "{}"
    answer_field: str | None = None
    max_length: Count = 512
    corpus: str | None = None
    corpus_field: str = "text"
    corpus_prompt: str | None = None
    corpus_answers: Literal["data", "teacher"] = "data"
    corpus_options: dict[str, Any] = field(default_factory=dict)
    corpus_texts: Count = 1000
    corpus_tokens: Annotated[int, Ge(2)] = 128
    ratio: float = 0.25
    unit: Unit | None = None
    ffn_ratio: float = 0.0
    ffn_multiple: int = 1
    allocation: Allocation | None = None
    p_min: float = 0.0
    growth: float = 1.0
    stages: Count = 3
    method: str = "norm_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    ffn_method: str | None = None
    ffn_options: dict[str, Any] = field(default_factory=dict)
    budget: Literal["heads", "parameters"] = "heads"
    parts: Parts | None = None
    skip_first: Natural = 0
    skip_last: Natural = 0
    log_start: Share = 0.3125
    compensation: Compensation | None = None
    damping: NonNegative = 0.01
    steps: Count = 1
    calibrate_on: Literal["task", "own"] = "task"
    train_on: Literal["task", "teacher"] = "task"
    keep_answers: Literal["right", "all"] = "right"
    unsolved: Literal["target", "drop"] = "target"
    answer_metric: str | None = None
    samples: Count = 1
    sample_temperature: NonNegative = 0.0
    max_gen_toks: Count | None = None
    prompts_count: bool = True
    regenerate: Natural = 1
    responses: str | None = None
    calibration: Count = 64
    response: bool = True
    top_k: Natural = 0
    top_k_rest: Literal["bucket", "none"] = "bucket"
    feature: bool = True
    feature_weight: Scale = 1.0
    hidden: bool = False
    hidden_weight: Scale = 1.0
    normalize: Literal["teacher", "none"] = "teacher"
    layer_map: dict[str, str] = field(default_factory=dict)
    temperature: Divisor = 2.0
    distill_weight: ScaleOrZero = 0.5
    task_weight: ScaleOrZero = 0.5
    epochs: Natural = 4
    patience: Natural = 0
    batch: Count = 8
    accumulate: Count = 1
    save_steps: Natural = 0
    resumable: bool = True
    lora: dict[str, Any] = field(default_factory=dict)
    rate: LearningRate = 5e-5
    decay: Decay = 0.01
    warmup: ShareBelowOne = 0.06
    clip: Positive = 5.0
    seed: Seed = 0
    trainer: dict[str, Any] = field(default_factory=dict)
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pruning()
        check_samples(self.samples, self.sample_temperature)
        if self.test in self.train:
            raise InputError(f"test={self.test} is also a training split; leave it out of train")
        if not (self.uses_teacher or self.task_weight):
            raise InputError("there is nothing to train on: no teacher, and task_weight=0; raise task_weight")
        if self.patience and self.validation == 0:
            raise InputError("patience needs a validation split; give validation")
        if self.patience and self.best_by == "none":
            raise InputError("patience waits for a better epoch, and best_by=none looks for none; leave out either")
        if "{}" not in self.answer:
            raise InputError("answer must contain {}, which is replaced by the target")

    @property
    def asks_models(self) -> bool:
        """Whether models answer training problems or prompts."""
        return self.calibrate_on == "own" or self.asks_teacher

    @property
    def asks_teacher(self) -> bool:
        """Whether the first teacher answers training problems, or the prompts of the corpus."""
        return "teacher" in (self.train_on, self.corpus_answers)

    @property
    def removes_channels(self) -> bool:
        """Whether channels are removed."""
        return self.ffn_ratio > 0 if self.budget == "heads" else self.parts in (None, "both", "channels")

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher is used."""
        return self.distill_weight > 0 and (self.response or self.feature or self.hidden)

    @property
    def uses_attention_maps(self) -> bool:
        """Whether the loss compares the attention maps of student and teacher (the feature term)."""
        return self.distill_weight > 0 and self.feature

    @property
    def uses_hidden_states(self) -> bool:
        """Whether the loss compares the hidden states of student and teacher."""
        return self.distill_weight > 0 and self.hidden

    def pruning(self) -> PruneOptions:
        """Return the pruner's options; each stage is one step of its schedule."""
        names = {option.name for option in fields(PruneOptions)} & {option.name for option in fields(self)}
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        return PruneOptions(**{**shared, "steps": self.stages})
