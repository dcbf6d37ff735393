"""Scores of layers and blocks."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmeval_prune import InputError, Plan, load_pretrained, map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.allocation import unit_pools
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.baselines import RandomScores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.depth import _gathering_tokens
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import DEPTH_KINDS, Removed, depth_parts_of
from lmeval_prune.pruners.schedule import resolve_options, stages
from tests.conftest import run_command
from tests.test_baselines import whole
from tests.test_pruners import text_of
from tests.tiny_models import ALL, CAUSAL, SEQ2SEQ, distinct, tiny

FAMILIES = ["llama", "gemma2", "gpt_neox", "mixtral", "bart", "opt"]
SLIDING = {"mistral", "ministral", "cohere2", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "mixtral", "phi3"}


def depth_scores(
    name: str, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None, **options: Any
) -> dict[str, float]:
    scores = make_pruner(name, options).scores(model_map, text, depth_parts_of(model_map), removed or {})
    return {key: float(value) for key, value in scores.values.items()}


def without(model_map: ModelMap, blocks: list[str]) -> Any:
    return Plan(blocks=blocks).applied_to(model_map.model, model_map) if blocks else nullcontext()


def run(model: Any, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Logits of a batch; an encoder-decoder reads it in both stacks."""
    more: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        more = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(ids), "decoder_attention_mask": real}
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=real, use_cache=False, **more).logits
    return logits


# --------------------------------------------------------------------------- scores


