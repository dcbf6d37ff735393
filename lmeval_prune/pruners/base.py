"""What a pruner is: it scores heads and feed-forward channels; the lowest go, as many as a schedule says.

A pruner is a frozen dataclass in a file of its own and a line in `PRUNERS` of `table.py`. Its fields are its options.
It writes `head_scores`, and where it can `channel_scores` and `compensation`; counting, units, schedules and plans are
common to all (`selection.py`, `schedule.py`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError, nearest
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.selection import Removed
from lmeval_prune.pruners.table import PRUNERS, check_pruner
from lmeval_prune.settings import typed, types_of

_HEADS_ONLY = "{} scores heads only; let channels stay, or score them by another method"

Scores = dict[str, Tensor]  # by layer, `L0`: (heads,) or (channels,); of columns of heads (heads, columns)


@dataclass(frozen=True)
class Scored:
    """What a pruner found out.

    Attributes:
        heads, channels: scores; empty where they were not asked for.
        means: of what projections read, `L0.o_proj` and `L0.down`; None if it did not look.
    """

    heads: Scores
    channels: Scores
    means: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Pruner(ABC):
    """A way to score what may be removed; the lowest scores go.

    Attributes:
        version: (of the class) raised whenever scores or compensation are computed otherwise than before, so that what
            was made by the earlier arithmetic is not taken for the result of this one.
        parts, allocation, compensates: (of the class) what `parts`, `allocation` and `compensation` of the options are,
            if they are left open. Of a method without `channel_scores`, `parts` is `heads`.
    """

    version: ClassVar[int] = 1
    parts: ClassVar[str] = "both"
    allocation: ClassVar[str] = "global"
    compensates: ClassVar[str] = "none"

    @property
    def identity(self) -> dict[str, Any]:
        """JSON value that with the model and the text determines what it finds: method, version and options."""
        return {"method": pruner_name(self), "version": self.version, **asdict(self)}

    def needs_text(self, heads: bool, channels: bool) -> bool:
        """Whether scores of heads, or of channels, depend on calibration text."""
        return False

    @abstractmethod
    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """A score for each query head of each attention layer.

        Args:
            model_map: of the model.
            text: calibration text.
            removed: heads that an earlier step removed and that are masked now. The others are to be scored as if the
                model had never had them.

        Raises:
            InputError: the method needs a text, and there is none.
        """

    def channel_scores(
        self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None
    ) -> Scores:
        """A score for each channel of each feed-forward block; as of `head_scores`.

        Raises:
            InputError: the method has none.
        """
        raise InputError(_HEADS_ONLY.format(pruner_name(self)))

    def scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        heads: bool,
        channels: bool,
        removed: tuple[Removed, Removed] = ({}, {}),
    ) -> Scored:
        """Scores of heads, of channels or of both at once; as of `head_scores`.

        Args:
            model_map: of the model.
            text: calibration text.
            heads, channels: which are asked for.
            removed: heads and channels that are masked now.
        """
        return Scored(
            self.head_scores(model_map, text, removed[0]) if heads else {},
            self.channel_scores(model_map, text, removed[1]) if channels else {},
        )

    @property
    def scores_channels(self) -> bool:
        """Whether the method scores channels, too."""
        return type(self).channel_scores is not Pruner.channel_scores

    def check_model(self, model_map: ModelMap) -> None:  # noqa: B027 - most methods suit every model
        """Refuse a model whose scores cannot be had; of one without weights, too.

        Raises:
            InputError: saying why. By default there is no such model.
        """

    def check(self, heads: bool, channels: bool, text: bool) -> None:
        """Refuse scores that cannot be had, before any is computed.

        Args:
            heads, channels: whether these are to be scored.
            text: whether there is calibration text.

        Raises:
            InputError: the method has no scores of channels, or needs a text.
        """
        if channels and not self.scores_channels:
            raise InputError(_HEADS_ONLY.format(pruner_name(self)))
        if not text and (heads or channels) and self.needs_text(heads, channels):
            needed(self, None)

    def compensation(self, model_map: ModelMap, plan: Plan, text: CalibrationText | None) -> Mapping[str, Tensor]:
        """What makes up for a plan's loss beside the `compensation` of the options; see `Plan`. By default nothing."""
        return {}


class ReadingPruner(Pruner):
    """A way that always reads calibration text, and scores heads and channels in one run of it, by `scores`."""

    def needs_text(self, heads: bool, channels: bool) -> bool:
        """Always; see the base class."""
        return True

    def head_scores(self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None) -> Scores:
        """Those of `scores`; see the base class."""
        return self.scores(model_map, text, True, False).heads

    def channel_scores(
        self, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None
    ) -> Scores:
        """Those of `scores`; see the base class."""
        return self.scores(model_map, text, False, True).channels

    @abstractmethod
    def scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        heads: bool,
        channels: bool,
        removed: tuple[Removed, Removed] = ({}, {}),
    ) -> Scored:
        """Both from one run of the text; see the base class."""


def by_member(scores: Tensor) -> Tensor:
    """A score of each head or channel: of heads whose columns are scored, the mean over columns."""
    return scores.mean(1) if scores.dim() > 1 else scores


def needed(pruner: Pruner, text: CalibrationText | None) -> CalibrationText:
    """The text that a pruner needs.

    Raises:
        InputError: there is none.
    """
    if text is None:
        raise InputError(f"{pruner_name(pruner)} is measured on a text; give --task NAME or --text FILE")
    return text


def make_pruner(name: str, options: Mapping[str, Any]) -> Pruner:
    """A pruner by its name and options.

    Raises:
        InputError: there is no such method or option, or a value is of another type.
    """
    kind = pruner_class(name)
    known = [one.name for one in fields(kind)]
    for key in options:
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"method {name} has no option {key!r}; {has}{nearest(key, known)}")
    made: Pruner = kind(**{key: typed(key, value, types_of(kind)[key]) for key, value in options.items()})
    return made


def pruner_class(name: str) -> Any:
    """The class of a method.

    Raises:
        InputError: there is no such method.
    """
    check_pruner(name)
    module, _, attribute = PRUNERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def pruner_name(pruner: Pruner) -> str:
    """The name of a pruner's method."""
    path = f"{type(pruner).__module__}:{type(pruner).__qualname__}"
    return next((name for name, target in PRUNERS.items() if target == path), type(pruner).__name__)
