"""Baseline pruners in float64: scores and compensations against literal references, budgets, layer by layer, resume."""

from __future__ import annotations

import copy
import math
import random
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lmeval_prune import Plan, map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.cli import main
from lmeval_prune.interventions.base import change_input
from lmeval_prune.pruners.allocation import UnitPool, allocate, removed_by, standardised, unit_pools
from lmeval_prune.pruners.base import Pruner, make_pruner
from lmeval_prune.pruners.baselines import RandomScores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.flap import Flap
from lmeval_prune.pruners.moments import Moments, ReferenceFluctuation, damped, input_moments, least_squares_for
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import Part, parts_of
from lmeval_prune.pruners.schedule import resolve_options, stages
from lmeval_prune.pruners.sequential import LayerwisePruning, Removal
from lmeval_prune.pruners.slimgpt import SlimGpt, WandaSp, eliminated
from lmeval_prune.pruners.taylor import gradients, projections_of, structure_sums
from lmeval_prune.surgery.cut import cut
from tests.test_pruners import text_of
from tests.tiny_models import output, tiny, tokens

BASELINES = ("flap", "wanda_sp", "slimgpt", "llm_pruner", "gisp", "magnitude", "random", "norm_entropy")
FAMILIES = ("llama", "qwen2", "phi3", "gpt2", "gpt_neox", "gemma3_text")  # groups, biases, fused, transposed, tied
CONFIDENT = ("confidence", "heads")


def plan_by(
    name: str, model_map: ModelMap, text: CalibrationText | None, method_options: Any = None, **settings: Any
) -> Plan:
    options = PruneOptions(**{"ratio": 0.3, "budget": "parameters", **settings})
    (plan,) = stages(make_pruner(name, method_options or {}), model_map, options, text)
    return plan


def whole(rows: int = 6, length: int = 11, batch: int = 4, seed: int = 1) -> CalibrationText:
    """Return windows without padding, with enough tokens for every column."""
    return CalibrationText.from_windows("whole", tokens(rows, length, seed), batch)


def scored(pruner: Pruner, model_map: ModelMap, text: CalibrationText) -> dict[str, torch.Tensor]:
    """Score heads and channels, by part."""
    return pruner.scores(model_map, text, parts_of(model_map), {}).values


def inputs_of(model_map: ModelMap, text: CalibrationText) -> dict[str, torch.Tensor]:
    """Return the inputs of projections, (tokens, columns)."""
    named = {f"{x.label}.o_proj": x.o_proj for x in model_map.attention}
    named |= {f"{x.label}.down": x.down for x in model_map.feed_forward}
    actual: dict[str, list[torch.Tensor]] = {name: [] for name in named}
    real = torch.ones(0)

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        actual[name].append(x.flatten(0, -2)[real.flatten().bool()].clone())
        return x

    with ExitStack() as stack:
        for name, module in named.items():
            change_input(module, partial(keep, name), stack)
        for _, _, real in text.run(model_map.model):  # noqa: B007 - read by the hooks
            pass
    return {name: torch.cat(value) for name, value in actual.items()}


# --------------------------------------------------------------------------- moments


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart"])
def test_moments_are_those_of_two_passes(family: str) -> None:
    """On padded text, and for values far from zero, where a sum of squares would lose digits."""
    model_map = map_model(tiny(family))
    inputs = inputs_of(model_map, text_of())
    parts = parts_of(model_map)
    for name, value in zip(
        [p.projection_name for p in parts], input_moments(model_map, text_of(), parts).values(), strict=True
    ):
        mean = inputs[name].sum(0) / len(inputs[name])
        variance = (inputs[name] - mean).square().sum(0) / len(inputs[name])
        torch.testing.assert_close(value.mean, mean, rtol=0, atol=1e-13)
        torch.testing.assert_close(value.variance, variance, rtol=1e-11, atol=1e-15)
        torch.testing.assert_close(value.mean_square, inputs[name].square().mean(0), rtol=1e-11, atol=1e-15)
    x = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
    far = Moments(3, products=True)
    for part in x.split([1, 0, 20, 29]):
        far.add(part)
    torch.testing.assert_close(far.variance, x.var(0, correction=0), rtol=1e-8, atol=0)
    torch.testing.assert_close(far.second, x.T @ x / 50)
    reference = ReferenceFluctuation(3)
    for part in x.split(10):
        reference.add(part)
    torch.testing.assert_close(reference.variance, far.variance)
    torch.testing.assert_close(reference.mean_square, x.square().mean(0))
    assert (reference.fluctuation > 2 * reference.variance).all()


