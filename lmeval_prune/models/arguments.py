"""The model_args of `pruned-hf`: fields of `Arguments`, names of methods, and arguments of lm-eval's `hf`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal, Self

from lmeval_prune.config import Count, Seed, Settings, parse_value
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.interventions import METHODS, Intervention, combined
from lmeval_prune.interventions.table import ALLOWANCES, parse_intervention
from lmeval_prune.models import TARGETS
from lmeval_prune.models.head_router import POLICIES, HeadRouter


@dataclass(frozen=True)
class Arguments(Settings):
    """Parsed model_args, created by `Arguments.of(dictionary)`.

    Attributes:
        pretrained: the model, as for `hf`.
        engine: `generate` for lm-eval's `hf`, `batched` for this package's decoding engine, which gives the same texts
            and log-likelihoods faster, or `auto`, which chooses for each request that generates (see `EngineHFLM`).
            Default: `auto`, with a router `batched`.
        engine_rows: number of answers that the engine decodes at once; default: as many as fit in memory.
        deterministic: recompute near-ties alone, so that no answer depends on the other rows of its batch (except
            where a token filter's similarity is next to its threshold). Default: only with a router.
        attention_path, attention_output, attention_heads: description of an unknown model family; see `map_model`.
        mask: file of an artefact to apply.
        responses: folder of the answer store.
        allow_empty_layer: accept heads that leave a layer without heads.
        allow_other_model: accept artefacts of another model if they fit.
        router: chooses the heads to prune for each attempt at a question: the folder of a fitted router, or one of
            `POLICIES`; after parsing, a `HeadRouter`.
        router_store: outcome store: of training questions for `random_top` and `best` (and the pool of `random`), of
            the evaluated questions for `oracle`.
        router_pool: heads for `random` (as for `heads=`); may include `dense`.
        router_seed: for `random` and `random_top`.
        router_size: number of heads in `random_top`'s shortlist.
        question_field: field of a task's documents with the question; default: the field with which the router or the
            store was created.
        interventions: applied to the model, in order.
        others: arguments of `hf`.
    """

    pretrained: Any = None
    engine: Literal["auto", "generate", "batched"] | None = None
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
    router_seed: Seed = 0
    router_size: Count = 16
    question_field: str | None = None
    interventions: tuple[Intervention, ...] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Parse model_args; `InputError` if an argument is invalid. Checks that need the model are done later."""
        names = argument_names()
        refuse_empty(values, names)
        others = {name: value for name, value in values.items() if value is not None or name not in names}
        package_arguments = {name: others.pop(name) for name in (*names, "pretrained") if name in others}
        methods = {name: package_arguments.pop(name) for name in METHODS if name in package_arguments}
        if "router" not in package_arguments and (stray := _ROUTER_SETTINGS & package_arguments.keys()):
            raise InputError(
                f"these belong to router=: {', '.join(sorted(stray))}; add router={', '.join(POLICIES)} or a folder"
            )
        arguments = cls(**package_arguments, others=others)
        methods |= {"mask": arguments.mask} if arguments.mask else {}
        allowances = {name: own for name in ALLOWANCES if (own := getattr(arguments, name)) is not None}
        interventions = [parse_intervention(name, value, allowances) for name, value in methods.items()]
        router = arguments.router
        if isinstance(router, str):
            router = resolve_name(TARGETS["router"])(arguments)
        return replace(arguments, interventions=combined(interventions), router=router)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router is not None and not isinstance(self.router, HeadRouter):
            object.__setattr__(self, "router", parse_value("router", self.router, str))
        if self.router is not None and self.engine == "generate":
            raise InputError("router= needs the decoding engine; leave out engine=generate")
        object.__setattr__(self, "engine", "batched" if self.router is not None else self.engine or "auto")
        if self.deterministic is None:
            object.__setattr__(self, "deterministic", self.router is not None)
        if self.engine != "batched" and (self.deterministic or self.engine_rows is not None):
            raise InputError("engine_rows and deterministic are settings of the decoding engine; add engine=batched")
        if (self.interventions or self.engine == "batched") and self.others.get("tp_plan"):
            raise InputError("heads cannot be pruned under tp_plan yet; use parallelize=true or one GPU per process")
        if self.engine == "batched" and self.others.get("mixed_precision_dtype"):
            raise InputError("engine=batched does not work with mixed_precision_dtype; leave one out")

    @property
    def description(self) -> dict[str, Any]:
        """Return the description of an unknown model family: arguments of `map_model`."""
        return {name: getattr(self, name) for name in FAMILY_DESCRIPTION}

    @property
    def loading(self) -> dict[str, Any]:
        """Return the model_args that load the unpruned model."""
        described = {name: value for name, value in self.description.items() if value is not None}
        model = {} if self.pretrained is None else {"pretrained": self.pretrained}
        return {**model, **self.others, **described}

    def refuse_misspelt(self, config: Any) -> None:
        """Refuse an unknown argument that resembles a known one, because `from_pretrained` would ignore it.

        Attributes of the model's `config` are valid arguments; a loaded model (None) accepts only those of `hf`.
        """
        for name in self.others:
            is_known = name in hf_arguments() or hasattr(config, name)
            if not is_known and (config is None or did_you_mean(name, argument_names(), cutoff=0.75)):
                raise unknown_argument(name)


_ROUTER_SETTINGS = {"router_store", "router_pool", "router_seed", "router_size", "question_field"}
FAMILY_DESCRIPTION = ("attention_path", "attention_output", "attention_heads")
ROUTER_ARGUMENTS = ("router", *sorted(_ROUTER_SETTINGS))
_INTERNAL = {"pretrained", "interventions", "others"}
METHODS.reserve({argument.name for argument in fields(Arguments)})


@cache
def hf_arguments() -> frozenset[str]:
    from lm_eval.models.huggingface import HFLM

    return frozenset(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}


def argument_names() -> list[str]:
    """Return the names of this package's arguments, including the methods."""
    return [*METHODS, *(argument.name for argument in fields(Arguments) if argument.name not in _INTERNAL)]


def refuse_empty(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse empty values, e.g. of an unset shell variable."""
    for name in names:
        if values.get(name) == "":
            raise InputError(f"{name}= is empty; give it a value, or leave it out")


def unknown_argument(name: str, further_names: Iterable[str] = ()) -> InputError:
    """Return the error for an unknown argument; `further_names` are valid arguments besides this package's."""
    hint = (
        did_you_mean(name, [*argument_names(), *further_names]) or "; leave it out, or install the package that has it"
    )
    return InputError(f"unknown model_arg {name!r}{hint}")
