"""Interventions: each changes how a stock model computes while it is applied, and nothing stays behind.

To add a method, write a dataclass in a file of its own, with `attach` and, where something can fail to fit, `resolve`.
Its fields are its model_args. Its identity in every store of answers, its entry in the results file and its artefact
follow from the fields, so that none can be forgotten.
"""

from __future__ import annotations

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NotRequired, Self

import torch
from torch import nn
from typing_extensions import TypedDict

from lmeval_prune.architectures import ModelMap, is_dispatched, loadable_fingerprints, map_model
from lmeval_prune.artefacts import read_artefact, validate_json, write_artefact
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.applied import applied_on, attached
from lmeval_prune.interventions.table import METHODS, method_class, method_name
from lmeval_prune.settings import Settings, required_fields, to_plain_json

logger = logging.getLogger(__name__)
SCHEMA_VERSION = 3  # 1: without weights; 2: settings beside the envelope


class OfModel(TypedDict):
    """The model that an artefact was made for."""

    name: str
    revision: str
    model_type: str
    heads: dict[str, Any]
    weights: NotRequired[list[str]]


class Contents(TypedDict):
    """Fields of an intervention's artefact."""

    model: OfModel
    settings: NotRequired[dict[str, Any]]  # before version 3 they stood beside the envelope


@dataclass(frozen=True)
class Origin:
    """The artefact that an intervention was read from, and the model that it was made for.

    Attributes:
        path, sha256: the file, and the hash of its content.
        model: `name`, `revision`, `model_type`, `heads` (shapes by layer) and `weights` (fingerprints of the weights,
            as they are and rounded to smaller types).
        any_model: accept another model, if the intervention fits it.
    """

    path: str
    sha256: str
    model: dict[str, Any]
    any_model: bool = False

    def check(self, model_map: ModelMap) -> None:
        """Refuse another model: by its weights, offloaded ones too; by its name, where weights cannot tell.

        Raises:
            InputError: naming what differs.
        """
        if self.any_model:
            return
        made, fix = f"{self.path} was made for", "make one for this model, or give allow_other_model=true if it fits"
        name, family = self.model["name"], self.model["model_type"]
        if family != model_map.model_type:
            raise InputError(f"{made} a {family} model, this one is {model_map.model_type}; {fix}")
        if model_map.signature() != {key: self.model[key] for key in ("model_type", "heads")}:
            raise InputError(f"{made} {name}, whose layers or heads differ from this model's; {fix}")
        check_weights(self.model.get("weights") or [], name, self.model["revision"], model_map, made, fix)


def check_weights(known: list[str], name: str, revision: str, model_map: ModelMap, made: str, fix: str) -> None:
    """Refuse a model that something was not made for: by its weights; quantised, or made for unknown ones, by its name.

    Args:
        known: fingerprints of the weights that it was made for, as they are and rounded to smaller types.
        name, revision: of that model.
        model_map: of the model at hand.
        made, fix: beginning and end of the message.

    Raises:
        InputError: naming what differs.
    """
    if known and _is_bare(model_map.model):
        return
    if known and not getattr(model_map.model, "is_quantized", False):
        if model_map.weights is None:
            raise InputError(f"{made} certain weights ({name}), and some of this model's cannot be read; {fix}")
        if model_map.weights not in known:
            raise InputError(f"{made} other weights ({name}) than this model's ({model_map.name}); {fix}")
        return
    if not known and model_map.weights:
        logger.warning("%s %s, and does not say for which weights: its name decides", made, name)
    if _differ(name.lower(), model_map.name.lower()):
        raise InputError(f"{made} {name}, this model is {model_map.name}; {fix}")
    if _differ(revision, model_map.revision):
        raise InputError(f"{made} revision {revision[:12]}, this one is {model_map.revision[:12]}; {fix}")


def _is_bare(model: nn.Module) -> bool:
    """Return whether a model's weights are not loaded yet."""
    return all(parameter.is_meta for parameter in model.parameters()) and not is_dispatched(model)


def _differ(known: str, other: str) -> bool:
    return bool(known and other) and known != other


