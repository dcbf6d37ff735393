"""What distillation must know of a kind of model: how it is read, fed, judged and written. The rest is common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NotRequired

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.artefacts import read_artefact
from lmeval_prune.athena.data import question_key
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.checkpoints.pruned import read_manifest
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import eager_attention
from lmeval_prune.interventions.channels import Channels
from lmeval_prune.pruners.calibration import CalibrationText

SCHEMA, VERSION = "lmeval-prune/distillation", 1
NOTE = "distillation.json"  # beside the weights of what was distilled


class StageNote(TypedDict):
    """A stage of a distillation."""

    stage: int
    heads: dict[str, list[int]]
    removed: dict[str, Any]
    parameters: int


class MaterialNote(TypedDict):
    """What a distillation learned from."""

    splits: dict[str, Any]
    trained_on: NotRequired[list[str]]
    validated_on: NotRequired[list[str]]


class Note(TypedDict):
    """Fields of `distillation.json`."""

    model: str
    options: dict[str, Any]
    material: MaterialNote
    stages: list[StageNote]


@dataclass(frozen=True)
class Material:
    """What is learned.

    Attributes:
        train, validation: examples; what they are, the host knows.
        lengths: tokens of each training example.
        about: how many there are, and how many were left out why.
        problems: what the validation examples were made of, where a host asks it.
    """

    train: Sequence[Any]
    validation: Sequence[Any]
    lengths: Sequence[int]
    about: dict[str, Any]
    problems: Sequence[Any] = ()


@dataclass(frozen=True)
class Seen:
    """Questions that a model and those that it was made from have seen, by `question_key`.

    Attributes:
        learned: trained on.
        validated: chose an epoch.
    """

    learned: frozenset[str] = frozenset()
    validated: frozenset[str] = frozenset()

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Seen:
        """As an artefact says it."""
        validated = frozenset(content.get("validated_on", ()))
        return cls(frozenset(content.get("trained_on", ())) - validated, validated)

    def content(self) -> dict[str, list[str]]:
        """For an artefact: `trained_on` are all, `validated_on` those of them that were never learned."""
        return {
            "trained_on": sorted(self.learned | self.validated),
            "validated_on": sorted(self.validated - self.learned),
        }

    def __or__(self, other: Seen) -> Seen:
        return Seen(self.learned | other.learned, self.validated | other.validated)


class Host(ABC):
    """A kind of model that is pruned and distilled.

    Args:
        options: what is asked.

    Attributes:
        metric: (of the class) by which the best epoch is chosen, as the trainer logs it.
        greater: (of the class) whether more of it is better.
    """

    metric: ClassVar[str]
    greater: ClassVar[bool]

    def __init__(self, options: DistillOptions) -> None:
        self.options = options

    # ------------------------------------------------------------------ the model

    @abstractmethod
    def skeleton(self, folder: str) -> Any:
        """The transformers model whose heads are pruned, without weights.

        Raises:
            InputError: the folder holds no such model.
        """

    def identity(self, folder: str) -> str:
        """A digest of a model's weights.

        Raises:
            InputError: there is no such model.
        """
        return checkpoint_identity(folder)

    @abstractmethod
    def check_teacher(self, folder: str) -> None:
        """Refuse a teacher whose answers cannot be compared; before any weights are read.

        Raises:
            InputError: its vocabulary is another one.
        """

    @abstractmethod
    def read(self, folder: str) -> nn.Module:
        """A model with its weights, in float32 at least, in evaluation mode."""

    @abstractmethod
    def write(
        self, model: Any, manifest: dict[str, Any], folder: Path, beside: Callable[[Path], None] | None = None
    ) -> None:
        """Write a model as a folder that appears whole.

        Args:
            model: to be written.
            manifest: of what was cut.
            folder: where to.
            beside: called with the folder that is being written, to add files.
        """

    def part(self, model: Any) -> Any:
        """The transformers model in a model whose heads are pruned."""
        return model

    def with_part(self, model: Any, part: Any) -> Any:
        """The model with another such part."""
        return part

    def part_folder(self, folder: Path) -> Path:
        """Where that part stands in a written model."""
        return folder

    def check_layers(self) -> None:
        """Refuse a model that was cut with something left in place of what went: it would be trained again.

        Raises:
            InputError: naming the layers.
        """
        folder = self.part_folder(Path(embedded.resolve(self.options.pretrained)))
        for stage in (read_manifest(folder) or {}).get("stages", []):
            given = stage["plan"].get("channels", {})
            emptied = [x for x, text in given.items() if len(Channels(text).numbers) == stage["parent"]["channels"][x]]
            if filled := ", ".join([*stage["removed"]["fillers"], *emptied]):
                raise InputError(
                    f"{self.options.pretrained} was cut with zeroed fillers ({filled}), which training would fill "
                    f"again; cut it by whole groups (unit=group or balanced), with something left in each layer"
                )

    # ------------------------------------------------------------------ what it learns

    @abstractmethod
    def seen(self, folder: str) -> Seen:
        """What a model, and those that it was made from, were trained on, as far as its files say it."""

    def all_seen(self, own: Seen, test: Iterable[Mapping[str, Any]], name: str) -> Seen:
        """What the result will have seen: its own training problems, and those of its parent and teacher.

        Args:
            own: training and validation problems.
            test: rows of the test.
            name: of the test.

        Raises:
            InputError: parent or teacher were trained on the test, or on validation problems.
        """
        asked, known = {question_key(row) for row in test}, own
        for folder in filter(None, (self.options.pretrained, self.options.teacher)):
            seen = self.seen(folder)
            if tested := asked & (seen.learned | seen.validated):
                raise InputError(
                    f"{folder} was trained on {len(tested)} of the {len(asked)} questions of the test split {name}; "
                    f"name the test that it was trained for, or another model"
                )
            if chosen := own.validated & seen.learned:
                raise InputError(
                    f"{folder} was trained on {len(chosen)} of the {len(own.validated)} validation problems, which "
                    f"would choose the epoch that has forgotten least; set apart those that it was validated on (the "
                    f"same validation, limit and seed), or give --validation 0"
                )
            known |= seen
        return known

    @abstractmethod
    def material(self) -> Material:
        """Load what is learned; no weights are read.

        Raises:
            InputError: there is none, or it is the test.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Arguments of the model for some examples, `input_ids`, `attention_mask` and `labels` among them."""

    @abstractmethod
    def items(self, inputs: Mapping[str, Any]) -> int:
        """How many judgements or tokens of a batch count: what task and response losses are divided by."""

    @abstractmethod
    def task_loss(self, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Cross-entropy, summed over the items."""

    @abstractmethod
    def response_loss(self, taught: Any, outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        """KL(teacher ‖ student) at the temperature, summed over the items."""

    def validated(self, model: Any, material: Material) -> dict[str, float]:
        """Further figures of a model in evaluation mode on the validation split."""
        return {}

    def calibration(self, material: Material) -> CalibrationText:
        """The first training examples as text for scores, in an order that the seed gives."""
        order = torch.randperm(len(material.train), generator=torch.Generator().manual_seed(self.options.seed)).tolist()
        chosen = [material.train[place] for place in order[: self.options.calibration]]
        made = [self.collate(chosen[start : start + 8]) for start in range(0, len(chosen), 8)]
        batches = tuple((one["input_ids"], one["attention_mask"]) for one in made)
        return CalibrationText(f"{len(chosen)} training problems", batches)


def note_of(folder: str | Path) -> dict[str, Any]:
    """What the `distillation.json` of a folder says.

    Raises:
        InputError: there is none.
    """
    return read_artefact(Path(folder) / NOTE, SCHEMA, VERSION, Note)[0]


def check_maps(bare: Any) -> None:
    """Refuse a model that gives out no attention maps; by one that has no weights.

    Raises:
        InputError: it gives out none, or not those of the heads that we know.
    """
    model_map: ModelMap = map_model(bare)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), eager_attention(bare):
            found = getattr(bare(input_ids=ids, output_attentions=True), "attentions", None)
    except Exception:  # not every model can be run without weights; what comes of it is looked at in training, too
        return
    check_found(found, model_map.model_type, [layer.heads for layer in model_map.attention])


def check_found(found: Sequence[Tensor | None] | None, model_type: str, heads: Sequence[int]) -> None:
    """Refuse attention maps that are missing, or not those of these layers.

    Raises:
        InputError: they are.
    """
    if found is None or [None if one is None else one.shape[1] for one in found] != list(heads):
        raise InputError(
            f"feature needs attention maps, and this {model_type} model does not give out those of its heads; give "
            f"--feature false"
        )