# --------------------------------------------------------------------------- scores


def test_flap_scores_are_variance_times_squared_norms() -> None:
    model_map, text = map_model(tiny("llama")), text_of()
    inputs = inputs_of(model_map, text)
    layer, block = model_map.attention[1], model_map.feed_forward[0]
    scores = scored(Flap(), model_map, text)
    for weight, x, actual in (
        (layer.o_proj.weight.data, inputs["L1.o_proj"], scores["heads.L1"].flatten()),
        (block.down.weight.data, inputs["L0.down"], scores["channels.L0"]),
    ):
        torch.testing.assert_close(actual, x.var(0, correction=0) * (weight**2).sum(0))


def test_flap_reference_scores_as_its_code_does() -> None:
    """1/(N−1) · Σ k/(k+1) · Σ_t (x − m_k)², m_k the mean of windows 0 … k; attention's scores squared."""
    model_map, text = map_model(tiny("llama")), whole(batch=4)
    x = inputs_of(model_map, text)["L0.o_proj"].view(6, 11, -1)
    fluctuation = torch.zeros(x.shape[-1], dtype=torch.float64)
    for k in range(1, 6):
        fluctuation += k / (k + 1) * (x[k] - x[: k + 1].flatten(0, 1).mean(0)).square().sum(0) / 5
    weight = model_map.attention[0].o_proj.weight.data
    expected = (fluctuation * weight.square().sum(0)).square()
    actual = scored(Flap(reference=True), model_map, text)
    torch.testing.assert_close(actual["heads.L0"].flatten(), expected)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_flap_reference_removes_what_its_code_removes(ratio: float, kv_heads: int) -> None:
    """Its allocation written out with its own calls; with grouped queries a unit is a group, which counts 170, too.

    Deviations are those of a sample, and what has the threshold itself goes.
    """
    changes = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 700, "num_hidden_layers": 4}
    model_map, text = map_model(tiny("llama", num_key_value_heads=2 * kv_heads, **changes)), whole(rows=8, length=20)
    scores = scored(Flap(reference=True), model_map, text)
    attention = torch.stack([scores[f"heads.L{n}"].flatten() for n in range(4)])
    mlp = torch.stack([scores[f"channels.L{n}"] for n in range(4)])
    attention, mlp = ((x - x.mean(1, keepdim=True)) / torch.std(x, 1, keepdim=True) for x in (attention, mlp))
    attention = attention.reshape(4, 2 * kv_heads, -1).mean(2)
    ranked, indices = torch.sort(torch.cat([attention.flatten(), mlp.flatten()]), descending=True)
    weights = torch.ones_like(indices)
    weights[indices < attention.numel()] = int(512.0 / 3)
    threshold = ranked[torch.argmin(torch.abs(weights.cumsum(0) - weights.sum() * (1 - ratio)))]
    plan = plan_by("flap", model_map, text, {"reference": True}, ratio=ratio, allow_empty_layer=True)
    share = 8 // (2 * kv_heads)
    gone = (attention <= threshold).nonzero().tolist()
    assert {*plan.heads} == {f"L{row}H{share * unit + n}" for row, unit in gone for n in range(share)} != set()
    for row, value in enumerate(mlp):
        assert plan.channels[f"L{row}"].numbers == (value <= threshold).nonzero().flatten().tolist()


def test_flap_reference_in_steps_removes_no_more_than_the_target() -> None:
    """A step whose target earlier ones have reached removes nothing, also if nothing is left."""
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    options = PruneOptions(0.06, allocation="flap_reference", parts="heads", unit="group", allow_empty_layer=True)
    (plan,) = stages(make_pruner("random", {}), model_map, options)
    *_, last = stages(make_pruner("random", {}), model_map, replace(options, steps=4))
    assert len(plan.heads) == 2 and last.heads == plan.heads
    *_, plan = stages(make_pruner("random", {}), model_map, replace(options, ratio=0.99, steps=4))
    assert plan.provenance["parameters"]["removed"] == plan.provenance["parameters"]["removable"]


