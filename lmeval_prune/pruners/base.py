"""Contract of a pruner: it scores heads and feed-forward channels; the lowest go, as many as the options say.

A pruner is a frozen dataclass in a file of its own and a line in `PRUNERS` of `table.py`. Its fields are its options.
It writes `scores`; counting, units, schedules and plans are common to all (`allocation.py`, `schedule.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import CHANNELS, Part, Removed
from lmeval_prune.pruners.table import PRUNERS, check_pruner
from lmeval_prune.settings import Settings


@dataclass(frozen=True)
class Scores:
    """Scores of heads and channels, the higher the longer they stay.

    Attributes:
        values: by part, `heads.L0` or `channels.L0`: (heads,), of columns of heads (heads, columns), or (channels,).
        means: by part, the mean over tokens of what its projection reads, if that is known.
    """

    values: dict[str, Tensor]
    means: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Pruner(Settings, ABC):
    """A way to score what may be removed; the lowest scores go.

    Attributes:
        version: (of the class) raised whenever scores are computed otherwise than before, so that what was made by the
            earlier arithmetic is not taken for the result of this one.
        reads_text: (of the class) scores depend on calibration text.
        heads_only: (of the class) channels cannot be scored.
        parts, allocation, compensates: (of the class) what `parts`, `allocation` and `compensation` of the options are,
            if they are left open. With `heads_only`, `parts` is `heads`.
    """

    version: ClassVar[int] = 1
    reads_text: ClassVar[bool] = False
    heads_only: ClassVar[bool] = False
    parts: ClassVar[str] = "both"
    allocation: ClassVar[str] = "global"
    compensates: ClassVar[str] = "none"

    @property
    def identity(self) -> dict[str, Any]:
        """JSON value that with the model and the text determines its scores: method, version and options."""
        return {"method": pruner_name(self), "version": self.version, **asdict(self)}

    @abstractmethod
    def scores(
        self, model_map: ModelMap, text: CalibrationText | None, parts: Sequence[Part], removed: Removed
    ) -> Scores:
        """Score heads and channels.

        Args:
            model_map: of the model.
            text: calibration text; `required(text)` refuses None.
            parts: all layers' heads, channels or both; not a selection of layers.
            removed: by part, what an earlier step removed and is masked now. The others are to be scored as if the
                model had never had it.

        Raises:
            InputError: the method needs a text, and there is none.
        """

    def check_model(self, model_map: ModelMap) -> None:
        """Refuse a model whose scores cannot be had, also one without weights.

        Raises:
            InputError: saying why. By default there is no such model.
        """

    def check(self, kinds: Collection[str], has_text: bool) -> None:
        """Refuse scores that cannot be had, before any is computed.

        Args:
            kinds: what is to be scored, `heads` and `channels`.
            has_text: whether there is calibration text.

        Raises:
            InputError: the method has no scores of channels, or needs a text.
        """
        if self.heads_only and CHANNELS in kinds:
            raise InputError(
                f"{pruner_name(self)} scores heads only; let channels stay (--parts heads, or no --ffn_ratio), or "
                f"score them by another method (--ffn_method)"
            )
        if kinds and self.reads_text and not has_text:
            self.required(None)

    def required(self, text: CalibrationText | None) -> CalibrationText:
        """Return the text.

        Raises:
            InputError: there is none.
        """
        if text is None:
            raise InputError(f"{pruner_name(self)} is measured on a text; give --task NAME or --text FILE")
        return text


def by_member(scores: Tensor) -> Tensor:
    """Return a score for each head or channel: the mean over columns where these are scored."""
    return scores.mean(1) if scores.dim() > 1 else scores


def make_pruner(name: str, options: Mapping[str, Any]) -> Pruner:
    """Make a pruner of its name and options.

    Raises:
        InputError: there is no such method or option, or a value does not suit it.
    """
    pruner: Pruner = pruner_class(name).from_dict(options, f"method {name}")
    return pruner


def pruner_class(name: str) -> Any:
    """Return the class of a method.

    Raises:
        InputError: there is no such method.
    """
    check_pruner(name)
    return resolve_name(PRUNERS[name])


def pruner_name(pruner: Pruner) -> str:
    """Return the name of a pruner's method."""
    path = f"{type(pruner).__module__}:{type(pruner).__qualname__}"
    return next((name for name, target in PRUNERS.items() if target == path), type(pruner).__name__)
