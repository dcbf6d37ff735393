"""Options that nothing would read are refused: by one rule, for every declared option."""

from __future__ import annotations

from dataclasses import MISSING, fields
from itertools import chain
from typing import Any, Literal, get_args, get_origin

import pytest

from lmeval_prune import InputError, map_model
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.stages import check_pruning
from lmeval_prune.grid.prune import Prune
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import resolve_options
from lmeval_prune.settings import Settings, annotations_of, union_members
from tests.tiny_models import tiny

MODEL: dict[str, Any] = {"pretrained": "model", "output": "student", "task": "task"}


# Options that are always read, or whose own checks say what they need.
ALWAYS: dict[type[Settings], set[str]] = {
    DistillOptions: {
        *("pretrained", "output", "task", "corpus", "data_dir", "seed", "batch", "validation", "stages", "epochs"),
        *("ratio", "ffn_ratio", "train_on", "response", "feature"),
        # of pruning, whose options the pruner's resolution checks, and of training
        *("unit", "ffn_multiple", "allocation", "method", "options", "budget", "parts"),
        *("skip_first", "skip_last", "log_start", "compensation", "damping", "steps", "calibration", "calibrate_on"),
        *(
            "patience",
            "accumulate",
            "save_steps",
            "resumable",
            "lora",
            "rate",
            "decay",
            "warmup",
            "clip",
            "trainer",
            "task_weight",
        ),
    },
}
# Settings under which an option is read, where those of `under` do not do.
READ: dict[str, dict[str, Any]] = {
    "ffn_options": {"ffn_method": "random", "ffn_ratio": 0.25},
    "ffn_method": {"ffn_ratio": 0.25},
    "top_k_rest": {"top_k": 8},
    "hidden_weight": {"hidden": True},
    "layer_map": {"hidden": True},
    "samples": {"sample_temperature": 0.7},
    **{name: {"train_on": "teacher"} for name in ("keep_answers", "unsolved", "answer_metric")},
    **{name: {"corpus": "texts"} for name in ("corpus_field", "corpus_prompt", "corpus_options", "corpus_texts")},
    "corpus_tokens": {"corpus": "texts"},
    "corpus_answers": {"corpus": "texts", "corpus_prompt": "question"},
}
OTHER: dict[str, Any] = {"answer": "It is {}.", "train": ("fold1",), "test": "fold0"}
# Settings under which each conditional option is unread: most are under the bare ones.
UNREAD: dict[str, dict[str, Any]] = {
    name: changes
    for names, changes in (
        (("train", "test", "answer", "answer_field", "limit", "chat", "max_length"), {"task": None, "corpus": "texts"}),
        (("top_k", "temperature"), {"response": False}),
        (("feature_weight", "normalize"), {"feature": False}),
        (("hidden", "teacher", "teachers"), {"distill_weight": 0.0}),
        (("distill_weight",), {"response": False, "feature": False}),
        (("p_min", "growth"), {"stages": 1}),
        (("best_by",), {"validation": 0.0}),
        (("corpus_answers",), {"corpus": "texts"}),
        (("corpus_field",), {"corpus": "texts", "corpus_prompt": "p", "corpus_answers": "teacher"}),
    )
    for name in names
}


def names_of(settings: type[Settings]) -> list[str]:
    own = {name for base in settings.__mro__[1:] for name in getattr(base, "__dataclass_fields__", {})}
    return [field.name for field in fields(settings) if field.name not in own]


def other_value(settings: type[Settings], name: str) -> Any:
    """Return another value than the default, within its bounds."""
    if name in OTHER:
        return OTHER[name]
    (field,) = [candidate for candidate in fields(settings) if candidate.name == name]
    kind = union_members(annotations_of(settings)[name])[0]
    default = None if field.default is MISSING else field.default
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != default)
    if get_origin(kind) is dict:
        return {"L0": "L0"}
    values = {bool: not default, int: 2 + default if isinstance(default, int) else 2, float: 0.125, str: "x"}
    return values[kind]


def conditional(settings: type[Settings]) -> list[str]:
    declared = [name for base in settings.__mro__ for use in vars(base).get("uses", ()) for name in use.names]
    return list(dict.fromkeys(declared))


@pytest.mark.parametrize(
    ("settings", "options", "name"),
    [
        *((DistanceOptions, {"text": "x"}, name) for name in DistanceOptions.uses[0].names),
        *((DistanceOptions, {"task": "x"}, name) for name in DistanceOptions.uses[1].names),
        *((Prune, {"method": "random", "ratio": 0.5}, name) for name in Prune.uses[0].names),
        (Prune, {"method": "flap", "ratio": 0.5, "task": "x", "own_answers": {}}, "tokens"),
    ],
)
def test_an_option_without_what_it_is_for_is_refused(settings: Any, options: dict[str, Any], name: str) -> None:
    settings(**options)
    with pytest.raises(InputError, match=f"^{name} is for .*; give that, or leave out {name}$"):
        settings(**options, **{name: other_value(settings, name)})


@pytest.mark.parametrize("settings", [DistillOptions])
def test_every_option_says_when_it_is_read(settings: type[Settings]) -> None:
    """A new option is always read, or belongs to a condition."""
    assert {*names_of(settings)} == {*conditional(settings)} | ALWAYS[settings]
    assert not {*conditional(settings)} & ALWAYS[settings]


@pytest.mark.parametrize(
    ("settings", "name"),
    [(kind, name) for kind in (DistillOptions,) for name in conditional(kind)],
)
def test_an_option_that_nothing_reads_is_refused(settings: Any, name: str) -> None:
    value = other_value(settings, name)
    with pytest.raises(InputError, match=f"^{name} is for .*; give that, or leave out {name}$"):
        settings(**{**MODEL, **UNREAD.get(name, {}), name: value})


@pytest.mark.parametrize(
    ("settings", "name"),
    [(kind, name) for kind in (DistillOptions,) for name in conditional(kind)],
)
def test_an_option_that_is_read_is_accepted(settings: Any, name: str) -> None:
    value = other_value(settings, name)
    extra = {"calibrate_on": "own"} if settings is DistillOptions and name in chain(ANSWERS_OF_MODELS) else {}
    assert getattr(settings(**{**MODEL, "ratio": 0.5, **extra, **READ.get(name, {}), name: value}), name) == value


ANSWERS_OF_MODELS = ("samples", "sample_temperature", "max_gen_toks", "responses", "prompts_count", "regenerate")


@pytest.mark.parametrize("method", ["magnitude", "block_influence", "slimgpt"])
def test_resolved_options_can_be_resolved_again(method: str) -> None:
    pruner, model_map = make_pruner(method, {}), map_model(tiny("llama"))
    resolved = resolve_options(PruneOptions(0.5), pruner, model_map)
    assert resolve_options(resolved, pruner, model_map) == resolved


@pytest.mark.parametrize(("name", "value"), [("calibration", 8), ("calibrate_on", "own")])
def test_calibration_of_a_method_that_reads_no_text_is_refused(name: str, value: Any) -> None:
    shared: dict[str, Any] = {**MODEL, "ratio": 0.5, "unit": "group", "stages": 2}
    model_map = map_model(tiny("llama"))
    with pytest.raises(InputError, match=f"^{name} is for a method or compensation that reads text"):
        check_pruning(DistillOptions(**shared, method="global_threshold", **{name: value}), model_map)
    check_pruning(DistillOptions(**shared, method="confidence", **{name: value}), model_map)
    check_pruning(DistillOptions(**shared, method="global_threshold", compensation="bias", **{name: value}), model_map)