def test_wanda_sp_sees_layers_that_are_pruned_already() -> None:
    """Layer 1's scores are those of a model whose first layer has lost its heads and channels."""
    model, text = tiny("llama", num_key_value_heads=4), whole()
    model_map = map_model(model)
    plan = plan_by("wanda_sp", model_map, text)
    first = Plan([x for x in plan.heads if x.startswith("L0")], {"L0": plan.channels["L0"]})
    with first.applied_to(model):
        x = inputs_of(model_map, text)
    weight = weight_of(model_map.attention[1].o_proj)
    scores = (weight.abs().mean(0) * x["L1.o_proj"].square().mean(0).sqrt()).view(4, -1).sum(1)
    gone = {int(name.partition("H")[2]) for name in plan.heads if name.startswith("L1")}
    assert gone == {*scores.argsort()[: len(gone)].tolist()}
    weight = weight_of(model_map.feed_forward[1].down)
    scores = weight.abs().mean(0) * x["L1.down"].square().mean(0).sqrt()
    lost = plan.channels["L1"].numbers
    assert {*lost} == {*scores.argsort()[: len(lost)].tolist()} and len(lost) in (14, 15)


def loss(model: Any, text: CalibrationText) -> float:
    """Mean next-token loss."""
    total, count = 0.0, 0
    for ids, real, _ in text.batches:
        with torch.no_grad():
            logits = model(ids, attention_mask=real).logits.log_softmax(-1)
        for row, mask in zip(range(len(ids)), real.bool(), strict=True):
            for position in range(1, ids.shape[1]):
                if mask[position] and mask[position - 1]:
                    total -= float(logits[row, position - 1, ids[row, position]])
                    count += 1
    return total / count


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "qwen2"])
def test_taylor_scores_are_finite_differences(family: str) -> None:
    """The signed sum over a group's or channel's weights is the slope of the loss as they are scaled together."""
    model, text = tiny(family), text_of(rows=4)
    model_map = map_model(model)
    parts = parts_of(model_map)
    first = gradients(model_map, text, projections_of(parts))
    terms = {module: weight_of(module) * value for module, value in first.items()}
    more, less = (structure_sums(parts, lambda m, by=by: (by * terms[m]).clamp(min=0)) for by in (1, -1))
    sums = {key: more[key] - less[key] for key in more}
    layer, block = model_map.attention[1], model_map.feed_forward[0]
    share = layer.heads // layer.kv_heads

    def scaled(by: float, group: int | None, channel: int) -> float:
        smaller = copy.deepcopy(model)
        mapped = map_model(smaller)
        if group is None:
            own = mapped.feed_forward[0]
            weight_of(own.down)[:, channel] *= by
            rows = [own.rows(part, channel) for part in own.parts]
        else:
            own = mapped.attention[1]
            heads = range(group * share, (group + 1) * share)
            for head in heads:
                weight_of(own.o_proj)[:, own.columns(head)] *= by
            rows = [*(own.rows("q", head) for head in heads), own.rows("k", group), own.rows("v", group)]
        for span in rows:
            weight_of(span.module)[span.start : span.stop] *= by
        return loss(smaller, text)

    step = 2e-3  # norms compute in float32
    for group in range(layer.kv_heads):
        slope = (scaled(1 + step, group, 0) - scaled(1 - step, group, 0)) / (2 * step)
        actual = float(sums["heads.L1"][group * share : (group + 1) * share].sum())
        assert actual == pytest.approx(slope, rel=1e-3, abs=2e-4)
    for channel in (0, 17):
        slope = (scaled(1 + step, None, channel) - scaled(1 - step, None, channel)) / (2 * step)
        assert float(sums["channels.L0"][channel]) == pytest.approx(slope, rel=1e-3, abs=2e-4)
    assert block.channels and all(not p.requires_grad or p.grad is None for p in model.parameters())


# --------------------------------------------------------------------------- compensation


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Correlated columns."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, dtype=torch.float64, generator=draw)
    return torch.randn(rows, columns, dtype=torch.float64, generator=draw) @ mixed


