"""ATHENA and distillation on a CUDA device: what they give, and that they end. All are skipped without one."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device

from lmeval_prune import load_pretrained, map_model
from lmeval_prune.athena import checkpoint, training
from lmeval_prune.athena.model import Athena
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.athena.solving import solve
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.distillation.trainer import DistillTrainer
from lmeval_prune.training.trainer import ResumableTrainer
from tests.athena_hosts import data_folder, document, encoder_folder, examples, host
from tests.conftest import ROOT
from tests.test_athena import collated, encoded
from tests.test_athena_training import losses
from tests.test_distillation import STILL, athena, dense, language  # noqa: F401 - fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("no_pictures"),
]
DEVICE = "cuda"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Athena:
    encoder = encoder_folder(tmp_path_factory.mktemp("encoders") / "tiny-bert")
    return host(encoder, constants=("1", "157/50"), steps=5, max_kept=14)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Record where losses are computed."""
    types: set[str] = set()

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
            types.update(tensor.device.type for tensor in (inputs["labels"], *model.parameters()))
            return original(self, model, inputs, *args, **named)

        return compute_loss

    for kind in (ResumableTrainer, DistillTrainer):
        monkeypatch.setattr(kind, "compute_loss", noted(kind.compute_loss))
    return types


def test_athena_gives_what_it_gives_on_a_cpu(model: Athena) -> None:
    inputs, there = collated(model, examples(model)), copy.deepcopy(model).to(DEVICE)
    with torch.no_grad():
        expected, actual = model(**inputs), there(**send_to_device(inputs, DEVICE))
    for name in ("reason", "answer"):
        torch.testing.assert_close(actual[name].cpu(), expected[name], rtol=0, atol=1e-9)


def test_its_search_ends_with_the_same_answers(model: Athena) -> None:
    expected, actual = solve(model, encoded(model)), solve(copy.deepcopy(model).to(DEVICE), encoded(model))
    assert [(step.thought, step.kept) for step in actual] == [(step.thought, step.kept) for step in expected]
    assert [step.logit for step in actual] == pytest.approx([step.logit for step in expected], abs=1e-9)


def test_athena_is_trained_as_on_a_cpu(tmp_path: Path, devices: set[str]) -> None:
    """The other one by a process that sees no device."""
    options = TrainOptions(
        output=str(tmp_path / "there"),
        encoder=str(encoder_folder(tmp_path / "encoder", dtype=torch.float32, **STILL)),
        data_dir=str(data_folder(tmp_path / "data")),
        validation=0.2,
        epochs=1,
        batch=4,
        dropout=0.0,
        seed=1,
    )
    script = (
        "import json, sys\n"
        "from lmeval_prune.athena import training\n"
        "from lmeval_prune.athena.options import TrainOptions\n"
        "training.train(TrainOptions(**json.loads(sys.argv[1])))\n"
    )
    reference = replace(options, output=str(tmp_path / "here"))
    subprocess.run(
        [sys.executable, "-c", script, json.dumps(asdict(reference))],
        check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "CUDA_VISIBLE_DEVICES": ""}, timeout=300,
    )  # fmt: skip
    training.train(options)
    assert devices == {DEVICE}
    expected, actual = ({k: v for k, v in losses(run.output) if "loss" in k} for run in (reference, options))
    assert actual == pytest.approx(expected, abs=1e-4)
    assert actual.keys() == {"loss", "eval_loss"}


def test_two_stages_of_athena(athena: DistillOptions, devices: set[str]) -> None:  # noqa: F811
    note = distill(replace(athena, epochs=1))
    assert devices == {DEVICE}
    assert [stage["removed"]["heads"] for stage in note["stages"]] == [2, 2]
    left = map_model(checkpoint.read(athena.output).encoder).attention
    assert [layer.heads for layer in left] == [len(heads) for heads in note["stages"][-1]["heads"].values()]


def test_two_stages_of_a_language_model(language: DistillOptions, devices: set[str]) -> None:  # noqa: F811
    note = distill(replace(language, stages=2, pruning={"unit": "group"}))
    assert devices == {DEVICE}
    assert [stage["removed"]["heads"] for stage in note["stages"]] == [2, 2]
    left = map_model(load_pretrained(language.output)).attention
    assert [layer.heads for layer in left] == [len(heads) for heads in note["stages"][-1]["heads"].values()]


def test_lm_eval_asks_it_there(model: Athena, tmp_path: Path) -> None:
    from lmeval_prune.models.athena import AthenaLM

    checkpoint.write(model, tmp_path / "host")
    instances: list[Any] = [SimpleNamespace(doc=document(number), task_name="own") for number in range(7)]
    for heads in ({}, {"heads": "L0H0-2+L1H1-3"}):
        here, there = (AthenaLM(str(tmp_path / "host"), device=device, **heads) for device in ("cpu", DEVICE))
        assert there.host.device.type == DEVICE
        assert there.generate_until(instances) == here.generate_until(instances)
