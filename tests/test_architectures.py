"""The architecture table against the behaviour of live models."""

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from lmeval_prune import InputError, map_model
from lmeval_prune.architectures import FAMILIES
from tests.tiny_models import ALL, ENCODERS, SEQ2SEQ, VOCABULARY, output, tiny, tokens


def test_every_family_of_the_table_is_tested() -> None:
    assert set(FAMILIES) == set(ALL)


@pytest.mark.parametrize("family", ALL)
def test_counts(family: str) -> None:
    model = tiny(family)
    attention = map_model(model)
    assert attention.stacks == (("encoder", "decoder", "cross") if family in SEQ2SEQ else ("",))
    assert [layer.index for layer in attention.attention if layer.stack == attention.stacks[0]] == [0, 1]
    expected = {"gpt_bigcode": 1, "deepseek_v3": 4}.get(family)
    grouped = (
        "num_key_value_heads" in ALL[family] and family not in {*ENCODERS, "opt", "gpt_neox"}
    ) or family == "falcon"
    for layer in attention.attention:
        assert layer.heads == 4
        assert layer.kv_heads == (expected or (2 if grouped else 4)), layer
        assert layer.name in dict(model.named_modules())


def _head_outputs(model, layer, inputs) -> torch.Tensor:
    """Input of the output projection, as (…, heads, head_dim)."""
    seen = []
    handle = layer.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output(model, inputs)
    handle.remove()
    return seen[0].unflatten(-1, (layer.heads, layer.head_dim))


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("family", ALL)
def test_rows_belong_to_the_heads_that_the_table_says(family: str, part: str) -> None:
    """Changing one head's query rows, or one group's key or value rows, changes that head's output alone."""
    model = tiny(family)
    attention = map_model(model)
    inputs = tokens()
    normed_across_heads = family in {"olmo2", "olmo3"} and part != "v"
    for layer in attention.attention:
        before = _head_outputs(model, layer, inputs)
        for index in range(layer.heads if part == "q" else layer.kv_heads):
            rows = layer.rows(part, index)
            weight = rows.module.weight.data.T if isinstance(rows.module, Conv1D) else rows.module.weight.data
            kept = weight[rows.start : rows.stop].clone()
            weight[rows.start : rows.stop] = torch.randn(kept.shape, dtype=kept.dtype)
            after = _head_outputs(model, layer, inputs)
            weight[rows.start : rows.stop] = kept
            changed = {h for h in range(layer.heads) if (after - before)[..., h, :].abs().max() > 1e-9}
            mine = {index} if part == "q" else {h for h in range(layer.heads) if layer.kv_head_of(h) == index}
            assert changed == mine or (normed_across_heads and mine <= changed), (layer.name, index)


def test_stablelm_bigcode_and_falcon_variants() -> None:
    multi_head = map_model(tiny("gpt_bigcode", multi_query=False))
    assert {layer.kv_heads for layer in multi_head.attention} == {4}
    old_falcon = {"new_decoder_architecture": False, "multi_query": True}
    assert {layer.kv_heads for layer in map_model(tiny("falcon", **old_falcon)).attention} == {1}
    assert {
        layer.kv_heads for layer in map_model(tiny("falcon", **{**old_falcon, "multi_query": False})).attention
    } == {4}


def test_unknown_family_is_refused_with_the_list_or_described() -> None:
    model = tiny("llama")
    model.config.model_type = "newcomer"
    with pytest.raises(InputError, match=r"unknown model family 'newcomer'; known: arcee, bart.*attention_path"):
        map_model(model)
    described = map_model(
        model, attention_path="model.layers.{i}.self_attn", attention_output="o_proj", attention_heads=4
    )
    assert [(x.index, x.heads, x.head_dim) for x in described.attention] == [(0, 4, 8), (1, 4, 8)]
    with pytest.raises(InputError, match="all three"):
        map_model(model, attention_path="model.layers.{i}.self_attn")
    with pytest.raises(InputError, match="cannot be divided into heads"):
        map_model(model, attention_path="model.layers.{i}.self_attn", attention_output="o_proj", attention_heads=5)
    with pytest.raises(InputError, match=r"\{i\}"):
        map_model(model, attention_path="model.layers.0.self_attn", attention_output="o_proj", attention_heads=4)
    with pytest.raises(InputError, match="no attention layers found"):
        map_model(model, attention_path="model.blocks.{i}.attn", attention_output="o_proj", attention_heads=4)


def test_peft_wrapping_is_seen_through() -> None:
    peft = pytest.importorskip("peft")
    model = tiny("llama")
    before = map_model(model).signature()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    assert map_model(wrapped).signature() == before
    assert wrapped.config.vocab_size == VOCABULARY
