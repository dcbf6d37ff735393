"""Compare the architecture table with the behaviour of live models."""

from typing import Any

import pytest
import torch
from torch import nn

from lmeval_prune import map_model
from lmeval_prune.architectures import FAMILIES, FeedForward, Rows
from lmeval_prune.architectures.blocks import is_transposed
from tests.tiny_models import ALL, ENCODERS, SEQ2SEQ, distinct, output, tiny, tokens, weight_view


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


def _inputs_of(model: nn.Module, modules: list[nn.Module]) -> list[torch.Tensor]:
    """Return the inputs of modules in one forward pass."""
    recorded: dict[nn.Module, torch.Tensor] = {}
    handles = [x.register_forward_pre_hook(lambda own, args: recorded.update({own: args[0]})) for x in modules]
    output(model, tokens())
    for handle in handles:
        handle.remove()
    return [recorded[module] for module in modules]


def changed_by(model: nn.Module, rows: Rows, reader: nn.Module) -> set[int]:
    """Which inputs of a projection change with other weights in some rows."""
    (before,) = _inputs_of(model, [reader])
    weight = weight_view(rows.module)
    kept = weight[rows.start : rows.stop].clone()
    weight[rows.start : rows.stop] = torch.randn(kept.shape, dtype=kept.dtype)
    (after,) = _inputs_of(model, [reader])
    weight[rows.start : rows.stop] = kept
    return set(((after - before).flatten(0, -2).abs().amax(0) > 1e-9).nonzero().flatten().tolist())


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("family", distinct(ALL))
def test_rows_belong_to_the_heads_that_the_table_says(family: str, part: str) -> None:
    """Changing one head's query rows, or one group's key or value rows, changes that head's output alone."""
    model = tiny(family)
    normed_across_heads = family in {"olmo2", "olmo3"} and part != "v"
    for layer in map_model(model).attention:
        for index in range(layer.heads if part == "q" else layer.kv_heads):
            changed = {n // layer.head_dim for n in changed_by(model, layer.rows(part, index), layer.o_proj)}
            expected = {index} if part == "q" else {h for h in range(layer.heads) if layer.kv_head_of(h) == index}
            assert changed == expected or (normed_across_heads and expected <= changed), (layer.name, index)


def test_stablelm_bigcode_and_falcon_variants() -> None:
    multi_head = map_model(tiny("gpt_bigcode", multi_query=False))
    assert {layer.kv_heads for layer in multi_head.attention} == {4}
    old_falcon = {"new_decoder_architecture": False, "multi_query": True}
    assert {layer.kv_heads for layer in map_model(tiny("falcon", **old_falcon)).attention} == {1}
    assert {
        layer.kv_heads for layer in map_model(tiny("falcon", **{**old_falcon, "multi_query": False})).attention
    } == {4}


PLAIN = {
    *("gpt2", "gpt_bigcode", "gptj", "codegen", "gpt_neo", "gpt_neox", "phi", "opt", "falcon", "bloom", "mpt", "arcee"),
    *("starcoder2", "bert", "roberta", "xlm-roberta", "distilbert", "t5", "bart", "mbart", "mt5-plain", "falcon-old"),
}
EXPERTS_ONLY = {"mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "gpt_oss"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ALL if family not in EXPERTS_ONLY},
    "t5-gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
    "mt5-plain": ("mt5", {"feed_forward_proj": "relu"}),
    "falcon-old": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "ffn_hidden_size": 40}),
    "qwen2_moe-dense-layer": ("qwen2_moe", {"mlp_only_layers": [0]}),
}
GATED = set(VARIANTS) - PLAIN
# a family that shares its entry of the table with one before it runs in `make test-long`
DISTINCT = [*distinct(family for family in VARIANTS if family in ALL), *(name for name in VARIANTS if name not in ALL)]
DISTINCT_GATED = [variant for variant in DISTINCT if getattr(variant, "values", (variant,))[0] in GATED]


def _blocks(variant: str) -> tuple[nn.Module, tuple[FeedForward, ...]]:
    family, changes = VARIANTS[variant]
    model = tiny(family, **changes)
    return model, map_model(model).feed_forward


