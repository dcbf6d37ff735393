"""What a method need not think of: its fields are read by their types, frozen, told apart and kept in its artefact."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lm_eval.utils import simple_parse_args_string

from lmeval_prune import HeadMask, InputError, map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.interventions import METHODS, Intervention, interventions_on
from lmeval_prune.interventions.base import change_input, change_output
from lmeval_prune.models.arguments import Arguments
from tests.tiny_models import output, tiny, tokens


@dataclass(frozen=True)
class Scale(Intervention):
    tokenwise = True
    factor: float = 0.5
    every: int = 1
    layers: int | None = None
    rule: str = "all"
    name: str | None = None
    squared: bool = False
    of: Any = None
    kind: Literal["first", "2", "nan"] = "first"

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        for layer in model_map.attention:
            change_input(layer.o_proj, lambda x: x * self.factor, stack)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "scale", f"{__name__}:Scale")


def intervention_of(value: Any) -> Intervention:
    (intervention,) = Arguments.of({"scale": value}).interventions
    return intervention


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, Scale(1.0)),
        ("0.25", Scale(0.25)),
        ({"factor": "1e-1", "every": 2.0}, Scale(0.1, 2)),
        ({"factor": 1, "layers": "3", "squared": "false"}, Scale(1.0, layers=3)),
        ({"squared": "yes", "layers": None, "rule": "some"}, Scale(squared=True, rule="some")),
        ({"rule": 3}, Scale(rule="3")),
        ({"rule": 1.5}, Scale(rule="1.5")),
        ({"name": 3}, Scale(name="3")),
        ({"name": None}, Scale(name=None)),
        ({"of": {"L0": [1, "a"]}}, Scale(of={"L0": (1, "a")})),
        ({"kind": 2}, Scale(kind="2")),
        ({"kind": float("nan")}, Scale(kind="nan")),
    ],
)
def test_fields_are_read_by_their_types(registered: None, value: Any, expected: Scale) -> None:
    model_map = map_model(tiny("llama"))
    assert intervention_of(value) == expected and hash(intervention_of(value)) == hash(expected)
    assert json.dumps(intervention_of(value).identity(model_map)) == json.dumps(expected.identity(model_map))


@pytest.mark.parametrize("words", ["3", "1.5", "1.0", "-2", "some", '"true"', "'None'"])
def test_a_text_is_what_was_typed_whatever_lm_eval_reads(registered: None, words: str, tmp_path: Path) -> None:
    """And it is the same text after its file, and in every store of answers."""
    model_map, text = map_model(tiny("llama")), words.strip("'\"")
    typed_in = simple_parse_args_string(f"rule={words}")
    intervention = intervention_of(typed_in)
    assert intervention == Scale(rule=text) and intervention.identity(model_map) == Scale(rule=text).identity(model_map)
    intervention.save(tmp_path / "scale.json", model_map)
    assert Scale.load(tmp_path / "scale.json") == intervention


def test_outputs_are_changed_alone_or_first_of_several() -> None:
    """A bias of a projection is changed, too; attention modules also return weights."""
    model, inputs = tiny("gpt2"), tokens()
    expected = copy.deepcopy(model)
    for layer in map_model(expected).attention:
        layer.o_proj.weight.data *= 0.5
        layer.o_proj.bias.data *= 0.5
    for part in ("o_proj", "module"):
        with ExitStack() as stack:
            for layer in map_model(model).attention:
                change_output(getattr(layer, part), lambda x: x * 0.5, stack)
            torch.testing.assert_close(output(model, inputs), output(expected, inputs), rtol=0, atol=1e-11)
    assert not torch.allclose(output(model, inputs), output(expected, inputs))


def test_masks_are_checked_together() -> None:
    model, inputs = tiny("llama"), tokens()
    with HeadMask("L0H0-2").applied_to(model):
        before = output(model, inputs)
        with pytest.raises(InputError), HeadMask("L0H3").applied_to(model):
            pass
        assert len(interventions_on(model)) == 1 and torch.equal(output(model, inputs), before)
        with HeadMask("L0H3", allow_empty_layer=True).applied_to(model):
            assert len(interventions_on(model)) == 2
