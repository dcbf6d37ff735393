"""Settings of a plan and of calibration text. Imports nothing, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, cast

from annotated_types import Ge

from lmeval_prune.errors import InputError
from lmeval_prune.settings import Count, Natural, NonNegative, Positive, Settings, Share, ShareBelowOne

T = TypeVar("T")


@dataclass(frozen=True)
class PruneOptions(Settings):
    """Settings of how much is removed of a model.

    Attributes:
        ratio: share that is removed: of the parameters of what parts names; of --budget heads, of all query heads
        unit: what heads are removed by: head (each by itself), group (a key-value head with its query heads) or
            balanced (one query head of every group at once). Default: group where the model has groups that can be cut,
            else head; with --budget heads, head
        ffn_ratio: with --budget heads, the share of all feed-forward channels that is removed
        ffn_multiple: as many channels stay in each block as make a multiple of this
        allocation: global (scores of all layers are compared) or uniform (each layer loses its share, and what
            rounding leaves is carried to the next; where the share is a whole number of units, layers stay alike, which
            a plain checkpoint needs); of a budget of parameters also standardised (heads and channels of
            all layers are compared, by how far they are from their layer's mean), flap_reference (the same as FLAP's
            released code counts) and log (later layers lose more); default: the method's
        p_min: with several steps, the share that the schedule starts from and raises to the ratio. With a ratio and an
            ffn_ratio it is that of the larger one; the smaller one starts from the same fraction of itself
        steps: stages, each scored anew with what is removed so far masked
        growth: exponent of the schedule between them
        allow_empty_layer: let a layer lose all its heads
        budget: what ratio counts: parameters (one share of those of heads and channels that can be removed) or heads
            (ratio is a share of all query heads, ffn_ratio of all channels)
        parts: of a budget of parameters, what goes: both, heads or channels. Default: what the method's paper removes:
            heads for norm_entropy, global_threshold and confidence, both for the others and with an ffn_method
        skip_first: of a budget of parameters, so many first layers are spared, and do not count in the ratio
        skip_last: the same of the last layers
        log_start: of allocation=log, what the first layer loses, as a share of the ratio
        compensation: what makes up for the loss: none, bias (the mean of what is lost) or least_squares (output
            projections that do best without it); default: the method's
        damping: of least squares, what is added to the diagonal, as a share of its mean
    """

    ratio: ShareBelowOne = 0.0
    unit: Literal["head", "group", "balanced"] | None = None
    ffn_ratio: ShareBelowOne = 0.0
    ffn_multiple: Count = 1
    allocation: Literal["global", "uniform", "standardised", "log", "flap_reference"] | None = None
    p_min: Share = 0.0
    steps: Count = 1
    growth: Positive = 1.0
    allow_empty_layer: bool = False
    budget: Literal["parameters", "heads"] = "parameters"
    parts: Literal["both", "heads", "channels"] | None = None
    skip_first: Natural = 0
    skip_last: Natural = 0
    log_start: Share = 0.3125
    compensation: Literal["none", "bias", "least_squares"] | None = None
    damping: NonNegative = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_min > max(self.ratio, self.ffn_ratio):
            raise InputError(f"p_min={self.p_min} must be at most the ratio, {max(self.ratio, self.ffn_ratio)}")
        if self.budget == "heads" and self.allocation in ("standardised", "log", "flap_reference"):
            raise InputError(
                f"allocation={self.allocation} counts parameters; leave out --budget heads, or give allocation global "
                f"or uniform"
            )

    def __str__(self) -> str:
        """Return in words what is to be removed; of options that leave nothing open."""
        if self.budget == "heads":
            shares = ((self.ratio, "query heads"), (self.ffn_ratio, "channels"))
            return " and ".join(f"{share:.4g}% of the {kind}" for ratio, kind in shares if (share := 100 * ratio))
        kinds = "heads and channels" if self.parts == "both" else self.parts or "what the method removes"
        ends = ((self.skip_first, "first"), (self.skip_last, "last"))
        spared = " and ".join(f"the {end} {count}" for count, end in ends if count)
        layers = f" in all layers but {spared}" if spared else ""
        return f"{100 * self.ratio:.4g}% of the parameters of {kinds}{layers}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of parts that lose something, `heads` and `channels`; of options that leave nothing open."""
        if self.budget == "heads":
            return tuple(kind for kind, ratio in (("heads", self.ratio), ("channels", self.ffn_ratio)) if ratio)
        return ("heads", "channels") if self.parts in ("both", None) else (self.parts,)

    def shares(self, step: int) -> tuple[float, float]:
        """Return the shares of heads and of channels that are gone after a step, 0 to T (eq. 5).

        p_t = p_min + (p_max − p_min)·(t/T)ⁿ, p_max the larger ratio; the smaller one is as far on its way.
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
    """Settings of calibration text.

    Attributes:
        task: calibration text: training split of this task, e.g. prune_gsm8k
        text: calibration text: this file
        windows: windows of the calibration text
        tokens: tokens of a window, special tokens included
        batch: windows a forward pass
        seed: of the order in which the text is read
        apply_chat_template: write calibration problems as the user's turns and their answers as the assistant's, as
            lm_eval asks with this option
        add_bos_token: as of lm_eval's model_args; default: what the tokenizer does by itself
    """

    task: str | None = None
    text: str | None = None
    windows: Count = 64
    tokens: Annotated[int, Ge(2)] = 128
    batch: Count = 8
    seed: int = 0
    apply_chat_template: bool = False
    add_bos_token: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task and self.text:
            raise InputError("give the calibration text by --task or by --text, not both")

    @property
    def is_named(self) -> bool:
        """True if a text is named."""
        return bool(self.task or self.text)


@dataclass(frozen=True)
class PruneSettings(TextOptions, PruneOptions):
    """Settings of a plan and of its calibration text."""


def pick(kind: type[T], settings: Any) -> T:
    """Make settings of a base class of those of a subclass."""
    return kind(**{each.name: getattr(settings, each.name) for each in fields(cast("Any", kind))})
