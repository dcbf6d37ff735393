"""Results that are made before a variant can be evaluated: a plan, a smaller checkpoint, a trained model.

A preparation is a dataclass whose fields are its settings in a grid's YAML. Its result is a folder, named by what it
depends on, made once, and shared by all cells that need it. To add one, add a line to `PREPARATIONS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.settings import Settings, to_plain_json

PREPARATIONS = {
    "random_heads": "lmeval_prune.grid.random_heads:RandomHeads",
    "prune": "lmeval_prune.grid.prune:Prune",
}


@dataclass(frozen=True)
class Preparation(Settings, ABC):
    """A result that is made of a model, once, in a folder of its own.

    Attributes:
        version: (of the class) raised whenever the result changes; results of before are then made again.
    """

    version: ClassVar[int] = 1

    @abstractmethod
    def make(self, lm: Any, folder: Path) -> None:
        """Write the result.

        Args:
            lm: the loaded `PrunedHFLM`, with nothing applied to it.
            folder: empty; it appears under its final name when this returns.
        """

    @abstractmethod
    def model_args(self, folder: Path) -> dict[str, Any]:
        """Return the model_args with which a variant uses the result."""

    def settings(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {each.name: to_plain_json(each.name, getattr(self, each.name)) for each in fields(self)}

    def identity(self) -> dict[str, Any]:
        """Return all that the result depends on beside the model, as a JSON value."""
        return {"settings": self.settings(), "version": self.version}


def with_chat_template(name: str, settings: dict[str, Any], apply_chat_template: bool) -> dict[str, Any]:
    """Add the grid's `apply_chat_template` to settings that read a task and do not set it."""
    reads = apply_chat_template and settings.get("task") and name in PREPARATIONS
    if reads and any(each.name == "apply_chat_template" for each in fields(resolve_name(PREPARATIONS[name]))):
        return {"apply_chat_template": True, **settings}
    return settings


def preparation(name: str, settings: dict[str, Any]) -> Preparation:
    """Make a preparation of its name and fields.

    Raises:
        InputError: there is no such preparation or field.
    """
    if name not in PREPARATIONS:
        known = did_you_mean(name, PREPARATIONS) or f"; there are {', '.join(PREPARATIONS)}"
        raise InputError(f"there is no preparation {name!r}{known}")
    result: Preparation = resolve_name(PREPARATIONS[name]).from_dict(settings, name)
    return result
