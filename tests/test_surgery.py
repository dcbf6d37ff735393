"""A plan tried out, the model that is cut by it, and its checkpoint loaded again are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmeval_prune import InputError, map_model
from lmeval_prune.architectures import uncuttable, units_of
from lmeval_prune.checkpoints.pruned import load_pretrained
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.surgery import cut, cut_to
from tests.tiny_models import ALL, CAUSAL, ENCODERS, output, tiny, tokens

UNCUTTABLE = {"olmo2", "olmo3", "codegen", "bloom", "mpt", "t5", "mt5"}
CUTTABLE = [family for family in ALL if family not in UNCUTTABLE]
EVERYDAY = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "deepseek_v3",
    "bert",
    "bart",
]
FAMILIES = [family if family in EVERYDAY else pytest.param(family, marks=pytest.mark.long) for family in CUTTABLE]
EXPERTS_ONLY = {"mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "gpt_oss"}


def heads_for(model: nn.Module, unit: str, alike: bool) -> list[str]:
    """Heads of one unit or two: in every layer the same number, or of some layers only."""
    found = []
    for place, layer in enumerate(map_model(model).attention):
        share = layer.heads // layer.kv_heads
        if place and not alike:
            continue
        if unit == "group":
            group = place % layer.kv_heads
            lost = range(group * share, (group + 1) * share)
        elif unit == "balanced":
            lost = range(place % share, layer.heads, share)
        else:
            lost = [1] if place % 2 else [0, 3]
        found += [f"{layer.label}H{head}" for head in lost]
    return found


def channels_for(model: nn.Module, alike: bool) -> dict[str, str]:
    blocks = map_model(model).feed_forward
    lost = ["0,3-6,11", "1,2,7-10"]
    return {block.label: lost[place % 2] if alike or not place else "5" for place, block in enumerate(blocks)}


def stored(family: str, folder: Path) -> Any:
    """A tiny model as it is when loaded: in the tests' float64 some of its constants are rounded to float32 else."""
    model: Any = tiny(family)
    model.save_pretrained(folder / "parent")
    return load_pretrained(folder / "parent", **implementations(model))


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, :2] = mask[2, :4] = 0
    return {"attention_mask": mask}


def implementations(model: Any) -> dict[str, str]:
    """As the tiny models have them: not every family has sdpa, nor grouped products float64."""
    return {"attn_implementation": model.config._attn_implementation, "experts_implementation": "eager"}


def compare(family: str, one: nn.Module, plan: Plan | None, other: nn.Module, generate: bool = True) -> None:
    """Logits of a padded batch, and generation with either cache."""
    inputs = tokens()
    with plan.applied_to(one) if plan else torch.no_grad():
        expected = output(one, inputs, **padded())
        texts = generated(family, one) if generate else {}
    got = output(other, inputs, **padded())
    shown = padded()["attention_mask"].bool()
    torch.testing.assert_close(got[shown], expected[shown], rtol=0, atol=1e-9, equal_nan=True)
    assert expected[0].isfinite().all()  # where nothing is padded
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
    found = {}
    for cache in caches:
        own = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        found[cache] = model.generate(
            tokens(2, 5), attention_mask=padded()["attention_mask"][:2, :5], **settings, **own
        )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_tried_out_is_the_model_cut_and_loaded_again(family: str, tmp_path: Path) -> None:
    """In every unit of the family, alike layers and differing ones, with channels; the model itself stays as it is."""
    model = stored(family, tmp_path)
    before = copy.deepcopy(model.state_dict())
    dense = output(model, tokens())
    for unit in units_of(map_model(model).attention[0]):
        for alike in (True, False):
            channels = channels_for(model, alike) if family not in EXPERTS_ONLY else {}
            plan = Plan(heads_for(model, unit, alike), channels)
            found = cut_to(tmp_path / f"{unit}-{alike}", model, plan)
            compare(family, model, plan, found.model, generate=False)
            loaded = load_pretrained(tmp_path / f"{unit}-{alike}", **implementations(model))
            assert loaded.dtype == torch.float64
            compare(family, model, plan, loaded)
            removed = found.manifest["removed"]
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
    model = stored(family, tmp_path)
    assert uncuttable(map_model(model))
    stack = map_model(model).stacks[0]
    head = f"{stack}.L0H1" if stack else "L0H1"
    with pytest.raises(InputError, match=f"cannot be cut out of this {family} model"):
        cut(model, Plan(head))
    for alike in (True, False):
        plan = Plan((), channels_for(model, alike))
        cut_to(tmp_path / str(alike), model, plan)
        compare(family, model, plan, load_pretrained(tmp_path / str(alike), **implementations(model)))
