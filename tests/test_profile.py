"""Costs against closed formulas, and the commands from importance map to profile."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmeval_prune import Plan, load_pretrained, map_model
from lmeval_prune.decoding.engine import engine_rate
from lmeval_prune.profiling.costs import cost_columns, counted_flops, formula_flops, parameters
from lmeval_prune.profiling.speed import Workload, generate_rate, measure, peak_memory
from lmeval_prune.surgery.cut import cut
from tests.conftest import run_command
from tests.tiny_models import ALL, tiny

EVERYDAY = {"llama", "phi3", "gpt2", "opt", "bert", "bart", "t5"}
EVERYDAY |= {"mixtral", "granitemoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"}  # with experts


@pytest.mark.parametrize(
    "family", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long) for name in ALL]
)
def test_the_formula_counts_what_torch_counts(family: str) -> None:
    plans = [Plan("L1H0-1", {"L0": "3-9"})] if family in ("llama", "phi3") else []
    plans += [Plan(blocks="L1.attention")] if family in ("llama", "gpt2") else []
    for model in (tiny(family), *(cut(tiny(family), plan).model for plan in plans)):
        assert formula_flops(map_model(model), 24) == counted_flops(model, 24)


def test_flops_that_no_formula_gives_are_unknown() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.experts = torch.nn.ParameterList([torch.zeros(2, 4, 4)])
    assert formula_flops(map_model(model), 24) is None
    model = tiny("llama")
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    assert cost_columns(model)["flops_per_prompt"] is None


def test_parameters_and_flops_of_a_cut_llama_are_closed_formulas() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    hidden, width, vocabulary, tokens = 32, 8, 64, 16
    done = cut(model, Plan("L0H0-1", {"L1": "0-15"}))
    layers = [(2, 1, 48), (4, 2, 32)]  # heads, key-value heads, channels
    weights = sum(hidden * width * (2 * h + 2 * kv) + 3 * hidden * c for h, kv, c in layers)
    norms = 5 * hidden
    assert parameters(done.model) == (weights + norms + vocabulary * hidden, weights + norms)
    products = sum(4 * tokens * tokens * h * width for h, _, _ in layers)
    flops = 2 * tokens * (weights + vocabulary * hidden) + products
    assert formula_flops(map_model(done.model), tokens) == flops == counted_flops(done.model, tokens)


def test_whole_answers_are_timed_by_generate_and_by_the_engine() -> None:
    """All new tokens count, also after an end token; a model that the engine does not run has no value."""
    types = ["sliding_attention", "full_attention"] * 2
    gemma = tiny("gemma3_text", num_hidden_layers=4, layer_types=types, sliding_window=3)
    models = {"a": tiny("llama"), "b": cut(gemma, Plan(blocks="L0.attention")).model, "c": tiny("bert")}
    seen: list[tuple[int, ...]] = []

    def answer(model: Any, ids: torch.Tensor, new: int, clock: str) -> float:
        seen.append((*ids.shape, new))
        return 7.0

    answerers = {"generate": generate_rate, "engine": engine_rate, "other": answer}
    speeds = measure(models, Workload(prompt=6, new=3, batches=(1, 2), rounds=1), answerers=answerers)
    kinds = ["prefill", "decode", "generate", "engine", "other"]
    assert list(speeds["a"]) == [f"{kind}_{batch}" for batch in (1, 2) for kind in kinds]
    assert list(speeds["b"]) == [name for name in speeds["a"] if "engine" not in name]
    assert list(speeds["c"]) == ["forward_1", "forward_2"] and speeds["a"]["other_2"] == 7
    assert seen == [(1, 6, 2)] * 2 + [(1, 6, 3)] * 2 + [(2, 6, 3)] * 2
    assert all(speed > 0 for rates in speeds.values() for speed in rates.values())


def test_generate_is_timed_to_the_last_token() -> None:
    """Also where the first token that it generates is an end token of the model."""
    model, ids = tiny("llama"), torch.arange(3, 9)[None]
    model.generation_config.eos_token_id = int(model(ids).logits[0, -1].argmax())
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    generate_rate(model, ids, 5)
    assert len(passes) == 5


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the processor's memory")
def test_the_peak_of_memory_is_the_models_own(tmp_path: Path) -> None:
    """Whatever the process that asks has, or had; and more weights are more."""
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "small")
    tiny("llama", dtype=torch.float32, vocab_size=2**20).save_pretrained(tmp_path / "large")  # 128 MiB, twice
    work = Workload(16, 2, (1,), 1)
    ballast = torch.ones(100 * 2**20)  # 400 MiB
    small = peak_memory(str(tmp_path / "small"), work)
    del ballast
    assert 0 < small < 100
    assert 100 < peak_memory(str(tmp_path / "large"), work) - small < 500  # of embeddings, the rows that are read


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(
        "\n\n".join(f"Ann has {n} apples and buys {n + 1} more. Now she has {2 * n + 1}." for n in range(60))
    )
    return str(path)


def test_from_importance_to_profile(
    tiny_folder: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is that of a process of its own, here for one model of two."""

    def peak_of_the_cut(name: str, *others: Any) -> float:
        return peak_memory(name, *others) if name == str(folder) else 1.0

    monkeypatch.setattr("lmeval_prune.profiling.speed.peak_memory", peak_of_the_cut)
    scores, plan, folder = (tmp_path / name for name in ("importance.json", "plan.json", "cut"))
    drawn = ("--text", text, "--windows", 4, "--tokens", 32)
    assert run_command("importance", "--pretrained", tiny_folder, "--output", scores, "--channels", *drawn) == 0
    assert scores.with_suffix(".png").stat().st_size > 5000
    shared = ("--pretrained", tiny_folder, "--output", plan, "--budget", "heads", "--ratio", 0.25, "--unit", "group",
              "--ffn_ratio", 0.25)  # fmt: skip
    assert run_command("prune", *shared, *drawn, "--method", "norm_entropy", "--cut", folder) == 0
    first = json.loads(plan.read_text())
    plan.unlink()
    assert run_command("prune", *shared, "--scores", scores) == 0
    second = json.loads(plan.read_text())
    assert second["settings"] == first["settings"] and second["made"]["calibration"] == first["made"]["calibration"]
    assert first["made"]["calibration"]["sha256"] and len(first["settings"]["heads"]) == 2
    loaded = load_pretrained(folder)
    assert run_command("cut", "--pretrained", tiny_folder, "--plan", plan, "--output", tmp_path / "again") == 0
    again = load_pretrained(tmp_path / "again")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in loaded.state_dict().items())
    assert run_command("prune", "--pretrained", folder, "--output", tmp_path / "next.json", "--ratio", 0.2, "--method", "random",
               "--cut", tmp_path / "next") == 0  # fmt: skip
    words = ("profile", tiny_folder, folder, "--output", tmp_path / "profile", "--prompt", 8, "--new", 2, "--rounds", 1)
    assert run_command(*words) == 0
    rows = json.loads((tmp_path / "profile" / "profile.json").read_text())["models"]
    assert rows[str(folder)]["parameters"] == parameters(loaded)[0] < rows[str(tiny_folder)]["parameters"]
    assert all(row["flops"] == row["flops_counted"] and row["peak_memory_mib"] > 0 for row in rows.values())