@pytest.mark.parametrize("units", ["heads", "channels"])
@pytest.mark.parametrize("error", ["exact", "diagonal"])
def test_slimgpt_kept_weights_are_one_least_squares_solve(units: str, error: str) -> None:
    """The order of the greedy removal does not matter, and its errors sum to the residual."""
    x, weight = drawn(60, 12), drawn(5, 12, seed=1)
    second = x.T @ x / len(x)
    members = [tuple(range(h, h + 3)) for h in range(0, 12, 3)] if units == "heads" else [(c,) for c in range(12)]
    pruner = SlimGpt(error, step=1)
    chosen = pruner.select(weight.clone(), Moments(12), second, members, 2)
    assert len({*chosen}) == 2
    updated, inverse, errors = weight.clone(), torch.linalg.inv(second), []
    for unit in chosen:
        errors += SlimGpt()._errors(updated, inverse, [members[unit]]).tolist()
        updated, inverse = eliminated(updated, inverse, list(members[unit]))
    gone = [column for unit in chosen for column in members[unit]]
    kept = [column for column in range(12) if column not in gone]
    solved = torch.linalg.lstsq(x[:, kept], x @ weight.T).solution.T
    torch.testing.assert_close(updated[:, kept], solved, rtol=1e-8, atol=1e-9)
    actual = least_squares_for(weight, second, gone)
    torch.testing.assert_close(actual[:, kept], solved, rtol=1e-8, atol=1e-9)
    assert not actual[:, gone].any()
    residual = (x @ weight.T - x[:, kept] @ solved.T).square().sum(1).mean()
    assert sum(errors) == pytest.approx(float(residual), rel=1e-9)


def test_slimgpt_takes_the_unit_that_costs_least_each_time() -> None:
    """Compared with solving for every remaining unit; ranking by first errors selects others."""
    differs = 0
    for seed in range(6):
        x, weight = drawn(60, 12, seed), drawn(5, 12, seed=seed + 50)
        second, members = x.T @ x / len(x), [tuple(range(h, h + 2)) for h in range(0, 12, 2)]
        left, gone = list(range(6)), list[int]()
        for _ in range(3):
            costs = {}
            for unit in left:
                columns = [c for u in (*gone, unit) for c in members[u]]
                apart = weight - least_squares_for(weight, second, columns)
                costs[unit] = float((apart @ second @ apart.T).trace())
            gone.append(min(costs, key=costs.__getitem__))
            left.remove(gone[-1])
        assert SlimGpt().select(weight, Moments(12), second, members, 3) == gone
        first = SlimGpt().unit_scores(weight, Moments(12), second, members).argsort()[:3].tolist()
        differs += {*first} != {*gone}
    assert differs


def test_slimgpt_solves_on_what_layers_before_left() -> None:
    """The second layer's weights solve least squares on inputs after the pruned and updated first layer."""
    model, text = tiny("llama", num_key_value_heads=4), whole(rows=16, length=20)
    model_map = map_model(model)
    plan = plan_by("slimgpt", model_map, text, allocation="uniform", damping=0.0)
    first = {name: value for name, value in plan.compensation.items() if name.startswith("L0")}
    before = Plan([x for x in plan.heads if x.startswith("L0")], {"L0": plan.channels["L0"]}, compensation=first)
    with before.applied_to(model):
        x = inputs_of(model_map, text)["L1.o_proj"]
    layer = model_map.attention[1]
    gone = [c for name in plan.heads if name.startswith("L1") for c in range(32)[layer.columns(int(name[3:]))]]
    kept = [column for column in range(32) if column not in gone]
    weight = layer.o_proj.weight.data
    solved = torch.linalg.lstsq(x[:, kept], x @ weight.T).solution.T
    assert gone and len(kept) < 32
    torch.testing.assert_close(plan.compensation["L1.o_proj.weight"][:, kept], solved, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["least_squares", "bias"])
def test_wanda_sp_makes_up_for_what_the_down_projection_reads_by_then(kind: str) -> None:
    """The down projection is compensated with inputs after its layer's heads are removed and compensated."""
    model, text = tiny("llama"), whole(rows=16, length=20)
    model_map, damping = map_model(model), {"damping": 0.0} if kind == "least_squares" else {}
    plan = plan_by("wanda_sp", model_map, text, compensation=kind, ratio=0.4, **damping)
    plain = plan_by("wanda_sp", model_map, text, ratio=0.4)
    assert plan.channels["L0"] == plain.channels["L0"]
    own = {name: value for name, value in plan.compensation.items() if name.startswith("L0.o_proj")}
    heads = [name for name in plan.heads if name.startswith("L0")]
    assert heads and own
    with Plan(heads, compensation=own).applied_to(model):
        x = inputs_of(model_map, text)["L0.down"]
    gone, weight = plan.channels["L0"].numbers, weight_of(model_map.feed_forward[0].down)
    kept = [column for column in range(48) if column not in gone]
    if kind == "bias":
        expected = weight[:, gone] @ x.mean(0)[gone]
        torch.testing.assert_close(plan.compensation["L0.down.bias"], expected, rtol=1e-9, atol=1e-12)
    else:
        solved = torch.linalg.lstsq(x[:, kept], x @ weight.T).solution.T
        torch.testing.assert_close(plan.compensation["L0.down.weight"][:, kept], solved, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "t5"])
