"""Every method of the matrix: nothing stays, nothing depends on batch or chunk, nothing is served for something else."""

from __future__ import annotations

import copy
import json
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lm_eval import simple_evaluate
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from lmeval_prune import HeadMask, InputError, map_model
from lmeval_prune.architectures.blocks import is_transposed
from lmeval_prune.interventions import METHODS, Intervention, interventions_on, load_intervention
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.settings import types_of
from tests.conftest import task_manager
from tests.methods import ROWS, Row
from tests.test_pruned_hf import GENERATE, PROMPTS, request
from tests.tiny_models import output, tiny, tokens

ARGUMENTS = [row for row in ROWS if row.value is not None]
FAMILIES = [(row, family) for row in ROWS for family in row.families]
CAUSAL = [(row, family) for row, family in FAMILIES if row.causal]


def made(row: Row, value: Any = None) -> Intervention:
    """The intervention that a user's argument makes."""
    (one,) = Arguments.of({row.name: row.value if value is None else value}).interventions
    return one


def applied(row: Row, model: nn.Module) -> AbstractContextManager[Any]:
    return row.apply(model) if row.apply else made(row).applied_to(model)


def lm(folder: Path, **arguments: Any) -> PrunedHFLM:
    return PrunedHFLM(str(folder), **{"dtype": "float64", "device": "cpu", "batch_size": 3, **arguments})


def state_of(model: nn.Module) -> list[Any]:
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    modules = [(name, type(module)) for name, module in model.named_modules()]
    return [hooks, modules, model.config._attn_implementation, interventions_on(model)]


def test_every_method_of_the_table_has_a_row() -> None:
    assert {row.name for row in ARGUMENTS} == set(METHODS)


@pytest.mark.parametrize(("row", "family"), FAMILIES, ids=str)
def test_nothing_stays(row: Row, family: str) -> None:
    """After the block, after an exception in it, and after an intervention that does not fit."""
    model, inputs = tiny(family), tokens()
    dense, weights, state = output(model, inputs), copy.deepcopy(model.state_dict()), state_of(model)
    with applied(row, model):
        assert (output(model, inputs) - dense).abs().max() > 1e-4, f"the method changes nothing on {family}"
        assert interventions_on(model)
    with pytest.raises(RuntimeError, match="inside"), applied(row, model):
        output(model, inputs)
        raise RuntimeError("inside")
    for value, _ in row.wrong if family == "llama" else ():
        with pytest.raises(InputError), made(row, value).applied_to(model):
            pass
    assert state_of(model) == state
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(output(model, inputs), dense)


