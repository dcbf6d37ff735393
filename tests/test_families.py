"""Families that the table does not name: recognised by their layers, proven in float64, or refused in one line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmeval_prune import HeadMask, InputError, load_pretrained, map_model
from lmeval_prune.architectures import ModelMap, tiny_model, uncuttable
from lmeval_prune.architectures.structure import recognise
from lmeval_prune.decoding import Engine
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.surgery import cut as surgery
from lmeval_prune.surgery.cut import Cut
from lmeval_prune.surgery.model_class import copy_implementations
from tests.test_decoding import alone, answers, some_requests
from tests.tiny_models import Letters

# families of which users ask, and one of each kind of layers
QUICK = [
    *("ministral3", "apertus", "nanochat", "olmoe", "glm4_moe", "gemma4_text", "llama4_text", "qwen3_next"),
    *("granite_swa", "laguna", "lara_mini", "falcon_h1"),
]
TOKENS = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(3))


def present(names: list[str]) -> list[str]:
    """The families that the installed transformers has."""
    return [name for name in names if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def default_model(name: str) -> Any:
    """The model of a family's default configuration, on the meta device."""
    config = AutoConfig.for_model(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def small(name: str) -> nn.Module:
    """A tiny random float64 model of a family's default configuration."""
    model = default_model(name)
    return tiny_model(model, recognise(model).depth)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, use_cache=False)[0]


def with_zeroed_columns(model: nn.Module, model_map: ModelMap, lost: dict[int, list[int]]) -> torch.Tensor:
    """Compute logits with the heads' columns of the output projections set to zero, written apart from the package."""
    kept = {}
    for layer in model_map.attention:
        projection = model.get_submodule(next(name for name, module in model.named_modules() if module is layer.o_proj))
        weight = projection.weight.data
        kept[projection] = weight.clone()
        width = weight.shape[1] // layer.heads
        for head in lost.get(layer.index, []):
            weight[:, head * width : (head + 1) * width] = 0
    result = logits(model)
    for projection, weight in kept.items():
        projection.weight.data.copy_(weight)
    return result


def check_masks(model: nn.Module) -> None:
    """Compare masks with zeroed columns: one head, several of several layers."""
    model_map = map_model(model)
    first, last = model_map.attention[0], model_map.attention[-1]
    dense = logits(model)
    for lost in ({first.index: [1]}, {first.index: [0, first.heads - 1], last.index: [0, 2]}):
        mask = HeadMask([(layer, head) for layer, heads in lost.items() for head in heads])
        with mask.applied_to(model, model_map):
            actual = logits(model)
        expected = with_zeroed_columns(model, model_map, lost)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
        assert (expected - dense).abs().max() > 1e-4
    assert torch.equal(logits(model), dense)


def check_cuts(model: nn.Module) -> None:
    """A cut model computes what the plan computes by hooks, with layers that are alike and that differ."""
    model_map = map_model(model)
    groups = [f"{layer.label}H0-{layer.group_size - 1}" for layer in model_map.attention]
    channels = {block.label: [0, 5] for block in model_map.feed_forward}
    if uncuttable(model_map):
        with pytest.raises(InputError, match="heads cannot be cut out of this"):
            surgery.cut(model, Plan(heads=groups[0]))
        groups = []
    for plan in (Plan(heads=groups or (), channels=channels), Plan(heads=groups[:1] or (), channels=channels)):
        if plan.heads or plan.channels:
            with plan.applied_to(model, model_map):
                expected = logits(model)
            # some classes compute the softmax with sinks in float32
            has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
            atol = 1e-6 if has_sinks else 1e-9
            part = surgery.cut(model, plan)
            smaller = part.model
            torch.testing.assert_close(logits(smaller), expected, rtol=0, atol=atol)
            removed = len(plan.mask.heads_of(model_map)) if plan.mask else 0
            assert map_model(smaller).total_heads == model_map.total_heads - removed
            check_loaded(part)


def check_loaded(part: Cut) -> None:
    """Check that the model that is loaded from the checkpoint has the cut model's weights, buffers and logits."""
    smaller = part.model
    with tempfile.TemporaryDirectory() as folder:
        part.save(Path(folder) / "cut", None)
        loaded = load_pretrained(Path(folder) / "cut")
    copy_implementations(smaller.config, loaded.config)  # the usual one of experts does not run in float64
    for part in ("named_parameters", "named_buffers"):
        expected, actual = (dict(getattr(model, part)()) for model in (smaller, loaded))
        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(logits(loaded), logits(smaller), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", present(QUICK))
def test_recognised_families_are_proven(name: str) -> None:
    model = small(name)
    check_masks(model)
    check_cuts(model)


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("mamba", None),
        ("bitnet", None),
        ("diffllama", ("o_proj", 32)),
        ("gemma3n_text", ("o_proj", 8)),
        *(
            (name, (output, heads))
            for name, output, heads in (("dory", "o_proj", 16), ("inkling2_loop_text", "o_proj.linear", 24))
            if present([name])
        ),
    ],
)
def test_other_layers_are_refused_unless_described(name: str, described: tuple[str, int] | None) -> None:
    with pytest.raises(InputError):
        map_model(default_model(name))
    if described:
        output, heads = described
        layers = map_model(
            default_model(name),
            attention_path="model.layers.*.self_attn",
            attention_output=output,
            attention_heads=heads,
        ).attention
        assert len(layers) > 10 and {layer.heads for layer in layers} == {heads}


class NewConfig(LlamaConfig):
    """A configuration that no table names."""

    model_type = "newcomer"


class New(LlamaForCausalLM):
    """A Llama of that configuration."""

    config_class = NewConfig


class MixedHeads(New):
    """Its output projection reads the slices of the heads in another order."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0].roll(4, -1),))


class MixedChannels(New):
    """Its channels depend on each other."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.Softmax(-1)


def new_model(kind: type, **changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(NewConfig(num_hidden_layers=3, vocab_size=259, **sizes, **changes)).eval()


def test_a_new_family_is_recognised() -> None:
    model = new_model(New)
    state = torch.random.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        assert [(layer.heads, layer.kv_heads) for layer in map_model(model).attention] == [(4, 2)] * 3
    assert map_model(model).channels() == dict.fromkeys(("L0", "L1", "L2"), 48)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_proof_refuses_heads_and_channels_that_are_not_apart() -> None:
    with pytest.raises(InputError):
        map_model(new_model(MixedHeads))
    mixed = map_model(new_model(MixedChannels))
    assert mixed.attention and mixed.feed_forward == ()


def test_the_shapes_of_the_live_modules_count() -> None:
    """A live module that is not what its class builds is refused, although the class is proven."""
    model = new_model(New)
    model.model.layers[1].self_attn.num_key_value_groups = 4
    with pytest.raises(InputError):
        map_model(model)
    model = new_model(New)
    model.model.layers[2].self_attn.v_proj = nn.Linear(32, 24)
    with pytest.raises(InputError):
        map_model(model)
    model = new_model(New)
    model.model.layers[0].self_attn.gate = nn.Linear(32, 32)
    assert uncuttable(map_model(model))


@pytest.mark.parametrize("name", present(["ministral3", "ernie4_5", "glm4_moe", "exaone"]))
def test_the_engine_gives_the_tokens_of_generate(name: str) -> None:
    model = small(name)
    engine, decoded = Engine(model, Letters()), some_requests(model, seed=1, prompts=2, per_prompt=3)
    assert engine.unsupported is None
    assert answers(engine, decoded) == {request.tag: alone(model, request) for request in decoded}
