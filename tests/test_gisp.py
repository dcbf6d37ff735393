"""GISP: scores and the joint ranking against literal loops in float64; which tokens count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lmeval_prune import map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import Part, parts_of
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.pruners.taylor import Gisp, gradients, projections_of
from tests.test_pruners import text_of
from tests.tiny_models import tiny

PAIRS = [([3, 9, 4], [7, 8, 2]), ([5], [6, 11, 13, 2]), ([12, 3, 3, 8, 10], [2])]  # prompts and answers


def literal_gradients(model: Any, pairs: Any, prompts_count: bool) -> dict[str, torch.Tensor]:
    """Compute gradients of the mean loss, token by token; of each text by itself, without padding."""
    losses = []
    for prompt, answer in pairs:
        ids = [*prompt, *answer]
        logits = model(torch.tensor([ids])).logits[0]
        for position in range(1, len(ids)):
            if prompts_count or position >= len(prompt):
                row = logits[position - 1]
                losses.append(row.exp().sum().log() - row[ids[position]])
    model.zero_grad()
    (sum(losses) / len(losses)).backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return grads


def literal_scores(model: Any, grads: dict[str, torch.Tensor], normalize: str) -> dict[str, list[float]]:
    """Sum |w·g| weight by weight of a llama with 4 heads of 8 columns, 2 keys and values, and 48 channels."""
    parameters = dict(model.named_parameters())
    scores: dict[str, list[float]] = {}

    def terms(name: str, rows: range | None = None, columns: range | None = None) -> list[float]:
        weight, grad = parameters[name].detach(), grads[name]
        return [
            abs(float(weight[i, j]) * float(grad[i, j]))
            for i in rows or range(weight.shape[0])
            for j in columns or range(weight.shape[1])
        ]

    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        heads, channels = [], []
        for head in range(4):
            head_rows, shared = range(8 * head, 8 * head + 8), range(8 * (head // 2), 8 * (head // 2) + 8)
            own = terms(f"{attention}.q_proj.weight", head_rows) + terms(f"{attention}.o_proj.weight", None, head_rows)
            half = terms(f"{attention}.k_proj.weight", shared) + terms(f"{attention}.v_proj.weight", shared)
            size = {"size": len(own) + len(half) / 2, "released": 4 * 8 * 32, "none": 1}[normalize]
            heads.append((math.fsum(own) + math.fsum(half) / 2) / size)
        for channel in range(48):
            channel_row = range(channel, channel + 1)
            own = terms(f"{mlp}.gate_proj.weight", channel_row) + terms(f"{mlp}.up_proj.weight", channel_row)
            own += terms(f"{mlp}.down_proj.weight", None, channel_row)
            channels.append(math.fsum(own) / {"size": len(own), "released": 3 * 48, "none": 1}[normalize])
        scores |= {f"heads.L{layer}": heads, f"channels.L{layer}": channels}
    return scores


@pytest.mark.parametrize("normalize", ["size", "released", "none"])
@pytest.mark.parametrize("prompts_count", [True, False])
def test_gisp_scores_are_those_of_a_loop_over_weights(normalize: str, prompts_count: bool) -> None:
    model = tiny("llama")
    model_map = map_model(model)
    text = CalibrationText.from_answers("test", PAIRS, 2, prompts_count)
    actual = make_pruner("gisp", {"normalize": normalize}).scores(model_map, text, parts_of(model_map), {}).values
    expected = literal_scores(model, literal_gradients(model, PAIRS, prompts_count), normalize)
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        # norms compute in float32
        torch.testing.assert_close(actual[key], torch.tensor(values).double(), rtol=2e-5, atol=1e-12, msg=key)


def test_gradients_of_answers_do_not_depend_on_batches_and_padding() -> None:
    model_map = map_model(tiny("llama"))
    projections = projections_of(parts_of(model_map))
    results = []
    for batch in (1, 2, 3):
        text = CalibrationText.from_answers("test", PAIRS, batch, prompts_count=False)
        results.append(gradients(model_map, text, projections))
        assert text.tokens == sum(len(answer) for _, answer in PAIRS)
    for result in results[1:]:
        for module in projections:
            torch.testing.assert_close(result[module], results[0][module], rtol=1e-4, atol=1e-9)


def ranked(model_map: ModelMap, scores: dict[str, Any], ratio: float) -> tuple[set[str], dict[str, set[int]]]:
    """Remove groups of heads and channels, lowest mean score first, until the parameters are nearest to the ratio."""
    units = []
    for part in parts_of(model_map):
        size, cost = (2, part.cost("group")) if part.kind == "heads" else (1, part.cost("head"))
        own = [
            (sum(map(float, scores[part.key][start : start + size])) / size, part, range(start, start + size), cost)
            for start in range(0, part.size, size)
        ]
        units += sorted(own, key=lambda unit: unit[0])[:-1]  # the last unit of a layer stays
    units.sort(key=lambda unit: unit[0])
    due = ratio * sum(
        part.cost("group") * (part.size // (2 if part.kind == "heads" else 1)) for part in parts_of(model_map)
    )
    sums = [sum(unit[3] for unit in units[:count]) for count in range(len(units) + 1)]
    count = min(range(len(sums)), key=lambda number: abs(sums[number] - due))
    heads, channels = set[str](), dict[str, set[int]]()
    for _, part, members, _ in units[:count]:
        if part.kind == "heads":
            heads |= {f"{part.label}H{member}" for member in members}
        else:
            channels.setdefault(part.label, set()).update(members)
    return heads, channels


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_gisp_ranks_heads_and_channels_of_all_layers_together(ratio: float) -> None:
    model_map, text = map_model(tiny("llama", num_hidden_layers=4)), text_of()
    pruner = make_pruner("gisp", {})
    (plan,) = stages(pruner, model_map, PruneOptions(ratio), text)
    heads, channels = ranked(model_map, pruner.scores(model_map, text, parts_of(model_map), {}).values, ratio)
    assert plan.provenance["options"]["allocation"] == "joint" and channels
    assert {*plan.heads} == heads
    assert {label: {*plan.channels[label].numbers} for label in plan.channels} == channels


def test_a_size_is_the_number_of_parameters_that_surgery_removes() -> None:
    """Without biases; so joint ranks by what a parameter is worth."""
    model_map, text = map_model(tiny("llama")), text_of()
    parts = parts_of(model_map)
    sums, scores = (Gisp(normalize=x).scores(model_map, text, parts, {}).values for x in ("none", "size"))
    for part in parts:
        sizes = (sums[part.key] / scores[part.key])[: 2 if part.kind == "heads" else 1]
        assert float(sizes.sum()) == pytest.approx(part.cost("group"))


@pytest.mark.parametrize("name", ["flap", "norm_entropy", "confidence", "slimgpt", "wanda_sp"])
def test_statistics_are_those_of_the_tokens_that_count(name: str) -> None:
    """Other tokens are read, too: the statistics of an answer are those in the presence of its prompt."""
    model_map = map_model(tiny("llama"))
    pruner = make_pruner(name, {})
    parts = parts_of(model_map, pruner.kinds)

    def scores(prompts_count: bool, batch: int = 2) -> dict[str, torch.Tensor]:
        text = CalibrationText.from_answers("test", PAIRS, batch, prompts_count)
        return pruner.scores(model_map, text, parts, {}).values

    every, answers = scores(True), scores(False)
    assert all(not torch.allclose(every[key], answers[key]) for key in every)
    for key, values in scores(False, batch=1).items():
        torch.testing.assert_close(values, answers[key])


def test_moments_of_answers_by_hand() -> None:
    """Mean square of the inputs of a projection over the positions of answers."""
    model = tiny("llama")
    block = map_model(model).feed_forward[1]
    recorded: list[torch.Tensor] = []
    handle = block.down.register_forward_pre_hook(lambda _, args: recorded.append(args[0][0]))
    for prompt, answer in PAIRS:
        with torch.no_grad():
            model(torch.tensor([[*prompt, *answer]]))
    handle.remove()
    rows = torch.cat([x[len(prompt) :] for x, (prompt, _) in zip(recorded, PAIRS, strict=True)])
    text = CalibrationText.from_answers("test", PAIRS, 2, prompts_count=False)
    actual = make_pruner("flap", {}).scores(map_model(model), text, [Part(block)], {}).values
    expected = rows.var(0, correction=0) * block.down.weight.detach().square().sum(0)
    torch.testing.assert_close(actual["channels.L1"], expected)
