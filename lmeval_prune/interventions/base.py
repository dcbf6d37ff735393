"""The base class of interventions: changes to a stock model that last as long as a `with` block.

A method is a frozen dataclass with `attach` and, if some values do not fit every model, `resolve`. Its fields are its
model_args. Its identity in stores of answers, its report and its artefact follow from the fields.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from typing_extensions import TypedDict

from lmeval_prune.architectures import ModelMap, is_dispatched, loadable_fingerprints, map_model
from lmeval_prune.artefacts import read_artefact, validate_json, write_artefact
from lmeval_prune.config import Settings, to_plain_json
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.applied import applied_on, attached
from lmeval_prune.interventions.table import METHODS, method_name
from lmeval_prune.registry import class_record, import_path, is_own

logger = logging.getLogger(__name__)
SCHEMA_VERSION = 3


class ModelRecord(TypedDict):
    """The model of an artefact."""

    name: str
    revision: str
    model_type: str
    heads: dict[str, Any]
    weights: list[str]


class ArtefactContents(TypedDict):
    """Fields of an intervention's artefact."""

    model: ModelRecord
    settings: dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """The artefact that an intervention was loaded from.

    Attributes:
        path, sha256: the file, and the hash of its content.
        model: the artefact's model: `name`, `revision`, `model_type`, `heads` (shapes by layer) and `weights`
            (fingerprints of the weights, also rounded to smaller types).
        allow_other_model: accept another model if the intervention fits it.
    """

    path: str
    sha256: str
    model: dict[str, Any]
    allow_other_model: bool = False

    def check(self, model_map: ModelMap) -> None:
        """Refuse a model other than the artefact's."""
        if self.allow_other_model:
            return
        subject = f"{self.path} was made for"
        fix = "make one for this model, or give allow_other_model=true if it fits"
        name = self.model["name"]
        if model_map.signature() != {key: self.model[key] for key in ("model_type", "heads")}:
            raise InputError(f"{subject} {name}, whose layers or heads differ from this model's; {fix}")
        check_weights(self.model["weights"], name, self.model["revision"], model_map, subject, fix)