@pytest.mark.parametrize("name", ["flap", "random"])
def test_a_bias_keeps_the_mean_of_what_a_module_gives(name: str, family: str) -> None:
    """For the inputs of the unpruned model on the calibration text; existing biases stay."""
    model, text = tiny(family), text_of()
    model_map = map_model(model)
    plan = plan_by(name, model_map, text, compensation="bias", allow_empty_layer=family == "t5")
    inputs = inputs_of(model_map, text)
    lost = {layer.label: heads for layer, heads in plan.heads_by_layer(model_map)}
    names = set()
    for layer in model_map.attention:
        if layer.label in lost:
            columns = [c for head in lost[layer.label] for c in range(64)[layer.columns(head)]]
            names.add((f"{layer.label}.o_proj", layer.o_proj, tuple(columns)))
    for block, numbers in plan.channels_by_layer(model_map):
        names.add((f"{block.label}.down", block.down, tuple(numbers)))
    assert {f"{name}.bias" for name, *_ in names} == {*plan.compensation} != set()
    for projection, module, columns in names:
        dense = module(inputs[projection]).mean(0)
        masked = inputs[projection].clone()
        masked[:, columns] = 0
        pruned = module(masked).mean(0)
        torch.testing.assert_close(pruned + plan.compensation[f"{projection}.bias"], dense, rtol=0, atol=1e-11)
        assert (pruned - dense).abs().max() > 1e-6


def test_least_squares_make_up_for_all_steps_after_the_last_one() -> None:
    """Later steps score the original weights; the solution is that of one step that removes the same."""
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), whole()
    options = PruneOptions(0.4, compensation="least_squares")
    (at_once,) = stages(RandomScores(), model_map, options, text)
    first, second = stages(RandomScores(), model_map, replace(options, steps=2), text)
    assert not first.compensation and at_once.compensation
    assert {*first.heads} < {*second.heads} and (second.heads, second.channels) == (at_once.heads, at_once.channels)
    assert second.compensation.keys() == at_once.compensation.keys()
    for name, value in at_once.compensation.items():
        torch.testing.assert_close(second.compensation[name], value)


def test_a_covariance_that_is_not_positive_definite_is_damped_more_and_more() -> None:
    """With fewer tokens than columns."""
    x = drawn(4, 12)
    second = x.T @ x / 4
    actual, damping = damped(second, 0.0)
    assert damping > 0 and torch.linalg.cholesky_ex(actual)[1] == 0
    assert damped(second, 0.01)[1] == 0.01
    (plan,) = stages(SlimGpt(), map_model(tiny("llama")), PruneOptions(0.3, damping=0.0), whole(rows=1, length=8))
    assert plan.provenance["damping"]


# --------------------------------------------------------------------------- allocation


def compared(scores: Any, removed: Any = None) -> Any:
    return standardised(scores, removed or {}, "standardised")


def counts_of(pools: list[UnitPool], ratio: float, allocation: str, log_start: float = 0.3125) -> list[int]:
    return allocate(pools, PruneOptions(log_start=log_start), ratio, allocation)


def test_standardised_scores_have_mean_0_and_deviation_1() -> None:
    model_map = map_model(tiny("llama"))
    for value in compared(scored(Flap(), model_map, text_of())).values():
        assert float(value.mean()) == pytest.approx(0, abs=1e-12)
        assert float(value.std(correction=0)) == pytest.approx(1, rel=1e-12)
    without = compared({"heads.L0": torch.tensor([1.0, 2.0, 3.0, 99.0])}, {"heads.L0": {3}})["heads.L0"][:3]
    assert float(without.mean()) == pytest.approx(0) and float(without.std(correction=0)) == pytest.approx(1)
    assert compared({"heads.L0": torch.ones(3)})["heads.L0"].tolist() == [0, 0, 0]


