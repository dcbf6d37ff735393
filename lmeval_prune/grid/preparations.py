"""Preparations: results that a variant needs before its evaluation, such as a plan or a smaller checkpoint.

A preparation is a dataclass whose fields are its settings in a grid's YAML. Its result is a folder, identified by a
hash of everything that it depends on, and shared by all cells that need it. To add one, add a line to `PREPARATIONS`,
or an entry point in `lmeval_prune.preparations` to another package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from lmeval_prune.config import Seed, Settings, to_plain_json
from lmeval_prune.interventions import HeadMask
from lmeval_prune.registry import Registry, class_record

PREPARATIONS = Registry(
    group="lmeval_prune.preparations",
    setting="preparation",
    own={
        "random_heads": "lmeval_prune.grid.preparations:RandomHeads",
        "prune": "lmeval_prune.grid.prune:Prune",
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

    def settings(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {field.name: to_plain_json(field.name, getattr(self, field.name)) for field in fields(self)}

    def identity(self) -> dict[str, Any]:
        """Return everything that the result depends on besides the model, as a JSON value."""
        return {**class_record(type(self)), "settings": self.settings(), "version": self.version}


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
        """Draw heads and write their mask."""
        self._draw(lm.model_map).save(folder / "mask.json", lm.model_map)

    def check(self, model_map: Any) -> None:
        """Refuse a share that leaves too few heads, or none; see `Preparation.check`."""
        self._draw(model_map)

    def _draw(self, model_map: Any) -> HeadMask:
        return HeadMask.random(round(self.share * model_map.total_heads), self.seed, model_map)

    def model_args(self, folder: Path) -> dict[str, Any]:
        """Return the mask."""
        return {"mask": str(folder / "mask.json")}


def with_chat_template(name: str, settings: dict[str, Any], apply_chat_template: bool) -> dict[str, Any]:
    """Add the grid's `apply_chat_template` to settings that name a task and do not set it."""
    reads_task = apply_chat_template and settings.get("task") and name in PREPARATIONS
    if reads_task and any(field.name == "apply_chat_template" for field in fields(PREPARATIONS.load(name))):
        return {"apply_chat_template": True, **settings}
    return settings


def make_preparation(name: str, settings: dict[str, Any]) -> Preparation:
    """Create a preparation from its name and fields."""
    preparation: Preparation = PREPARATIONS.load(name).from_dict(settings, name)
    return preparation
