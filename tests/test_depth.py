"""Blocks and layers: left out by a plan, cut out of a checkpoint, loaded, decoded with a cache and by the engine."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lmeval_prune import HeadMask, InputError, Plan, load_pretrained, map_model
from lmeval_prune.architectures.names import block_names, compact_names
from lmeval_prune.checkpoints.loading import checkpoint_columns, read_manifest, removal_summary, removed_blocks
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.interventions import combined
from lmeval_prune.surgery.cut import cut, cut_to
from tests.test_surgery import compare
from tests.tiny_models import ALL, SEQ2SEQ, implementations, output, stored, tiny, tokens

EVERYDAY = {"llama", "gemma2", "olmo2", "gpt2", "gpt_oss", "deepseek_v3", "falcon", "opt", "bert", "t5"}
FAMILIES = [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long) for name in ALL]


def loaded(family: str, model: Any, plan: Plan, folder: Path) -> Any:
    """Cut a model, and compare the checkpoint with the plan, also in generation with caches."""
    cut_to(folder, model, plan)
    smaller = load_pretrained(folder, **implementations(family))
    compare(family, model, plan, smaller)
    return smaller


# --------------------------------------------------------------------------- what it means to leave a block out


NORMS = {  # before and after the attention, before and after the feed-forward block
    "llama": ("input_layernorm", "", "post_attention_layernorm", ""),
    "olmo2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "gemma2": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def literal_layer(family: str, layer: Any, x: torch.Tensor, without: str, **named: Any) -> torch.Tensor:
    """A layer's formula without one of its blocks."""
    if family == "gpt_neox":  # both blocks read the layer's input
        attended = layer.attention(layer.input_layernorm(x), **named)[0] if without != "attention" else 0
        return x + attended + (layer.mlp(layer.post_attention_layernorm(x)) if without != "feed_forward" else 0)
    before, after, before_fed, after_fed = (getattr(layer, name, lambda y: y) for name in NORMS[family])
    if without != "attention":
        x = x + after(layer.self_attn(before(x), **named)[0])
    return x if without == "feed_forward" else x + after_fed(layer.mlp(before_fed(x)))


@pytest.mark.parametrize("without", ["attention", "feed_forward"])
@pytest.mark.parametrize("family", [*NORMS, "gpt_neox"])
def test_a_block_that_is_left_out_is_not_in_the_layer_s_formula(family: str, without: str) -> None:
    model, literal = tiny(family), tiny(family)
    name = next(sublayer.layer for sublayer in map_model(literal).sublayers if sublayer.index == 1)
    layer = literal.get_submodule(name)
    layer.forward = lambda hidden_states, **named: literal_layer(family, layer, hidden_states, without, **named)
    with Plan(blocks=f"L1.{without}").applied_to(model):
        torch.testing.assert_close(output(model, tokens()), output(literal, tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_without_the_output_of_its_projection_is_left_out(family: str) -> None:
    """Of any family: the weights of the projection are zero, or the experts return zeros."""
    model = tiny(family)
    for sublayer in map_model(model).sublayers:
        literal = copy.deepcopy(model)
        module = next(twin.output for twin in map_model(literal).sublayers if str(twin) == str(sublayer))
        if sublayer.block is None:
            forward = module.forward

            def zeros(*inputs: Any, forward: Any = forward, **named: Any) -> Any:
                result = forward(*inputs, **named)
                return (result[0] * 0, *result[1:]) if isinstance(result, tuple) else result * 0

            module.forward = zeros  # type: ignore[method-assign]
        for parameter in module.parameters() if sublayer.block else ():
            nn.init.zeros_(parameter)
        with Plan(blocks=str(sublayer)).applied_to(model):
            torch.testing.assert_close(output(model, tokens()), output(literal, tokens()), rtol=0, atol=1e-12)


# --------------------------------------------------------------------------- checkpoints


NOT_IDENTITY = {"bert", "roberta", "xlm-roberta", "distilbert", "bart", "mbart"}  # a norm of the residual stream stays


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_without_blocks_is_the_plan(family: str, tmp_path: Path) -> None:
    """A whole layer, and two blocks of two layers; logits, and texts with every cache."""
    model = stored(family, tmp_path / "parent")
    stack = "decoder." if family in SEQ2SEQ else ""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for number, blocks in enumerate((f"{stack}L1", f"{stack}L1.attention+{stack}L0.feed_forward")):
        plan = Plan(blocks=blocks)
        smaller = loaded(family, model, plan, tmp_path / str(number))
        assert type(smaller).__name__.startswith("Pruned") == (bool(number) or family in NOT_IDENTITY)
        left = {str(sublayer) for sublayer in map_model(model).sublayers} - set(plan.fit_to(map_model(model)).blocks)
        assert len(map_model(smaller).sublayers) == len(left)
        removed = [sublayer for sublayer in map_model(model).sublayers if str(sublayer) not in left]
        lost = sum(x.numel() for x in model.parameters()) - sum(x.numel() for x in smaller.parameters())
        assert lost >= sum(x.numel() for sublayer in removed for x in sublayer.output.parameters()) > 0
        assert checkpoint_columns(read_manifest(tmp_path / str(number)) or {})["removed"]["blocks"] == len(removed)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "smollm3", "qwen3_moe", "gpt_neo"])
