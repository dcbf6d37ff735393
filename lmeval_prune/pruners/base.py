"""The base class of pruners: a pruner scores heads and channels, or layers and blocks; the lowest scores are removed.

A pruner is a frozen dataclass with a line in `PRUNERS` of `table.py`, or an entry point in `lmeval_prune.pruners` of
another package. Its fields are its options.
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
from lmeval_prune.pruners.parts import HEADS, KINDS, DepthPart, Part, Removed
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.registry import class_record, is_own


@dataclass(frozen=True)
class Scores:
    """Scores by part key (`heads.L0`, `channels.L0`, `layers.L0`, …); the highest scores stay longest."""

    values: dict[str, Tensor]  # (heads,), (heads, columns of a head) or (channels,); (1,) of a layer or block
    means: Mapping[str, Tensor] | None = None  # (columns,): mean input of the projection, if the pruner computed it


@dataclass(frozen=True)
class Pruner(Settings, ABC):
    """Base class of methods that score parts of a model; the lowest scores are removed.

    Attributes:
        version: (class) raise it when the scores change, so that stored results of the earlier arithmetic are not
            reused.
        kinds: (class) what the method can score: `heads`, `channels`, `layers`, `attention`, `feed_forward`.
        reads_text: (class) scores depend on calibration text.
        reads_logits: (class) scores depend on the next-token distributions of a causal language model.
        compares_with_unpruned: (class) scores compare with the unpruned model, so that what earlier steps removed is
            not masked: the method applies it itself.
        parts, allocation, compensates: (class) defaults of the options `parts`, `allocation` and `compensation`.
    """

    version: ClassVar[int] = 1
    kinds: ClassVar[tuple[str, ...]] = KINDS
    reads_text: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = False
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
    def scores(self, model_map: ModelMap, text: CalibrationText | None, parts: list[Any], removed: Removed) -> Scores:
        """Score parts of a model.

        Args:
            model_map: map of the model.
            text: calibration text; `require_text(text)` refuses None.
            parts: each a `Part` (the heads or the channels of a layer) or a `DepthPart` (a layer or block).
            removed: by part, members that an earlier step removed and that are masked now. Scores of the other members
                must not depend on them.
        """

    def check(self, model_map: ModelMap, kinds: Collection[str], has_text: bool = True) -> None:
        """Raise `InputError` if the method cannot score these kinds, or the model, which may have no weights yet."""
        if not {*kinds} <= {*self.kinds}:
            raise InputError(f"{pruner_name(self)} scores {', '.join(self.kinds)}; give --parts {self.kinds[0]}")
        if kinds and self.reads_text and not has_text:
            self.require_text(None)
        if self.reads_logits and not model_map.predicts_next_token:
            raise InputError(f"{pruner_name(self)} needs the next-token distributions of a causal language model")

    def require_text(self, text: CalibrationText | None) -> CalibrationText:
        if text is None:
            raise InputError(f"{pruner_name(self)} needs a calibration text; give --task NAME or --text FILE")
        return text


def score(
    pruner: Pruner,
    model_map: ModelMap,
    text: CalibrationText | None,
    parts: Sequence[Part | DepthPart],
    removed: Removed | None = None,
) -> Scores:
    """Return a pruner's scores of these parts; `InputError` for other shapes or NaN, which would be misread."""
    scores = pruner.scores(model_map, text, list(parts), removed or {})
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
    return PRUNERS.name_of(type(pruner), type(pruner).__name__)