@dataclass(frozen=True)
class Intervention(Settings, ABC):
    """A change to a model's computation.

    A subclass is a frozen dataclass. Its fields are read by their types and bounds (`ratio: ShareBelowOne`, see
    `Settings`): numbers, texts, booleans, None, or lists and dictionaries of these. A field declared with
    `compare=False` says how an intervention is checked or carried out, not what it computes, and is no part of its
    identity. A subclass with a `__post_init__` of its own calls this one.

    Attributes:
        contents: (of the class) the fields of its artefact, a `TypedDict`.
        version: (of the class) raised whenever the method computes something else than before, so that answers, cells
            and outcomes of the earlier arithmetic are not taken for those of this one.
        tokenwise: (of the class, or set by what the fields say) what it does to a token depends on that token alone.
            Then rows of different requests can stand in one packed batch, and the decoding engine runs it.
        by_sequence: (of the class) what it does to a token depends on those before it in the same sequence. Of packed
            tokens it tells whose they are, and keeps what it remembers of each sequence in the store behind it
            (`AttentionCall.store`). The engine runs it, too, but takes no token back. A method that is neither is left
            to `generate`.
        origin: the artefact that it was loaded from.
    """

    hashable: ClassVar[bool] = True
    contents: ClassVar[Any] = Contents
    version: ClassVar[int] = 1
    tokenwise: ClassVar[bool] = False
    by_sequence: ClassVar[bool] = False
    origin: Origin | None = field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def label(cls, message: str) -> str:
        """Return a message that begins with `METHOD.field`."""
        return f"{method_name(cls)}.{message}"

    def resolve(self, model_map: ModelMap) -> Self:
        """Fill in what the fields leave open for this model (ranges, defaults), and refuse what does not fit it.

        It is called before the weights are loaded, too, on a model without any.

        Raises:
            InputError: the intervention does not fit the model.
        """
        return self

    @abstractmethod
    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Change the model, and leave in `stack` whatever undoes the change.

        Args:
            model_map: where everything is in the model. `self` has been resolved for it.
            stack: its callbacks run, last first, when the intervention ends, by an exception too.
        """

    @property
    def needs_order(self) -> bool:
        """Return whether answers depend on earlier answers, so that they cannot come from a store."""
        return False

    def slot_bytes(self, model_map: ModelMap, length: int) -> int:
        """Return the memory it takes beside keys and values in the engine's store, for a sequence of so many tokens."""
        return 0

    def uncounted(self) -> AbstractContextManager[None]:
        """Open a block whose forward passes are trials, which do not count in what is measured."""
        return nullcontext()

    def compared(self) -> AbstractContextManager[None]:
        """Open an `uncounted` block whose results are compared: what a rounding could turn is made certain in it."""
        return self.uncounted()

    def joined(self, other: Intervention) -> Self | None:
        """Return this and another one as a single intervention; None if they only nest."""
        return None

    def converted(self, kind: type[Intervention]) -> Intervention | None:
        """Return this as an intervention of another kind; None if it is none."""
        return self if isinstance(self, kind) else None

    # ------------------------------------------------------------------ what follows from the fields

    def fit_to(self, model_map: ModelMap) -> Self:
        """Resolve it, after checking that the model is the one that an artefact was made for."""
        if self.origin:
            self.origin.check(model_map)
        return self.resolve(model_map)

    @contextmanager
    def applied_to(
        self, model: nn.Module, model_map: ModelMap | None = None, any_thread: bool = False
    ) -> Iterator[ModelMap]:
        """Apply the intervention to `model` inside a `with` block; blocks nest and compose.

        Whatever runs the model inside the block, in any thread, runs it under the intervention, eagerly where it was
        compiled. Copying or pickling the model, calling it when a module that is changed has been replaced, and
        applying more in another thread are refused.

        Args:
            model: a stock transformers model.
            model_map: its `map_model`, where it is already at hand or the family needs describing.
            any_thread: let other threads apply more, one after another.

        Yields:
            The model's map.

        Raises:
            InputError: the intervention does not fit the model, alone or with what is applied already; the model is
                then unchanged.
        """
        model_map = model_map or map_model(model)
        resolved = self.fit_to(model_map)
        for each in combined([*interventions_on(model), resolved]):
            each.fit_to(model_map)
        with attached(resolved, model_map, any_thread):
            yield model_map

    def settings(self) -> dict[str, Any]:
        """Return the fields that make up its identity, as JSON values."""
        return {item.name: to_plain_json(item.name, getattr(self, item.name)) for item in fields(self) if item.compare}

    def identity(self, model_map: ModelMap) -> dict[str, Any]:
        """Return a JSON value that determines what it does to this model."""
        return {"method": method_name(type(self)), "version": self.version, **self.fit_to(model_map).settings()}

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return its entry in the results file, by default `{METHOD: its fields}`."""
        report: dict[str, Any] = {method_name(type(self)): self.fit_to(model_map).settings()}
        return report | ({"file": self.origin.path, "file_sha256": self.origin.sha256} if self.origin else {})

    def summary(self, model_map: ModelMap) -> str:
        """Return one short line for a log, by default its name and fields."""
        settings = self.fit_to(model_map).settings().items()
        return f"{method_name(type(self))}: {', '.join(f'{name}={value}' for name, value in settings)}"

    # ------------------------------------------------------------------ the artefact

    @classmethod
    def schema(cls) -> str:
        """Return the name of its artefact's schema."""
        return "lmeval-prune/" + re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    def save(self, path: str | os.PathLike[str], model_map: ModelMap) -> None:
        """Write it as an artefact for this model: JSON, atomically.

        Raises:
            InputError: it does not fit the model, or the file cannot be written.
        """
        self._write(path, model_map, {})

    def _write(self, path: str | os.PathLike[str], model_map: ModelMap, more: dict[str, Any]) -> None:
        settings = self.fit_to(model_map).settings()
        weights = loadable_fingerprints(model_map.model, model_map.weights)
        model = {"name": model_map.name, "revision": model_map.revision, "weights": weights, **model_map.signature()}
        write_artefact(path, self.schema(), SCHEMA_VERSION, {"settings": settings, "model": model, **more})

    @classmethod
    def load(cls, path: str | os.PathLike[str], allow_other_model: bool = False) -> Self:
        """Read an artefact. It is refused on another model, unless `allow_other_model`.

        Raises:
            InputError: the file is missing, broken, a pickle, or another kind of artefact.
        """
        return cls._of(path, *read_artefact(path, cls.schema(), SCHEMA_VERSION), allow_other_model)

    @classmethod
    def _of(cls, path: str | os.PathLike[str], content: dict[str, Any], sha256: str, allow_other_model: bool) -> Self:
        """Make it of an artefact's content; fields that are missing there have their defaults."""
        validate_json(content, cls.contents, path)
        known = {item.name: item for item in fields(cls) if item.compare}
        settings = content.get("settings")
        if content["schema_version"] < 3:  # they stood beside the envelope
            settings = {name: content[name] for name in known if name in content}
        required = known.keys() & set(required_fields(cls))
        if settings is None or not required <= settings.keys():
            raise InputError(f"{path} lacks the fields of a {cls.schema()} artefact")
        if unknown := [name for name in settings if name not in known]:
            raise InputError(
                f"{path} has settings that this lmeval-prune does not know: {', '.join(unknown)}; upgrade it"
            )
        origin = Origin(str(path), sha256, content["model"], allow_other_model)
        try:
            return cls(**settings, **cls._attached(Path(path), content), origin=origin)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def _attached(cls, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Return fields that are no settings, from what an artefact has beside them; by default there are none."""
        return {}


def load_intervention(path: str | os.PathLike[str], allow_other_model: bool = False) -> Intervention:
    """Read an artefact of any method of the table, told by its schema.

    Raises:
        InputError: the file is missing, broken, a pickle, or no intervention.
    """
    kinds = {kind.schema(): kind for kind in map(method_class, METHODS)}
    content, sha256 = read_artefact(path, tuple(kinds), SCHEMA_VERSION)
    loaded: Intervention = kinds[content["schema"]]._of(path, content, sha256, allow_other_model)
    return loaded


def interventions_on(model: nn.Module) -> tuple[Intervention, ...]:
    """Return what is applied to a model, or to what it wraps, in the order in which it was applied."""
    return tuple(applied_on(model))


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Open a block whose forward passes are trials for all that is applied to a model."""
    with ExitStack() as stack:
        for intervention in interventions_on(model):
            stack.enter_context(intervention.uncounted())
        yield


def combined(interventions: Iterable[Intervention]) -> tuple[Intervention, ...]:
    """Return interventions in order, those of one kind as one where they can be (head masks: their union)."""
    result: list[Intervention] = []
    for later in interventions:
        for position, earlier in enumerate(result):
            if (union := earlier.joined(later) or later.joined(earlier)) is not None:
                result[position] = union
                break
        else:
            result.append(later)
    return tuple(result)


def change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], stack: ExitStack) -> None:
    """Pass the first input of `module` through `change` until `stack` closes."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(inputs[0]), *inputs[1:])

    stack.callback(module.register_forward_pre_hook(hook).remove)


def change_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], stack: ExitStack) -> None:
    """Pass the output of `module` (the first, if it has several) through `change` until `stack` closes."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    stack.callback(module.register_forward_hook(hook).remove)
