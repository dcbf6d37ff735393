"""A plan applied by hooks, the cut model, and its reloaded checkpoint compute the same."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lmeval_prune import HeadMask, InputError, artefacts, map_model
from lmeval_prune.architectures import uncuttable
from lmeval_prune.architectures.blocks import is_transposed
from lmeval_prune.checkpoints import loading as pruned
from lmeval_prune.checkpoints.loading import load_pretrained, read_manifest
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.interventions.table import method_name
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.surgery.cut import cut, cut_to
from tests.test_pruned_hf import GENERATE, PROMPTS, request
from tests.tiny_models import ALL, CAUSAL, ENCODERS, implementations, output, stored, tiny, tokens

UNCUTTABLE = {"olmo2", "olmo3", "codegen", "bloom", "mpt", "t5", "mt5"}
CUTTABLE = [family for family in ALL if family not in UNCUTTABLE]
EVERYDAY = {
    *("llama", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "bert", "bart"),
}
FAMILIES = [family if family in EVERYDAY else pytest.param(family, marks=pytest.mark.long) for family in CUTTABLE]
NO_NUMBERS_BESIDE_PADDING = {"bloom", "gemma2", "mpt"}  # as they are, in float64: NaN, where a text begins with padding
EXPERTS_ONLY = {"mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "gpt_oss"}


def heads_for(model: nn.Module, unit: str, alike: bool) -> list[str]:
    """Return heads of one or two units: the same number in every layer, or in some layers only."""
    actual = []
    for position, layer in enumerate(map_model(model).attention):
        share = layer.heads // layer.kv_heads
        if position and not alike:
            continue
        if unit == "group":
            group = position % layer.kv_heads
            lost = range(group * share, (group + 1) * share)
        elif unit == "balanced":
            lost = range(position % share, layer.heads, share)
        else:
            lost = [1] if position % 2 else [0, 3]
        actual += [f"{layer.label}H{head}" for head in lost]
    return actual


def channels_for(model: nn.Module, alike: bool) -> dict[str, str]:
    blocks = map_model(model).feed_forward
    lost = ["0,3-6,11", "1,2,7-10"]
    return {block.label: lost[position % 2] if alike or not position else "5" for position, block in enumerate(blocks)}


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :2] = mask[2, :4] = 0
    return {"attention_mask": mask}


def compare(family: str, model: nn.Module, plan: Plan | None, other: nn.Module, generate: bool = True) -> None:
    """Compare logits of a padded batch, and generation with both caches."""
    inputs = tokens()
    with plan.applied_to(model) if plan else torch.no_grad():
        expected = output(model, inputs, **padded())
        texts = generated(family, model) if generate else {}
    actual = output(other, inputs, **padded())
    shown = padded()["attention_mask"].bool()
    if family in NO_NUMBERS_BESIDE_PADDING:
        shown = shown & output(model, inputs, **padded()).isfinite().all(-1)
        assert shown[0].all()  # where nothing is padded
    torch.testing.assert_close(actual[shown], expected[shown], rtol=0, atol=1e-9)
    assert expected[shown].isfinite().all()
    if generate:
        again = generated(family, other)
        assert texts.keys() == again.keys()
        for name, text in texts.items():
            assert torch.equal(text, again[name]), name


def generated(family: str, model: nn.Module) -> dict[str, torch.Tensor]:
    if family in ENCODERS:
        return {}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    caches = ["dynamic"] + (["static"] if family in CAUSAL and type(model)._can_compile_fullgraph else [])
    actual = {}
    for cache in caches:
        own = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        actual[cache] = model.generate(
            tokens(2, 5), attention_mask=padded()["attention_mask"][:2, :5], **settings, **own
        )
    return actual


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_tried_out_is_the_model_cut_and_loaded_again(family: str, tmp_path: Path) -> None:
    """For every unit, for equal and different layers, with channels; the model itself does not change."""
    model = stored(family, tmp_path / "parent")
    before = copy.deepcopy(model.state_dict())
    dense = output(model, tokens())
    layer = map_model(model).attention[0]
    units = {"head": True, "group": layer.kv_heads > 1, "balanced": layer.kv_heads < layer.heads}
    for unit in filter(units.get, units):
        for alike in (True, False):
            channels = channels_for(model, alike) if family not in EXPERTS_ONLY else {}
            plan = Plan(heads_for(model, unit, alike), channels)
            actual = cut_to(tmp_path / f"{unit}-{alike}", model, plan)
            compare(family, model, plan, actual.model, generate=False)
            loaded = load_pretrained(tmp_path / f"{unit}-{alike}", **implementations(family))
            assert loaded.dtype == torch.float64
            compare(family, model, plan, loaded)
            removed = actual.manifest["stages"][-1]["removed"]
            fillers = sum(map(len, removed["fillers"].values()))
            assert removed["heads"] + fillers == len(plan.fit_to(map_model(model)).heads)
            own, was = (sum(x.numel() for x in m.parameters()) for m in (loaded, model))
            assert own < was
            shapes = map_model(loaded)
            assert shapes.total_heads == map_model(model).total_heads - removed["heads"]
    assert torch.equal(output(model, tokens()), dense)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("family", sorted(UNCUTTABLE))
def test_families_whose_heads_cannot_be_cut_are_refused_and_their_channels_go(family: str, tmp_path: Path) -> None:
    model = stored(family, tmp_path / "parent")
    assert uncuttable(map_model(model))
    stack = map_model(model).stacks[0]
    head = f"{stack}.L0H1" if stack else "L0H1"
    with pytest.raises(InputError):
        cut(model, Plan(head))
    for alike in (True, False):
        plan = Plan((), channels_for(model, alike))
        cut_to(tmp_path / str(alike), model, plan)
        compare(family, model, plan, load_pretrained(tmp_path / str(alike), **implementations(family)))


# --------------------------------------------------------------------------- plans


def test_plans_one_after_the_other_are_their_union(tmp_path: Path) -> None:
    """By hooks, as cuts of a cut, and as one cut; a group is removed with the last of its heads."""
    model = stored("llama", tmp_path / "parent")
    first, second = Plan("L0H0", {"L0": "1-4"}), Plan("L0H1+L1H2", {"L0": "3-8", "L1": "7"})
    union = first.merged_with(second)
    assert union is not None and len(union.kv_heads_by_layer(map_model(model))) == 1
    with first.applied_to(model), second.applied_to(model):
        expected = output(model, tokens())
    compare("llama", model, union, cut(model, union).model)
    torch.testing.assert_close(output(cut(model, union).model, tokens()), expected, rtol=0, atol=1e-9)
    cut_to(tmp_path / "first", model, Plan("L0H0-1", {"L0": "1-4"}))
    smaller = load_pretrained(tmp_path / "first")
    assert [layer.heads for layer in map_model(smaller).attention] == [2, 4]
    again = cut_to(tmp_path / "second", smaller, Plan("L1H2", {"L0": "2-4", "L1": "7"}))  # numbers of the smaller one
    whole = Plan("L0H0-1+L1H2", {"L0": "1-4,6-8", "L1": "7"})
    compare("llama", model, whole, load_pretrained(tmp_path / "second"))
    stages = read_manifest(tmp_path / "second")["stages"]
    assert [stage["removed"]["heads"] for stage in stages] == [2, 0]
    assert stages[1]["removed"]["fillers"] == {"L1": [2]} and "fillers" in again.manifest["notes"][1]
    assert stages[1]["parent"]["weights"] == read_manifest(tmp_path / "first")["weights"]


def test_a_cut_of_a_cut_remembers_its_own_stages(tmp_path: Path) -> None:
    """Also without saving; a manifest does not apply to other weights in its folder."""
    model = stored("llama", tmp_path / "parent")
    cut_to(tmp_path / "parent-pruned", model, Plan((), {"L0": "0-9"}))  # unrelated
    once = cut(model, Plan("L0H0-1"))
    twice = cut(once.model, Plan("L1H0-1"))
    assert [stage["removed"]["heads"] for stage in twice.manifest["stages"]] == [2, 2]
    assert [stage["removed"]["channels"] for stage in twice.manifest["stages"]] == [0, 0]
    assert twice.manifest["stages"][1]["parent"]["weights"] == once.manifest["weights"]
    twice.save(tmp_path / "twice")
    loaded = load_pretrained(tmp_path / "twice")
    again = cut(loaded, Plan((), {"L1": "3"}))
    assert again.manifest["stages"][:2] == read_manifest(tmp_path / "twice")["stages"]
    tiny("llama", seed=1).save_pretrained(tmp_path / "twice")  # over it, with other weights
    other = LlamaForCausalLM.from_pretrained(tmp_path / "twice")
    assert len(cut(other, Plan("L0H1")).manifest["stages"]) == 1


def test_a_head_mask_is_cut_as_the_plan_that_it_is_and_nothing_is_drawn() -> None:
    model = tiny("llama")
    draws = torch.get_rng_state()
    actual = cut(model, HeadMask("L0H0-1"))
    assert torch.equal(torch.get_rng_state(), draws)
    assert actual.manifest["weights"] == cut(model, Plan("L0H0-1")).manifest["weights"]


@pytest.mark.parametrize("removed", [{"L0": [0, 1]}, {"L0": [0, 1], "L1": [2, 3]}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_holds_each_tensor_once_and_shares_none(
    removed: dict, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model is neither drawn at random nor copied, and a trained student leaves its teacher as it is."""
    model: Any = tiny("llama", tie_word_embeddings=tied)
    before, drawn = copy.deepcopy(model.state_dict()), list[int]()

    def draw(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        drawn.append(0 if tensor.is_meta else tensor.numel())
        return tensor

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, draw)
    plan = Plan(channels=removed)
    with Copied() as copied:
        smaller = cut(model, plan).model
    assert sum(drawn) == 0
    assert copied.numbers <= 1.01 * sum(parameter.numel() for parameter in smaller.parameters())  # and of buffers
    assert (smaller.lm_head.weight is smaller.model.embed_tokens.weight) == tied
    with torch.no_grad():
        for parameter in smaller.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_cut_shares_no_tensor_with_its_plan() -> None:
    """Training the cut model would change what is cut by the plan next."""
    model: Any = tiny("llama")
    hidden, width = model.config.hidden_size, model.model.layers[0].self_attn.o_proj.weight.shape[1]
    weights = {"L0.o_proj.bias": torch.ones(hidden), "L1.o_proj.weight": torch.ones(hidden, width)}
    plan = Plan("L0H0", compensation={name: tensor.to(model.dtype) for name, tensor in weights.items()})
    smaller = cut(model, plan).model
    with torch.no_grad():
        for parameter in smaller.parameters():
            parameter.zero_()
    assert all((tensor == 1).all() for tensor in plan.compensation.values())