def test_a_profile_on_a_text_has_the_distance(
    tiny_folder: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `distance` measures it; refused before any measurement for another tokenizer."""
    monkeypatch.setattr("lmeval_prune.profiling.speed.ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    smaller = cut(load_pretrained(str(tiny_folder)), Plan("L1H0-1"))
    smaller.save(tmp_path / "cut", AutoTokenizer.from_pretrained(tiny_folder))
    words = ("--text", text, "--output", tmp_path / "out", "--prompt", 8, "--new", 2, "--rounds", 1, "--batches", 1)
    assert run_command("profile", tiny_folder, tmp_path / "cut", *words) == 0
    rows = json.loads((tmp_path / "out" / "profile.json").read_text())["models"]
    assert "distance" not in rows[str(tiny_folder)]
    distance = rows[str(tmp_path / "cut")]["distance"]
    compared = ("--checkpoint", tmp_path / "cut", "--text", text, "--output", tmp_path / "d.json")
    assert run_command("distance", tiny_folder, *compared) == 0
    expected = json.loads((tmp_path / "d.json").read_text())["variants"][str(tmp_path / "cut")]
    assert distance["mean_kld"] > 0 and distance == {name: expected[name] for name in distance}
    table = (tmp_path / "out" / "profile.md").read_text()
    assert f"{distance['mean_kld']:.3f} ± " in table and "same top p (%)" in table
    other = AutoTokenizer.from_pretrained(tiny_folder)
    other.add_tokens(["one more"])
    other.save_pretrained(tmp_path / "cut")
    assert run_command("profile", tiny_folder, tmp_path / "cut", *words) == 2
