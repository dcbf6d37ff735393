"""Scores of layers and blocks, compositions of blocks with heads and channels, and measured costs."""

from __future__ import annotations

import itertools
import json
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
from lmeval_prune.profiling.speed import Workload
from lmeval_prune.pruners import composition
from lmeval_prune.pruners.allocation import Budget, UnitPool, unit_pools
from lmeval_prune.pruners.base import Scores, make_pruner
from lmeval_prune.pruners.block_kl import _gathering_tokens
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.composition import Choice, best_levels, choice_of
from lmeval_prune.pruners.cost_table import CostTable
from lmeval_prune.pruners.layer_store import Removal
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import DEPTH_KINDS, Removed, depth_parts_of, parts_of
from lmeval_prune.pruners.random_scores import RandomScores
from lmeval_prune.pruners.schedule import _composed, check_methods, resolve_options, stages
from lmeval_prune.pruners.sequential import make_plan
from lmeval_prune.reporting import maps
from lmeval_prune.surgery import block_costs
from lmeval_prune.surgery.block_costs import measure_costs
from lmeval_prune.surgery.cut import cut
from lmeval_prune.training import curves
from tests.conftest import run_command
from tests.test_baselines import inputs_of, whole
from tests.test_pruners import text_of
from tests.tiny_models import ALL, CAUSAL, SEQ2SEQ, distinct, output, tiny, tokens

FAMILIES = ["llama", "gemma2", "gpt_neox", "mixtral", "bart", "opt"]
SLIDING = {"mistral", "ministral", "cohere2", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "mixtral", "phi3"}


def depth_scores(
    name: str, model_map: ModelMap, text: CalibrationText | None, removed: Removed | None = None, **options: Any
) -> dict[str, float]:
    scores = make_pruner(name, options).depth_scores(model_map, text, depth_parts_of(model_map), Removal(removed or {}))
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
    for ids, real in text.batches:
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


def test_block_kl_has_the_compensation_of_earlier_steps() -> None:
    model: Any = tiny("llama")
    model_map, text, draw = map_model(model), text_of(), torch.Generator().manual_seed(2)
    bias = {"L0.o_proj.bias": torch.randn(32, generator=draw, dtype=torch.float64)}
    parts = depth_parts_of(model_map, ["attention", "feed_forward"])
    scores = (
        make_pruner("block_kl", {}).depth_scores(model_map, text, parts, Removal({"heads.L0": {0, 1}}, bias)).values
    )
    for part in parts:
        total, count = 0.0, 0
        for ids, real in text.batches:
            dense = run(model, ids, real).log_softmax(-1)
            with Plan("L0H0-1", compensation=bias, blocks=[part.block]).applied_to(model):
                pruned = run(model, ids, real).log_softmax(-1)
            divergences = (dense.exp() * (dense - pruned)).sum(-1)[real.bool()]
            total, count = total + float(divergences.sum()), count + len(divergences)
        assert float(scores[part.key]) == pytest.approx(total / count, rel=1e-9), part.key


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
        for ids, real in text.batches:
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
    counted = tuple(real * torch.randint(2, real.shape, generator=draw) for _, real in text.batches)
    for mask in counted:
        mask[:, :3] = 0
    hook = model.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[:2].numel()))
    actual = depth_scores("block_kl", model_map, replace(text, counted=counted))
    hook.remove()
    assert {*rows} == {int(mask.sum()) if has_head else mask.numel() for mask in counted}
    for part in depth_parts_of(model_map):
        total = 0.0
        for (ids, real), mask in zip(text.batches, counted, strict=True):
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


def test_random_scores_of_layers_are_drawn_by_seed() -> None:
    model_map = map_model(tiny("llama"))
    first, again, other = (depth_scores("random", model_map, None, seed=seed) for seed in (0, 0, 1))
    assert first == again and first.keys() == other.keys() and first != other
    assert {key.partition(".")[0] for key in first} == {*DEPTH_KINDS}