class Copied(TorchDispatchMode):
    """Counts the numbers that are copied from tensor to tensor, but for conversions."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.index_select, torch.ops.aten.copy_):
            self.numbers += result.numel()
        return result


def test_masks_are_plans_and_plans_of_heads_are_masks(tmp_path: Path) -> None:
    model = tiny("llama")
    model_map = map_model(model)
    HeadMask("L0H1+L1H0").save(tmp_path / "mask.json", model_map)
    Plan("L0H1+L1H0").save(tmp_path / "plan.json", model_map)
    Plan("L0H1", {"L0": "3"}).save(tmp_path / "more.json", model_map)
    actual = []
    for name in ("heads", "plan", "mask"):
        for file in ("mask.json", "plan.json"):
            (intervention,) = Arguments.of({name: str(tmp_path / file)}).interventions
            assert name == "mask" or method_name(type(intervention)) == name
            assert intervention.origin
            with intervention.applied_to(model):
                actual.append(output(model, tokens()))
            with pytest.raises(InputError), intervention.applied_to(tiny("llama", seed=1)):
                pass
    assert all(torch.equal(value, actual[0]) for value in actual)
    with pytest.raises(InputError):
        Arguments.of({"heads": str(tmp_path / "more.json")})
    (both,) = Arguments.of({"heads": "L0H2", "plan": str(tmp_path / "plan.json")}).interventions
    assert both.fit_to(model_map).heads == ("L0H1", "L0H2", "L1H0")
    together = Arguments.of({"heads": "L0H0+L0H2-3", "plan": str(tmp_path / "plan.json")}).interventions[0]
    with pytest.raises(InputError):
        together.fit_to(model_map)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_biases_and_updated_projections_go_with_a_plan(family: str, tmp_path: Path) -> None:
    """The reference model has the plan's weights, and its pruned inputs are zeroed."""
    model = stored(family, tmp_path / "parent")
    model_map = map_model(model)
    hidden, width = model.config.hidden_size, model_map.attention[0].heads * model_map.attention[0].head_dim
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "L0.o_proj.weight": torch.randn(hidden, width, generator=draw, dtype=torch.float64),
        "L1.o_proj.bias": torch.randn(hidden, generator=draw, dtype=torch.float64),
        "L0.down.bias": torch.randn(hidden, generator=draw, dtype=torch.float64),
    }
    plan = Plan("L0H1+L1H0", {"L0": "2,5"}, compensation=tensors)
    literal = copy.deepcopy(model)
    for layer, block in zip(map_model(literal).attention, map_model(literal).feed_forward, strict=True):
        for module, name, lost in (
            (layer.o_proj, "o_proj", range(8, 16) if layer.index == 0 else range(8)),
            (block.down, "down", [2, 5] if block.index == 0 else []),
        ):
            columns = module.weight.data.T if is_transposed(module) else module.weight.data
            if (new := tensors.get(f"{layer.label}.{name}.weight")) is not None:
                columns[:] = new
            columns[:, list(lost)] = 0
            if (bias := tensors.get(f"{layer.label}.{name}.bias")) is not None:
                module.bias = nn.Parameter(bias + (0 if module.bias is None else module.bias.data))
    expected = output(literal, tokens())
    with plan.applied_to(model):
        torch.testing.assert_close(output(model, tokens()), expected, rtol=0, atol=1e-9)
    plan.save(tmp_path / "plan.json", model_map)
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.identity(model_map) == plan.identity(model_map)
    assert Plan("L0H1+L1H0", {"L0": "2,5"}).identity(model_map) != plan.identity(model_map)
    cut_to(tmp_path / "cut", model, loaded)
    torch.testing.assert_close(output(load_pretrained(tmp_path / "cut"), tokens()), expected, rtol=0, atol=1e-9)
    next(tmp_path.glob("plan.*.safetensors")).write_bytes(b"other")
    with pytest.raises(InputError):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_runs_in_the_engine_under_masks_of_its_own() -> None:
    model, plan = tiny("llama"), Plan("L0H1", {"L0": "3-20", "L1": "5"})
    prompts = [tuple(row) for row in tokens(3, 6).tolist()]
    masks = [None, HeadMask("L1H0"), HeadMask("L0H2+L1H3")]
    with plan.applied_to(model):
        engine = Engine(model)
        requests = [Request(p, m, SamplingParams(5)) for p, m in zip(prompts, masks, strict=True)]
        actual = {request.prompt: answer for request, answer in engine.decode(requests)}
        assert engine.unsupported is None
        for prompt, mask in zip(prompts, masks, strict=True):
            with mask.applied_to(model) if mask else nullcontext():
                expected = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert actual[prompt] == expected[0, 6:].tolist()


