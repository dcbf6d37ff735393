"""Options that nothing would read are refused: by one rule, for every declared option."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

import pytest

from lmeval_prune import InputError, map_model
from lmeval_prune.cli import main
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.grid.prune import Prune
from lmeval_prune.pruners import schedule
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import PruneOptions, PruneSettings, ScoringOptions, TextOptions
from lmeval_prune.pruners.schedule import resolve_options
from lmeval_prune.settings import Settings, annotations_of, union_members
from tests.tiny_models import tiny

OWN: dict[str, Any] = {"calibrate_on": "own", "task": "task"}
# Options that are always read, or whose own checks say what they need.
ALWAYS: dict[type[Settings], set[str]] = {
    PruneOptions: {"ratio", "ffn_ratio", "allocation", "steps", "budget", "costs", "compensation"},
    TextOptions: {"task", "text", "calibrate_on"},
}
# Settings under which an option is read, where those of `under` do not do.
READ: dict[str, dict[str, Any]] = {
    "depth_method": {"allocation": "composition", "budget": "parameters"},
    "ffn_multiple": {"budget": "heads", "ffn_ratio": 0.25},
    "ffn_options": {"ffn_method": "random", "ffn_ratio": 0.25},
    "ffn_method": {"ffn_ratio": 0.25},
    "costs": {"budget": "latency", "allocation": "composition"},
    "parts": {"budget": "parameters"},
    "skip_first": {"budget": "parameters"},
    "skip_last": {"budget": "parameters"},
    "samples": {"sample_temperature": 0.7},
    "tokens": {"calibrate_on": "task"},
}
OTHER: dict[str, Any] = {"depth_method": "random"}
# Settings under which each conditional option is unread: most are under the bare ones.
UNREAD: dict[str, dict[str, Any]] = {
    name: changes
    for names, changes in ((("parts", "skip_first", "skip_last", "ffn_multiple"), {"budget": "heads"}),)
    for name in names
}


def names_of(settings: type[Settings]) -> list[str]:
    own = {name for base in settings.__mro__[1:] for name in getattr(base, "__dataclass_fields__", {})}
    return [field.name for field in fields(settings) if field.name not in own or settings is TextOptions]


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


METHOD_USES = {name for use in schedule._USES for name in use.names}


@pytest.mark.parametrize("settings", [PruneOptions, TextOptions])
def test_every_option_says_when_it_is_read(settings: type[Settings]) -> None:
    """A new option is always read, or belongs to a condition."""
    more = METHOD_USES if settings is PruneOptions else set()
    assert {*names_of(settings)} == {*conditional(settings)} | more | ALWAYS[settings]
    assert not ({*conditional(settings)} | more) & ALWAYS[settings]


def bare(settings: type[Settings], name: str) -> dict[str, Any]:
    if settings is PruneOptions:
        return {"ratio": 0.25, **({"budget": "heads"} if name in UNREAD and "budget" in UNREAD[name] else {})}
    return {}


@pytest.mark.parametrize(
    ("settings", "name"),
    [(kind, name) for kind in (PruneOptions, TextOptions) for name in conditional(kind)],
)
def test_an_option_that_nothing_reads_is_refused(settings: Any, name: str) -> None:
    value = other_value(settings, name)
    with pytest.raises(InputError, match=f"^{name} is for .*; give that, or leave out {name}$"):
        settings(**{**bare(settings, name), name: value})


@pytest.mark.parametrize(
    ("settings", "name"),
    [(kind, name) for kind in (PruneOptions, TextOptions) for name in conditional(kind)],
)
def test_an_option_that_is_read_is_accepted(settings: Any, name: str) -> None:
    value = other_value(settings, name)
    under: dict[Any, dict[str, Any]] = {
        PruneOptions: {"ratio": 0.5, "steps": 2},
        TextOptions: OWN,
    }
    assert getattr(settings(**{**under[settings], **READ.get(name, {}), name: value}), name) == value


@pytest.mark.parametrize(
    ("method", "options", "name"),
    [
        ("magnitude", {"damping": 0.5}, "damping"),
        ("flap", {"damping": 0.5}, "damping"),
        ("wanda_sp", {"damping": 0.5}, "damping"),
        ("magnitude", {"log_start": 0.5}, "log_start"),
        ("slimgpt", {"log_start": 0.5, "allocation": "uniform"}, "log_start"),
        ("block_influence", {"unit": "group"}, "unit"),
        ("magnitude", {"unit": "group", "parts": "channels"}, "unit"),
        ("block_influence", {"allow_empty_layer": True}, "allow_empty_layer"),
        ("magnitude", {"allow_empty_layer": True, "allocation": "composition"}, "allow_empty_layer"),
    ],
)
def test_options_that_the_method_does_not_read_are_refused(method: str, options: dict[str, Any], name: str) -> None:
    pruner, model_map = make_pruner(method, {}), map_model(tiny("llama"))
    with pytest.raises(InputError, match=f"^{name} is for .*; give that, or leave out {name}$"):
        resolve_options(PruneOptions(0.5, **options), pruner, model_map)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("slimgpt", {"damping": 0.5, "log_start": 0.5}),
        ("slimgpt", {"damping": 0.5, "compensation": "none"}),
        ("magnitude", {"damping": 0.5, "compensation": "least_squares"}),
        ("magnitude", {"unit": "group", "allow_empty_layer": True}),
        ("magnitude", {"allow_empty_layer": True, "parts": "channels"}),
    ],
)
def test_options_that_the_method_reads_are_accepted(method: str, options: dict[str, Any]) -> None:
    resolve_options(PruneOptions(0.5, **options), make_pruner(method, {}), map_model(tiny("llama")))


def test_a_default_that_is_given_is_no_mistake() -> None:
    options = PruneOptions(0.5, log_start=0.3125, damping=0.01, growth=1)
    resolve_options(options, make_pruner("magnitude", {}), map_model(tiny("llama")))


@pytest.mark.parametrize("method", ["magnitude", "block_influence", "slimgpt"])
def test_resolved_options_can_be_resolved_again(method: str) -> None:
    pruner, model_map = make_pruner(method, {}), map_model(tiny("llama"))
    resolved = resolve_options(PruneOptions(0.5), pruner, model_map)
    assert resolve_options(resolved, pruner, model_map) == resolved


@pytest.mark.parametrize(
    ("settings", "changes"), [(ScoringOptions, {}), (PruneSettings, {"ratio": 0.5})], ids=["importance", "prune"]
)
def test_own_answers_are_renewed_by_steps_alone(settings: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^regenerate is for .*steps"):
        settings(**OWN, **changes, regenerate=2)
    PruneSettings(0.5, **OWN, steps=2, regenerate=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("prune --method magnitude --ratio 0.5 --text TEXT", "the method needs none, and no text is read; leave out"),
        ("importance --method magnitude --text TEXT", "the method needs none, and no text is read; leave out"),
        ("prune --method random --ratio 0.5 --seed 3", "seed is for a calibration text"),
        ("prune --method flap --ratio 0.5 --parts heads --ffn_method random --text TEXT", "and none are removed"),
        ("prune --method flap --ratio 0.5 --text TEXT --p_min 0.2", "p_min is for several --steps"),
        ("importance --method flap --text TEXT --samples 2", "samples is for --calibrate_on own"),
    ],
)
def test_the_commands_refuse_in_one_line(
    words: str, message: str, tiny_folder: Any, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("Ann has 3 apples.\n\n" * 60)
    command, *rest = words.replace("TEXT", str(tmp_path / "text.txt")).split()
    assert main([command, "--pretrained", str(tiny_folder), "--output", str(tmp_path / "a.json"), *rest]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