def test_settings_of_single_layers_go_with_the_layers(family: str, tmp_path: Path) -> None:
    """Sliding windows, rotary embeddings and kinds of feed-forward blocks stay with their layers."""
    more: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 3}
    if family in ("gemma2", "gemma3_text", "cohere2", "gpt_oss"):
        more["layer_types"] = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    if family == "smollm3":
        more |= {"no_rope_layers": [1, 0, 1, 1], "layer_types": ["full_attention"] * 4}
    if family == "qwen3_moe":
        more = {"num_hidden_layers": 4, "mlp_only_layers": [1, 3]}
    if family == "gpt_neo":
        more = {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 3}
    model = stored(family, tmp_path / "parent", **more)
    smaller = loaded(family, model, Plan(blocks="L0+L2"), tmp_path / "cut")
    assert not type(smaller).__name__.startswith("Pruned")
    if "layer_types" in more:
        assert smaller.config.layer_types == [more["layer_types"][1], more["layer_types"][3]]
    if family == "qwen3_moe":
        assert smaller.config.mlp_only_layers == [0, 1]
    if family == "gpt_neo":
        assert smaller.config.attention_layers == ["local", "local"]


def test_sizes_of_layers_get_their_new_numbers(tmp_path: Path) -> None:
    """Also where the feed-forward block is the layer itself: an OPT with the settings of other families."""
    for family in ("opt", "llama"):
        model = stored(family, tmp_path / family / "parent", num_hidden_layers=4)
        plan = Plan("L0H0-1" if family == "llama" else (), {"L3": "0-9"}, "L1+L2.attention")
        loaded(family, model, plan, tmp_path / f"{family}-cut")
        layers = json.loads((tmp_path / f"{family}-cut" / "config.json").read_text())["per_layer_config"]
        assert [layers.get(number, {}).get("intermediate_size", 48) for number in "0123"] == [48, 48, 38, 48]


def test_the_number_of_dense_layers_follows(tmp_path: Path) -> None:
    model = stored("deepseek_v3", tmp_path / "parent", num_hidden_layers=3, first_k_dense_replace=2)
    smaller = loaded("deepseek_v3", model, Plan(blocks="L0"), tmp_path / "cut")
    assert smaller.config.first_k_dense_replace == 1 and type(smaller).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    "blocks", ["L0.attention", "L0.attention+L2.attention", "L1.attention+L3.attention", "L1-3.attention"]
)
@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_caches_are_filled_in_order_where_layers_have_no_attention(family: str, blocks: str, tmp_path: Path) -> None:
    """Of windows of three tokens and of all, in turn: also without any of one type, and without the first layer's."""
    more: dict[str, Any] = {"num_hidden_layers": 4}
    if family == "gemma3_text":
        more |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3}
    model = stored(family, tmp_path / "parent", **more)
    smaller = loaded(family, model, Plan(blocks=blocks), tmp_path / "cut")
    cache = smaller(tokens(2, 9), use_cache=True).past_key_values
    assert cache.get_seq_length() == 9


