"""The packages of docs/examples, installed as a reader would install them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmeval_prune import Plan
from lmeval_prune.cli import main
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.sprint.options import ROUTERS, FitOptions
from lmeval_prune.sprint.router import Router, fit_embeddings
from tests.test_registry import forget
from tests.test_sprint import POOL, world

EXAMPLES = Path(__file__).resolve().parents[1] / "docs/examples"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def install(name: str) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(tmp_path)]
        subprocess.run([*pip, str(EXAMPLES / name)], check=True, capture_output=True)
        monkeypatch.syspath_prepend(str(tmp_path))
        forget(PRUNERS)
        forget(ROUTERS)

    yield install
    monkeypatch.undo()
    forget(PRUNERS)
    forget(ROUTERS)


def test_a_pruner_of_a_package(install, tiny_folder: Path, tmp_path: Path) -> None:
    install("pruner")
    (tmp_path / "text.txt").write_text("Bees make honey. Sheep give wool. " * 40, encoding="utf-8")
    words = ["--ratio", "0.3", "--text", str(tmp_path / "text.txt"), "--windows", "4", "--tokens", "16"]
    command = ["prune", "--pretrained", str(tiny_folder), "--method", "largest_inputs", "--options", "power=4"]
    assert main([*command, *words, "--output", str(tmp_path / "plan.json")]) == 0
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.provenance["power"] == 4.0 and plan.heads and plan.channels


def test_a_router_of_a_package(install, tmp_path: Path) -> None:
    install("router")
    fit_embeddings(*world(200, 1), POOL[:6], "none", FitOptions(router="ridge")).save(tmp_path / "router")
    x, z = world(300, 2)
    first = torch.tensor([order[0] for order in Router.load(tmp_path / "router").ranking(x)])
    assert z.gather(1, first[:, None]).mean() > z.mean(0).max() + 0.1  # better than the best column for all