# --------------------------------------------------------------------------- checkpoints


def test_alike_layers_are_a_stock_checkpoint_and_others_say_so_loudly(tmp_path: Path) -> None:
    model = stored("llama", tmp_path / "parent")
    cases = {
        "stock": (Plan("L*H0-1"), "LlamaForCausalLM"),
        "mistral": (Plan("L*H0", {"L0": "0", "L1": "4"}), "MistralForCausalLM"),
        "own": (Plan("L0H0-1", {"L0": "5"}), "PrunedLlamaForCausalLM"),
    }
    model = load_pretrained(tmp_path / "parent")
    mha = tiny("llama", num_key_value_heads=4)
    mha.save_pretrained(tmp_path / "mha")
    for name, (plan, kind) in cases.items():
        parent = load_pretrained(tmp_path / "mha") if name == "mistral" else model
        done = cut_to(tmp_path / name, parent, plan)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["architectures"] == [kind] and config["head_dim"] == 8
        assert done.manifest["class"] == kind and ("Mistral" in str(done.manifest["notes"])) == (name == "mistral")
        with plan.applied_to(parent):
            expected = output(parent, tokens())
        if name == "own":
            sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 47}
            assert config["per_layer_config"]["0"] == sizes and config["allow_global_per_layer_attribute_access"]
            assert set(config["auto_map"]) == {"AutoModel", "AutoModelForCausalLM"}
            with pytest.raises(OSError, match=r"no file named model\.safetensors"):
                AutoModelForCausalLM.from_pretrained(tmp_path / name)
            actual = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True, dtype=torch.float64)
            base = AutoModel.from_pretrained(tmp_path / name, trust_remote_code=True, dtype=torch.float64)
            assert type(actual).__module__.startswith("transformers_modules")
            torch.testing.assert_close(base(tokens()).last_hidden_state, actual.model(tokens()).last_hidden_state)
            assert [layer.heads for layer in map_model(cut(actual, Plan("L1H0-1")).model).attention] == [2, 2]
        else:
            actual = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        torch.testing.assert_close(output(actual.eval(), tokens()), expected, rtol=0, atol=1e-9)


