"""The schedule of dynamic pruning (its eq. 5 and Algorithm 1): stages that remove more and more, each scored anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan, ranges_of
from lmeval_prune.pruners.base import Pruner, Scores, pruner_name
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.selection import ALLOCATIONS, Removed, select_channels, select_heads


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
        if self.growth <= 0:
            raise InputError(f"growth must be above 0, not {self.growth}")

    def at(self, step: int) -> float:
        """p_t of a step, 0 to T (eq. 5)."""
        return self.p_min + (self.ratio - self.p_min) * (step / self.steps) ** self.growth


@dataclass(frozen=True)
class PruneOptions:
    """What is removed, beside by which scores.

    Attributes:
        ratio: share of all query heads that is removed
        unit: head (any), group (a key-value head with its query heads) or balanced (a query head of each group)
        ffn_ratio: share of all feed-forward channels that is removed
        ffn_multiple: as many channels stay in each block as make a multiple of this
        allocation: global (scores of all layers are compared) or uniform (each layer loses its share; its checkpoint
            is a plain one); default: the method's
        p_min: share that the first of several steps starts from
        steps: stages, each scored anew with what is removed so far masked
        growth: exponent of the schedule between them
        allow_empty_layer: let a layer lose all its heads
    """

    ratio: float = 0.0
    unit: str = "head"
    ffn_ratio: float = 0.0
    ffn_multiple: int = 1
    allocation: str | None = None
    p_min: float = 0.0
    steps: int = 1
    growth: float = 1.0
    allow_empty_layer: bool = False

    def __post_init__(self) -> None:
        if self.allocation not in (None, *ALLOCATIONS):
            raise InputError(f"allocation={self.allocation!r} is not known; use {' or '.join(ALLOCATIONS)}")
        if self.ffn_multiple < 1:
            raise InputError(f"ffn_multiple must be at least 1, not {self.ffn_multiple}")
        self.schedules()

    def schedules(self) -> tuple[Schedule, Schedule]:
        """Of heads and of channels; p_min is a share of the larger one's way."""
        heads = Schedule(self.ratio, self.p_min if self.ratio else 0.0, self.steps, self.growth)
        share = self.p_min / self.ratio if self.ratio else 0.0
        return heads, Schedule(self.ffn_ratio, share * self.ffn_ratio, self.steps, self.growth)


def stages(
    pruner: Pruner,
    model_map: ModelMap,
    options: PruneOptions,
    text: CalibrationText | None = None,
    channel_pruner: Pruner | None = None,
    scores: tuple[Scores, Scores] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Plan]:
    """Plans of Algorithm 1, one a step, each with all that is removed so far.

    Args:
        pruner: scores heads, and channels unless there is another one for them.
        model_map: of the model; it is as it was whenever a plan is yielded.
        options: how much goes, and in which units.
        text: calibration text, for pruners that need one.
        channel_pruner: scores channels.
        scores: of heads and channels, where they are at hand for a single step.
        progress: is told what happens.

    Raises:
        InputError: the options do not suit the model or the pruner.
    """
    heads: Removed = {}
    channels: Removed = {}
    of_heads, of_channels = options.schedules()
    channel_pruner = channel_pruner or pruner
    if text is None and scores is None:
        for one, asked in ((pruner, (bool(options.ratio), False)), (channel_pruner, (False, bool(options.ffn_ratio)))):
            if any(asked) and one.needs_text(*asked):
                raise InputError(f"{pruner_name(one)} is measured on a text; give --task NAME or --text FILE")
    made = {"method": pruner_name(pruner), **asdict(pruner), "options": asdict(options)}
    made |= {"ffn_method": pruner_name(channel_pruner)} if options.ffn_ratio else {}
    made |= {"calibration": text.about()} if text is not None else {}
    compensation: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for step in range(1, options.steps + 1):
        so_far = _plan(heads, channels, options.allow_empty_layer, compensation=compensation)
        with so_far.applied_to(model_map.model, model_map):
            if scores is not None and step == 1:
                head_scores, channel_scores = scores
            else:
                progress(f"step {step} of {options.steps}: scoring heads")
                head_scores = pruner.head_scores(model_map, text) if options.ratio else {}
                progress(f"step {step} of {options.steps}: scoring channels" if options.ffn_ratio else "")
                channel_scores = channel_pruner.channel_scores(model_map, text) if options.ffn_ratio else {}
        if options.ratio:
            allocation = options.allocation or pruner.allocation
            heads = select_heads(
                model_map, head_scores, of_heads.at(step), options.unit, allocation, heads, options.allow_empty_layer
            )
        if options.ffn_ratio:
            allocation = options.allocation or channel_pruner.allocation
            channels = select_channels(
                model_map, channel_scores, of_channels.at(step), options.ffn_multiple, allocation, channels
            )
        bare = _plan(heads, channels, options.allow_empty_layer)
        compensation = {**compensation, **pruner.compensation(model_map, bare, text)}
        history.append({"step": step, "ratio": of_heads.at(step), "heads": sum(map(len, heads.values()))})
        kept = {f"heads.{k}": v for k, v in head_scores.items()} | {
            f"channels.{k}": v for k, v in channel_scores.items()
        }
        yield _plan(
            heads,
            channels,
            options.allow_empty_layer,
            compensation=compensation,
            scores=kept,
            made={**made, "stages": list(history)},
        )


def _plan(heads: Removed, channels: Removed, allow_empty_layer: bool, **more: Any) -> Plan:
    return Plan(
        tuple(f"{label}H{head}" for label, numbers in heads.items() for head in sorted(numbers)),
        {label: ranges_of(sorted(numbers)) for label, numbers in channels.items()},
        allow_empty_layer=allow_empty_layer,
        **more,
    )