@pytest.mark.parametrize("family", sorted(EXPERTS_ONLY))
def test_a_layer_of_experts_has_no_feed_forward_block(family: str) -> None:
    actual = map_model(tiny(family))
    assert actual.attention and actual.feed_forward == ()


@pytest.mark.parametrize("variant", VARIANTS)
def test_feed_forward_counts(variant: str) -> None:
    family, _ = VARIANTS[variant]
    model, blocks = _blocks(variant)
    layers = [layer.label for layer in map_model(model).attention if layer.stack != "cross"]
    assert [block.label for block in blocks] == (layers[:1] if family in {"deepseek_v3", "qwen2_moe"} else layers)
    wide = {"gpt2", "gpt_bigcode", "gptj", "codegen", "gpt_neo", "falcon", "bloom", "mpt"}
    channels = 40 if variant == "falcon-old" else 128 if variant in wide else 48
    assert map_model(model).channels() == dict.fromkeys((block.label for block in blocks), channels)
    for block in blocks:
        assert dict(model.named_modules())[block.name] is block.module
        assert (block.gate is not None) == (variant in GATED)
        assert (block.gate is block.up) == (family in {"phi3", "glm", "glm4"})


@pytest.mark.parametrize("variant", DISTINCT)
def test_rows_belong_to_the_channels_that_the_table_says(variant: str) -> None:
    """Changing a channel's gate or up row changes that channel's activation alone."""
    model, blocks = _blocks(variant)
    for block in blocks:
        for part, channel in [(part, channel) for part in block.parts for channel in (0, 5, block.channels - 1)]:
            assert changed_by(model, block.rows(part, channel), block.down) == {channel}, (block.name, part)


@pytest.mark.parametrize("variant", DISTINCT_GATED)
def test_the_gate_is_what_goes_through_the_activation(variant: str) -> None:
    """The input of `down` is activation(gate) · up, recomputed from the rows of both."""
    model, blocks = _blocks(variant)
    for block in blocks:
        x, actual = _inputs_of(model, [block.up, block.down])
        activation = next(child for name, child in block.module.named_children() if name.startswith("act"))
        gate, up = (_product(x, block.rows(part)) for part in ("gate", "up"))
        torch.testing.assert_close(actual, activation(gate) * up)
        assert (actual - activation(up) * gate).abs().max() > 0.1


def _product(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    bias = 0 if rows.module.bias is None else rows.module.bias[rows.start : rows.stop]
    return x @ weight_view(rows.module)[rows.start : rows.stop].T + bias


def test_a_family_is_described() -> None:
    model = tiny("llama")
    model.config.model_type = "newcomer"
    described = map_model(
        model, attention_path="model.layers.{i}.self_attn", attention_output="o_proj", attention_heads=4
    )
    assert [(x.index, x.heads, x.head_dim) for x in described.attention] == [(0, 4, 8), (1, 4, 8)]
    assert described.feed_forward == () and described.channels() == {}
    whole_layers = map_model(
        model, attention_path="model.layers.*", attention_output="self_attn.o_proj", attention_heads=4
    )
    assert [layer.name for layer in whole_layers.attention] == ["model.layers.0", "model.layers.1"]


def test_layers_of_another_tower_are_no_layers_of_the_model() -> None:
    model = tiny("llama")
    alone = map_model(model).feed_forward
    encoder = tiny("llama").model
    for layer in encoder.layers:
        del layer.self_attn
    model.vision = nn.ModuleDict({"layers": encoder.layers})
    assert map_model(model).feed_forward == alone


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", "gate_proj up_proj down_proj"),
        ("glm", "gate_up_proj down_proj"),
        ("gpt2", "c_fc c_proj"),
        ("opt", "fc1 fc2"),
        ("t5", "wi wo"),
    ],
)
def test_peft_wrapping_of_the_feed_forward_block_is_seen_through(family: str, names: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny(family)
    before = map_model(model)
    config = peft.LoraConfig(r=2, target_modules=names.split(), fan_in_fan_out=family == "gpt2")
    after = map_model(peft.get_peft_model(model, config))
    assert after.channels() == before.channels()
    for block, plain in zip(after.feed_forward, before.feed_forward, strict=True):
        assert block.down.base_layer is plain.down and is_transposed(block.down) == (family == "gpt2")
        assert {part: module.base_layer for part, module in block.parts.items()} == plain.parts