def test_what_only_our_class_computes_loads_in_no_stock_class(tmp_path: Path) -> None:
    """Llama's class has no such biases and would drop them silently."""
    model = stored("llama", tmp_path / "parent")
    plan = Plan(
        "L0H1", compensation={f"L0.{name}.bias": torch.full((32,), 5.0).double() for name in ("o_proj", "down")}
    )
    actual = cut_to(tmp_path / "cut", model, plan)
    assert type(actual.model).__name__ == "PrunedLlamaForCausalLM"
    for kind in (AutoModelForCausalLM, AutoModel, LlamaForCausalLM):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            kind.from_pretrained(tmp_path / "cut")
    code = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", trust_remote_code=True, dtype=torch.float64).eval()
    for number, loaded in enumerate((code, load_pretrained(tmp_path / "cut"))):
        compare("llama", model, plan, loaded)
        loaded.save_pretrained(tmp_path / f"again-{number}", max_shard_size="20KB")  # as after training
        assert len([*(tmp_path / f"again-{number}").glob("*.safetensors")]) > 1
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            AutoModelForCausalLM.from_pretrained(tmp_path / f"again-{number}")
        compare("llama", model, plan, load_pretrained(tmp_path / f"again-{number}"))


def test_what_belongs_to_a_model_is_kept(tiny_folder: Path, tmp_path: Path) -> None:
    """dtype, generation settings, tokenizer and chat template stay; `pruned-hf` runs it and reports its costs."""
    for kind in (torch.float32, torch.bfloat16):
        model = load_pretrained(tiny_folder, dtype=kind)
        model.generation_config.repetition_penalty = 1.25
        cut_to(tmp_path / str(kind), model, Plan("L0H1+L1H2-3"), AutoTokenizer.from_pretrained(tiny_folder))
        loaded = load_pretrained(tmp_path / str(kind))
        assert loaded.dtype == kind and loaded.generation_config.repetition_penalty == 1.25
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / str(kind))
        assert (
            tokenizer.chat_template
            and tokenizer("a b")["input_ids"] == AutoTokenizer.from_pretrained(tiny_folder)("a b")["input_ids"]
        )
    folder = tmp_path / str(torch.float32)
    requested = [request("generate_until", (prompt, dict(GENERATE)), i) for i, prompt in enumerate(PROMPTS)]
    load_pretrained(tiny_folder, dtype=torch.float32).save_pretrained(tmp_path / "32")
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path / "32")
    settings: dict[str, Any] = {"device": "cpu", "batch_size": 3}
    plain = PrunedHFLM(str(tmp_path / "32"), plan={"heads": "L0H1+L1H2-3"}, **settings).generate_until(requested)
    for engine in ({}, {"engine": "batched"}):
        lm = PrunedHFLM(str(folder), **settings, **engine)
        lm.model.generation_config.repetition_penalty = 1.0
        assert lm.generate_until(requested) == plain
        info = lm.get_model_info()["pruning"]["checkpoint"]
        assert info["parameters"] == sum(x.numel() for x in lm.model.parameters()) and info["flops_per_prompt"]
        assert info["removed"]["heads"] == 2 and info["parent"] == {"name": tiny_folder.name, "revision": ""}
    both = PrunedHFLM(str(folder), heads="L1H0", **settings)
    assert both.generate_until(requested) != plain


