"""The one attention function: what stands in front of attention, of the model's own and of the engine's store."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmeval_prune import HeadMask, InputError, map_model
from lmeval_prune.interventions.applied import changed_by
from lmeval_prune.interventions.attention_call import Attend, AttentionCall, check_attention_calls, intercept_attention
from tests.tiny_models import CAUSAL, ENCODERS, OWN_ATTENTION, SEQ2SEQ, distinct, output, tiny, tokens


def through(model: Any, handler: Any, inputs: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with ExitStack() as stack:
        intercept_attention(map_model(model), handler, stack)
        return output(model, inputs, **arguments)


def passed_on(call: AttentionCall, attend: Attend) -> Any:
    return attend(call)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", distinct([*CAUSAL, *ENCODERS, *SEQ2SEQ]))
def test_a_handler_that_passes_on_changes_nothing(family: str, attention: str) -> None:
    """With a padded batch, so that masks count; families that compute attention otherwise are refused."""
    model = tiny(family, attention)
    before = model.config._attn_implementation
    if family in OWN_ATTENTION:
        with pytest.raises(InputError):
            check_attention_calls(map_model(model))
        return
    inputs, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    calls: list[AttentionCall] = []

    def seen(call: AttentionCall, attend: Attend) -> Any:
        calls.append(call)
        return attend(call)

    expected = output(model, inputs, attention_mask=mask)
    assert torch.equal(through(model, seen, inputs, attention_mask=mask).nan_to_num(), expected.nan_to_num())
    assert {call.layer.name for call in calls} == {layer.name for layer in map_model(model).attention}
    assert model.config._attn_implementation == before
    assert torch.equal(output(model, inputs, attention_mask=mask).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_it_sees_keys_as_they_are_cached(family: str) -> None:
    model, inputs = tiny(family), tokens(2, 5)
    cache, keys = DynamicCache(config=model.config), []
    with ExitStack() as stack:
        intercept_attention(
            map_model(model), lambda call, attend: (keys.append(call.key.clone()), attend(call))[1], stack
        )
        model(inputs, past_key_values=cache, use_cache=True)
    assert all(torch.equal(layer.keys, key) for layer, key in zip(cache.layers, keys, strict=True))


def test_the_last_one_put_in_stands_first_and_may_answer_alone() -> None:
    model, inputs, order = tiny("llama"), tokens(1, 4), []

    def noted(name: str, answers: bool = False) -> Any:
        def handler(call: AttentionCall, attend: Attend) -> Any:
            order.append(name)
            if answers:
                return torch.zeros_like(call.query).transpose(1, 2), None
            return attend(call)

        return handler

    with ExitStack() as stack:
        model_map = map_model(model)
        for name, answers in (("a", False), ("b", True), ("c", False)):
            intercept_attention(model_map, noted(name, answers), stack)
        actual = output(model, inputs)
    assert order == ["c", "b"] * 2
    with HeadMask("L*H*", allow_empty_layer=True).applied_to(model):
        torch.testing.assert_close(actual, output(model, inputs), rtol=0, atol=1e-12)


def test_it_is_undone_in_any_order_and_by_an_exception() -> None:
    model, inputs = tiny("qwen3"), tokens(1, 4)
    expected, model_map = output(model, inputs), map_model(model)
    first, second = ExitStack(), ExitStack()
    intercept_attention(model_map, passed_on, first)
    intercept_attention(model_map, lambda call, attend: (attend(call)[0] * 2, None), second)
    doubled = output(model, inputs)
    first.close()
    assert torch.equal(output(model, inputs), doubled) and not torch.equal(doubled, expected)
    second.close()
    assert torch.equal(output(model, inputs), expected) and model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError), ExitStack() as stack:
        intercept_attention(model_map, passed_on, stack)
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_model_of_the_same_configuration_is_left_alone(attention: str) -> None:
    """Be it built from the same configuration object, or copied inside the block."""
    model, inputs = tiny("llama", attention), tokens(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0

    def out(model: Any) -> torch.Tensor:
        return output(model, inputs, attention_mask=mask).nan_to_num()

    other = type(model)(model.config).to(torch.float64).eval()
    expected, plain = out(other), out(model)

    def double(call: AttentionCall, attend: Attend) -> Any:
        return attend(call)[0] * 2, None

    with ExitStack() as stack:
        intercept_attention(map_model(model), double, stack)
        doubled = out(model)
        assert torch.equal(out(other), expected)
        with pytest.raises(InputError):
            intercept_attention(map_model(other), double, stack)
        copied = copy.deepcopy(model)
        assert torch.equal(out(copied), plain)
        assert torch.equal(out(model), doubled)
    for instance, own in ((model, plain), (other, expected), (copied, plain)):
        assert torch.equal(out(instance), own)
    assert torch.equal(through(copied, double, inputs, attention_mask=mask).nan_to_num(), doubled)
    assert torch.equal(out(copied), plain)
    assert not torch.equal(doubled, plain)


def test_a_change_may_have_another_type_under_autocast() -> None:
    """There operations choose the type; elsewhere it is refused, and so are integers."""
    x = torch.ones(2, 3)
    wide = changed_by(test_a_change_may_have_another_type_under_autocast, x, x)
    assert wide is x
    with torch.autocast("cpu", torch.bfloat16):
        assert changed_by(len, x.bfloat16(), x).dtype == torch.bfloat16
        with pytest.raises(InputError):
            changed_by(len, x.long(), x)
    with pytest.raises(InputError):
        changed_by(len, x.bfloat16(), x)
