"""The interface of a kind of model that is distilled: how it is read, fed, judged and written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NotRequired

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_artefact
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.loading import as_input_error
from lmeval_prune.checkpoints.pruned import read_manifest
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.channels import Channels
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.training.questions import Document, SeenQuestions, question_keys

SCHEMA, VERSION = "lmeval-prune/distillation", 1
NOTE = "distillation.json"  # beside the weights of a distilled model


class StageNote(TypedDict):
    """Fields that are read of a stage."""

    stage: int
    heads: dict[str, list[int]]
    removed: dict[str, Any]
    parameters: int


class MaterialNote(TypedDict):
    """Fields that are read of the training problems."""

    splits: dict[str, Any]
    trained_on: NotRequired[list[str]]
    validated_on: NotRequired[list[str]]


class Note(TypedDict):
    """Fields of `distillation.json`."""

    model: str
    options: dict[str, Any]
    material: MaterialNote
    stages: list[StageNote]


def read_note(folder: str | Path) -> dict[str, Any]:
    """Read the `distillation.json` of a folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    return read_artefact(Path(folder) / NOTE, SCHEMA, VERSION, Note)[0]


@dataclass(frozen=True)
class TrainingExamples:
    """Examples of a distillation, in the form of their host.

    Attributes:
        train, validation: examples.
        lengths: tokens of each training example.
        note: for `distillation.json`: how many there are and were left out, splits, digests of questions.
        problems: of the validation, where a host solves them.
    """

    train: Sequence[Any]
    validation: Sequence[Any]
    lengths: Sequence[int]
    note: dict[str, Any]
    problems: Sequence[Any] = ()


class Host(ABC):
    """A kind of model that is pruned and distilled.

    Attributes:
        metric, greater: figure in the log that chooses the best epoch, and whether more of it is better.
        token, use: a special token that the tokenizer must have, and what it does.
    """

    metric: ClassVar[str]
    greater: ClassVar[bool]
    token: ClassVar[str]
    use: ClassVar[str]

    def __init__(self, options: DistillOptions) -> None:
        self.options = options

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self.tokenizer_of(self.options.pretrained)

    def tokenizer_of(self, folder: str) -> Any:
        """Read a model's tokenizer; `InputError` if it cannot be read or lacks the token."""
        with as_input_error(f"the tokenizer of {folder} cannot be read"):
            path = self.backbone_folder(Path(embedded.resolve(folder)))
            tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if getattr(tokenizer, self.token) is None:
            name = self.token.replace("_", " ")
            raise InputError(f"the tokenizer of {folder} has no {name}, which {self.use}; set its {self.token}")
        return tokenizer

    @abstractmethod
    def skeleton(self, folder: str) -> Any:
        """Return the transformers model whose heads are pruned, without weights; `InputError` if there is none."""

    def identity(self, folder: str) -> str:
        """Return a digest of a model's weights; `InputError` if there is no such model."""
        return checkpoint_identity(folder)

    @abstractmethod
    def check_teacher(self, folder: str) -> None:
        """Refuse (`InputError`) a teacher with another vocabulary; no weights are read."""

    @abstractmethod
    def read(self, folder: str) -> nn.Module:
        """Read a model, in float32 at least, in evaluation mode."""

    @abstractmethod
    def write(
        self, model: Any, manifest: dict[str, Any], folder: Path, beside: Callable[[Path], None] | None = None
    ) -> None:
        """Write a model and the manifest of its cuts as a folder that appears whole.

        `beside` is called with the folder that is being written, to add files.
        """

    def backbone(self, model: Any) -> Any:
        """Return the transformers model in a model whose heads are pruned."""
        return model

    def with_backbone(self, model: Any, backbone: Any) -> Any:
        """Return the model with another such transformers model."""
        return backbone

    def backbone_folder(self, folder: Path) -> Path:
        """Return the folder of that transformers model in a model's."""
        return folder

    def check_layers(self) -> None:
        """Refuse a model that was cut with zeroed fillers, which would be trained again.

        Raises:
            InputError: naming the layers.
        """
        folder = self.backbone_folder(Path(embedded.resolve(self.options.pretrained)))
        for stage in (read_manifest(folder) or {}).get("stages", []):
            removed, sizes = stage["plan"].get("channels", {}), stage["parent"]["channels"]
            emptied = [block for block, text in removed.items() if len(Channels(text).numbers) == sizes[block]]
            if layers := ", ".join([*stage["removed"]["fillers"], *emptied]):
                raise InputError(
                    f"{self.options.pretrained} was cut with zeroed fillers ({layers}), which training would fill "
                    f"again; cut it by whole groups (unit=group or balanced), with something left in each layer"
                )

    @abstractmethod
    def examples(self) -> TrainingExamples:
        """Load training and validation examples; no weights are read.

        Raises:
            InputError: there are none, or the test is among them.
        """

    @abstractmethod
    def seen(self, folder: str) -> SeenQuestions:
        """Return what a model, and those that it was made from, were trained on, as far as its files say it."""

    def all_seen(self, questions: SeenQuestions, test: Iterable[Document], name: str) -> SeenQuestions:
        """Return the questions of this training, and those of parent and teacher; `name` is that of the test.

        Raises:
            InputError: parent or teacher were trained on the test, or on validation problems.
        """
        tested, known = question_keys(test), questions
        validated = questions.validated - questions.learned  # a question of both is learned here, too
        for folder in filter(None, (self.options.pretrained, self.options.teacher)):
            seen = self.seen(folder)
            if count := len(tested & (seen.learned | seen.validated)):
                raise InputError(
                    f"{folder} was trained on {count} of the {len(tested)} questions of the test split {name}; "
                    f"name the test that it was trained for, or another model"
                )
            if count := len(validated & seen.learned):
                raise InputError(
                    f"{folder} was trained on {count} of the {len(validated)} validation problems, which "
                    f"would choose the epoch that has forgotten least; set apart those that it was validated on (the "
                    f"same validation, limit and seed), or give --validation 0"
                )
            known |= seen
        return known

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Make the model's arguments of examples, `input_ids`, `attention_mask` and `labels` among them."""

    @abstractmethod
    def items(self, inputs: Mapping[str, Any]) -> int:
        """Count the judgements or tokens of a batch that task and response losses are divided by."""

    @abstractmethod
    def task_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the cross-entropy, summed over the items."""

    @abstractmethod
    def response_loss(self, teacher: Any, student: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return KL(teacher ‖ student) of the outputs at the temperature, summed over the items."""

    def figures(self, model: Any, examples: TrainingExamples) -> dict[str, float]:
        """Return further figures of a model in evaluation mode on the validation split."""
        return {}

    def calibration(self, examples: TrainingExamples) -> CalibrationText:
        """Draw training examples, by the seed, as text for scores."""
        generator = torch.Generator().manual_seed(self.options.seed)
        order = torch.randperm(len(examples.train), generator=generator).tolist()
        drawn = [examples.train[index] for index in order[: self.options.calibration]]
        batches = [self.collate(drawn[start : start + 8]) for start in range(0, len(drawn), 8)]
        pairs = tuple((batch["input_ids"], batch["attention_mask"]) for batch in batches)
        return CalibrationText(f"{len(drawn)} training problems", pairs)
