"""The base class of interventions: changes to a stock model that last as long as a `with` block.

A method is a frozen dataclass with `attach` and, if some values do not fit every model, `resolve`. Its fields are its
model_args. Its identity in stores of answers, its report and its artefact follow from the fields.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.artefacts import read_artefact, write_artefact
from lmeval_prune.config import Settings, to_plain_json
from lmeval_prune.interventions.applied import applied_on, attached, changed_by, combined
from lmeval_prune.interventions.table import SCHEMA_VERSION, ArtefactContents, Origin, method_name
from lmeval_prune.registry import class_record, import_path, is_own


@dataclass(frozen=True)
class Intervention(Settings, ABC):
    """A change to a model's computation.

    A subclass is a frozen dataclass. Its fields are parsed and checked by their types and bounds (`ratio:
    ShareBelowOne`, see `Settings`): numbers, texts, booleans, None, or lists and dictionaries of these. A field with
    `compare=False` changes checks or execution, not the result, and is not part of the identity. A `__post_init__` in a
    subclass calls `super().__post_init__()`.

    Attributes:
        contents: (class variable) the fields of the artefact, a `TypedDict`.
        version: (class variable, or set from the fields) raise it when the method computes something else, so that
            stored answers, cells and outcomes of the earlier version are not used.
        tokenwise: (class variable, or set from the fields) the effect on a token depends on that token alone. The
            decoding engine runs such methods: tokens of different requests share one packed batch.
        by_sequence: (class variable) the effect on a token depends on earlier tokens of the same sequence, and the
            method keeps its state of each sequence in the engine's store (`AttentionCall.store`). The engine runs such
            methods, too. Any other method falls back to `generate`.
        origin: the artefact that it was loaded from.
    """

    hashable: ClassVar[bool] = True
    contents: ClassVar[Any] = ArtefactContents
    version: ClassVar[int] = 1
    tokenwise: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = False
    origin: Origin | None = field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def message_prefix(cls) -> str:
        return f"{method_name(cls)}."

    def resolve(self, model_map: ModelMap) -> Self:
        """Fill in defaults and ranges for a model, and refuse values that do not fit it.

        Also called on a model without weights, before they are loaded.
        """
        return self

    @abstractmethod
    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Change the model, and register callbacks in `stack` that undo the change; `self` is resolved for the model.

        The callbacks run in reverse order when the intervention ends, also after an exception.
        """

    @property
    def needs_order(self) -> bool:
        """Return whether answers depend on earlier answers, so that stored answers cannot be used."""
        return False

    def slot_bytes(self, model_map: ModelMap, length: int) -> int:
        """Return the bytes of state that the engine's store needs for a sequence of `length` tokens."""
        return 0

    def preserve_state(self) -> AbstractContextManager[None]:
        """Restore counters and state after a block of trial passes."""
        return nullcontext()

    def fixed_decisions(self) -> AbstractContextManager[None]:
        """Preserve state, and fix decisions that rounding could change, while the engine compares logits."""
        return self.preserve_state()

    def merged_with(self, other: Intervention) -> Self | None:
        """Return one intervention with the effect of both; None if they only nest."""
        return None

    def converted(self, kind: type[Intervention]) -> Intervention | None:
        """Return this as an intervention of another class; None if that class cannot express it."""
        return self if isinstance(self, kind) else None

    # ------------------------------------------------------------------ derived from the fields

    def fit_to(self, model_map: ModelMap) -> Self:
        """Resolve it for a model, after checking that an artefact belongs to this model."""
        if self.origin:
            self.origin.check(model_map)
        return self.resolve(model_map)

    @contextmanager
    def applied_to(
        self, model: nn.Module, model_map: ModelMap | None = None, any_thread: bool = False
    ) -> Iterator[ModelMap]:
        """Apply the intervention to `model` inside a `with` block, which yields the model's map; blocks nest.

        Every call of the model inside the block, in any thread, runs under the intervention, and `torch.compile` is
        ignored. A copied or pickled model and another intervention from another thread are refused.

        Args:
            model: a stock transformers model.
            model_map: its `map_model`, for a family that needs a description, or to save the time.
            any_thread: let other threads apply further interventions.
        """
        model_map = model_map or map_model(model)
        resolved = self.fit_to(model_map)
        for intervention in combined([*interventions_on(model), resolved]):
            intervention.fit_to(model_map)
        with attached(resolved, model_map, any_thread):
            yield model_map

    def settings(self) -> dict[str, Any]:
        """Return the fields of its identity as JSON values."""
        return {item.name: to_plain_json(item.name, getattr(self, item.name)) for item in fields(self) if item.compare}

    def identity(self, model_map: ModelMap) -> dict[str, Any]:
        """Return a JSON value that determines its effect on this model."""
        kind = type(self)
        named = {"method": method_name(kind), **class_record(kind), "version": self.version}
        return named | self.fit_to(model_map).settings()

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return its entry in the results file, by default `{METHOD: fields}`."""
        elsewhere = class_record(type(self))
        named = elsewhere | {"version": self.version} if elsewhere else {}
        report: dict[str, Any] = {method_name(type(self)): named | self.fit_to(model_map).settings()}
        return report | ({"file": self.origin.path, "file_sha256": self.origin.sha256} if self.origin else {})

    def summary(self, model_map: ModelMap) -> str:
        """Return one short line for a log, by default its name and fields."""
        settings = self.fit_to(model_map).settings().items()
        return f"{method_name(type(self))}: {', '.join(f'{name}={value}' for name, value in settings)}"

    @classmethod
    def schema(cls) -> str:
        """Return the name of its artefact's schema; that of a class from elsewhere is its import path."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
        return f"lmeval-prune/{name}" if is_own(cls) else import_path(cls)

    def save(self, path: str | os.PathLike[str], model_map: ModelMap, **extra: Any) -> None:
        """Write an artefact for this model, with `extra` fields: JSON, atomically."""
        content = {"settings": self.fit_to(model_map).settings(), "model": model_map.record(), **extra}
        write_artefact(path, self.schema(), SCHEMA_VERSION, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], allow_other_model: bool = False) -> Self:
        """Read an artefact, which fits its own model only, unless `allow_other_model`; missing fields have defaults."""
        content, sha256 = read_artefact(path, cls.schema(), SCHEMA_VERSION, cls.contents)
        origin = Origin(str(path), sha256, content["model"], allow_other_model)
        return cls(**content["settings"], **cls.fields_of(Path(path), content), origin=origin)

    @classmethod
    def fields_of(cls, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Return the values of fields that are not among an artefact's settings."""
        return {}


def interventions_on(model: nn.Module) -> tuple[Intervention, ...]:
    """Return the interventions applied to a model or the model that it wraps, first applied first."""
    return tuple(applied_on(model))


def change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], stack: ExitStack) -> None:
    """Pass the first input of `module` through `change` until `stack` closes; it keeps shape and type."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (changed_by(change, change(inputs[0]), inputs[0]), *inputs[1:])

    stack.callback(module.register_forward_pre_hook(hook).remove)


def change_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], stack: ExitStack) -> None:
    """Pass the output of `module` (the first of several) through `change` until `stack` closes; see `change_input`."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        result = changed_by(change, change(first), first)
        return (result, *rest) if isinstance(output, tuple) else result

    stack.callback(module.register_forward_hook(hook).remove)