_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8} | {
    f"linear_{name}": size
    for name, size in (("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8), ("value_head_dim", 8))
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_LINEAR,
        **dict.fromkeys(("num_experts", "num_experts_per_tok"), 2),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    },
    "qwen3_5_text": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 48},
    "jamba": {
        **dict.fromkeys(("attn_layer_period", "expert_layer_period", "num_experts"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
        **dict.fromkeys(("mamba_d_state", "mamba_dt_rank"), 4),
        "use_mamba_kernels": False,
    },
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_lose_blocks_and_layers_of_their_attention(family: str, tmp_path: Path) -> None:
    """Their other layers, of linear attention, convolutions or state spaces, stay as they are."""
    model = stored(family, tmp_path / "parent", num_hidden_layers=4, **HYBRIDS[family])
    for blocks in ("L1.attention", "L1.feed_forward", "L1"):
        loaded(family, model, Plan(blocks=blocks), tmp_path / blocks)


def test_cuts_of_cuts_lack_what_earlier_ones_lacked(tmp_path: Path) -> None:
    """A block, then heads, then the other block of the layer, with which the layer goes, then another layer."""
    model = stored("llama", tmp_path / "parent", num_hidden_layers=4)
    steps = [
        Plan(blocks="L1.attention"),
        Plan("L0H0-1", {"L2": "0-9"}),
        Plan(blocks="L1.feed_forward"),
        Plan(blocks="L1"),
        Plan("L1H0-1"),
    ]
    smaller = model
    for number, plan in enumerate(steps):
        smaller = loaded("llama", smaller, plan, tmp_path / str(number))
    assert [layer.heads for layer in map_model(smaller).attention] == [2, 2]
    assert type(smaller).__name__ == "LlamaForCausalLM" and smaller.config.num_hidden_layers == 2
    manifest = read_manifest(tmp_path / "4") or {}
    assert checkpoint_columns(manifest)["removed"] == {
        "heads": 12,
        "kv_heads": 6,
        "channels": 96,
        "blocks": 4,
        "layers": 2,
    }


def test_a_layer_without_heads_or_channels_is_gone_unless_a_bias_stays(tmp_path: Path) -> None:
    """No filler is needed; a compensation's bias, which the block still adds, needs one."""
    model = stored("llama", tmp_path / "parent", num_hidden_layers=3)
    plan = Plan("L0H*+L1H*", {"L1": "0-47"}, allow_empty_layer=True)
    smaller = loaded("llama", model, plan, tmp_path / "gone")
    manifest = read_manifest(tmp_path / "gone") or {}
    assert removal_summary(manifest).endswith("blocks: L0.attention+L1")
    zeroed = cut(model, Plan(blocks="L1"), keep_shapes=True).manifest
    assert "blocks" not in removal_summary(zeroed)
    assert [layer.label for layer in map_model(smaller).attention] == ["L1"]
    assert [str(sublayer) for sublayer in map_model(smaller).sublayers] == [
        "L0.feed_forward",
        "L1.attention",
        "L1.feed_forward",
    ]
    bias = {"L0.o_proj.bias": torch.ones(32, dtype=torch.float64)}
    kept = Plan("L0H*", allow_empty_layer=True, compensation=bias)
    assert [layer.heads for layer in map_model(loaded("llama", model, kept, tmp_path / "kept")).attention] == [1, 4, 4]
    everything = Plan("L*H*", allow_empty_layer=True)
    assert [x.heads for x in map_model(loaded("llama", model, everything, tmp_path / "all")).attention] == [1, 1, 1]


def test_zeroed_blocks_keep_their_shapes(tmp_path: Path) -> None:
    model = stored("gpt2", tmp_path / "parent")
    plan = Plan("L0H1", blocks="L1.attention+L0.feed_forward")
    done = cut(model, plan, keep_shapes=True)
    assert type(done.model) is type(model) and "blocks" not in done.manifest["stages"][-1]["removed"]
    assert "1 heads, 0 channels and 2 blocks stay with zero weights" in done.manifest["notes"][0]
    compare("gpt2", model, plan, done.model)


# --------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("blocks", ["L1", "L1.attention", "L0.attention+L2.feed_forward", "L3.attention+L1.attention"])
def test_the_engine_runs_models_without_blocks(blocks: str) -> None:
    """Under masks of the layers that are left, whose first pruned layers differ."""
    model: Any = cut(tiny("llama", num_hidden_layers=4), Plan(blocks=blocks)).model
    labels = [layer.label for layer in map_model(model).attention]
    masks = [None, HeadMask(f"{labels[0]}H0"), HeadMask(f"{labels[1]}H3"), HeadMask(f"{labels[-1]}H1+{labels[0]}H2")]
    prompts = [tuple(row) for row in tokens(2, 6).tolist()]
    engine = Engine(model)
    assert engine.unsupported is None and engine.unscored is None
    requests = [Request(prompt, mask, SamplingParams(5)) for prompt in prompts for mask in masks]
    for request, answer in list(engine.decode(requests)):
        with request.mask.applied_to(model) if request.mask else torch.no_grad():
            ids = torch.tensor([request.prompt])
            expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 6:].tolist()
        end = expected.index(2) + 1 if 2 in expected else 5
        assert answer == expected[:end]


def test_the_engine_falls_back_where_layers_of_a_type_are_missing() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    model = tiny("gemma3_text", num_hidden_layers=4, layer_types=types, sliding_window=3)
    engine = Engine(cut(model, Plan(blocks="L0.attention")).model)
    assert engine.unsupported
    assert len(list(engine.decode([Request((3, 4, 5), None, SamplingParams(4))]))) == 1


# --------------------------------------------------------------------------- plans


def test_names_of_blocks_are_expanded_and_sorted() -> None:
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    every = ("L1.attention", "L1.feed_forward", "L2.attention", "L2.feed_forward")
    for blocks in ("L1-2", "l2+L1", ["L2.feed_forward", "L1", "L2.ATTENTION"], "L1-2.attention+L1-2.feed_forward"):
        assert Plan(blocks=blocks).fit_to(model_map).blocks == every
    bart = Plan(blocks="decoder.L1").fit_to(map_model(tiny("bart"))).blocks
    assert bart == ("decoder.L1.attention", "cross.L1.attention", "decoder.L1.feed_forward")


def test_plans_with_blocks_are_joined_and_what_is_inside_is_left_out() -> None:
    """Heads, channels and biases of a removed block have no effect, whichever plan is applied first."""
    model = tiny("llama")
    model_map = map_model(model)
    bias = {"L1.o_proj.bias": torch.ones(32, dtype=torch.float64)}
    plans = [Plan("L1H1+L0H0", {"L1": "3"}, compensation=bias), Plan(blocks="L1.attention")]
    expected = Plan("L0H0", {"L1": "3"}, "L1.attention").fit_to(model_map)
    for pair in (plans, plans[::-1]):
        (union,) = combined(pair)
        assert union.fit_to(model_map) == expected
        with pair[0].applied_to(model), pair[1].applied_to(model):
            nested = output(model, tokens())
        with expected.applied_to(model):
            assert torch.equal(nested, output(model, tokens()))
    assert Plan(blocks="L1").merged_with(HeadMask("L0H1")) == Plan("L0H1", blocks="L1")
    assert Plan("L0H1", blocks="L1.attention").converted(HeadMask) is None


def test_plans_with_blocks_survive_their_file(tmp_path: Path) -> None:
    model_map, plan = map_model(tiny("llama")), Plan("L0H1", blocks="L1")
    assert "blocks" not in Plan("L0H1").identity(model_map)
    plan.save(tmp_path / "plan.json", model_map)
    again = Plan.load(tmp_path / "plan.json")
    assert again.blocks == ("L1.attention", "L1.feed_forward") and again == plan.fit_to(model_map)
    report = plan.report(model_map)["plan"]
    assert (report["blocks_pruned"], report["blocks_total"]) == (2, 4)


def test_families_whose_layers_do_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recognised family is proven: without its blocks, a layer must return its input."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("seed_oss", **sizes, num_key_value_heads=2, head_dim=8, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    plan = Plan(blocks="L1.attention")
    smaller = cut(model, plan).model
    with plan.applied_to(model):
        torch.testing.assert_close(output(smaller, tokens()), output(model, tokens()), rtol=0, atol=1e-9)
    layer = type(model.model.layers[0])
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *inputs, **named: 2 * forward(*inputs, **named))
    with pytest.raises(InputError):
        plan.fit_to(map_model(model))


def test_cross_attention_is_named_by_its_layer_of_the_decoder() -> None:
    model = tiny("t5", num_layers=4, num_decoder_layers=4)
    smaller = cut(cut(model, Plan(blocks="decoder.L1")).model, Plan(blocks="decoder.L1"))
    kinds = ("decoder.L{}.attention", "cross.L{}.attention", "decoder.L{}.feed_forward")
    assert removed_blocks(smaller.manifest["stages"]) == [[kind.format(layer) for kind in kinds] for layer in (1, 2)]


def test_blocks_of_several_cuts_have_their_names_in_the_first_model() -> None:
    model = tiny("llama", num_hidden_layers=6)
    smaller = cut(cut(model, Plan(blocks="L1+L3")).model, Plan(blocks="L1+L2.attention"))
    names = removed_blocks(smaller.manifest["stages"])
    assert [compact_names(blocks) for blocks in names] == ["L1+L3", "L2+L4.attention"]
    assert removal_summary(smaller.manifest).endswith("in 2 stages; blocks: L1-3+L4.attention")
    with Plan(blocks=removal_summary(smaller.manifest).rpartition(" ")[2]).applied_to(model):
        torch.testing.assert_close(output(smaller.model, tokens()), output(model, tokens()), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("L5", "L5"),
        ("L6+L5+L9.attention+L7", "L5-7+L9.attention"),
        ("L3.feed_forward+L3.attention+L4.feed_forward", "L3+L4.feed_forward"),
        ("decoder.L1+encoder.L2+decoder.L2-3.attention", "decoder.L1+decoder.L2-3.attention+encoder.L2"),
    ],
)
def test_compact_names_are_the_same_blocks(names: str, text: str) -> None:
    assert compact_names(block_names(names)) == text