@pytest.mark.parametrize("plan", [Plan("L*H0-1"), Plan("L0H0-1")])
def test_generation_settings_that_transformers_would_not_write_are_kept(plan: Plan, tmp_path: Path) -> None:
    model = stored("llama", tmp_path / "parent")
    model.generation_config.temperature = 0.6  # and do_sample is false
    cut_to(tmp_path / "cut", model, plan)
    assert load_pretrained(tmp_path / "cut").generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert model.generation_config.temperature == 0.6


@pytest.mark.parametrize("live", [False, True])
def test_a_manifest_speaks_for_the_weights_that_it_was_written_with(
    live: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """In a results file."""
    folder, tokenizer = tmp_path / "cut", AutoTokenizer.from_pretrained(tiny_folder)

    def evaluated(dtype: str) -> dict[str, Any] | None:
        arguments: Any = load_pretrained(folder, dtype=dtype) if live else str(folder)
        settings = {"tokenizer": tokenizer} if live else {"dtype": dtype}
        return PrunedHFLM(arguments, device="cpu", **settings).get_model_info()["pruning"].get("checkpoint")

    done = cut_to(folder, load_pretrained(tiny_folder, dtype=torch.float32), Plan("L*H0-1"), tokenizer)
    for dtype in ("float32", "bfloat16"):
        actual = evaluated(dtype)
        assert actual["removed"]["heads"] == 4 and actual["parent"] == {
            name: done.manifest["stages"][-1]["parent"][name] for name in ("name", "revision")
        }
        assert actual["parent"]["name"] == tiny_folder.name
    load_pretrained(tiny_folder, dtype=torch.float32).save_pretrained(folder)
    assert evaluated("float32") is None


TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def killed_at(step: int, folder: Path, model: nn.Module, plan: Plan) -> int:
    """Save in a process that exits with 255 at its n-th disk access, or with the number of accesses."""
    child = os.fork()
    if child == 0:
        count = 0

        def die(event: str, arguments: Any) -> None:
            nonlocal count
            if event in TOUCHES and str(folder.parent) in str(arguments):
                count += 1
                if count == step:
                    os._exit(255)

        try:
            sys.addaudithook(die)
            cut_to(folder, model, plan)
        finally:
            os._exit(count)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_killed_save_leaves_the_last_checkpoint(
    exchange: bool, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every step: the folder is the old checkpoint or the new one, and the next save works.

    Where two names cannot be exchanged, it may be missing, and then the next save finds it, even one that fails. By
    default every eighth step, and the last ones, when the folder takes its place.
    """
    if not exchange:
        monkeypatch.setattr(artefacts, "_exchange", lambda *_: False)
    model = stored("llama", tmp_path / "parent")
    folder, missing = tmp_path / "written" / "cut", 0  # beside nothing else, so that what is read is not counted
    old = cut_to(folder, model, Plan("L*H0-1"))
    before, new = output(old.model, tokens()), output(cut(model, Plan("L0H0-1")).model, tokens())
    shutil.copytree(folder, tmp_path / "counted" / "cut")
    count = killed_at(0, tmp_path / "counted" / "cut", model, Plan("L0H0-1"))
    assert count > 20
    for step in [*range(1, count - 9, stride), *range(max(1, count - 9), count + 1)]:
        assert killed_at(step, folder, model, Plan("L0H0-1")) == 255
        if not folder.exists():
            missing += 1
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(pruned, "_write_model", interrupted)
                cut_to(folder, model, Plan("L0H0-1"))
        actual = output(load_pretrained(folder), tokens())
        assert torch.allclose(actual, before, atol=1e-9) or torch.allclose(actual, new, atol=1e-9), step
    assert killed_at(0, folder, model, Plan("L0H0-1")) >= count
    assert bool(missing) != exchange
    torch.testing.assert_close(output(load_pretrained(folder), tokens()), new, rtol=0, atol=1e-9)
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_is_none_of_ours_is_not_overwritten(tmp_path: Path) -> None:
    """Foreign files, also beside a checkpoint; changed checkpoints; and the model that is cut."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("…")
    with pytest.raises(InputError):
        cut_to(tmp_path / "mine", tiny("llama"), Plan("L0H1"))
    folder, model = tmp_path / "cut", stored("llama", tmp_path / "parent")
    cut_to(folder, model, Plan("L*H0-1"))
    for name in ("results/thesis.txt", "model.finetune.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("mine")
        with pytest.raises(InputError, match=name):
            cut_to(folder, model, Plan("L0H0-1"))
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
        if (folder / name).parent != folder:
            (folder / name).parent.rmdir()
    for parent in (folder, tmp_path / "link"):
        if parent != folder:
            parent.symlink_to(folder)
        before = (folder / "model.safetensors").read_bytes()
        with pytest.raises(InputError):
            cut_to(parent, load_pretrained(folder), Plan("L1H1"))
        assert (folder / "model.safetensors").read_bytes() == before
    tiny("llama", seed=3).save_pretrained(folder)
    with pytest.raises(InputError):
        cut_to(folder, model, Plan("L0H0-1"))
