"""What can be set of a plan. Imports nothing, so that `--help` is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lmeval_prune.errors import InputError

BUDGETS = ("heads", "parameters")
ALLOCATIONS = {
    "heads": ("global", "uniform"),
    "parameters": ("global", "uniform", "standardised", "log", "flap_reference"),
}
COMPENSATIONS = ("none", "bias", "least_squares")
PARTS = ("both", "heads", "channels")


@dataclass(frozen=True)
class Schedule:
    """How much is removed by when: p_t = p_min + (p_max − p_min)·(t/T)ⁿ.

    Attributes:
        ratio: p_max, the share that is removed in the end.
        p_min: the share at the start.
        steps: T, how many stages.
        growth: n.
    """

    ratio: float
    p_min: float = 0.0
    steps: int = 1
    growth: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise InputError(f"a ratio must be at least 0 and below 1, not {self.ratio}; 0.25 removes a quarter")
        if not 0 <= self.p_min <= self.ratio:
            raise InputError(f"p_min must be from 0 to the ratio {self.ratio}, not {self.p_min}")
        if self.steps < 1:
            raise InputError(f"a schedule needs at least 1 step, not {self.steps}")
        if not 0 < self.growth < math.inf:
            raise InputError(f"growth must be above 0, not {self.growth}")

    def at(self, step: int) -> float:
        """p_t of a step, 0 to T (eq. 5)."""
        return self.p_min + (self.ratio - self.p_min) * (step / self.steps) ** self.growth


@dataclass(frozen=True)
class PruneOptions:
    """What is removed, beside by which scores.

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

    ratio: float = 0.0
    unit: str | None = None
    ffn_ratio: float = 0.0
    ffn_multiple: int = 1
    allocation: str | None = None
    p_min: float = 0.0
    steps: int = 1
    growth: float = 1.0
    allow_empty_layer: bool = False
    budget: str = "parameters"
    parts: str | None = None
    skip_first: int = 0
    skip_last: int = 0
    log_start: float = 0.3125
    compensation: str | None = None
    damping: float = 0.01

    def __post_init__(self) -> None:
        allocations = ALLOCATIONS[self.budget] if self.budget in ALLOCATIONS else ALLOCATIONS["parameters"]
        choices = {"budget": BUDGETS, "allocation": allocations, "parts": PARTS, "compensation": COMPENSATIONS}
        for name, known in choices.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(f"{name}={value!r} is not known; use {', '.join(known[:-1])} or {known[-1]}")
        if self.ffn_multiple < 1:
            raise InputError(f"ffn_multiple must be at least 1, not {self.ffn_multiple}")
        if min(self.skip_first, self.skip_last) < 0:
            raise InputError("skip_first and skip_last are numbers of layers, at least 0")
        if not 0 <= self.log_start <= 1:
            raise InputError(f"log_start must be from 0 to 1, not {self.log_start}")
        if not 0 <= self.damping < math.inf:
            raise InputError(f"damping must be at least 0, not {self.damping}")
        self.schedules()

    def __str__(self) -> str:
        """Return in words what is to be removed; of options that leave nothing open."""
        if self.budget == "heads":
            shares = ((self.ratio, "query heads"), (self.ffn_ratio, "channels"))
            return " and ".join(f"{share:.4g}% of the {kind}" for ratio, kind in shares if (share := 100 * ratio))
        kinds = "heads and channels" if self.parts == "both" else self.parts or "what the method removes"
        ends = ((self.skip_first, "first"), (self.skip_last, "last"))
        spared = " and ".join(f"the {end} {count}" for count, end in ends if count)
        where = f" in all layers but {spared}" if spared else ""
        return f"{100 * self.ratio:.4g}% of the parameters of {kinds}{where}"

    def schedules(self) -> tuple[Schedule, Schedule]:
        """Of heads and of channels. The larger ratio starts at p_min, the other one as far on its way."""
        larger = Schedule(max(self.ratio, self.ffn_ratio), self.p_min, self.steps, self.growth)
        started = self.p_min / larger.ratio if larger.ratio else 0.0
        heads, channels = (
            Schedule(ratio, started * ratio, self.steps, self.growth) for ratio in (self.ratio, self.ffn_ratio)
        )
        return heads, channels
