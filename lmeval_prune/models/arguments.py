"""model_args: what is ours is taken out, by the fields of dataclasses and the table of methods; the rest is `hf`'s."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, nearest
from lmeval_prune.interventions import METHODS, Intervention, combined, load_intervention
from lmeval_prune.interventions.table import method_class
from lmeval_prune.models.routers import RouterOptions
from lmeval_prune.models.tries import Tries
from lmeval_prune.settings import typed, types_of


@dataclass(frozen=True)
class EngineOptions:
    """How generation requests are answered.

    Attributes:
        engine: `generate` or `batched`: our decoding engine, the same texts at a higher rate. Default `generate`;
            `batched` with a router, which needs it.
        engine_rows: answers that the engine decodes at once; default: what memory holds.
        deterministic: the engine decides near-ties alone, so that no answer depends on its neighbours (but where a
            token filter's similarity is next to its threshold); default only with a router.
    """

    engine: str | None = None
    engine_rows: int | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        if self.engine not in (None, "generate", "batched"):
            raise InputError(f"engine={self.engine!r} is not known; use generate or batched")
        if self.engine_rows is not None and self.engine_rows < 1:
            raise InputError(f"engine_rows must be a whole number above 0, not {self.engine_rows!r}")

    def completed(self, routed: bool) -> EngineOptions:
        """With the defaults filled in.

        Raises:
            InputError: they contradict each other.
        """
        if routed and self.engine == "generate":
            raise InputError("router= answers by the decoding engine; leave out engine=generate")
        engine = self.engine or ("batched" if routed else "generate")
        deterministic = routed if self.deterministic is None else self.deterministic
        if engine == "generate" and (deterministic or self.engine_rows is not None):
            raise InputError("engine_rows and deterministic are the engine's; add engine=batched")
        return EngineOptions(engine, self.engine_rows, deterministic)


@dataclass(frozen=True)
class Description:
    """Of a family that we do not know; see `map_model`."""

    attention_path: str | None = None
    attention_output: str | None = None
    attention_heads: int | None = None

    def __post_init__(self) -> None:
        if self.attention_heads is not None and self.attention_heads < 1:
            raise InputError(f"attention_heads must be a whole number above 0, not {self.attention_heads!r}")


@dataclass(frozen=True)
class Allowances:
    """What is refused unless it is allowed."""

    allow_empty_layer: bool = False
    allow_other_model: bool = False


@dataclass(frozen=True)
class Files:
    """What is read and written beside the model: an artefact that is applied, a folder of answers."""

    mask: str | None = None
    responses: str | None = None


@dataclass(frozen=True)
class Arguments:
    """The model_args of `pruned-hf`.

    Attributes:
        interventions: what is applied to the model, in order.
        tries: decides the heads of a question's tries, if there is a router.
        engine: see there.
        description: see there.
        responses: folder of the answer store.
        others: `hf`'s own.
    """

    interventions: tuple[Intervention, ...]
    tries: Tries | None
    engine: EngineOptions
    description: dict[str, Any]
    responses: str | None
    others: dict[str, Any]

    @classmethod
    def of(cls, given: dict[str, Any]) -> Arguments:
        """Sort out what a user gave.

        Raises:
            InputError: something cannot be used, as far as that is known without the model.
        """
        ours = our_names()
        left = {name: value for name, value in given.items() if value is not None or name not in ours}
        allowed = read_fields(Allowances, left)
        methods = {name: left.pop(name) for name in METHODS if name in left}
        routing = read_fields(RouterOptions, left)
        engine = EngineOptions(**read_fields(EngineOptions, left)).completed(routed="router" in routing)
        description = vars(Description(**read_fields(Description, left)))
        files = Files(**read_fields(Files, left))
        interventions = [_method(name, value, allowed) for name, value in methods.items()]
        if files.mask:
            mask = load_intervention(files.mask, allowed.get("allow_other_model", False))
            interventions.append(_with(mask, allowed))
        _check_theirs(left, bool(interventions), engine)
        return cls(combined(interventions), _tries(routing, allowed), engine, description, files.responses, left)

    def check_names(self, pretrained: str) -> None:
        """Find mistakes that loading would report late, or by a traceback.

        Raises:
            InputError: saying what is wrong.
        """
        embedded.check_name(pretrained, self.others)
        if self.responses and Path(self.responses).is_file():
            raise InputError(f"responses={self.responses} is a file; name a folder")

    def refuse_misspelt(self, theirs: set[str], config: Any) -> None:
        """An argument that is nobody's but close to ours is a slip: `from_pretrained` would swallow it.

        Args:
            theirs: names of `hf`'s arguments.
            config: the model's configuration, whose attributes can be given, too; None for a live model, to which
                only `hf`'s own can be given.

        Raises:
            InputError: naming the argument that was probably meant.
        """
        for name in self.others:
            if name not in theirs and not hasattr(config, name) and (_meant(name) or config is None):
                raise unknown(name)


def unknown(name: str) -> InputError:
    """What to say of an argument that nobody knows."""
    return InputError(f"unknown model_arg {name!r}{_meant(name) or '; leave it out'}")


def _meant(name: str) -> str:
    return nearest(name, our_names(), cutoff=0.75)


def our_names() -> list[str]:
    """Names of all our arguments."""
    groups = (Allowances, EngineOptions, Description, Files, RouterOptions)
    return [*METHODS, *(one.name for group in groups for one in fields(group))]


def _method(name: str, value: Any, allowed: dict[str, Any]) -> Intervention:
    """An intervention from its argument: its first field's value, or a dictionary of its fields."""
    if value == "":
        raise InputError(f"{name}= is empty; leave it out for the unpruned model")
    kind = method_class(name)
    if isinstance(value, str) and value.endswith(".json"):
        return _read_as(kind, name, value, allowed)
    own = {one.name: one for one in fields(kind) if one.init and one.name != "origin"}
    given = value if isinstance(value, dict) else {next(iter(own)): value}
    for key in given:
        if key not in own:
            hint = nearest(str(key), own) or f"; it has {', '.join(own)}"
            raise InputError(f"{name} has no setting {key!r}{hint}")
    needed = [key for key, one in own.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [key for key in needed if key not in given]:
        example = ", ".join(f'"{key}": …' for key in missing)
        raise InputError(
            f"{name} needs {', '.join(missing)}; on the command line several settings are given as JSON: "
            f'--model_args \'{{"pretrained": "…", "{name}": {{{example}}}}}\''
        )
    return _with(kind(**given), allowed)


def _read_as(kind: type[Intervention], name: str, path: str, allowed: dict[str, Any]) -> Intervention:
    """An artefact as a method: its own kind, or one that says the same."""
    one = load_intervention(path, allowed.get("allow_other_model", False))
    found = one.converted(kind)
    if found is None:
        raise InputError(f"{name}={path} is a {one.schema()} artefact that says more than {name} can; give it as mask=")
    return _with(found, allowed)


def _with(one: Intervention, allowed: dict[str, Any]) -> Intervention:
    """With the allowances that it knows."""
    names = {each.name for each in fields(one)}
    known: dict[str, Any] = {name: value for name, value in allowed.items() if name in names}
    return replace(one, **known)


def _tries(routing: dict[str, Any], allowed: dict[str, Any]) -> Tries | None:
    """Who decides the heads of tries, from the arguments of a router."""
    if "router" not in routing:
        if routing:
            raise InputError(
                f"these belong to router=: {', '.join(routing)}; add router=random, random_top, best or oracle"
            )
        return None
    if not isinstance(routing["router"], Tries):
        routing = {**routing, "router": typed("router", routing["router"], str)}
    tries = RouterOptions(**routing).tries(allowed.get("allow_other_model", False))
    tries.allow_empty_layer = allowed.get("allow_empty_layer", tries.allow_empty_layer)
    return tries


def _check_theirs(others: dict[str, Any], prunes: bool, engine: EngineOptions) -> None:
    """Refuse values of `hf`'s arguments that it would refuse by a traceback, or that do not go with ours."""
    if prunes and others.get("tp_plan"):
        raise InputError("heads cannot be pruned under tp_plan yet; use parallelize=true or one GPU a process")
    if engine.engine == "batched" and (others.get("mixed_precision_dtype") or others.get("tp_plan")):
        raise InputError("engine=batched does not work with mixed_precision_dtype or tp_plan; leave one out")
    dtype, size = others.get("dtype"), others.get("batch_size")
    known = dtype == "auto" or isinstance(getattr(torch, dtype, None) if isinstance(dtype, str) else dtype, torch.dtype)
    if dtype is not None and not known:
        raise InputError(f"dtype={dtype} is not a type of torch's; use auto, float32, bfloat16 or float16")
    if size is not None and not re.fullmatch(r"auto(:\d+(\.\d*)?)?|0*[1-9]\d*", str(size)):
        raise InputError(f"batch_size={size} is neither a whole number above 0 nor auto nor auto:N")


def read_fields(kind: type, left: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a dataclass out of the arguments, each read by its type.

    Raises:
        InputError: a value is empty or of another type.
    """
    found: dict[str, Any] = {}
    for one in fields(kind):
        if one.name in left:
            value = left.pop(one.name)
            if value == "":
                raise InputError(f"{one.name}= is empty; give it a value, or leave it out")
            found[one.name] = typed(one.name, value, types_of(kind)[one.name])
    return found