def random_pools(draw: random.Random) -> list[UnitPool]:
    """Return pools of layers of different sizes, some without channels."""
    actual = []
    for number in range(draw.randint(3, 12)):
        for kind, most, cost in (("heads", 12, draw.randint(500, 3000)), ("channels", 200, draw.randint(20, 60))):
            if kind == "channels" and draw.random() < 0.2:
                continue
            size = draw.randint(4, most)
            scores = torch.tensor(sorted(draw.random() for _ in range(size)), dtype=torch.float64)
            actual.append(UnitPool(f"{kind}.L{number}", [(position,) for position in range(size)], scores, cost))
    return actual


@pytest.mark.parametrize("allocation", ["uniform", "global", "standardised", "log"])
def test_budgets_are_hit_within_one_unit(allocation: str) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        pools, ratio = random_pools(draw), draw.uniform(0.05, 0.35 if allocation == "log" else 0.6)
        counts = counts_of(pools, ratio, allocation, 0.3125)
        expected = ratio * sum(pool.size * pool.cost for pool in pools)
        removed = sum(count * pool.cost for pool, count in zip(pools, counts, strict=True))
        assert abs(removed - expected) <= max(pool.cost for pool in pools), seed
        assert all(0 <= count < pool.size for pool, count in zip(pools, counts, strict=True))


def test_log_takes_more_and_more_and_its_mean_is_the_ratio() -> None:
    """The 20% of the paper: 0.0625 in the first of 32 layers, 0.25 in the last."""
    pools = [UnitPool(f"channels.L{n}", [(c,) for c in range(10000)], torch.zeros(10000), 1.0) for n in range(32)]
    shares = [count / 10000 for count in counts_of(pools, 0.2, "log", 0.3125)]
    expected = [0.0625 + (shares[-1] - 0.0625) * math.log(n + 1) / math.log(32) for n in range(32)]
    assert shares == pytest.approx(expected, abs=2e-4) and shares[-1] == pytest.approx(0.25, abs=1e-3)
    assert sum(shares) / 32 == pytest.approx(0.2, abs=1e-4)


def test_global_compares_heads_with_heads_and_standardised_all_with_all() -> None:
    pools = [
        UnitPool("heads.L0", [(0,), (1,)], torch.tensor([0.1, 0.9]).double(), 10.0),
        UnitPool("channels.L0", [(c,) for c in range(10)], torch.arange(10).double() / 10 + 0.2, 1.0),
        UnitPool("heads.L1", [(1,), (0,)], torch.tensor([0.5, 0.6]).double(), 10.0),
        UnitPool("channels.L1", [(c,) for c in range(10)], torch.arange(10).double() / 10 + 2, 1.0),
    ]
    assert counts_of(pools, 0.25, "global") == [1, 5, 0, 0]
    assert counts_of(pools, 0.25, "standardised") == [1, 4, 0, 0]  # 0.1, then 0.2 to 0.5; then the head of 0.5
    assert removed_by(pools, [1, 4, 0, 0], {}) == {"heads.L0": {0}, "channels.L0": {0, 1, 2, 3}}


def test_a_head_of_multi_query_attention_costs_its_query_alone() -> None:
    model = tiny("gpt_bigcode")
    model_map = map_model(model)
    plan = plan_by("magnitude", model_map, None, ratio=0.5)
    fewer = sum(x.numel() for x in model.parameters()) - sum(x.numel() for x in cut(model, plan).model.parameters())
    assert plan.heads and fewer == plan.provenance["parameters"]["removed"]


@pytest.mark.parametrize("unit", ["group", "balanced"])
def test_an_emptied_layer_counts_as_whole_in_later_steps(unit: str) -> None:
    model_map = map_model(tiny("llama", num_hidden_layers=4))
    empty = {"heads.L1": {0, 1, 2, 3}}
    scores = {f"heads.{layer.label}": torch.arange(4.0) for layer in model_map.attention}
    pools = unit_pools(model_map, PruneOptions(0.6, unit=unit), ["heads"], scores, empty)
    assert [pool.size for pool in pools] == [2, 2, 2, 2]
    options = PruneOptions(0.5, budget="parameters", unit=unit, steps=3, parts="heads", allow_empty_layer=True)
    *_, plan = stages(make_pruner("random", {"seed": 3}), model_map, options)
    assert (
        len(plan.heads) == 8
        and plan.provenance["parameters"]["removed"] * 2 == plan.provenance["parameters"]["removable"]
    )