@pytest.mark.parametrize(("row", "family"), CAUSAL, ids=str)
def test_prefill_is_decoding(row: Row, family: str) -> None:
    """A text fed at once, in chunks, and token by token."""
    model, inputs = tiny(family), tokens(rows=1, length=12)
    with applied(row, model), torch.no_grad():
        whole = output(model, inputs)
        for sizes in ([5, 1, 4, 2], [1] * 12):
            cache, parts = DynamicCache(config=model.config), []
            for part in inputs.split(sizes, dim=1):
                parts.append(model(part, past_key_values=cache, use_cache=True).logits)
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("row", "family"), FAMILIES, ids=str)
def test_neighbours_and_padding_do_not_matter(row: Row, family: str) -> None:
    model = tiny(family)
    texts = [tokens(1, length, seed=length)[0] for length in (9, 4, 7)]
    batch, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for i, text in enumerate(texts):
        batch[i, 9 - len(text) :], mask[i, 9 - len(text) :] = text, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with applied(row, model):
        together = output(model, batch, attention_mask=mask, position_ids=positions)
        for i, text in enumerate(texts):
            alone = output(model, text[None])[0]
            torch.testing.assert_close(together[i, 9 - len(text) :], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_composes_with_a_head_mask(row: Row) -> None:
    """In either order, it is the method on a model without that head."""
    model, inputs, mask = tiny("llama"), tokens(), HeadMask("L1H0")
    without = copy.deepcopy(model)
    layer = map_model(without).attention[1]
    assert not is_transposed(layer.o_proj)
    layer.o_proj.weight.data[:, layer.columns(0)] = 0
    with applied(row, without):
        expected = output(without, inputs)
    with mask.applied_to(model), applied(row, model):
        torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=1e-11)
    with applied(row, model), mask.applied_to(model):
        torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_its_identity_is_what_it_does(row: Row) -> None:
    model_map = map_model(tiny("llama"))
    own = made(row).identity(model_map)
    assert own["method"] == row.name and json.loads(json.dumps(own)) == own
    assert all(made(row, value).identity(model_map) == own for value in (row.value, *row.same))
    assert all(
        json.dumps(made(row, value).identity(model_map)) == json.dumps(own) for value in row.same
    )  # not 1 and 1.0
    others = [json.dumps(made(row, value).identity(model_map)) for value in row.others]
    assert len({json.dumps(own), *others}) == 1 + len(others)
    assert hash(made(row)) == hash(made(row))


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_the_types_of_its_fields_are_checked(row: Row) -> None:
    hints = types_of(type(made(row)))
    first = next(one.name for one in fields(made(row)) if one.name != "origin")
    value = row.value if isinstance(row.value, dict) else {first: row.value}
    for one in fields(made(row)):
        if one.init and {bool, int, float} & {hints[one.name], *get_args(hints[one.name])}:
            with pytest.raises(InputError, match=f"{one.name}='nonsense' is (not|neither)"):
                made(row, {**value, one.name: "nonsense"})


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_stores_of_answers_keep_it_apart(row: Row, tiny_folder: Path, tmp_path: Path) -> None:
    """Dense, this value and another one share a folder; each gets its own answers, the second time from there."""
    asked = [request("generate_until", (prompt, dict(GENERATE)), i) for i, prompt in enumerate(PROMPTS)]
    given: list[dict[str, Any]] = [{}, *({row.name: value} for value in (row.value, *row.others))]
    fresh = [lm(tiny_folder, **one).generate_until(asked) for one in given]
    assert fresh[0] != fresh[1]
    for again in (False, True):
        for one, expected in zip(given, fresh, strict=True):
            stored = lm(tiny_folder, **one, responses=str(tmp_path / "s"))
            if again:
                stored.model.forward = None  # everything is in the store
            assert stored.generate_until(asked) == expected
            stored.close()


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_the_results_file_names_it(row: Row, tiny_folder: Path) -> None:
    arguments = {"pretrained": str(tiny_folder), "dtype": "float32", row.name: row.value}
    results = simple_evaluate(
        "pruned-hf", arguments, tasks=["prune_tiny_choice"], limit=2, device="cpu", task_manager=task_manager()
    )
    pruning = results["config"]["pruning"]
    assert pruning[row.name]
    json.dumps(pruning)


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_mistakes_are_said_before_weights_are_loaded(
    row: Row, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    assert row.wrong
    for value, message in row.wrong:
        with pytest.raises(InputError, match=message) as error:
            lm(tiny_folder, **{row.name: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_it_survives_its_file(row: Row, tmp_path: Path) -> None:
    model = tiny("llama")
    model_map, one = map_model(model), made(row)
    one.save(tmp_path / "one.json", model_map)
    for loaded in (type(one).load(tmp_path / "one.json"), load_intervention(tmp_path / "one.json")):
        assert type(loaded) is type(one) and loaded.identity(model_map) == one.identity(model_map)
        with loaded.applied_to(model), applied(row, tiny("llama")):
            pass
    other = tiny("llama", seed=1)
    with pytest.raises(InputError, match="other weights"), loaded.applied_to(other):
        pass
    with type(one).load(tmp_path / "one.json", allow_other_model=True).applied_to(other):
        pass
    for kind in (torch.float32, torch.bfloat16, torch.float16):  # the same weights, in a smaller type
        rounded = map_model(copy.deepcopy(model).to(kind))
        assert rounded.weights != model_map.weights and load_intervention(tmp_path / "one.json").fit_to(rounded)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1.1e-6  # float16 rounds it
    one.save(tmp_path / "half.json", map_model(half))
    for kind in (torch.float16, torch.float32, torch.float64):
        assert load_intervention(tmp_path / "half.json").fit_to(map_model(copy.deepcopy(half).to(kind)))


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_the_engine_gives_what_generate_gives(row: Row, tiny_folder: Path) -> None:
    """By running the method, or by leaving it to `generate`."""
    asked = [request("generate_until", (prompt, dict(GENERATE)), i) for i, prompt in enumerate(PROMPTS)]
    expected = lm(tiny_folder, **{row.name: row.value}).generate_until(asked)
    batched = lm(tiny_folder, **{row.name: row.value}, engine="batched")
    assert batched.generate_until(asked) == expected != lm(tiny_folder).generate_until(asked)
    assert (batched.engine.unsupported is None) == (made(row).tokenwise or made(row).by_sequence)
