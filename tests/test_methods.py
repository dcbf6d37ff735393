"""Every method of the matrix: nothing stays, nothing depends on batch or chunk, nothing is served for something else."""

from __future__ import annotations

import copy
import json
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from torch import nn
from transformers import DynamicCache

from lmeval_prune import HeadMask, InputError, map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import columns_of, is_transposed
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.interventions import METHODS, Intervention, interventions_on, load_intervention
from lmeval_prune.interventions.base import change_output
from lmeval_prune.models.arguments import Arguments
from tests.conftest import task_manager
from tests.methods import ROWS, Row
from tests.test_pruned_hf import GENERATE, PROMPTS, request
from tests.test_pruned_hf import model as pruned_hf
from tests.tiny_models import output, tiny, tokens

ARGUMENTS = [row for row in ROWS if row.value is not None]
FAMILIES = [(row, family) for row in ROWS for family in row.families]
CAUSAL = [(row, family) for row, family in FAMILIES if row.causal]


def intervention_of(row: Row, value: Any = None) -> Intervention:
    """Make the intervention of a user's argument."""
    (intervention,) = Arguments.of({row.name: row.value if value is None else value}).interventions
    return intervention


def applied(row: Row, model: nn.Module) -> AbstractContextManager[Any]:
    return row.apply(model) if row.apply else intervention_of(row).applied_to(model)


