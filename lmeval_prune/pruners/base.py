"""Base classes of pruners: a pruner scores heads and channels, or layers and blocks; the lowest scores are removed.

A pruner is a frozen dataclass in its own file and one line in `PRUNERS` of `table.py`, or an entry point in
`lmeval_prune.pruners` of another package. Its fields are its options. It implements `scores`; all pruners share
counting, units, schedules and plans (`allocation.py`, `schedule.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import check_finite
from lmeval_prune.config import Settings
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.parts import DEPTH_KINDS, HEADS, KINDS, DepthPart, Part, Removal, Removed
from lmeval_prune.pruners.stores import Sums
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import class_record, is_own


@dataclass(frozen=True)
class Scores:
    """Scores by part key (`heads.L0`, `channels.L0`, `layers.L0`, …); the highest scores stay longest."""

    values: dict[str, Tensor]  # (heads,), (heads, columns of a head) or (channels,); (1,) of a layer or block
    means: Mapping[str, Tensor] | None = None  # (columns,): mean input of the projection, if the pruner computed it


@dataclass(frozen=True)
class Pruner(Settings, ABC):
    """Base class of methods that score heads and channels; the lowest scores are removed.

    Attributes:
        version: (class) raise it when the scores change, so that stored results of the earlier arithmetic are not
            reused.
        reads_text: (class) scores depend on calibration text.
        reads_logits: (class) scores depend on the next-token distributions of a causal language model.
        heads_only: (class) the method cannot score channels.
        depth: (class) the method can score whole layers and blocks, by `depth_scores`.
        depth_only: (class) it scores nothing else.
        compares_with_unpruned: (class) scores compare with the unpruned model, so that what earlier steps removed is
            not masked: the method applies it itself, with its compensation.
        parts, allocation, compensates: (class) defaults of the options `parts`, `allocation` and `compensation`. With
            `heads_only`, `parts` is `heads`.
    """

    version: ClassVar[int] = 1
    reads_text: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
    heads_only: ClassVar[bool] = False
    depth: ClassVar[bool] = False
    depth_only: ClassVar[bool] = False
    compares_with_unpruned: ClassVar[bool] = False
    parts: ClassVar[str] = "both"
    allocation: ClassVar[str] = "global"
    compensates: ClassVar[str] = "none"

    @property
    def identity(self) -> dict[str, Any]:
        """Method, version and options as JSON; with the model and the text they determine the scores."""
        named = {"method": pruner_name(self), **class_record(type(self)), "version": self.version}
        return named | asdict(self)

    @abstractmethod
    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Score heads and channels.

        Args:
            model_map: map of the model.
            text: calibration text; `require_text(text)` refuses None.
            parts: the heads, the channels or both, of all layers.
            removed: by part, members that an earlier step removed and that are masked now. Scores of the other members
                must not depend on them.
        """

    def depth_scores(
        self,
        model_map: ModelMap,
        text: CalibrationText | None,
        parts: Sequence[DepthPart],
        earlier: Removal,
        sums: Sums | None = None,
    ) -> Scores:
        """Score whole layers and blocks, each by one number, (1,).

        `earlier` is what earlier steps removed, and their compensation. `sums` are those of a killed run, for a method
        of many passes, which adds its own. The other arguments are those of `scores`.
        """
        raise NotImplementedError

    def check_model(self, model_map: ModelMap) -> None:
        """Raise `InputError` if the method cannot score this model, which may have no weights yet."""
        if self.reads_logits and not model_map.predicts_next_token:
            raise InputError(f"{pruner_name(self)} needs the next-token distributions of a causal language model")

    def check(self, kinds: Collection[str], has_text: bool) -> None:
        """Raise `InputError` if the method cannot score these kinds (see `parts.py`), or needs a text."""
        width = () if self.depth_only else (HEADS,) if self.heads_only else KINDS
        scored = (*width, *(DEPTH_KINDS if self.depth else ()))
        if not {*kinds} <= {*scored}:
            raise InputError(f"{pruner_name(self)} scores {', '.join(scored)}; give --parts {scored[0]}")
        if kinds and self.reads_text and not has_text:
            self.require_text(None)

    def require_text(self, text: CalibrationText | None) -> CalibrationText:
        """Return the calibration text, or raise `InputError` if it is None."""
        if text is None:
            raise InputError(f"{pruner_name(self)} needs a calibration text; give --task NAME or --text FILE")
        return text


class DepthPruner(Pruner):
    """Base class of methods that score whole layers and blocks alone."""

    depth: ClassVar[bool] = True
    depth_only: ClassVar[bool] = True
    parts: ClassVar[str] = "layers"

    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Part], removed: Removed) -> Scores:
        """Score nothing: these methods score no heads and channels."""
        return Scores({})


def check_scores(pruner: Pruner, scores: Scores, parts: Sequence[Part | DepthPart]) -> Scores:
    """Return what a pruner scored of these parts; `InputError` for other shapes or NaN, which would be misread."""
    values = {part.key: scores.values[part.key].detach().clone() for part in parts}  # tensors may be shared
    for part in parts:
        shape = tuple(values[part.key].shape)
        if shape[:1] != (part.size,) or 0 in shape or len(shape) > (2 if part.kind == HEADS else 1):
            raise InputError(f"{pruner_name(pruner)} returned scores of shape {shape} for {part.key}")
    if not is_own(type(pruner)):  # else the numbers are outside the range of the model's type
        check_finite(values, f"the result of {pruner_name(pruner)}", "mend the pruner")
    return Scores(values, scores.means)


def per_member(scores: Tensor) -> Tensor:
    """Return one score per head or channel: the mean over columns if a head's columns are scored."""
    return scores.mean(1) if scores.dim() > 1 else scores


def make_pruner(name: str, options: Mapping[str, Any]) -> Pruner:
    """Create a pruner from its method name and options; raise `InputError` for unknown names or wrong values."""
    pruner: Pruner = PRUNERS.load(name).from_dict(options, f"method {name}")
    return pruner


def pruner_name(pruner: Pruner) -> str:
    """Return the method name of a pruner."""
    return PRUNERS.name_of(type(pruner), type(pruner).__name__)
