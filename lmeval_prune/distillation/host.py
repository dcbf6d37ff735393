"""Interface of a kind of model that can be distilled: reading, examples, losses and writing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from lmeval_prune.artefacts import read_artefact
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import checkpoint_identity, configuration_digests, read_manifest
from lmeval_prune.comparison.tokens import Text
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.pruners.calibration import Batch, CalibrationText
from lmeval_prune.training.questions import Document, TrainingQuestions, question_keys

SCHEMA, VERSION = "lmeval-prune/distillation", 1
NOTE = "distillation.json"  # beside the weights: model, options, material (what is trained on), stages
TASK_LOSS, SOLVED_THEN_LOSS = "eval_task", "eval_solved_then_loss"  # metrics in the log that choose the best epoch


def read_note(folder: str | Path) -> dict[str, Any]:
    return read_artefact(Path(folder) / NOTE, SCHEMA, VERSION)[0]


@dataclass(frozen=True)
class TrainingExamples:
    """Examples of a distillation; their type depends on the host."""

    train: Sequence[Any]
    validation: Sequence[Any]
    lengths: Sequence[int]  # number of tokens of each training example
    note: dict[str, Any]  # for `distillation.json`: counts, splits, digests of questions
    problems: Sequence[Any] = ()  # validation problems, whatever is learned of them
    questions: Sequence[Any] = ()  # training problems that a model can be asked


class Host(ABC):
    """A kind of model that can be pruned and distilled.

    The *backbone* is the transformers model whose heads are pruned: the model itself, or its encoder.
    """

    choosing: ClassVar[tuple[str, bool]] = (TASK_LOSS, False)  # the best epoch by default; whether higher is better

    def __init__(self, options: DistillOptions) -> None:
        self.options = options

    @property
    def best_by(self) -> tuple[str, bool] | None:
        """Metric that chooses the epoch whose weights are kept, and whether higher is better; None: the last epoch."""
        return {"loss": (TASK_LOSS, False), "none": None}.get(str(self.options.best_by), self.choosing)

    # ------------------------------------------------------------------ models

    @abstractmethod
    def skeleton(self, folder: str) -> Any:
        """Return the backbone without weights; `InputError` if the folder has no suitable model."""

    @abstractmethod
    def read(self, folder: str) -> nn.Module:
        """Read a model in evaluation mode, with at least float32."""

    @abstractmethod
    def write(self, model: Any, manifest: dict[str, Any], folder: Path, add_files: Callable[[Path], None]) -> None:
        """Write a model and the manifest of its cuts atomically; `add_files` adds further files to the folder."""

    def write_card(self, model: Any, manifest: dict[str, Any], note: dict[str, Any], folder: Path) -> None:  # noqa: B027
        """Write the card of the distilled model, if it gets one; `note` has the fields of `distillation.json`."""

    def identity(self, folder: str) -> str:
        """Return a digest of a model's weights; `InputError` if the model does not exist."""
        return checkpoint_identity(folder)

    def configuration(self, folder: str) -> dict[str, str]:
        """Return digests of a model's configuration, tokenizer and chat template, by the names of their files."""
        return configuration_digests(folder)

    def backbone(self, model: Any) -> Any:
        return model

    def with_backbone(self, model: Any, backbone: Any) -> Any:
        return backbone

    def backbone_folder(self, folder: Path) -> Path:
        return folder

    @cached_property
    def tokenizer(self) -> Any:
        return self.tokenizer_of(self.options.pretrained)

    def tokenizer_of(self, folder: str) -> Any:
        path = self.backbone_folder(Path(embedded.resolve(folder)))
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)

    @abstractmethod
    def check_teacher(self, folder: str) -> None:
        """Raise an `InputError` if the teacher has another vocabulary; no weights are read."""

    def check(self) -> None:
        """Raise an `InputError` if the model was cut with zeroed fillers, or if answers do not suit the models."""
        folder = self.backbone_folder(Path(embedded.resolve(self.options.pretrained)))
        for stage in (read_manifest(folder) or {}).get("stages", []):
            if layers := ", ".join([*stage["removed"]["fillers"], *stage["removed"]["zeroed_channels"]]):
                raise InputError(
                    f"{self.options.pretrained} was cut with zeroed fillers ({layers}), which training would change; "
                    f"cut it with unit=group or balanced"
                )

    # ------------------------------------------------------------------ data

    @abstractmethod
    def examples(self) -> TrainingExamples:
        """Load training and validation examples; `InputError` if there are none, or if they contain the test."""

    @abstractmethod
    def contents(self) -> dict[str, str]:
        """Return digests of what is trained on, by their names in the settings."""

    @abstractmethod
    def questions_of(self, folder: str) -> TrainingQuestions:
        """Return the recorded training questions of a model and its ancestors."""

    def all_questions(
        self, questions: TrainingQuestions, test: Iterable[Document], test_name: str
    ) -> TrainingQuestions:
        """Return the questions of this training, of the model and of the teacher; without epochs, of the model alone.

        `InputError` if model or teacher were trained on the test or on validation problems.
        """
        is_trained = self.options.epochs > 0
        questions = questions if is_trained else TrainingQuestions()
        tested, total = question_keys(test), questions
        validated = questions.validated - questions.trained
        for folder in filter(None, (self.options.pretrained, self.options.other_teacher if is_trained else None)):
            earlier = self.questions_of(folder)
            if count := len(tested & (earlier.trained | earlier.validated)):
                raise InputError(
                    f"{folder} was trained on {count} of the {len(tested)} questions of the test split {test_name}"
                )
            if count := len(validated & earlier.trained):
                raise InputError(
                    f"{folder} was trained on {count} of the {len(validated)} validation problems; give the "
                    f"validation, limit and seed of its training, or --validation 0"
                )
            total |= earlier
        return total

    def taught(self, examples: TrainingExamples, work: Path) -> TrainingExamples:
        """Return examples of what the teacher answers, which one process asks once, and keeps in a file of `work`."""
        raise NotImplementedError

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Batch examples into the model's inputs, with `input_ids`, `attention_mask` and `labels`."""

    def calibration(self, examples: TrainingExamples, model: Any) -> CalibrationText:
        """Draw training problems with their targets, whatever is learned; of prompts alone, the teacher's answers."""
        drawn = self.drawn(examples.questions or examples.train)
        batches = [self.collate(drawn[start : start + 8]) for start in range(0, len(drawn), 8)]
        rows = tuple(Batch(x["input_ids"], x["attention_mask"], x["attention_mask"]) for x in batches)
        return CalibrationText(f"{len(drawn)} training problems", rows)

    def drawn(self, examples: Sequence[Any]) -> list[Any]:
        """Draw as many examples by the seed as the pruner reads."""
        generator = torch.Generator().manual_seed(self.options.seed)
        order = torch.randperm(len(examples), generator=generator).tolist()
        return [examples[index] for index in order[: self.options.calibration]]

    def compared_texts(self, examples: TrainingExamples) -> list[Text]:
        """Return texts on which next-token distributions are compared; empty for a host without such."""
        return []

    # ------------------------------------------------------------------ losses

    @abstractmethod
    def items(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of judgements or tokens in a batch, the divisor of task and response losses."""

    @abstractmethod
    def loss(self, outputs: Any, inputs: Mapping[str, Any], teacher: Any = None) -> dict[str, Tensor]:
        """Return the cross-entropy (`task`), and with a teacher's outputs KL(teacher ‖ student) at the temperature.

        Both are summed over the items; the second is `response`.
        """

    def count_solved(self, model: Any, problems: Sequence[Any]) -> int | None:
        """Return how many validation problems a model solves, if that chooses the epoch."""
        return None
