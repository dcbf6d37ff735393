"""Sources of calibration text: a task's problems or a file, which are read, and own answers, which a model gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_prune.pruners.calibration import CalibrationText, check_length, read_calibration
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.pruners.schedule import Renew


class TextSource(ABC):
    """A source of calibration text for a model."""

    @abstractmethod
    def of(self, model: Any) -> CalibrationText:
        """Return the text for a model with its weights and interventions."""

    def renewed(self, model: Any) -> Renew | None:
        """Return the function that gives each step its own text; None if all steps read the same."""
        return None


@dataclass(frozen=True)
class FixedText(TextSource):
    """A text that does not depend on the model."""

    text: CalibrationText

    def of(self, model: Any) -> CalibrationText:
        """Return the text."""
        return self.text


def read_text(model: Any, tokenizer: Any, options: TextOptions) -> FixedText:
    """Read the problems of a task or a file; `InputError` if the model, perhaps without weights, cannot read them."""
    check_length(model, options.window)
    reading = (options.windows, options.window, options.batch, options.seed)
    tokenisation = (options.apply_chat_template, options.add_bos_token)
    return FixedText(read_calibration(tokenizer, options.text, options.task, *reading, *tokenisation))


def responses_folder(responses: str | None, output: Path) -> Path:
    """Return the folder of the answer store: the one that is named, or `NAME.responses` beside the output."""
    return Path(responses) if responses else output.with_name(f"{output.name.removesuffix('.json')}.responses")