@pytest.mark.parametrize("family", FAMILIES)
def test_block_influence_is_the_angle_of_the_residual_stream(family: str) -> None:
    """Streams are read from whole runs of the model, in which later blocks of the layer are left out."""
    model: Any = tiny(family)
    model_map, text = map_model(model), text_of()
    actual = depth_scores("block_influence", model_map, text)
    layers: dict[str, list[str]] = {}
    for sublayer in model_map.sublayers:
        layers.setdefault(sublayer.layer, []).append(str(sublayer))

    def streams(
        layer: str, blocks: list[str], ids: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen: list[torch.Tensor] = []

        def hook(_: nn.Module, inputs: Any, named: Any, out: Any) -> None:
            seen.extend((inputs[0] if inputs else named["hidden_states"], out[0] if isinstance(out, tuple) else out))

        with without(model_map, blocks):
            handle = model.get_submodule(layer).register_forward_hook(hook, with_kwargs=True)
            run(model, ids, real)
            handle.remove()
        return seen[0], seen[1]

    expected: dict[str, list[float]] = {key: [] for key in actual}
    for ids, real, _ in text.batches:
        for layer, names in layers.items():
            start, end = streams(layer, [], ids, real)
            points = [start, *(streams(layer, names[n:], ids, real)[1] for n in range(1, len(names))), end]
            keys = [f"{name.rpartition('.')[2]}.{name.rpartition('.')[0]}" for name in names]
            pairs = {key: points[n : n + 2] for n, key in enumerate(keys)}
            pairs[f"layers.{names[0].rpartition('.')[0]}"] = [start, end]
            for key, (before, after) in pairs.items():
                for row, position in itertools.product(*map(range, real.shape)):
                    if real[row, position]:
                        x, y = before[row, position], after[row, position]
                        cosine = float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
                        expected[key].append(1 - cosine)
    for key, values in expected.items():
        assert actual[key] == pytest.approx(sum(values) / len(values), abs=1e-9), key


@pytest.mark.parametrize("removed", [{}, {"layers.L2": {0}}, {"attention.L1": {0}, "heads.L0": {0, 1}}])
def test_block_kl_is_the_distance_of_the_model_without_the_block(removed: Removed) -> None:
    """From the unpruned model, also where earlier steps have removed something."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), text_of()
    actual = depth_scores("block_kl", model_map, text, removed)
    earlier = {"layers.L2": ["L2"], "attention.L1": ["L1.attention"]}
    before = [name for key in removed for name in earlier.get(key, [])]
    heads = Plan("L0H0-1") if "heads.L0" in removed else None
    for part in depth_parts_of(model_map):
        if part.key in removed:
            continue
        total, count = 0.0, 0
        for ids, real, _ in text.batches:
            dense = run(model_map.model, ids, real)
            with (
                without(model_map, [*before, part.block]),
                heads.applied_to(model_map.model) if heads else nullcontext(),
            ):
                pruned = run(model_map.model, ids, real)
            for row, position in itertools.product(*map(range, real.shape)):
                if real[row, position]:
                    p, q = (x[row, position].softmax(-1).tolist() for x in (dense, pruned))
                    total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                    count += 1
        assert actual[part.key] == pytest.approx(total / count, rel=1e-9, abs=1e-12), part.key


@pytest.mark.parametrize(("family", "has_head"), [("llama", True), ("llama", False), ("cohere", True), ("bart", True)])
def test_block_kl_of_some_tokens_leaves_out_the_logits_of_the_others(family: str, has_head: bool) -> None:
    """Own code on the Hub may compute logits without a module: then all of them are computed."""
    model: Any = tiny(family)
    if not has_head:
        model.get_output_embeddings = lambda: None
    model_map, text, rows = map_model(model), text_of(), list[int]()
    draw = torch.Generator().manual_seed(1)
    counted = tuple(real * torch.randint(2, real.shape, generator=draw) for _, real, _ in text.batches)
    for mask in counted:
        mask[:, :3] = 0
    hook = model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[:2].numel()))
    actual = depth_scores(
        "block_kl",
        model_map,
        replace(text, batches=tuple(x._replace(counted=y) for x, y in zip(text.batches, counted, strict=True))),
    )
    hook.remove()
    assert {*rows} == {int(mask.sum()) if has_head else mask.numel() for mask in counted}
    for part in depth_parts_of(model_map):
        total = 0.0
        for (ids, real, _), mask in zip(text.batches, counted, strict=True):
            dense = run(model, ids, real).log_softmax(-1)
            with Plan(blocks=[part.block]).applied_to(model, model_map):
                pruned = run(model, ids, real).log_softmax(-1)
            total += float((dense.exp() * (dense - pruned)).sum(-1)[mask.bool()].sum())
        assert actual[part.key] == pytest.approx(total / sum(int(mask.sum()) for mask in counted), rel=1e-9), part.key


@pytest.mark.parametrize("family", distinct([*CAUSAL, *SEQ2SEQ]))
def test_passes_that_start_at_a_layer_equal_those_of_the_whole_model(family: str) -> None:
    """Bit by bit, with padding, sliding windows and both stacks; and no layer before the left-out block runs again."""
    shape = {"num_hidden_layers": 4} if "num_hidden_layers" in ALL[family] else {}
    model: Any = tiny(family, **shape, **({"sliding_window": 6} if family in SLIDING else {}))
    model_map, text, ran = map_model(model), text_of(), list[str]()
    parts = depth_parts_of(model_map)
    expected = dict.fromkeys([part.key for part in parts], 0.0)
    for _, inputs in text.inputs(model):
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        with torch.no_grad(), _gathering_tokens(model.get_output_embeddings(), real):
            dense = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
            for part in parts:
                with Plan(blocks=[part.block]).applied_to(model, model_map):
                    pruned = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
                expected[part.key] += float((dense.exp() * (dense - pruned)).sum(-1).sum())
    for sublayer in model_map.sublayers:
        sublayer.output.register_forward_hook(lambda *_, sublayer=sublayer: ran.append(sublayer))
    scores = depth_scores("block_kl", model_map, text)
    assert scores == {key: total / text.tokens for key, total in expected.items()} and min(scores.values()) > 0
    layers = list(dict.fromkeys(sublayer.layer for sublayer in model_map.sublayers))
    starts = [layers.index(part.sublayers[0].layer) for part in parts]
    for sublayer in model_map.sublayers:  # one dense pass for the logits, one for the outputs of the layers
        passes = 2 + sum(start <= layers.index(sublayer.layer) for start in starts)
        assert ran.count(sublayer) == len(text.batches) * passes, sublayer


# --------------------------------------------------------------------------- plans


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["block_influence", "block_kl", "random"])
def test_layers_are_removed_one_after_the_other(name: str, steps: int) -> None:
    """In one stage those of the lowest scores; in several, each by the scores of the model without the earlier ones."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=6)), text_of()
    options = PruneOptions(0.5, parts="layers", steps=steps)
    plans = list(stages(make_pruner(name, {}), model_map, options, text))
    removed: Removed = {}
    for plan in plans:
        with plan_of(removed).applied_to(model_map.model) if removed and name != "block_kl" else nullcontext():
            scores = depth_scores(name, model_map, text, removed)
        ranked = sorted(
            (score, key) for key, score in scores.items() if key.startswith("layers.") and key not in removed
        )
        removed |= {key: {0} for _, key in ranked[: 3 // steps]}
        assert plan.fit_to(model_map) == plan_of(removed).fit_to(model_map)
    assert plans[-1].provenance["parameters"]["removed"] * 2 == plans[-1].provenance["parameters"]["removable"]
    assert plans[-1].provenance["stages"][-1]["layers"] == 3
    assert plans[-1].provenance["removes"] == "50% of the parameters of layers"


def plan_of(removed: Removed) -> Plan:
    return Plan(blocks=[key.partition(".")[2] for key in removed])


@pytest.mark.parametrize(
    ("parts", "kinds"),
    [("attention", {"attention"}), ("feed_forward", {"feed_forward"}), ("blocks", {"attention", "feed_forward"})],
)
def test_blocks_of_one_kind_or_of_both_are_compared(parts: Any, kinds: set[str]) -> None:
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    (plan,) = stages(make_pruner("block_influence", {}), model_map, PruneOptions(0.5, parts=parts), text_of())
    scores = depth_scores("block_influence", model_map, text_of())
    ranked = sorted((score, key) for key, score in scores.items() if key.partition(".")[0] in kinds)
    chosen = {f"{label}.{kind}" for _, key in ranked[: len(plan.blocks)] for kind, label in [key.split(".")]}
    assert {*plan.blocks} == chosen and chosen
    counted = plan.provenance["parameters"]
    largest = max(part.cost("") for part in depth_parts_of(model_map, kinds))
    assert abs(counted["removed"] - counted["removable"] / 2) <= largest / 2 + 1e-6


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"parts": "layers"}, 2),
        ({"parts": "layers", "growth": 3.0, "steps": 2}, 1),  # of a quarter of a layer, then of two
        ({"parts": "layers", "p_min": 0.5, "steps": 2}, 1),  # of two layers, then of none
        ({"parts": "blocks", "growth": 2.0, "steps": 4}, 3),
        ({"budget": "heads"}, 8),
        ({"budget": "heads", "allocation": "uniform", "growth": 1.5, "steps": 4}, 2),
        ({"parts": "heads", "p_min": 0.5, "steps": 3, "compensation": "least_squares"}, 1),
    ],
)
def test_only_steps_that_remove_a_unit_count(settings: dict[str, Any], most: int) -> None:
    """The plan is that of the steps that remove something; what comes after the last step comes all the same."""
    renewed = list[int]()
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), whole(rows=16, length=20)
    options = PruneOptions(0.5, **{"steps": 3 * most, **settings})
    *_, plan = stages(RandomScores(), model_map, options, text, renew=lambda step: renewed.append(step))
    history = plan.provenance["stages"]
    assert len(history) == most and {*renewed} >= {*range(2, most + 1)}
    counts = [tuple(stage.get(kind, 0) for kind in ("heads", *DEPTH_KINDS)) for stage in history]
    assert counts == sorted({*counts}) and any(counts[0])
    assert any(name.endswith(".weight") for name in plan.compensation) == (options.compensation == "least_squares")
    if most == 1:
        (expected,) = stages(RandomScores(), model_map, replace(options, steps=1, p_min=0.0, growth=1.0), text)
        assert plan.blocks == expected.blocks and plan.heads == expected.heads and plan.tensors == expected.tensors