def test_standardised_scores_rank_heads_and_channels_that_are_counted() -> None:
    """`--method flap --budget heads` ranks by distance from the layer's mean; the plan records the allocation."""
    model, text = tiny("llama", num_hidden_layers=4), text_of()
    with torch.no_grad():
        for layer, block in zip((m := map_model(model)).attention, m.feed_forward, strict=True):
            layer.o_proj.weight *= 1 + 5 * layer.index  # raw scores of later layers are all higher
            block.down.weight *= 1 + 5 * layer.index
    model_map = map_model(model)
    plan = plan_by("flap", model_map, text, budget="heads", ratio=0.5, ffn_ratio=0.3)
    assert plan.provenance["head_allocation"] == plan.provenance["ffn_allocation"] == "standardised"
    scores = {key: values for key, values in scored(Flap(), model_map, text).items() if key.startswith("channels.")}
    every = [
        (float(x), (key.removeprefix("channels."), number))
        for key, values in compared(scores).items()
        for number, x in enumerate(values)
    ]
    lowest = {name for _, name in sorted(every)[: int(0.3 * len(every))]}
    assert lowest == {(label, number) for label in plan.channels for number in plan.channels[label].numbers}
    assert len({name[:2] for name in plan.heads}) > 2
    raw = plan_by("flap", model_map, text, budget="heads", ratio=0.5, ffn_ratio=0.3, allocation="global")
    assert raw.heads != plan.heads and raw.provenance["head_allocation"] == "global"


def test_layers_that_are_spared_do_not_count() -> None:
    model_map, text = map_model(tiny("llama", num_hidden_layers=5)), text_of()
    every = plan_by("flap", model_map, text).provenance["parameters"]["removable"]
    for name in ("flap", "wanda_sp", "llm_pruner"):
        plan = plan_by(name, model_map, text, skip_first=1, skip_last=2)
        assert {x[:2] for x in plan.heads} | {*plan.channels} <= {"L1", "L2"}
        counted = plan.provenance["parameters"]
        assert counted["removable"] == every * 2 / 5
        assert abs(counted["removed"] - 0.3 * counted["removable"]) <= Part(model_map.attention[0]).cost("group")


# --------------------------------------------------------------------------- plans


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*BASELINES, CONFIDENT])
def test_every_plan_is_its_surgery(name: Any, family: str) -> None:
    """Hooks and cut model compute the same; the recorded parameter count is the number removed."""
    method, parts = (name, "both") if isinstance(name, str) else name
    model, text = tiny(family), text_of()
    model_map = map_model(model)
    before = copy.deepcopy(model.state_dict())
    plan = plan_by(method, model_map, text, parts=parts, ratio=0.4)
    again = plan_by(method, model_map, text, parts=parts, ratio=0.4)
    assert again == plan and again.identity(model_map) == plan.identity(model_map)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert bool(plan.heads) or method in ("flap", "gisp")
    assert bool(plan.channels) == (parts == "both")
    smaller = cut(model, plan).model
    with plan.applied_to(model):
        expected = output(model, tokens())
    torch.testing.assert_close(output(smaller, tokens()), expected, rtol=0, atol=1e-9)
    assert (expected - output(model, tokens())).abs().max() > 1e-6
    added = sum(
        value.numel()
        for key, value in plan.compensation.items()
        if key.endswith("bias") and _lacks_bias(model_map, key)
    )
    fewer = sum(x.numel() for x in model.parameters()) - sum(x.numel() for x in smaller.parameters())
    assert fewer + added == plan.provenance["parameters"]["removed"]
    assert plan.provenance["calibration"]["sha256"] and plan.provenance["options"]["budget"] == "parameters"


