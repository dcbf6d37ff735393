"""Options of pruning plans and of calibration text. This module imports no torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge

from lmeval_prune.config import Count, Natural, NonNegative, Positive, Seed, Settings, Share, ShareBelowOne
from lmeval_prune.errors import InputError

Allocation = Literal["global", "uniform", "joint", "standardised", "log", "flap_reference"]
Parts = Literal["both", "heads", "channels", "layers", "blocks", "attention", "feed_forward"]
Unit = Literal["head", "group", "balanced"]
Compensation = Literal["none", "bias", "least_squares"]


@dataclass(frozen=True)
class PruneOptions(Settings):
    """Options that say how much of a model is removed.

    Attributes:
        ratio: share that is removed: of the parameters of the selected parts; with --budget heads, of all query heads
        unit: unit in which heads are removed: head (single heads), group (a key-value head with its query heads) or
            balanced (one query head of every group). Default: group where the model has groups that can be cut, else
            head; with --budget heads, head
        ffn_ratio: with --budget heads, share of all feed-forward channels that is removed
        allocation: global (compare the scores of all layers) or uniform (the same share of each layer, the rounding
            remainder from the next one; with a share of whole units all layers have the same shape); with a budget of
            parameters also joint (compare the scores of heads with those of channels), standardised (compare them by
            their distance from their layer's mean), flap_reference (the same, with the costs of FLAP's released code)
            and log (later layers lose more); default: the method's
        p_min: with several steps, the share at which the schedule starts; it ends at the ratio. With a ratio and an
            ffn_ratio it applies to the larger one; the smaller one starts at the same fraction of itself
        steps: number of steps; each scores the model without the units that earlier ones removed
        growth: exponent of the schedule between p_min and the ratio
        allow_empty_layer: let a layer lose all its heads
        budget: what ratio counts: parameters (of what can be removed) or heads (ratio is a share of all query heads,
            ffn_ratio of all channels)
        parts: with a budget of parameters, what is removed: both (heads and channels), heads, channels, layers (whole
            ones), attention or feed_forward (whole blocks), or blocks (of both kinds). Default: what the method's paper
            removes, and both with an ffn_method
        skip_first: with a budget of parameters, number of first layers that are not pruned and do not count in the
            ratio
        skip_last: the same for the last layers
        log_start: with allocation=log, share that the first layer loses, divided by the ratio
        compensation: for removed units: none, bias (their mean output) or least_squares (an updated weight of the
            output projection); default: the method's
        damping: for least squares, number added to the diagonal of the covariance, divided by the diagonal's mean
    """

    ratio: ShareBelowOne = 0.0
    unit: Unit | None = None
    ffn_ratio: ShareBelowOne = 0.0
    allocation: Allocation | None = None
    p_min: Share = 0.0
    steps: Count = 1
    growth: Positive = 1.0
    allow_empty_layer: bool = False
    budget: Literal["parameters", "heads"] = "parameters"
    parts: Parts | None = None
    skip_first: Natural = 0
    skip_last: Natural = 0
    log_start: Share = 0.3125
    compensation: Compensation | None = None
    damping: NonNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_min > max(self.ratio, self.ffn_ratio):
            raise InputError(f"p_min={self.p_min} must be at most the ratio, {max(self.ratio, self.ffn_ratio)}")
        if self.budget == "heads":
            is_ignored = self.parts is not None or self.allocation not in (None, "global", "uniform")
        else:
            is_ignored = self.ffn_ratio > 0
        if is_ignored:  # the plan would be another than the one asked for
            raise InputError("--budget heads takes --ffn_ratio, no --parts and few --allocation")

    def __str__(self) -> str:
        """Describe in words what resolved options remove, e.g. `20% of the parameters of heads and channels`."""
        if self.budget == "heads":
            shares = ((self.ratio, "query heads"), (self.ffn_ratio, "channels"))
            return " and ".join(f"{share:.4g}% of the {kind}" for ratio, kind in shares if (share := 100 * ratio))
        return f"{100 * self.ratio:.4g}% of the parameters of {' and '.join(self.kinds)}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of parts that resolved options remove, as in `parts.py`."""
        if self.budget == "heads":
            return tuple(kind for kind, ratio in (("heads", self.ratio), ("channels", self.ffn_ratio)) if ratio)
        groups = {"both": ("heads", "channels"), "blocks": ("attention", "feed_forward")}
        return groups.get(self.parts or "both", (str(self.parts),))

    def shares(self, step: int) -> tuple[float, float]:
        """Return the shares of heads and of channels that are removed after a step, 0 to T.

        Eq. 5: p_t = p_min + (p_max − p_min)·(t/T)ⁿ for the larger ratio p_max; the smaller one is scaled in proportion.
        """
        largest = max(self.ratio, self.ffn_ratio)
        start = self.p_min / largest if largest else 0.0
        heads, channels = (
            start * ratio + (ratio - start * ratio) * (step / self.steps) ** self.growth
            for ratio in (self.ratio, self.ffn_ratio)
        )
        return heads, channels


@dataclass(frozen=True)
class TextOptions(Settings):
    """Options of calibration text.

    Attributes:
        calibrate_on: task (problems with the answers of the data) or own (prompts of the problems with the model's own
            answers)
        sample_temperature: temperature of own answers; 0: greedy
        max_gen_toks: tokens of an own answer at most (default: the task's)
        prompts_count: measure prompts of own answers, too; false: only the tokens of the answers
        regenerate: steps after which the model pruned so far answers again; 0: the unpruned model's answers are used
            throughout
        responses: folder of the answer store, which later runs can share (default: beside the output)
        task: calibration text: training split of this task, e.g. prune_gsm8k
        text: calibration text: this file; of a .jsonl file the field `text` of each line
        windows: number of windows of calibration text; of own answers: number of questions
        tokens: tokens per calibration window, special tokens included; not for own answers
        batch: calibration windows per forward pass
        seed: seed of the order in which the text is read, and of sampled answers
        apply_chat_template: write calibration problems as user turns and their answers as assistant turns, like
            lm_eval's option of this name
        add_bos_token: like lm_eval's model_arg of this name; default: what the tokenizer does
    """

    calibrate_on: Literal["task", "own"] = "task"
    sample_temperature: NonNegative = 0.0
    max_gen_toks: Count | None = None
    prompts_count: bool = True
    regenerate: Natural = 1
    responses: str | None = None
    task: str | None = None
    text: str | None = None
    windows: Count = 128
    tokens: Annotated[int, Ge(2)] = 128
    batch: Count = 8
    seed: Seed = 0
    apply_chat_template: bool = False
    add_bos_token: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task and self.text:
            raise InputError("give the calibration text by --task or by --text, not both")

    @property
    def has_text(self) -> bool:
        return bool(self.task or self.text)


@dataclass(frozen=True)
class PruneSettings(TextOptions, PruneOptions):
    """Options of a plan and of its calibration text."""


def pick(base: type[Any], settings: Any) -> Any:
    """Copy the fields of a base class from an instance of a subclass."""
    return base(**{field.name: getattr(settings, field.name) for field in fields(base)})
