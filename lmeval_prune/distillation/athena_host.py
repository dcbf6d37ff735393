"""ATHENA as a host of distillation: the heads of its encoder are pruned, its judgements on the gold graph compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoTokenizer

from lmeval_prune.artefacts import digest
from lmeval_prune.athena import checkpoint, training
from lmeval_prune.athena.batches import Collator
from lmeval_prune.athena.data import Material as AthenaMaterial
from lmeval_prune.athena.data import question_key
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.checkpoints.loading import refused_as
from lmeval_prune.checkpoints.skeleton import skeleton_of
from lmeval_prune.distillation.host import Host, Material, Seen
from lmeval_prune.distillation.losses import choice_divergence, judgement_divergence
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.tasks.data import load

_OF_TEXTS = {"task": None, "chat": False, "answer": "{}", "answer_field": None}


class AthenaHost(Host):
    """See the base class. Data, test and validation split are those that the host was trained with."""

    metric, greater = "eval_accuracy", True

    def __init__(self, options: DistillOptions) -> None:
        super().__init__(options)
        self.about = checkpoint.describe(options.pretrained)
        for name, default in _OF_TEXTS.items():
            if getattr(options, name) != default:
                raise InputError(f"{name} is for language models, and {options.pretrained} is an ATHENA; leave it out")
        self.constants: list[str] = list(self.about["settings"]["constants"])

    @cached_property
    def tokenizer(self) -> Any:
        """The encoder's."""
        return self._tokenizer(self.options.pretrained)

    def _tokenizer(self, folder: str) -> Any:
        with refused_as(f"the tokenizer in {folder} cannot be read"):
            found = AutoTokenizer.from_pretrained(Path(folder) / checkpoint.ENCODER, trust_remote_code=False)
        if found.mask_token is None:
            raise InputError(f"the encoder in {folder} has no mask token, which takes the place of numbers")
        return found

    def skeleton(self, folder: str) -> Any:
        """The encoder's; see the base class."""
        return skeleton_of(str(Path(folder) / checkpoint.ENCODER))

    def identity(self, folder: str) -> str:
        """Of encoder and head; see the base class."""
        return digest([checkpoint.describe(folder)["head_sha256"], super().identity(f"{folder}/{checkpoint.ENCODER}")])

    def check_teacher(self, folder: str) -> None:
        """Tokens and constants; see the base class."""
        other = checkpoint.describe(folder)["settings"]["constants"]
        if self._tokenizer(folder).get_vocab() != self.tokenizer.get_vocab() or other != self.constants:
            raise InputError(
                f"the teacher {folder} has another vocabulary or other constants than {self.options.pretrained}; name "
                f"a teacher with the same ones"
            )

    def read(self, folder: str) -> nn.Module:
        """See the base class."""
        return checkpoint.read(folder)

    def write(
        self, model: Any, manifest: dict[str, Any], folder: Path, beside: Callable[[Path], None] | None = None
    ) -> None:
        """See the base class."""
        model.about = {**model.about, **Seen.of(manifest).content()} if "trained_on" in manifest else model.about
        checkpoint.write(model, folder, manifest, beside)

    def part(self, model: Any) -> Any:
        """The encoder."""
        return model.encoder

    def with_part(self, model: Any, part: Any) -> Any:
        """With another encoder."""
        model.encoder = part
        return model

    def part_folder(self, folder: Path) -> Path:
        """The encoder's."""
        return folder / checkpoint.ENCODER

    def seen(self, folder: str) -> Seen:
        """See the base class; of a host that does not say what it was validated on, by drawing that again."""
        about = checkpoint.describe(folder)
        if "options" in about and "validated_on" not in about:
            found = AthenaMaterial.of(self._training(about["options"]))
            about["validated_on"] = [question_key(one.document) for one in found.validation]
        return Seen.of(about)

    def _training(self, own: Mapping[str, Any], **given: Any) -> TrainOptions:
        """The options of a host's training, and what differs from them."""
        known = {**own, "train": tuple(own["train"]), "output": self.options.output, "patience": 0}
        return TrainOptions(**{**known, **given, "data_dir": self.options.data_dir})

    def material(self) -> Material:
        """See the base class."""
        own, asked = self.about.get("options"), self.options
        if own is None:
            raise InputError(f"{asked.pretrained} does not say what it was trained on; train it anew")
        given = {"test": asked.test, "train": asked.train, "validation": asked.validation, "limit": asked.limit}
        wanted = self._training(own, **{name: value for name, value in given.items() if value not in (None, ())})
        found = AthenaMaterial.of(wanted)
        own_questions = Seen(
            *(frozenset(question_key(one.document) for one in some) for some in (found.train, found.validation))
        )
        test = load(wanted.data, wanted.test, wanted.data_dir)
        seen = self.all_seen(own_questions, test, wanted.test)
        length, constants = self.about["settings"]["max_length"], self.constants
        made = [one.example(self.tokenizer, length, constants) for one in found.train]
        train = [example for example in made if example]
        judged = [one.example(self.tokenizer, length, constants) for one in found.validation]
        about = {
            "train": len(train),
            "validation": len(found.validation),
            "ungrounded": found.ungrounded,
            "repeated": found.repeated,
            "splits": {"data": wanted.data, "test": wanted.test, "train": list(wanted.train)},
            **seen.content(),
        }
        validation = [example for example in judged if example]
        return Material(train, validation, [len(example.problem.ids) for example in train], about, found.validation)

    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        """See the base class."""
        return Collator(len(self.constants), self.tokenizer.pad_token_id)(examples)

    def items(self, inputs: Mapping[str, Any]) -> int:
        """Candidates and kept thoughts."""
        return len(inputs["labels"])

    def task_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """See the base class."""
        return training.task_loss(outputs, inputs["labels"], 1)

    def response_loss(self, taught: Any, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Of candidates one by one, and of the choice among each problem's kept thoughts; see the base class."""
        temperature = self.options.temperature
        reasons = judgement_divergence(taught.reason, outputs.reason, temperature)
        return reasons + choice_divergence(taught.answer, outputs.answer, outputs.kept_problem, temperature)

    def validated(self, model: Any, material: Material) -> dict[str, float]:
        """The share of problems that it solves."""
        return {self.metric: training.share_solved(model, material.problems)}