def _lacks_bias(model_map: ModelMap, name: str) -> bool:
    label, _, part = name.removesuffix(".bias").rpartition(".")
    blocks = {"o_proj": {x.label: x.o_proj for x in model_map.attention}}
    blocks["down"] = {x.label: x.down for x in model_map.feed_forward}
    return getattr(blocks[part][label], "bias", None) is None


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "gptj", "bert", "gpt_neo"])
def test_a_layer_reads_what_it_reads_in_the_whole_model(family: str) -> None:
    """Earlier layers are stubs; with padding and several kinds of masks. No stub remains afterwards."""
    model, text = (
        tiny(family, num_layers=4, attention_types=[[["global", "local"], 2]], window_size=4)
        if (family == "gpt_neo")
        else tiny(family, **({} if family in ("gpt2", "gptj") else {"num_hidden_layers": 4})),
        text_of(),
    )
    model_map = map_model(model)
    dense, expected = output(model, tokens()), inputs_of(model_map, text)
    pruning = LayerwisePruning(model_map, text, lambda *_: set())
    for number, layer in enumerate(model_map.attention):
        moments = Moments(32 if layer.o_proj is None else expected[f"{layer.label}.o_proj"].shape[-1], products=True)
        pruning.run_layer(number, Removal(), {layer.o_proj: moments})
        x = expected[f"{layer.label}.o_proj"]
        torch.testing.assert_close(moments.second, x.T @ x / len(x), rtol=1e-9, atol=1e-12)
        pruning.run_layer(number, Removal(), {}, keep_output=True)
    assert torch.equal(output(model, tokens()), dense)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_hash_of_a_text_does_not_depend_on_batches() -> None:
    assert whole(batch=1).record() == whole(batch=4).record() != whole(batch=4, seed=2).record()


# --------------------------------------------------------------------------- the command, and mistakes


@pytest.mark.parametrize("name", ["flap", "wanda_sp", "slimgpt", "llm_pruner"])
def test_a_model_with_a_layer_of_one_group_can_be_pruned_again(name: str) -> None:
    """By the default unit, which the method has; the layer with one group of heads stays or loses half of it."""
    smaller = cut(tiny("llama", seed=3), Plan(heads="L0H0-1")).model
    assert [(layer.heads, layer.kv_heads) for layer in map_model(smaller).attention] == [(2, 1), (4, 2)]
    plan = plan_by(name, map_model(smaller), whole(), parts="heads", allocation="uniform", ratio=0.5)
    assert plan.heads and cut(smaller, plan).model


def test_scores_at_hand_are_not_mixed_with_other_settings(tiny_folder: Path, tmp_path: Path) -> None:
    """Another method is refused; each text is recorded under its purpose; means are measured."""
    for name in ("Ann", "Bob"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} has {n} apples, {n + 1} more." for n in range(60)))
    model = ["--pretrained", str(tiny_folder)]
    drawn = ["--windows", "4", "--tokens", "32", "--text"]
    first, second = ([*drawn, str(tmp_path / f"{name}.txt")] for name in ("Ann", "Bob"))

    def provenance_of(*words: str) -> dict[str, Any]:
        (tmp_path / "plan.json").unlink(missing_ok=True)
        assert main(["prune", *model, *words, "--output", str(tmp_path / "plan.json")]) == 0
        return dict(Plan.load(tmp_path / "plan.json").provenance)

    flap = str(tmp_path / "flap.json")
    assert main(["importance", *model, *first, "--method", "flap", "--channels", "--output", flap]) == 0
    about = provenance_of("--scores", flap, *second, "--ratio", "0.4")
    assert (about["calibration"]["text"], about["beside_scores"]["text"]) == ("file Ann.txt", "file Bob.txt")
    for words in (["--method", "magnitude"], ["--options", "reference=true"]):
        more = ["--ratio", "0.4", "--scores", flap, *words, "--output", str(tmp_path / "no.json")]
        assert main(["prune", *model, *more]) == 2


def test_units_are_groups_where_they_can_be_cut() -> None:
    for family, budget, unit in (
        ("llama", "parameters", "group"),
        ("llama", "heads", "head"),
        ("bloom", "parameters", "head"),
        ("gpt_bigcode", "parameters", "head"),
        ("olmo2", "parameters", "head"),
    ):
        options = resolve_options(PruneOptions(0.2, budget=budget), RandomScores(), map_model(tiny(family)))
        assert options.unit == unit
    pools = unit_pools(map_model(tiny("llama")), PruneOptions(0.2, unit="balanced"), ["heads"])
    assert [(pool.cost, pool.size) for pool in pools] == [(2 * 2 * 8 * 32, 2)] * 2


def test_a_sequential_score_is_that_of_the_dense_model() -> None:
    """As `importance` shows them: nothing is removed yet."""
    model_map, text = map_model(tiny("llama")), whole()
    x = inputs_of(model_map, text)["L1.down"]
    weight = weight_of(model_map.feed_forward[1].down)
    actual = scored(WandaSp(), model_map, text)["channels.L1"]
    torch.testing.assert_close(actual, weight.abs().mean(0) * x.square().mean(0).sqrt())
