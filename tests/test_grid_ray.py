"""The grid on Ray's own local cluster of several nodes: the same cells, also when a node dies in mid-run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune import InputError
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.ray_runner import run_on_ray
from lmeval_prune.grid.run import run
from tests.conftest import ROOT
from tests.test_grid import described, outcomes

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.long


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one processor each, beside a head that does nothing."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def alone(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grids") / "alone"
    assert run(Grid.of(described(tiny_folder)), str(folder)).failed == []
    return folder


def test_a_node_that_dies_changes_nothing(tiny_folder: Path, alone: Path, tmp_path: Path, cluster: Any) -> None:
    """Killed when it has begun to answer; its job is done again by the other one."""
    with pytest.raises(InputError):
        list(run_on_ray(tmp_path, [], Grid.of(described(tiny_folder)), gpus=3))
    output, killed = tmp_path / "g", []

    def kill() -> None:
        while not list(output.glob("answers/*/rank-*.jsonl")):
            time.sleep(0.02)
        cluster.remove_node(cluster.nodes[0], allow_graceful=False)
        killed.append(len(list(output.glob("cells/[!.]*"))))

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    summary = run(Grid.of(described(tiny_folder, together=2)), str(output), run_on_ray)
    killer.join(60)
    assert killed and killed[0] < 12
    assert summary.failed == [] and summary.new == 12
    assert outcomes(output) == outcomes(alone)
    names = {json.loads(path.read_text())["variant"] for path in output.glob("cells/*/cell.json")}
    assert len(names) == 6
