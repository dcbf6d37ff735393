"""The model_args of `pruned-hf`: ours are the fields of `Arguments` and the names of methods; the rest are `hf`'s."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.interventions import METHODS, Intervention, combined, load_intervention
from lmeval_prune.interventions.table import method_class
from lmeval_prune.models.head_router import HeadRouter
from lmeval_prune.models.registered import load_registered
from lmeval_prune.settings import Count, Settings, parse_value, required_fields


@dataclass(frozen=True)
class Arguments(Settings):
    """Parsed model_args: `Arguments.of(dictionary)`.

    Attributes:
        pretrained: the model, as for `hf`.
        engine: `generate` or `batched` (our decoding engine: the same texts at a higher rate). Default `generate`;
            `batched` with a router, which needs it.
        engine_rows: answers that the engine decodes at once; default: what memory holds.
        deterministic: decide near-ties alone, so that no answer depends on its neighbours in a batch (except where a
            token filter's similarity is next to its threshold). Default: only with a router.
        attention_path, attention_output, attention_heads: describe an unknown model family; see `map_model`.
        mask: file of an artefact to apply.
        responses: folder of the answer store.
        allow_empty_layer: accept heads that leave a layer without any.
        allow_other_model: accept artefacts of another model, if they fit.
        router: chooses a head for each try of a question: folder of a fitted router, or one of `POLICIES`; once
            parsed, a `HeadRouter`.
        router_store: outcome store: of training questions for `random_top` and `best` (and the pool of `random`), of
            the evaluated questions for `oracle`.
        router_pool: heads for `random` (as for `heads=`), `dense` among them if wanted.
        router_seed: for `random` and `random_top`.
        router_size: of `random_top`'s shortlist.
        question_field: field of a task's documents that holds the question; default the one that the router or the
            store was made with.
        interventions: applied to the model, in order.
        others: arguments of `hf`.
    """

    pretrained: Any = None
    engine: Literal["generate", "batched"] | None = None
    engine_rows: Count | None = None
    deterministic: bool | None = None
    attention_path: str | None = None
    attention_output: str | None = None
    attention_heads: Count | None = None
    mask: str | None = None
    responses: str | None = None
    allow_empty_layer: bool | None = None
    allow_other_model: bool | None = None
    router: Any = None
    router_store: str | None = None
    router_pool: str | None = None
    router_seed: int = 0
    router_size: int = 16
    question_field: str | None = None
    interventions: tuple[Intervention, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Parse model_args; `InputError` if an argument cannot be used, as far as that is known without the model."""
        names = argument_names()
        others = {name: value for name, value in values.items() if value is not None or name not in names}
        refuse_empty(values, names)
        known = {name: others.pop(name) for name in (*names, "pretrained") if name in others}
        methods = {name: known.pop(name) for name in METHODS if name in known}
        if "router" not in known and (stray := _ROUTER_SETTINGS & known.keys()):
            raise InputError(
                f"these belong to router=: {', '.join(sorted(stray))}; add router=random, random_top, best or oracle"
            )
        arguments = cls(**known, others=others)
        interventions = [arguments._method(name, value) for name, value in methods.items()]
        if arguments.mask:
            mask = load_intervention(arguments.mask, bool(arguments.allow_other_model))
            interventions.append(arguments._with_allowances(mask))
        arguments = replace(arguments, interventions=combined(interventions), router=arguments._tries())
        arguments._check_others()
        return arguments

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router is not None and not isinstance(self.router, HeadRouter):
            object.__setattr__(self, "router", parse_value("router", self.router, str))
        if self.router is not None and self.engine == "generate":
            raise InputError("router= answers by the decoding engine; leave out engine=generate")
        object.__setattr__(self, "engine", self.engine or ("generate" if self.router is None else "batched"))
        if self.deterministic is None:
            object.__setattr__(self, "deterministic", self.router is not None)
        if self.engine == "generate" and (self.deterministic or self.engine_rows is not None):
            raise InputError("engine_rows and deterministic are the engine's; add engine=batched")

    @property
    def description(self) -> dict[str, Any]:
        """Describe an unknown model family: arguments of `map_model`."""
        return {name: getattr(self, name) for name in ("attention_path", "attention_output", "attention_heads")}

    @property
    def loading(self) -> dict[str, Any]:
        """Return the model_args by which the unpruned model is loaded."""
        described = {name: value for name, value in self.description.items() if value is not None}
        model = {} if self.pretrained is None else {"pretrained": self.pretrained}
        return {**model, **self.others, **described}

    def check_names(self, pretrained: str) -> None:
        """Refuse a model that is not there, or a file as the answer store, before anything is loaded."""
        embedded.check_name(pretrained, dict(self.others))
        if self.responses and Path(self.responses).is_file():
            raise InputError(f"responses={self.responses} is a file; name a folder")

    def refuse_misspelt(self, hf_arguments: set[str], config: Any) -> None:
        """Refuse an argument that is nobody's but close to one of ours: `from_pretrained` would swallow it.

        Args:
            hf_arguments: names of `hf`'s arguments.
            config: the model's configuration, whose attributes can be given, too; None for a live model, to which
                only `hf`'s own can be given.

        Raises:
            InputError: naming the argument that was probably meant.
        """
        for name in self.others:
            if name not in hf_arguments and not hasattr(config, name) and (_is_near_ours(name) or config is None):
                raise unknown_argument(name)

    # ------------------------------------------------------------------ parsing

    def _method(self, name: str, value: Any) -> Intervention:
        """Make an intervention of its argument: a file, its first field's value, or a dictionary of its fields."""
        kind: Any = method_class(name)
        if isinstance(value, str) and value.endswith(".json"):
            artefact = load_intervention(value, bool(self.allow_other_model))
            converted = artefact.converted(kind)
            if converted is None:
                raise InputError(
                    f"{name}={value} is a {artefact.schema()} artefact that says more than {name} can; give it as mask="
                )
            return self._with_allowances(converted)
        known = [each.name for each in fields(kind) if each.init and each.name != "origin"]
        settings = value if isinstance(value, dict) else {known[0]: value}
        _check_settings(name, settings, known, required_fields(kind))
        return self._with_allowances(kind(**settings))

    def _with_allowances(self, intervention: Intervention) -> Intervention:
        allowances = {name: getattr(self, name) for name in ("allow_empty_layer", "allow_other_model")}
        known = {each.name for each in fields(intervention)}
        changes: dict[str, Any] = {
            name: value for name, value in allowances.items() if name in known and value is not None
        }
        return replace(intervention, **changes)

    def _tries(self) -> HeadRouter | None:
        if self.router is None:
            return None
        tries: HeadRouter = self.router if isinstance(self.router, HeadRouter) else load_registered("router")(self)
        if self.allow_empty_layer is not None:
            tries.allow_empty_layer = self.allow_empty_layer
        return tries

    def _check_others(self) -> None:
        """Refuse values of `hf`'s arguments that it would refuse by a traceback, or that do not go with ours."""
        others = self.others
        if self.interventions and others.get("tp_plan"):
            raise InputError("heads cannot be pruned under tp_plan yet; use parallelize=true or one GPU a process")
        if self.engine == "batched" and (others.get("mixed_precision_dtype") or others.get("tp_plan")):
            raise InputError("engine=batched does not work with mixed_precision_dtype or tp_plan; leave one out")
        dtype, size = others.get("dtype"), others.get("batch_size")
        type_of_weights = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype not in (None, "auto") and not isinstance(type_of_weights, torch.dtype):
            raise InputError(f"dtype={dtype} is not a type of torch's; use auto, float32, bfloat16 or float16")
        if size is not None and not re.fullmatch(r"auto(:\d+(\.\d*)?)?|0*[1-9]\d*", str(size)):
            raise InputError(f"batch_size={size} is neither a whole number above 0 nor auto nor auto:N")


_ROUTER_SETTINGS = {"router_store", "router_pool", "router_seed", "router_size", "question_field"}
ROUTER_ARGUMENTS = ("router", *sorted(_ROUTER_SETTINGS))
_NOT_GIVEN_BY_USERS = {"pretrained", "interventions", "others"}


def argument_names() -> list[str]:
    """Return the names of our arguments, methods among them."""
    return [*METHODS, *(each.name for each in fields(Arguments) if each.name not in _NOT_GIVEN_BY_USERS)]


def _check_settings(name: str, settings: Mapping[str, Any], known: list[str], required: list[str]) -> None:
    """Refuse settings that a method does not have, or lacks."""
    for key in settings:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; it has {', '.join(known)}"
            raise InputError(f"{name} has no setting {key!r}{hint}")
    if missing := [key for key in required if key not in settings]:
        example = json.dumps({"pretrained": "…", name: dict.fromkeys(missing, "…")}, ensure_ascii=False)
        raise InputError(
            f"{name} needs {', '.join(missing)}; on the command line several settings are given as JSON: "
            f"--model_args '{example}'"
        )


def refuse_empty(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse empty texts, which a forgotten value or an unset variable of a shell leaves."""
    for name in names:
        if values.get(name) == "":
            raise InputError(f"{name}= is empty; give it a value, or leave it out")


def unknown_argument(name: str, known: Iterable[str] = ()) -> InputError:
    """Return the refusal of an argument that is neither ours nor one of these others that are known."""
    hint = did_you_mean(name, [*argument_names(), *known]) or "; leave it out"
    return InputError(f"unknown model_arg {name!r}{hint}")


def _is_near_ours(name: str) -> bool:
    return bool(did_you_mean(name, argument_names(), cutoff=0.75))
