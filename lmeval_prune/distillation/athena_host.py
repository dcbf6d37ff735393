"""Distil ATHENA: prune its encoder, and compare its judgements on the gold graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lmeval_prune.artefacts import digest
from lmeval_prune.athena import checkpoint, training
from lmeval_prune.athena.batches import collate, make_examples
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.problems import ProblemSplit
from lmeval_prune.checkpoints.loading import skeleton_of
from lmeval_prune.config import differs_from_default
from lmeval_prune.distillation.host import SOLVED_THEN_LOSS, Host, TrainingExamples
from lmeval_prune.distillation.losses import choice_divergence, judgement_divergence
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.tasks.data import load
from lmeval_prune.training.questions import TrainingQuestions

LANGUAGE_OPTIONS = ("task", "chat", "answer", "max_length", "prompts", "calibrate_on", "train_on", "max_gen_toks")


class AthenaHost(Host):
    """ATHENA as a host, with the data, test split and validation split of its own training."""

    choosing = (SOLVED_THEN_LOSS, True)

    def __init__(self, options: DistillOptions) -> None:
        super().__init__(options)
        self.about = checkpoint.describe(options.pretrained)
        for name in LANGUAGE_OPTIONS:
            if differs_from_default(options, name):
                raise InputError(f"{name} is for language models, and {options.pretrained} is an ATHENA; leave it out")
        self.settings = checkpoint.read_settings(options.pretrained)

    def skeleton(self, folder: str) -> Any:
        return skeleton_of(str(Path(folder) / checkpoint.ENCODER))

    def identity(self, folder: str) -> str:
        return digest([checkpoint.describe(folder)["head_sha256"], super().identity(f"{folder}/{checkpoint.ENCODER}")])

    def configuration(self, folder: str) -> dict[str, str]:
        encoder = super().configuration(f"{folder}/{checkpoint.ENCODER}")
        settings = {checkpoint.SETTINGS: digest(checkpoint.describe(folder)["settings"])}
        return settings | {f"{checkpoint.ENCODER}/{name}": value for name, value in encoder.items()}

    def check_teacher(self, folder: str) -> None:
        constants = checkpoint.read_settings(folder).constants
        if self.tokenizer_of(folder).get_vocab() != self.tokenizer.get_vocab() or constants != self.settings.constants:
            raise InputError(f"the teacher {folder} has another vocabulary or constants than {self.options.pretrained}")

    def read(self, folder: str) -> nn.Module:
        return checkpoint.read(folder)

    def write(self, model: Any, manifest: dict[str, Any], folder: Path, add_files: Callable[[Path], None]) -> None:
        if "trained_on" in manifest:
            model.about = {**model.about, **TrainingQuestions.from_artefact(manifest).to_artefact()}
        checkpoint.write(model, folder, manifest, add_files)

    def backbone(self, model: Any) -> Any:
        return model.encoder

    def with_backbone(self, model: Any, backbone: Any) -> Any:
        model.encoder = backbone
        return model

    def backbone_folder(self, folder: Path) -> Path:
        return folder / checkpoint.ENCODER

    def questions_of(self, folder: str) -> TrainingQuestions:
        return TrainingQuestions.from_artefact(checkpoint.describe(folder))

    @cached_property
    def split_options(self) -> TrainOptions:
        """Training options of the ATHENA with this distillation's splits."""
        options = self.options
        names = ("test", "validation", "limit")
        changes = {name: value for name in names if (value := getattr(options, name)) is not None}
        fixed = {"output": options.output, "data_dir": options.data_dir, "patience": 0}
        label = f"the training in {Path(options.pretrained) / checkpoint.SETTINGS}"
        return TrainOptions.from_dict({**self.about["options"], **changes, **fixed}, label)

    @cached_property
    def split(self) -> ProblemSplit:
        return ProblemSplit.load(self.split_options)

    def contents(self) -> dict[str, str]:
        return {"problems": self.split.digest}

    def examples(self) -> TrainingExamples:
        options, split = self.split_options, self.split
        test = load(options.data, options.test, options.data_dir)
        questions = self.all_questions(split.questions, test, options.test)
        train, validation = (
            make_examples(problems, self.tokenizer, self.settings) for problems in (split.train, split.validation)
        )
        note = {
            "train": len(train),
            "validation": len(split.validation),
            "ungrounded": split.ungrounded,
            "repeated": split.repeated,
            "splits": {"data": options.data, "test": options.test, "train": list(options.train)},
            **questions.to_artefact(),
        }
        return TrainingExamples(
            train, validation, [len(example.problem.ids) for example in train], note, split.validation
        )

    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        return collate(examples, len(self.settings.constants), self.tokenizer.pad_token_id)

    def items(self, inputs: Mapping[str, Any]) -> int:
        return len(inputs["labels"])

    def loss(self, outputs: Any, inputs: Mapping[str, Any], teacher: Any = None) -> dict[str, Tensor]:
        terms, temperature = {"task": training.task_loss(outputs, inputs["labels"], 1)}, self.options.temperature
        if teacher is not None:
            # candidates are judged independently; the answer is a choice among a problem's kept thoughts
            reasons = judgement_divergence(teacher.reason, outputs.reason, temperature)
            choices = choice_divergence(teacher.answer, outputs.answer, outputs.kept_problem, temperature)
            terms["response"] = reasons + choices
        return terms

    def count_solved(self, model: Any, problems: Sequence[Any]) -> int | None:
        return None if self.options.best_by else training.count_solved(model, problems)
