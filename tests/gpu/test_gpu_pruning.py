"""Scores, plans, cut models, Token Filtering and Probe Pruning with the model on a GPU: what they are on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmeval_prune import Plan, TokenFilter, map_model
from lmeval_prune.cli import main
from lmeval_prune.interventions.probe_pruning import ProbePruning
from lmeval_prune.profiling.costs import counted_flops
from lmeval_prune.pruners.base import PRUNERS, make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.surgery.cut import cut
from tests.test_pruners import text_of
from tests.tiny_models import output, tiny, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # rotary embeddings are in float32, whose sines differ by device
HEADS_ONLY = "confidence"  # its channels are by another method
OPTIONS = {
    **{name: (name, {}, {}) for name in PRUNERS},
    "norm_entropy of several steps": ("norm_entropy", {}, {"steps": 2}),
    "flap as its reference": ("flap", {"reference": True}, {}),
    "flap by least squares": ("flap", {}, {"compensation": "least_squares"}),
    "magnitude with biases": ("magnitude", {}, {"compensation": "bias"}),
    "wanda_sp with biases": ("wanda_sp", {}, {"compensation": "bias"}),
}
OTHERS = ("gpt2", "gemma3_text", "gpt_neo")  # transposed weights; windows; weights that a model gives out itself
CASES = [(name, "llama") for name in OPTIONS]
CASES += [(name, family) for name in ("norm_entropy", "confidence", "slimgpt", "llm_pruner") for family in OTHERS]


def plan_of(name: str, model: nn.Module, text: CalibrationText, work: Path | None = None) -> Plan:
    method, options, more = OPTIONS[name]
    pruner, channels = make_pruner(method, options), make_pruner("magnitude", {}) if method == HEADS_ONLY else None
    *_, plan = stages(pruner, map_model(model), PruneOptions(0.5, parts="both", **more), text, channels, work=work)
    return plan


def check_alike(actual: Plan, expected: Plan) -> None:
    assert (actual.heads, actual.channels) == (expected.heads, expected.channels) and (actual.heads or actual.channels)
    for actual_tensors, expected_tensors in (
        (actual.compensation, expected.compensation),
        (actual.scores, expected.scores),
    ):
        assert actual_tensors.keys() == expected_tensors.keys() and all(
            tensor.device.type == "cpu" for tensor in actual_tensors.values()
        )
        for label, tensor in expected_tensors.items():
            torch.testing.assert_close(actual_tensors[label], tensor, **NEAR)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_plan_is_that_of_a_cpu(name: str, family: str, tmp_path: Path) -> None:
    """Made there, applied there, cut there; of windows with padding."""
    model, text, inputs = tiny(family), text_of(), tokens()
    expected = plan_of(name, model, text)
    with expected.applied_to(model):
        logits = output(model, inputs)
    model.to(DEVICE)
    actual = plan_of(name, model, text, tmp_path / "layers")
    check_alike(actual, expected)
    check_alike(plan_of(name, model, text, tmp_path / "layers"), expected)  # of what is kept of layers, where it is
    with actual.applied_to(model):
        torch.testing.assert_close(output(model, inputs.to(DEVICE)).cpu(), logits, **NEAR)
    actual.save(tmp_path / "plan.json", map_model(model))
    with Plan.load(tmp_path / "plan.json").applied_to(model):
        torch.testing.assert_close(output(model, inputs.to(DEVICE)).cpu(), logits, **NEAR)
    smaller = cut(model, actual)
    assert {parameter.device.type for parameter in smaller.model.parameters()} == {DEVICE}
    torch.testing.assert_close(output(smaller.model, inputs.to(DEVICE)).cpu(), logits, **NEAR)
    smaller.save(tmp_path / "smaller")


@pytest.mark.parametrize("options", [{}, {"focus": "uniform", "similarity": "key"}, {"state": "run"}], ids=str)
def test_a_token_filter_skips_what_it_skips_on_a_cpu(options: dict[str, Any]) -> None:
    model, inputs = tiny("llama"), tokens(length=24)
    token_filter = TokenFilter(ratio=0.3, warmup=3, **options)
    with token_filter.applied_to(model):
        expected = output(model, inputs)
    model.to(DEVICE)
    with token_filter.applied_to(model):
        torch.testing.assert_close(output(model, inputs.to(DEVICE)).cpu(), expected, **NEAR)


@pytest.mark.parametrize("planned", [False, True])
def test_probe_pruning_chooses_what_it_chooses_on_a_cpu(planned: bool) -> None:
    """In two batches, the first with padding; also where a plan takes heads and channels away."""
    model, text = tiny("llama"), text_of("left")
    probe, plan = ProbePruning(0.5, skip_first=0), Plan("L0H1", {"L1": "3-9"}) if planned else Plan()

    def logits(device: str) -> torch.Tensor:
        with plan.applied_to(model), probe.applied_to(model), torch.no_grad():
            return torch.cat([model(**inputs).logits[:, -1] for _, inputs in text.inputs(model.to(device))]).cpu()

    torch.testing.assert_close(logits("cpu"), logits(DEVICE), **NEAR)


def test_arithmetic_is_counted_there() -> None:
    model = tiny("llama")
    assert counted_flops(model, 16) == counted_flops(model.to(DEVICE), 16)


def test_the_command_plans_there_what_it_plans_on_a_cpu(tiny_folder: Path, tmp_path: Path) -> None:
    plans = []
    for device in ("cpu", DEVICE):
        path = tmp_path / f"{device}.json"
        words = ["--pretrained", str(tiny_folder), "--output", str(path), "--method", "magnitude", "--ratio", "0.25"]
        assert main(["prune", *words, "--device", device]) == 0
        plans.append(Plan.load(path))
    assert plans[0].heads == plans[1].heads != ()