@pytest.mark.parametrize("name", ["block_influence", "block_kl"])
def test_scores_of_other_blocks_do_not_depend_on_padding(name: str) -> None:
    model_map, text = map_model(tiny("llama")), text_of()
    ids, real = (torch.cat(tensors) for tensors in zip(*text.batches, strict=True))
    others = CalibrationText.from_windows("test", torch.where(real.bool(), ids, ids + 1), 2, real)
    assert depth_scores(name, model_map, text) == pytest.approx(depth_scores(name, model_map, others))


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
    assert plans[-1].provenance["removes"] == "50% of the parameters of whole layers"


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
    ("name", "options", "message"),
    [
        ("magnitude", {"parts": "layers"}, "magnitude scores heads and channels, not whole layers or blocks; use one of "),
        ("block_kl", {"parts": "both"}, "block_kl scores whole layers and blocks; give --parts layers"),
        ("block_kl", {"parts": "layers", "allocation": "uniform"}, "leave out allocation=uniform"),
        ("block_kl", {"parts": "layers", "compensation": "bias"}, "compensation=bias is for heads and channels"),
        ("block_kl", {"parts": "layers", "budget": "latency", "costs": "c.json"}, "met by --allocation composition"),
        ("magnitude", {"budget": "latency", "allocation": "composition"}, "needs measured costs, and only it reads them"),
        ("magnitude", {"costs": "c.json"}, "needs measured costs, and only it reads them"),
        ("magnitude", {"parts": "layers", "allocation": "composition"}, "give --parts both, heads or channels"),
        ("magnitude", {"allocation": "composition", "depth_method": "flap"},
         "^depth_method=flap: flap scores heads and channels"),
        ("magnitude", {"allocation": "composition", "depth_method": "slimgpt"},
         "^depth_method=slimgpt: slimgpt scores heads and channels"),
        ("magnitude", {"depth_method": "random"}, "depth_method is for --allocation composition; give"),
        ("block_kl", {"parts": "layers", "depth_method": "blok_kl"}, "depth_method is for --allocation composition"),
        ("magnitude", {"allocation": "composition", "budget": "heads"}, "allocation=composition counts parameters"),
        ("slimgpt", {"allocation": "composition"}, "use allocation uniform or log"),
        ("slimgpt", {"parts": "layers"}, "slimgpt scores heads and channels, not whole layers or blocks; use one of "),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        list(stages(make_pruner(name, {}), map_model(tiny("llama")), PruneOptions(0.5, **options), text_of()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scores", [{}, {"heads.L0": torch.ones(4)}])
def test_a_depth_method_that_scores_no_blocks_is_named(scores: dict[str, torch.Tensor]) -> None:
    """Also beside a method of channels or stored scores, which have nothing to do with it."""
    options = PruneOptions(0.5, allocation="composition", depth_method="slimgpt")
    pruner, channel_pruner = make_pruner("magnitude", {}), make_pruner("random", {})
    with pytest.raises(InputError, match=r"^depth_method=slimgpt: slimgpt scores heads and channels, not whole layers"):
        list(stages(pruner, map_model(tiny("llama")), options, text_of(), channel_pruner, scores))


@pytest.mark.parametrize(
    ("kind", "settings", "ratio", "most"),
    [
        ("layers", {"parts": "layers"}, 0.5, 2),
        ("attention", {"parts": "attention"}, 0.75, 3),
        ("heads", {"parts": "heads"}, 0.5, 4),
        ("heads", {"budget": "heads"}, 0.5, 8),
    ],
)
def test_no_more_steps_than_units_that_go(kind: str, settings: dict[str, Any], ratio: float, most: int) -> None:
    """A group of heads is one unit: more steps than groups would score again without removing anything."""
    model_map, pruner = map_model(tiny("llama", num_hidden_layers=4)), make_pruner("random", {})
    options = PruneOptions(ratio, **settings, steps=most)
    removed = [len(plan.heads) + len(plan.blocks) for plan in stages(pruner, model_map, options)]
    assert len(removed) == most and removed == sorted(set(removed)) and removed[0] > 0
    with pytest.raises(
        InputError,
        match=rf"^steps={most + 1} are more than the units \({kind}\) that the ratio removes, at most {most};",
    ):
        list(stages(pruner, model_map, replace(options, steps=most + 1)))


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        ({"parts": "layers", "growth": 3.0, "steps": 2}, 1),  # of a quarter of a layer, then of two
        ({"parts": "layers", "p_min": 0.5, "steps": 2}, 1),  # of two layers, then of none
        ({"parts": "blocks", "growth": 2.0, "steps": 4}, 3),
        ({"budget": "heads", "allocation": "uniform", "growth": 1.5, "steps": 4}, 2),
        ({"parts": "heads", "allocation": "composition", "p_min": 0.5, "steps": 2, "depth_method": "random"}, 2),
        ({"parts": "heads", "p_min": 0.5, "steps": 3, "compensation": "least_squares"}, 1),
    ],
)
def test_a_step_that_can_remove_no_unit_is_not_scored(
    settings: dict[str, Any], scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is that of the steps that remove something; what comes after the last step comes all the same."""
    calls, renewed, lines = list[str](), list[int](), list[str]()
    for name in ("scores", "depth_scores"):
        method = getattr(RandomScores, name)
        monkeypatch.setattr(RandomScores, name, lambda *args, f=method, n=name: calls.append(n) or f(*args))
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), whole(rows=16, length=20)
    options = PruneOptions(0.5, **settings)
    *_, plan = stages(
        RandomScores(), model_map, options, text, progress=lines.append, renew=lambda step: renewed.append(step)
    )
    history = plan.provenance["stages"]
    assert len(calls) == scored and renewed == [*range(2, len(history) + 1)]
    counts = [tuple(stage.get(kind, 0) for kind in ("heads", *DEPTH_KINDS)) for stage in history]
    assert counts == sorted({*counts}) and any(counts[0])
    skipped = [line for line in lines if line.endswith("can remove no unit and is skipped")]
    assert len(skipped) == options.steps - len(history) > 0
    assert any(name.endswith(".weight") for name in plan.compensation) == (options.compensation == "least_squares")
    lines.clear()
    at_once = replace(options, steps=1, p_min=0.0, growth=1.0)
    if len(history) == 1:
        (expected,) = stages(RandomScores(), model_map, at_once, text)
        assert plan == expected and plan.tensors == expected.tensors


@pytest.mark.parametrize("family", ["llama", "bart"])
@pytest.mark.parametrize("parts", ["layers", "attention"])
def test_the_last_attention_stays(family: str, parts: Any) -> None:
    """The one with the highest score of each stack; a ratio that cannot be met so is refused before anything is scored."""
    model_map, pruner = map_model(tiny(family)), make_pruner("random", {})
    resolved = resolve_options(PruneOptions(0.99, parts=parts), pruner, model_map)
    with pytest.raises(InputError, match=r"0.99 would leave no attention in the model; give a smaller ratio"):
        check_methods(pruner, pruner, model_map, resolved, False)
    holders = depth_parts_of(model_map, [parts])
    scores = {part.key: torch.tensor([float(n)]) for n, part in enumerate(holders)}
    pools = unit_pools(model_map, Budget((parts,), 0.99, "global", resolved), scores)
    staying = [pool.key for pool in pools if not pool.limit(True)]
    stacks: dict[str, str] = {part.sublayers[0].stack: part.key for part in holders}
    assert staying == [*stacks.values()]
    spared = replace(resolved, skip_first=1)
    assert all(pool.limit(True) for pool in unit_pools(model_map, Budget((parts,), 0.99, "global", spared), scores))


def test_an_encoder_has_no_distribution_of_the_next_token() -> None:
    with pytest.raises(InputError, match="which only causal language models have; use block_influence"):
        list(stages(make_pruner("block_kl", {}), map_model(tiny("bert")), PruneOptions(0.5), text_of()))


# --------------------------------------------------------------------------- compositions


def brute_force(choices: list[Choice], limit: float, required: list[list[int]]) -> float:
    """The largest value of all combinations that fit."""
    best = -math.inf
    for levels in itertools.product(*(range(len(choice.unit_counts)) for choice in choices)):
        cost = sum(choice.costs[level] for choice, level in zip(choices, levels, strict=True))
        stay = all(any(levels[n] for n in group) for group in required)
        if cost <= limit * (1 + 1e-9) and stay:
            best = max(best, sum(choice.values[level] for choice, level in zip(choices, levels, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_chosen_levels_are_the_best_of_all(seed: int) -> None:
    """Of small random tables: costs with an intercept, as measured ones have, and not always rising."""
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    choices = []
    for _ in range(5):
        count = int(torch.randint(2, 6, (1,), generator=draw))
        values = torch.cat([torch.zeros(1), drawn(count - 1).cumsum(0)])
        costs = torch.cat([torch.zeros(1), 0.5 + drawn(count - 1) + 0.2 * torch.arange(count - 1)])
        choices.append(Choice(tuple(range(count)), tuple(values.tolist()), tuple(costs.tolist())))
    limit = float(drawn(1)) * sum(choice.costs[-1] for choice in choices) + 0.8
    required = [[0, 2]] if seed % 2 else []
    levels, gap = best_levels(choices, limit, required)
    assert gap <= 1e-6
    value = sum(choice.values[level] for choice, level in zip(choices, levels, strict=True))
    assert value == pytest.approx(brute_force(choices, limit, required), abs=1e-9)
    assert sum(choice.costs[level] for choice, level in zip(choices, levels, strict=True)) <= limit * (1 + 1e-9)
    assert not required or any(levels[n] for n in required[0])


def test_a_budget_that_nothing_fits_is_refused() -> None:
    choice = Choice((0, 1), (0.0, 1.0), (0.0, 3.0))
    with pytest.raises(InputError, match="no composition fits into this budget"):
        best_levels([choice], 2.0, [[0]])


def test_a_solver_that_runs_out_of_time_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choices, solve = [Choice((0, 1), (0.0, 1.0), (0.0, 3.0))], composition.milp
    assert best_levels(choices, 3.0) == ([1], 0.0) and not caplog.text

    def stopped(*arguments: Any, **named: Any) -> Any:
        result = solve(*arguments, **named)
        result.update(status=1, mip_gap=0.25)
        return result

    monkeypatch.setattr(composition, "milp", stopped)
    assert best_levels(choices, 3.0) == ([1], 0.25)
    assert "a better one may keep up to 25% more score" in caplog.text


def test_units_share_the_score_of_their_block() -> None:
    """S · Σ_k s / Σ s of the k best, from a shifted score; by number where all scores are equal."""
    pool = UnitPool("channels.L0", [(2,), (0,), (1,), (3,)], torch.tensor([-1.0, 0.0, 2.0, 4.0]).double(), 10.0)
    choice = choice_of(pool, 2.0, -1.0, 1, lambda pool, count: count * pool.cost)
    assert choice.unit_counts == (0, 1, 2, 3, 4) and choice.costs == (0, 10, 20, 30, 40)
    assert choice.values == pytest.approx([0, 2 * 5 / 9, 2 * 8 / 9, 2.0, 2.0])
    equal = UnitPool("channels.L0", pool.units, torch.zeros(4).double(), 10.0)
    assert choice_of(equal, 2.0, 0.0, 2, lambda pool, count: count).values == pytest.approx([0, 1, 2])
    known = choice_of(pool, 2.0, 0.0, 1, lambda pool, count: 1.0 if count != 3 else None)
    assert known.unit_counts == (0, 1, 2, 4)


@pytest.mark.parametrize("method", ["magnitude", "llm_pruner", "random"])
def test_a_composition_keeps_at_least_what_layers_heads_or_channels_alone_keep(method: str, tmp_path: Path) -> None:
    """Its plan is cut as it is tried; a block that goes takes its heads or channels with it."""
    model: Any = tiny("llama", num_hidden_layers=4)
    model_map, text = map_model(model), text_of()
    options = PruneOptions(0.5, allocation="composition", ffn_multiple=8)
    (plan,) = stages(make_pruner(method, {}), model_map, options, text)
    note = plan.provenance
    assert note["parameters"]["removed"] >= 0.5 * note["parameters"]["removable"] - 1
    assert note["kept_cost"] <= 0.5 * note["whole_cost"] * (1 + 1e-9) and 0 < note["kept_score"] < 1
    gone = [key for key, (kept, _) in note["composition"].items() if not kept]
    names = {"heads": "attention", "channels": "feed_forward"}
    assert {*plan.blocks} == {f"{label}.{names[kind]}" for kind, label in (key.split(".") for key in gone)}
    smaller = cut(model, plan).model
    with plan.applied_to(model):
        torch.testing.assert_close(output(smaller, tokens()), output(model, tokens()), rtol=0, atol=1e-9)
    for key, (kept, size) in note["composition"].items():
        kind, label = key.split(".")
        sizes = (
            {x.label: (x.kv_heads, 2) for x in model_map.attention}
            if kind == "heads"
            else {x.label: (x.channels, 48) for x in model_map.feed_forward}
        )
        assert size == sizes[label][1] and (kind == "heads" or kept % 8 == 0)
    plan.save(tmp_path / "plan.json", model_map)
    assert Plan.load(tmp_path / "plan.json") == plan.fit_to(model_map)


@pytest.mark.parametrize("method", ["magnitude", "llm_pruner", "flap", "norm_entropy"])
def test_a_composition_in_steps_removes_more_each_time(method: str) -> None:
    """By weights, by gradients, which a block that is gone does not get, by moments and by attention."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), text_of()
    own = {"ffn_multiple": 4, "depth_method": "block_influence", "compensation": "none"}
    options = PruneOptions(0.6, allocation="composition", steps=3, **own)
    plans = list(stages(make_pruner(method, {}), model_map, options, text))
    shares = [plan.provenance["parameters"]["removed"] for plan in plans]
    assert shares == sorted(shares) and shares[-1] >= 0.6 * plans[0].provenance["parameters"]["removable"] - 1
    for before, after in itertools.pairwise(plans):
        assert {*before.blocks} <= {*after.blocks}
        lost = {head.partition("H")[0] for head in before.heads if head not in after.heads}
        assert {f"{label}.attention" for label in lost} <= {*after.blocks}


def test_least_squares_of_a_composition_know_of_the_blocks_that_are_gone() -> None:
    """A down projection is solved for what it reads under all that the plan removes and compensates before it."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), whole(rows=16, length=20)
    options = PruneOptions(0.4, allocation="composition", compensation="least_squares", damping=0.0, ffn_multiple=4)
    worth = {part.key: torch.ones(1).double() for part in depth_parts_of(model_map, ["attention", "feed_forward"])}
    worth |= {key: torch.zeros(1).double() for key in ("attention.L0", "feed_forward.L1")}
    (plan,) = stages(make_pruner("random", {}), model_map, options, text, scores=worth)
    block = next(x for x in reversed(model_map.feed_forward) if f"{x.label}.down.weight" in plan.compensation)
    assert {*plan.blocks} >= {"L0.attention", "L1.feed_forward"} and block.label >= "L2"
    gone, name = plan.channel_numbers(block.label), f"{block.label}.down.weight"
    others = {label: plan.channel_numbers(label) for label in plan.channels if label < block.label}
    heads = [head for head in plan.heads if head.partition("H")[0] <= block.label]
    before = {
        key: x for key, x in plan.compensation.items() if key < block.label or key == f"{block.label}.o_proj.weight"
    }
    with Plan(heads, others, plan.blocks, compensation=before).applied_to(model_map.model, model_map):
        x = inputs_of(model_map, text)[f"{block.label}.down"]
    kept = [column for column in range(block.channels) if column not in gone]
    solved = torch.linalg.lstsq(x[:, kept], x @ block.down.weight.detach().T).solution.T
    torch.testing.assert_close(plan.compensation[name][:, kept], solved, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gone", [{}, {"attention.L1": {0}, "heads.L1": {*range(4)}}])
def test_the_parameters_of_a_composition_are_those_that_a_cut_removes(gone: Removed) -> None:
    """Also where an earlier step has removed a block of which several heads make a unit."""
    model: Any = tiny("llama", num_hidden_layers=4)
    model_map, pruner = map_model(model), make_pruner("magnitude", {})
    options = resolve_options(PruneOptions(0.6, allocation="composition"), pruner, model_map)
    draw = torch.Generator().manual_seed(1)
    parts = [*parts_of(model_map), *depth_parts_of(model_map)]
    scores = Scores({part.key: torch.rand(part.size, generator=draw, dtype=torch.float64) for part in parts})
    after, note = _composed(model_map, Budget(options.kinds, 0.6, "composition", options), scores, gone)

    def size(of: Any) -> int:
        return sum(x.numel() for name, x in of.named_parameters() if "self_attn" in name or "mlp" in name)

    assert note["parameters"]["removable"] == size(model)
    assert note["parameters"]["removed"] == size(model) - size(cut(model, make_plan(after, True)).model)


# --------------------------------------------------------------------------- measured costs


def table_of(
    attention: dict[str, float],
    feed_forward: dict[str, float],
    rounds: int = 3,
    layers: int = 2,
    dtype: str = "float64",
) -> CostTable:
    """A table as measured: seconds of a small model, with noise that all sizes of a round share."""
    noise = [0.0, 5.0, 1.0][:rounds]

    def times(costs: dict[str, float]) -> dict[str, list[float]]:
        return {size: [7 + own + layers * cost for own in noise] for size, cost in {"0": 0.0, **costs}.items()}

    shapes: Any = {"model_type": "llama", "hidden_size": 32, "head_dim": 8, "dtype": dtype}
    work: Any = {"batch": 2, "prompt": 4, "new": 2, "clock": "wall", "layers": layers, "rounds": rounds}
    where: Any = {"device": "cpu: x", "threads": 1, "torch": "2", "transformers": "5"}
    seconds: Any = {"attention": times(attention), "feed_forward": times(feed_forward)}
    return CostTable(shapes, work, where, seconds)


def test_a_budget_of_latency_counts_measured_seconds(tmp_path: Path) -> None:
    """Heads save nothing here, and channels little; so blocks go, those that matter least."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), text_of()
    table = table_of({"2/1": 0.99, "4/2": 1.0}, {"16": 1.9, "32": 1.95, "48": 2.0})
    assert table.cost("attention", "2/1") == pytest.approx(0.99) and table.cost("attention", "3/1") is None
    table.save(tmp_path / "costs.json")
    options = PruneOptions(0.5, allocation="composition", budget="latency", costs=str(tmp_path / "costs.json"))
    (plan,) = stages(make_pruner("magnitude", {}), model_map, options, text)
    note = plan.provenance
    assert note["whole_cost"] == pytest.approx(12.0) and note["kept_cost"] <= 6.0
    assert len(plan.blocks) >= 3 and note["costs"]["workload"]["batch"] == 2
    assert note["removes"] == "50% of the measured time of heads and channels, or of their blocks as a whole,"
    kept = {key: count for key, (count, _) in note["composition"].items()}
    spent = sum(
        table.cost("attention", f"{2 * n}/{n}") or 0 for key, n in kept.items() if key.startswith("heads") and n
    )
    spent += sum(table.cost("feed_forward", str(n)) or 0 for key, n in kept.items() if key.startswith("channels") and n)
    assert note["kept_cost"] == pytest.approx(spent)


def test_all_measured_sizes_of_a_block_are_levels(tmp_path: Path) -> None:
    """Also those that are no 32nds of the block, as after an earlier cut; a Llama that was written as Mistral, too."""
    table = table_of({"4/2": 0.01}, {"40": 0.5, "96": 1.0})
    table.shapes["model_type"] = "mistral"
    table.save(tmp_path / "costs.json")
    latency: Any = {"allocation": "composition", "budget": "latency", "costs": str(tmp_path / "costs.json")}
    options = PruneOptions(0.7, depth_method="random", **latency)  # of 2.02: no room for a block of 96 channels
    (plan,) = stages(make_pruner("magnitude", {}), map_model(tiny("llama", intermediate_size=96)), options)
    kept = plan.provenance["composition"]
    assert sorted(count for key, (count, _) in kept.items() if key.startswith("channels")) == [0, 40]


def test_no_block_is_cheaper_than_a_smaller_one() -> None:
    """Sizes out of order share their mean, over the fewest neighbours; a size that costs nothing is not negative."""
    table = table_of({"2/1": -0.5, "4/2": 1.0}, {"16": 1.0, "32": 3.0, "48": 2.0, "64": 1.0, "80": 4.0})
    assert [table.cost("feed_forward", size) for size in ("0", "16", "32", "48", "64", "80")] == pytest.approx(
        [0, 1, 2, 2, 2, 4]
    )
    assert [table.cost("attention", size) for size in ("0", "2/1", "4/2")] == pytest.approx([0, 0, 1])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of({"2/1": 1.0}, {"48": 1.0}), "lacks the cost of heads.L0 with 2 units"),
        (table_of({"4/2": 1.0}, {"47": 1.0}), "lacks the cost of channels.L0 with 48 units"),
        (CostTable(**{**vars(table_of({}, {})), "shapes": {"model_type": "llama", "hidden_size": 64, "head_dim": 8,
         "dtype": "float64"}}), "costs of other blocks .*hidden_size 64"),
        (CostTable(**{**vars(table_of({}, {})), "workload": {**table_of({}, {}).workload, "rounds": 4}}), "not complete"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_one_line(table: CostTable, message: str, tmp_path: Path) -> None:
    """Of the options alone, before any weights are read."""
    table.save(tmp_path / "costs.json")
    options = PruneOptions(0.5, allocation="composition", budget="latency", costs=str(tmp_path / "costs.json"))
    with pytest.raises(InputError, match=message) as error:
        resolve_options(options, RandomScores(), map_model(tiny("llama")))
    assert "\n" not in str(error.value)


def test_costs_are_measured_in_rounds_and_a_killed_measurement_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement is in the file at once; other settings are refused; the models are those of the plans."""
    path, work = tmp_path / "costs.json", Workload(4, 2, (2,), 2)
    skeleton = tiny("llama", num_hidden_layers=6)
    timed: list[tuple[int, int, int]] = []

    def seconds(model: Any, _: Workload) -> float:
        model_map = map_model(model)
        last = model.model.layers[-1]
        heads = [x.heads for x in model_map.attention if x.index == 4]
        timed.append(
            (
                len(model_map.attention),
                heads[0] if heads else 0,
                getattr(last.mlp, "down_proj", last.mlp).weight.shape[1] if hasattr(last.mlp, "down_proj") else 0,
            )
        )
        if len(timed) == 5:
            raise KeyboardInterrupt
        return 1.0 + len(timed)

    monkeypatch.setattr(block_costs, "_seconds", seconds)
    arguments: Any = (path, skeleton, work, 3, 1, torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        measure_costs(*arguments)
    assert sum(len(times) for kind in json.loads(path.read_text())["seconds"].values() for times in kind.values()) == 4
    table = measure_costs(*arguments)
    assert [*table.sizes("attention")] == ["0", "2/1", "4/2"] and [*table.sizes("feed_forward")] == [
        "0",
        "16",
        "32",
        "48",
    ]
    assert {len(times) for kind in ("attention", "feed_forward") for times in table.sizes(kind).values()} == {2}
    table.check(map_model(skeleton), str(path))
    assert timed[:3] == [(1, 0, 48), (5, 2, 48), (5, 4, 48)] and timed[3] == (5, 4, 0)
    before = len(timed)
    measure_costs(*arguments)
    assert len(timed) == before
    with pytest.raises(InputError, match="has measurements with prompt=4, these have 5; name another --output"):
        measure_costs(path, skeleton, Workload(5, 2, (2,), 2), 3, 1, torch.device("cpu"))


def test_a_text_for_scores_of_blocks_is_recorded_beside_that_of_stored_scores(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Also where the stored scores are those of layers."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} has {n} apples." for n in range(60)))

    def provenance_of(command: str, output: str, *words: object) -> Any:
        shared = (command, "--pretrained", tiny_folder, "--output", tmp_path / output)
        assert run_command(*shared, *words) == 0
        return Plan.load(tmp_path / output).provenance

    read = ("--windows", 2, "--tokens", 16)
    scored = provenance_of(
        "importance", "s.json", "--method", "flap", "--channels", "--text", tmp_path / "a.txt", *read
    )
    composed = ("--allocation", "composition", "--depth_method", "block_influence", "--compensation", "none")
    plan = provenance_of("prune", "p.json", "--scores", tmp_path / "s.json", *composed, "--ratio", 0.4, "--text", tmp_path / "b.txt",
                *read)  # fmt: skip
    assert plan["calibration"] == scored["calibration"] != plan["depth_calibration"]
    direct = provenance_of(
        "prune", "d.json", "--method", "block_influence", "--ratio", 0.5, "--text", tmp_path / "b.txt", *read
    )
    assert plan["depth_calibration"] == direct["calibration"]
    scored = provenance_of("importance", "l.json", "--method", "block_influence", "--text", tmp_path / "a.txt", *read)
    plan = provenance_of("prune", "q.json", "--scores", tmp_path / "l.json", "--parts", "layers", "--ratio", 0.5)
    assert plan["calibration"] == scored["calibration"]


def test_from_costs_to_a_cut_checkpoint(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By the commands that a user gives; removed layers, too."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Ann has {n} apples and buys {n + 1} more." for n in range(60)))

    def command(*words: object) -> str:
        assert run_command(*words) == 0
        return capsys.readouterr().out

    small = ("--batch", 1, "--prompt", 4, "--new", 2, "--rounds", 1, "--levels", 3, "--device", "cpu")
    printed = command("costs", "--pretrained", tiny_folder, "--output", tmp_path / "costs.json", *small)
    assert "attention: 0 0 ms, 2/1" in printed and "feed-forward: 0 0 ms, 16" in printed
    content = json.loads((tmp_path / "costs.json").read_text())  # what a quiet machine measures of larger models
    for kind, sizes in content["seconds"].items():
        for size in sizes:
            sizes[size] = [1.0 + 0.1 * int(size.partition("/")[0]) + bool(int(size[0])) + (kind == "attention")]
    (tmp_path / "costs.json").write_text(json.dumps(content))
    shared = ("--pretrained", tiny_folder, "--text", text, "--windows", 2, "--tokens", 16, "--device", "cpu")
    composed = ("--allocation", "composition", "--method", "magnitude", "--ratio", 0.4)
    latency = ("--budget", "latency", "--costs", tmp_path / "costs.json")
    command("prune", *shared, *composed, *latency, "--output", tmp_path / "a.json", "--cut", tmp_path / "a")
    load_pretrained(tmp_path / "a")
    layers = ("--method", "block_influence", "--ratio", 0.5)
    printed = command("prune", *shared, *layers, "--output", tmp_path / "b.json", "--cut", tmp_path / "b")
    assert "removes 2 of 4 blocks (L1) of tiny-llama, 50.00% of the removable parameters" in printed
    assert load_pretrained(tmp_path / "b").config.num_hidden_layers == 1
    printed = command("importance", *shared, "--method", "block_influence", "--output", tmp_path / "scores.json")
    assert "lowest: " in printed and "layers L" in printed
    command("prune", "--pretrained", tiny_folder, "--scores", tmp_path / "scores.json", "--parts", "layers", "--ratio", 0.5,
            "--output", tmp_path / "c.json")  # fmt: skip
    assert Plan.load(tmp_path / "c.json").blocks == Plan.load(tmp_path / "b.json").blocks


def test_pictures_name_layers_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores, a layer without one of the blocks is empty there; of a training, what each stage removed."""
    figures: list[Any] = []
    for module in (maps, curves):
        monkeypatch.setattr(module, "save", lambda figure, _: figures.append(figure))
    maps.draw_scores({"L0": [1.0, float("nan")], "L1": [0.5, 2.0]}, "scores", Path("a"), ["layers", "attention"])
    axes, bar = figures[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["layers", "attention"] and not axes.get_xlabel()
    assert bar.get_ylim() == (0.5, 2.0)
    log = [{"epoch": 1.0, "loss": 2.0}]
    stages = [
        {"stage": 1, "removed": {"heads": 8, "channels": 96, "blocks": 3}, "log": log,
         "removed_blocks": ["L1.attention", "L1.feed_forward", "L2.attention"]},
        {"stage": 2, "removed": {"heads": 3, "channels": 0}, "log": log, "removed_blocks": []},
        {"stage": 3, "removed": {"heads": 0, "channels": 0}, "log": log, "removed_blocks": []},
    ]  # fmt: skip
    curves.draw(stages, {"loss": ("loss", "black", "-")}, "stages", Path("b"))
    texts = [text.get_text().strip() for text in figures[1].axes[0].texts]
    assert texts == ["−L1+L2.attention", "−3 heads", "nothing removed"]
