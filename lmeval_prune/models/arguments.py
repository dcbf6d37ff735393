"""model_args: what is ours is taken out, by the fields of dataclasses and the table of methods; the rest is `hf`'s."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError
from lmeval_prune.interventions import METHODS, Intervention, load_intervention
from lmeval_prune.interventions.base import frozen
from lmeval_prune.interventions.table import method_class
from lmeval_prune.models.routers import RouterOptions
from lmeval_prune.models.tries import Tries


@dataclass(frozen=True)
class EngineOptions:
    """How generation requests are answered.

    Attributes:
        engine: `generate` or `batched`: our decoding engine, the same texts at a higher rate. Default `generate`;
            `batched` with a router, which needs it.
        engine_rows: answers that the engine decodes at once; default: what memory holds.
        deterministic: the engine decides near-ties alone, so that no answer depends on its neighbours; default
            only with a router.
    """

    engine: str | None = None
    engine_rows: int | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        if self.engine not in (None, "generate", "batched"):
            raise InputError(f"engine={self.engine!r} is not known; use generate or batched")
        if self.engine_rows is not None and (not isinstance(self.engine_rows, int) or self.engine_rows < 1):
            raise InputError(f"engine_rows must be a whole number above 0, not {self.engine_rows!r}")
        if self.deterministic is not None:
            object.__setattr__(self, "deterministic", true_or_false("deterministic", self.deterministic))

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
        left = dict(given)
        allowed = {name: true_or_false(name, left.pop(name)) for name in _ALLOWANCES if name in left}
        methods = [_method(name, left.pop(name), allowed) for name in (*METHODS, "mask") if _is_given(left, name)]
        interventions = joined([one for one in methods if one is not None])
        routing = RouterOptions(**_fields_of(RouterOptions, left))
        engine = EngineOptions(**_fields_of(EngineOptions, left))
        engine = engine.completed(routed=routing.router is not None)
        description = _fields_of(Description, left)
        responses = left.pop("responses", None)
        if interventions and left.get("tp_plan"):
            raise InputError("heads cannot be pruned under tp_plan yet; use parallelize=true or one GPU a process")
        if engine.engine == "batched" and (left.get("mixed_precision_dtype") or left.get("tp_plan")):
            raise InputError("engine=batched does not work with mixed_precision_dtype or tp_plan; leave one out")
        tries = routing.tries(allowed.get("allow_other_model", False))
        return cls(interventions, tries, engine, description, responses, left)

    def check_names(self, pretrained: str) -> None:
        """Find mistakes that loading would report late, or by a traceback.

        Raises:
            InputError: saying what is wrong.
        """
        path = Path(pretrained).expanduser()
        if not path.exists():
            close = difflib.get_close_matches(pretrained, embedded.MODELS, n=1)
            if close:
                raise InputError(f"pretrained={pretrained} is not known; did you mean {close[0]}?")
            if pretrained.startswith(("/", "./", "../", "~")) or pretrained.count("/") > 1:
                raise InputError(f"pretrained={pretrained}: there is no such folder")
        dtype = self.others.get("dtype")
        if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise InputError(f"dtype={dtype} is not a type of torch's; use auto, float32, bfloat16 or float16")
        if self.responses:
            if Path(self.responses).is_file():
                raise InputError(f"responses={self.responses} is a file; name a folder")
            try:
                Path(self.responses).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"responses={self.responses} cannot be made: {error.strerror}; name another folder"
                ) from None

    def refuse_misspelt(self, theirs: set[str], config: Any) -> None:
        """An argument that is nobody's but close to ours is a slip: `from_pretrained` would swallow it.

        Args:
            theirs: names of `hf`'s arguments.
            config: the model's configuration, whose attributes can be given, too.

        Raises:
            InputError: naming the argument that was probably meant.
        """
        for name in self.others:
            close = difflib.get_close_matches(name, our_names(), n=1, cutoff=0.75)
            if name not in theirs and not hasattr(config, name) and close:
                raise InputError(f"unknown model_arg {name!r}; did you mean {close[0]!r}?")


def our_names() -> list[str]:
    """Names of all our arguments."""
    groups = [one.name for group in (EngineOptions, Description, RouterOptions) for one in fields(group)]
    return [*METHODS, "mask", *_ALLOWANCES, *groups, "responses"]


def true_or_false(name: str, value: Any) -> bool:
    """A flag as people write it.

    Raises:
        InputError: it is neither true nor false.
    """
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": False}
    if str(value).lower() not in words:
        raise InputError(f"{name}={value!r} is neither true nor false")
    return words[str(value).lower()]


def joined(interventions: list[Intervention]) -> tuple[Intervention, ...]:
    """Interventions in order, those of one kind as one where they can be (head masks: their union)."""
    found: list[Intervention] = []
    for one in interventions:
        for place, before in enumerate(found):
            if (both := before.joined(one)) is not None:
                found[place] = both
                break
        else:
            found.append(one)
    return tuple(found)


_ALLOWANCES = ("allow_empty_layer", "allow_other_model")


def _is_given(left: dict[str, Any], name: str) -> bool:
    if left.get(name) is None:
        left.pop(name, None)
        return False
    return True


def _method(name: str, value: Any, allowed: dict[str, bool]) -> Intervention | None:
    """An intervention from its argument: its first field's value, a dictionary of its fields, or (`mask`) a file."""
    if name == "mask":
        return _with(load_intervention(value, allowed.get("allow_other_model", False)), allowed)
    if value == "":
        raise InputError(f"{name}= is empty; leave it out for the unpruned model")
    kind = method_class(name)
    own = {one.name: one for one in fields(kind) if one.init and one.name != "origin"}
    given = value if isinstance(value, dict) else {next(iter(own)): value}
    for key in given:
        if key not in own:
            close = difflib.get_close_matches(str(key), own, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(own)}"
            raise InputError(f"{name} has no setting {key!r}{hint}")
    needed = [key for key, one in own.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [key for key in needed if key not in given]:
        raise InputError(f"{name} needs {', '.join(missing)}, e.g. {name}={{{', '.join(map(repr, missing))}: …}}")
    return _with(kind(**{key: frozen(item) for key, item in given.items()}), allowed)


def _with(one: Intervention, allowed: dict[str, bool]) -> Intervention:
    """With the allowances that it knows."""
    names = {each.name for each in fields(one)}
    known: dict[str, Any] = {name: value for name, value in allowed.items() if name in names}
    return replace(one, **known)


def _fields_of(kind: type, left: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a dataclass out of the arguments."""
    return {one.name: left.pop(one.name) for one in fields(kind) if one.name in left}
