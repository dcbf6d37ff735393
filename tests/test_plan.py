"""Plans as artefacts and one after another; what they compute when they are cut is in `test_surgery.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmeval_prune import Plan, map_model
from lmeval_prune.surgery.cut import cut
from tests.tiny_models import output, tiny, tokens


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("first", "second"), [("b", "w"), ("w", "b"), ("wb", "w"), ("w", "wb"), ("wb", "wb")])
def test_plans_that_compensate_compose(family: str, first: str, second: str) -> None:
    """Nested, joined, and as a cut of a cut: biases add up, the later weights count."""
    model = tiny(family)
    plans = []
    for seed, (given, heads, channels) in enumerate(((first, (), {}), (second, "L0H1", {"L1": "3-5"}))):
        tensors = {}
        for name, width in (("L0.o_proj", 32), ("L1.down", map_model(model).feed_forward[1].channels)):
            tensors |= {f"{name}.weight": drawn(32, width, seed=seed)} if "w" in given else {}
            tensors |= {f"{name}.bias": drawn(32, seed=seed + 7)} if "b" in given else {}
        plans.append(Plan(heads, channels, compensation=tensors))
    one, two = plans
    with one.applied_to(model), two.applied_to(model):
        nested = output(model, tokens())
    joined = one.joined(two)
    assert joined is not None
    with joined.applied_to(model):
        torch.testing.assert_close(output(model, tokens()), nested, rtol=0, atol=1e-9)
    twice = cut(cut(model, one).model, two).model
    torch.testing.assert_close(output(twice, tokens()), nested, rtol=0, atol=1e-9)


def test_saving_a_plan_deletes_its_own_old_tensors_and_no_other_file(tmp_path: Path) -> None:
    model_map = map_model(tiny("llama"))
    mine = [tmp_path / name for name in ("model.finetune.safetensors", "model.0a1b2c3d.safetensors")]
    for one in mine:
        one.write_bytes(b"mine")
    path = tmp_path / "model.json"
    found = []
    for seed in (0, 1, None):
        scores = {} if seed is None else {"heads.L0": drawn(4, seed=seed)}
        Plan("L0H1", scores=scores).save(path, model_map)
        assert Plan.load(path).scores.keys() == scores.keys()
        found.append({one.name for one in tmp_path.glob("*.safetensors")} - {one.name for one in mine})
    assert [len(one) for one in found] == [1, 1, 0] and found[0] != found[1]
    assert all(one.read_bytes() == b"mine" for one in mine)


@pytest.mark.parametrize("file", ["mine.safetensors", "../mine.safetensors", 3, None])
def test_a_json_that_names_a_file_of_others_does_not_delete_it(file: object, tmp_path: Path) -> None:
    model_map, path = map_model(tiny("llama")), tmp_path / "sub" / "plan.json"
    Plan("L0H1", scores={"heads.L0": drawn(4, seed=0)}).save(path, model_map)
    content = json.loads(path.read_text())
    content["tensors"]["file"] = file
    path.write_text(json.dumps(content))
    for mine in (tmp_path / "mine.safetensors", path.with_name("mine.safetensors")):
        mine.write_bytes(b"mine")
    Plan("L0H2").save(path, model_map)
    assert (tmp_path / "mine.safetensors").exists() and path.with_name("mine.safetensors").exists()