def state_of(model: nn.Module) -> list[Any]:
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    modules = [(name, type(module)) for name, module in model.named_modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return [hooks, modules, attributes, model.config._attn_implementation, interventions_on(model)]


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
        with pytest.raises(InputError), intervention_of(row, value).applied_to(model):
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


@dataclass(frozen=True)
class ByLength(Intervention):
    """Divides the first layer's attention by the length of the text, which a hook on the model itself reads."""

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        lengths: list[torch.Tensor] = []

        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("attention_mask")
            lengths[:] = [(torch.ones_like(args[0]) if mask is None else mask).sum(1)]

        stack.callback(model_map.model.register_forward_pre_hook(read, with_kwargs=True).remove)
        change_output(model_map.attention[0].o_proj, lambda x: x / lengths[0][:, None, None], stack)


@pytest.mark.parametrize("row", [*ROWS, Row("ByLength", apply=ByLength().applied_to)], ids=str)
def test_likelihoods_do_not_depend_on_the_batch(row: Row, tiny_folder: Path) -> None:
    """Texts of different lengths, which `hf` pads on the right without saying so."""
    pairs = [
        ("a", " b"),
        ("one two three", " four"),
        ("x y", " long and longer, the longest"),
        ("one", " two three"),
        ("one", "x"),
    ]
    pairs += [("one", "<pad>x"), ("one", "<pad><pad>x")]  # tokens 0, with which `hf` pads
    texts = ["abc", "a text of its own, and more", "x", "one two three four five"]
    by_kind = {
        "loglikelihood": [request("loglikelihood", pair, i) for i, pair in enumerate(pairs)],
        "loglikelihood_rolling": [request("loglikelihood_rolling", (text,), i) for i, text in enumerate(texts)],
    }
    dense = pruned_hf(tiny_folder, batch_size=1)
    for kind, requests in by_kind.items():
        values = []
        for size in (1, 4):
            hf_lm = pruned_hf(tiny_folder, batch_size=size)
            with applied(row, hf_lm.model):
                values.append(torch.tensor(getattr(hf_lm, kind)(requests), dtype=torch.float64))
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-9)
        assert not torch.allclose(values[0], torch.tensor(getattr(dense, kind)(requests), dtype=torch.float64))


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
def test_it_composes_with_the_masks_of_the_engines_requests(row: Row) -> None:
    """Each request is answered by the method on a model without the heads of its mask."""
    model, masks, params = tiny("llama"), (None, HeadMask("L1H0"), HeadMask("L0H2+L1H1")), SamplingParams(12, eos=())
    prompts = [tuple(prompt.tolist()) for prompt in tokens(6, 9)]
    expected = {}
    for mask in masks:
        without = copy.deepcopy(model)
        for layer, heads in mask.by_layer(map_model(without)) if mask else ():
            layer.o_proj.weight.data[:, columns_of(layer, heads)] = 0
        with applied(row, without):
            for prompt in prompts:
                answer = without.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
                expected[prompt, mask] = answer[0, len(prompt) :].tolist()
    requests = [Request(prompt, mask, params) for prompt in prompts for mask in masks]
    with applied(row, model):
        answers = {(request.prompt, request.mask): answer for request, answer in Engine(model).decode(requests)}
    assert answers == expected
    assert all(expected[prompt, masks[0]] != expected[prompt, masks[2]] for prompt in prompts)


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_its_identity_is_what_it_does(row: Row) -> None:
    model_map = map_model(tiny("llama"))
    own = intervention_of(row).identity(model_map)
    assert own["method"] == row.name and json.loads(json.dumps(own)) == own
    assert all(intervention_of(row, value).identity(model_map) == own for value in (row.value, *row.same))
    assert all(
        json.dumps(intervention_of(row, value).identity(model_map)) == json.dumps(own) for value in row.same
    )  # not 1 and 1.0
    others = [json.dumps(intervention_of(row, value).identity(model_map)) for value in row.others]
    assert len({json.dumps(own), *others}) == 1 + len(others)
    assert hash(intervention_of(row)) == hash(intervention_of(row))


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_stores_of_answers_keep_it_apart(row: Row, tiny_folder: Path, tmp_path: Path) -> None:
    """Dense, this value and another one share a folder; each gets its own answers, the second time from there."""
    instances = [request("generate_until", (prompt, dict(GENERATE)), i) for i, prompt in enumerate(PROMPTS)]
    variants: list[dict[str, Any]] = [{}, *({row.name: value} for value in (row.value, *row.others))]
    fresh = [pruned_hf(tiny_folder, **arguments).generate_until(instances) for arguments in variants]
    assert fresh[0] != fresh[1]
    for again in (False, True):
        for arguments, expected in zip(variants, fresh, strict=True):
            stored = pruned_hf(tiny_folder, **arguments, responses=str(tmp_path / "s"))
            if again:
                stored.model.forward = None  # everything is in the store
            assert stored.generate_until(instances) == expected
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
def test_it_survives_its_file(row: Row, tmp_path: Path) -> None:
    model = tiny("llama")
    model_map, intervention = map_model(model), intervention_of(row)
    intervention.save(tmp_path / "one.json", model_map)
    for loaded in (type(intervention).load(tmp_path / "one.json"), load_intervention(tmp_path / "one.json")):
        assert type(loaded) is type(intervention) and loaded.identity(model_map) == intervention.identity(model_map)
        with loaded.applied_to(model), applied(row, tiny("llama")):
            pass
    other = tiny("llama", seed=1)
    with pytest.raises(InputError, match="other weights"), loaded.applied_to(other):
        pass
    with type(intervention).load(tmp_path / "one.json", allow_other_model=True).applied_to(other):
        pass
    for kind in (torch.float32, torch.bfloat16, torch.float16):  # the same weights, in a smaller type
        rounded = map_model(copy.deepcopy(model).to(kind))
        assert rounded.weights != model_map.weights and load_intervention(tmp_path / "one.json").fit_to(rounded)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1.1e-6  # float16 rounds it
    intervention.save(tmp_path / "half.json", map_model(half))
    for kind in (torch.float16, torch.float32, torch.float64):
        assert load_intervention(tmp_path / "half.json").fit_to(map_model(copy.deepcopy(half).to(kind)))


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_the_engine_gives_what_generate_gives(row: Row, tiny_folder: Path) -> None:
    """By running the method, or by leaving it to `generate`."""
    instances = [request("generate_until", (prompt, dict(GENERATE)), i) for i, prompt in enumerate(PROMPTS)]
    expected = pruned_hf(tiny_folder, **{row.name: row.value}).generate_until(instances)
    batched = pruned_hf(tiny_folder, **{row.name: row.value}, engine="batched")
    assert batched.generate_until(instances) == expected != pruned_hf(tiny_folder).generate_until(instances)
    assert (batched.engine.unsupported is None) == (intervention_of(row).tokenwise or intervention_of(row).by_sequence)