@pytest.mark.parametrize("family", ["llama", "bart"])
@pytest.mark.parametrize("parts", ["layers", "attention"])
def test_the_last_attention_stays(family: str, parts: Any) -> None:
    """The one with the highest score of each stack; a ratio that cannot be met so is refused."""
    model_map, pruner = map_model(tiny(family)), make_pruner("random", {})
    resolved = resolve_options(PruneOptions(0.99, parts=parts), pruner, model_map)
    with pytest.raises(InputError, match=r"0\.99"):
        list(stages(pruner, model_map, resolved))
    holders = depth_parts_of(model_map, [parts])
    scores = {part.key: torch.tensor([float(n)]) for n, part in enumerate(holders)}
    pools = unit_pools(model_map, resolved, [parts], scores)
    staying = [pool.key for pool in pools if not pool.limit(True)]
    stacks: dict[str, str] = {part.sublayers[0].stack: part.key for part in holders}
    assert staying == [*stacks.values()]
    spared = replace(resolved, skip_first=1)
    assert all(pool.limit(True) for pool in unit_pools(model_map, spared, [parts], scores))


# --------------------------------------------------------------------------- measured costs


def test_from_scores_of_layers_to_a_cut_checkpoint(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))

    def command(*words: object) -> str:
        assert run_command(*words) == 0
        return capsys.readouterr().out

    shared = ("--pretrained", tiny_folder, "--text", text, "--windows", 2, "--tokens", 16, "--device", "cpu")
    layers = ("--method", "block_influence", "--ratio", 0.5)
    printed = command("prune", *shared, *layers, "--output", tmp_path / "b.json", "--cut", tmp_path / "b")
    assert "2 of 4 blocks, 50.00% of the removable parameters" in printed
    assert load_pretrained(tmp_path / "b").config.num_hidden_layers == 1
    printed = command("importance", *shared, "--method", "block_influence", "--output", tmp_path / "scores.json")
    assert "lowest: " in printed and "layers L" in printed
    command("prune", "--pretrained", tiny_folder, "--scores", tmp_path / "scores.json", "--parts", "layers", "--ratio", 0.5,
            "--output", tmp_path / "c.json")  # fmt: skip
    assert Plan.load(tmp_path / "c.json").blocks == Plan.load(tmp_path / "b.json").blocks