def check_weights(
    fingerprints: list[str], name: str, revision: str, model_map: ModelMap, subject: str, fix: str
) -> None:
    """Refuse a model with other weights, or with another name or revision if the weights cannot be compared.

    `fingerprints` are those of the expected weights, also rounded to smaller types; empty if unknown. `subject` and
    `fix` begin and end the message.
    """
    model = model_map.model
    if fingerprints and all(parameter.is_meta for parameter in model.parameters()) and not is_dispatched(model):
        return
    if fingerprints and not getattr(model_map.model, "is_quantized", False):
        if model_map.weights not in fingerprints:  # None if some cannot be read
            raise InputError(f"{subject} other weights ({name}) than this model's ({model_map.name}); {fix}")
        return
    if not fingerprints and model_map.weights:
        logger.warning("%s %s, without fingerprints of the weights: only the name is compared", subject, name)
    for expected, actual in ((name.lower(), model_map.name.lower()), (revision, model_map.revision)):
        if expected and actual and expected != actual:
            raise InputError(f"{subject} {expected}, this model is {actual}; {fix}")


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
            methods, but never removes tokens. Any other method falls back to `generate`.
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
        """Return the method's name before a field's in messages: `METHOD.`."""
        return f"{method_name(cls)}."

    def resolve(self, model_map: ModelMap) -> Self:
        """Fill in defaults and ranges for a model, and refuse values that do not fit it.

        Also called on a model without weights, before they are loaded.
        """
        return self

    @abstractmethod
    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Change the model, and register callbacks that undo the change.

        Args:
            model_map: the parts of the model. `self` is resolved for it.
            stack: runs its callbacks in reverse order when the intervention ends, also after an exception.
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
        """Preserve state, and fix decisions that rounding could change, inside a block.

        The engine compares logits with the model's own in such a block.
        """
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
        """Apply the intervention to `model` inside a `with` block; blocks nest and compose.

        Every call of the model inside the block, in any thread, runs under the intervention, and eagerly if the model
        was compiled. Inside the block, a copied or pickled model and another intervention from another thread are
        refused.

        Args:
            model: a stock transformers model.
            model_map: its `map_model`, for a family that needs a description, or to save the time.
            any_thread: let other threads apply further interventions.

        Yields:
            The model's map.
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

    # ------------------------------------------------------------------ the artefact

    @classmethod
    def schema(cls) -> str:
        """Return the name of its artefact's schema; that of a class from elsewhere is its import path."""
        if not is_own(cls):
            return import_path(cls)
        return "lmeval-prune/" + re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    def save(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Write an artefact for this model: JSON, atomically."""
        self._write(path, model_map, {})

    def _write(self, path: str | os.PathLike[str], model_map: ModelMap, extra: dict[str, Any]) -> None:
        settings = self.fit_to(model_map).settings()
        weights = loadable_fingerprints(model_map.model, model_map.weights)
        model = {"name": model_map.name, "revision": model_map.revision, "weights": weights, **model_map.signature()}
        write_artefact(path, self.schema(), SCHEMA_VERSION, {"settings": settings, "model": model, **extra})

    @classmethod
    def load(cls, path: str | os.PathLike[str], allow_other_model: bool = False) -> Self:
        """Read an artefact. It fits its own model only, unless `allow_other_model`."""
        return cls._from_content(path, *read_artefact(path, cls.schema(), SCHEMA_VERSION), allow_other_model)

    @classmethod
    def _from_content(
        cls, path: str | os.PathLike[str], content: dict[str, Any], sha256: str, allow_other_model: bool
    ) -> Self:
        """Build it from an artefact's content; missing fields have their defaults."""
        validate_json(content, cls.contents, path)
        origin = Origin(str(path), sha256, content["model"], allow_other_model)
        return cls(**content["settings"], **cls._extra_fields(Path(path), content), origin=origin)

    @classmethod
    def _extra_fields(cls, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        return {}


def load_intervention(path: str | os.PathLike[str], allow_other_model: bool = False) -> Intervention:
    """Read an artefact of any method in the table, by its schema."""
    kinds = {kind.schema(): kind for kind in map(METHODS.load, METHODS.own)}
    try:
        content, sha256 = read_artefact(path, tuple(kinds), SCHEMA_VERSION)
    except InputError:
        elsewhere = {kind.schema(): kind for kind in map(METHODS.load, METHODS.keys() - METHODS.own.keys())}
        if not elsewhere:
            raise
        kinds |= elsewhere
        content, sha256 = read_artefact(path, tuple(kinds), SCHEMA_VERSION)
    loaded: Intervention = kinds[content["schema"]]._from_content(path, content, sha256, allow_other_model)
    return loaded


def interventions_on(model: nn.Module) -> tuple[Intervention, ...]:
    """Return the interventions applied to a model or the model that it wraps, first applied first."""
    return tuple(applied_on(model))


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore the state of all interventions on a model after a block of trial passes."""
    with ExitStack() as stack:
        for intervention in interventions_on(model):
            stack.enter_context(intervention.preserve_state())
        yield


def combined(interventions: Iterable[Intervention]) -> tuple[Intervention, ...]:
    """Merge interventions that can be merged (head masks: their union), in order."""
    result: list[Intervention] = []
    for later in interventions:
        for position, earlier in enumerate(result):
            if (union := earlier.merged_with(later) or later.merged_with(earlier)) is not None:
                result[position] = union
                break
        else:
            result.append(later)
    return tuple(result)


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


def changed_by(
    change: Callable[..., Any], result: Any, tensor: torch.Tensor, shape: Sequence[int] = ()
) -> torch.Tensor:
    """Return what `change` made of a tensor; `InputError` for another type or shape, which could be broadcast.

    Under autocast the type may be another: operations choose it, and the next module converts it.
    """
    shape = tuple(shape or tensor.shape)
    same_shape = isinstance(result, torch.Tensor) and result.shape == shape
    if same_shape and result.dtype == tensor.dtype:
        return result
    device = tensor.device.type
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if same_shape and is_autocast and result.is_floating_point():
        return result
    kind = f"{tuple(result.shape)} in {result.dtype}" if isinstance(result, torch.Tensor) else type(result).__name__
    raise InputError(
        f"{qualified_name(change)} returned {kind}, not a tensor {shape} in {tensor.dtype}; mend the method"
    )


def qualified_name(function: Any) -> str:
    """Return the full name of a function: `package.module.Class.attach.<locals>.name`."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
