"""Preparations: what a variant needs before its evaluation: a random mask, a plan by any pruner, a smaller checkpoint.

A preparation is a dataclass whose fields are its settings in a grid's YAML. Its result is a folder, identified by a
hash of everything that it depends on, and shared by all cells that need it. To add one, add a line to `PREPARATIONS`,
or an entry point in `lmeval_prune.preparations` to another package.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from lmeval_prune.artefacts import digest, final_path, read_texts
from lmeval_prune.config import Seed, Settings, Use, to_plain_json
from lmeval_prune.grid.task_identity import task_digest
from lmeval_prune.interventions import HeadMask
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import PruneOptions, PruneSettings, TextOptions, pick
from lmeval_prune.pruners.parts import HEADS
from lmeval_prune.registry import Registry, class_record
from lmeval_prune.tasks.prompts import training_documents

logger = logging.getLogger(__name__)
PREPARATIONS = Registry(
    group="lmeval_prune.preparations",
    setting="preparation",
    own={
        "random_heads": "lmeval_prune.grid.preparations:RandomHeads",
        "prune": "lmeval_prune.grid.preparations:Prune",
    },
)


@dataclass(frozen=True)
class Preparation(Settings, ABC):
    """A result that is computed once from a model, in its own folder.

    Attributes:
        version: (of the class) raise it whenever the result changes, so that earlier results are not used.
    """

    version: ClassVar[int] = 1

    def check(self, model_map: Any) -> None:
        """Raise `InputError` if the result cannot be computed of a model, which has no weights yet."""

    @abstractmethod
    def make(self, lm: Any, folder: Path) -> None:
        """Write the result.

        Args:
            lm: the loaded `PrunedHFLM` without interventions.
            folder: an empty folder, which is renamed to its final name when this method returns.
        """

    @abstractmethod
    def model_args(self, folder: Path) -> dict[str, Any]:
        """Return the model_args of a variant that uses the result in `folder`."""

    def identity(self) -> dict[str, Any]:
        """Return everything that the result depends on besides the model, as a JSON value."""
        settings = {each.name: to_plain_json(each.name, getattr(self, each.name)) for each in fields(self)}
        return {**class_record(type(self)), "settings": settings, "version": self.version}


@dataclass(frozen=True)
class RandomHeads(Preparation):
    """A mask of a random share of a model's heads, which keeps at least one head of each layer.

    It is the control for any selection of heads.

    Attributes:
        share: share of all heads, rounded to a whole number of heads.
        seed: seed of the draw.
    """

    share: Annotated[float, Interval(gt=0, lt=1)]
    seed: Seed = 0

    def make(self, lm: Any, folder: Path) -> None:
        self._draw(lm.model_map).save(folder / "mask.json", lm.model_map)

    def check(self, model_map: Any) -> None:
        self._draw(model_map)

    def _draw(self, model_map: Any) -> HeadMask:
        return HeadMask.random(round(self.share * model_map.total_heads), self.seed, model_map)

    def model_args(self, folder: Path) -> dict[str, Any]:
        return {"mask": str(folder / "mask.json")}


@dataclass(frozen=True)
class Prune(PruneSettings, Preparation):
    """A plan as `lmeval-prune prune` makes it, with that command's options, or the checkpoint cut by the plan.

    Attributes:
        method: name of the pruner.
        options: options of the pruner.
        cut: evaluate the smaller checkpoint, to measure its speed and memory; otherwise the plan is applied by hooks.
    """

    uses: ClassVar[tuple[Use, ...]] = (
        Use(
            "a calibration text (task or text)",
            lambda options: options.has_text,
            ("windows", "tokens", "batch", "seed", "apply_chat_template"),
        ),
    )
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    cut: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        make_pruner(self.method, self.options)

    @cached_property
    def source(self) -> Any:
        """The calibration text, read once, so that the plan is of the text that identifies it; None without one."""
        return calibration_source(self.task, self.text) if self.has_text else None

    def identity(self) -> dict[str, Any]:
        """Return everything that the result depends on: with the pruner's version, a text, a task's problems."""
        pruner = make_pruner(self.method, self.options)
        record = class_record(type(pruner))
        return {
            **super().identity(),
            "method": pruner.version,
            **({"pruner": record} if record else {}),
            **({"problems": task_digest(*self.source)} if self.task else {}),
            **({"text": digest(self.source)} if self.text else {}),
        }

    def check(self, model_map: Any) -> None:
        """Refuse options that do not suit the method or the model; see `Preparation.check`."""
        from lmeval_prune.pruners.schedule import resolve_options
        from lmeval_prune.surgery.cut import check_cuttable

        pruner = make_pruner(self.method, self.options)
        options = resolve_options(pick(PruneOptions, self), pruner, model_map, pruner, self.has_text)
        if self.cut:
            check_cuttable(model_map, HEADS in options.kinds)

    def make(self, lm: Any, folder: Path) -> None:
        from lmeval_prune.planning.own_answers import text_source
        from lmeval_prune.pruners.schedule import stages
        from lmeval_prune.surgery.cut import cut_to

        pruner, model_map = make_pruner(self.method, self.options), lm.model_map
        answers, work = (  # a killed run resumes here
            final_path(folder).with_name(f".{folder.name}.{kind}") for kind in ("responses", "scoring")
        )
        text = renew = None
        if self.has_text:
            reading = pick(TextOptions, self)
            if reading.add_bos_token is None:
                reading = replace(reading, add_bos_token=lm.add_bos_token)
            responses = Path(self.responses or answers)
            text, renew = text_source(lm.model, lm.tokenizer, reading, responses, self.source)(lm.model)
        *_, plan = stages(
            pruner, model_map, pick(PruneOptions, self), text, progress=logger.info, work=work, renew=renew
        )
        plan.save(folder / "plan.json", model_map)
        if self.cut:
            cut_to(folder / "model", model_map.model, plan, lm.tokenizer)
        for finished in (work, answers):
            rmtree(finished, ignore_errors=True)

    def model_args(self, folder: Path) -> dict[str, Any]:
        return {"pretrained": str(folder / "model")} if self.cut else {"plan": str(folder / "plan.json")}


@cache
def calibration_source(task: str | None, text: str | None) -> Any:
    """Read a calibration text once for all plans of a grid: `cells_of` clears the cache."""
    return training_documents(task) if task else read_texts(str(text))


def make_preparation(name: str, settings: dict[str, Any], apply_chat_template: bool = False) -> Preparation:
    """Create a preparation; one that reads a task does so with the grid's `apply_chat_template`, unless it is set."""
    kind = PREPARATIONS.load(name)
    reads_chats = any(each.name == "apply_chat_template" for each in fields(kind))
    if apply_chat_template and settings.get("task") and reads_chats:
        settings = {"apply_chat_template": True, **settings}
    preparation: Preparation = kind.from_dict(settings, name)
    return preparation
