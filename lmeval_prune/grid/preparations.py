"""What is made before a variant can be evaluated: a plan, a smaller checkpoint, a trained model.

A preparation is a dataclass: its fields are its settings in a grid's YAML. Its result is a folder that is named by what
it depends on, made once, and shared by all cells that need it. A line a preparation; nothing is imported before it is
asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from lmeval_prune.errors import InputError, nearest
from lmeval_prune.settings import as_json, frozen, typed, types_of

PREPARATIONS = {
    "random_heads": "lmeval_prune.grid.random_heads:RandomHeads",
    "prune": "lmeval_prune.grid.pruned:Pruned",
}


@dataclass(frozen=True)
class Preparation(ABC):
    """Makes something of a model, once, in a folder of its own.

    Attributes:
        version: (of the class) raised whenever the result is made otherwise than before; what is there is made anew.
    """

    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            value = typed(one.name, getattr(self, one.name), types_of(type(self))[one.name])
            object.__setattr__(self, one.name, frozen(one.name, value))

    @abstractmethod
    def make(self, lm: Any, folder: Path) -> None:
        """Write the result.

        Args:
            lm: the loaded `PrunedHFLM`, with nothing applied to it.
            folder: empty; it appears under its own name when this returns.
        """

    @abstractmethod
    def model_args(self, folder: Path) -> dict[str, Any]:
        """The model_args with which a variant uses the result."""

    def settings(self) -> dict[str, Any]:
        """The fields, as JSON values."""
        return {one.name: as_json(one.name, getattr(self, one.name)) for one in fields(self)}

    def identity(self) -> dict[str, Any]:
        """JSON value of all that the result depends on beside the model."""
        return {"settings": self.settings(), "version": self.version}


def with_chat_template(name: str, settings: dict[str, Any], apply_chat_template: bool) -> dict[str, Any]:
    """Return settings with the grid's `apply_chat_template`, where a task is read and they leave it open."""
    reads = settings.get("task") and name in PREPARATIONS and "apply_chat_template" in _fields_of(name)
    return {"apply_chat_template": True, **settings} if apply_chat_template and reads else settings


def _fields_of(name: str) -> dict[str, Any]:
    return {each.name: each for each in fields(resolve_name(PREPARATIONS[name]))}


def preparation(name: str, given: dict[str, Any]) -> Preparation:
    """A preparation by its name and fields.

    Raises:
        InputError: there is no such preparation or field.
    """
    if name not in PREPARATIONS:
        known = nearest(name, PREPARATIONS) or f"; there are {', '.join(PREPARATIONS)}"
        raise InputError(f"there is no preparation {name!r}{known}")
    kind = resolve_name(PREPARATIONS[name])
    own = _fields_of(name)
    for key in given:
        if key not in own:
            raise InputError(f"{name} has no setting {key!r}{nearest(str(key), own)}")
    for key, one in own.items():
        if key not in given and one.default is MISSING and one.default_factory is MISSING:
            raise InputError(f"{name} needs {key}")
    made: Preparation = kind(**given)
    return made
