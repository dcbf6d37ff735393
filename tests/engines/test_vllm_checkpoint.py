"""A checkpoint whose layers differ in a real vLLM (`make test-vllm`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import LOCAL, WITH_VLLM, evaluate, line_of, run, vllm

pytestmark = WITH_VLLM
UNEVEN = "L5H0-2+L7H0-5"  # of nine heads in groups of three


@pytest.fixture(scope="module")
def uneven(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Export a checkpoint whose layers have unlike head counts, and the line that serves it."""
    folder = tmp_path_factory.mktemp("uneven")
    words = ["--pretrained", "smollm2-135m", "--heads", UNEVEN, "--output", folder / "cut"]
    line = line_of(run("lmeval-prune", "export", "model", *words, folder=folder))
    layers = json.loads((folder / "cut" / "config.json").read_text())["per_layer_config"]
    assert {index: layer["num_attention_heads"] for index, layer in layers.items()} == {"5": 6, "7": 3}
    return folder / "cut", line


@pytest.fixture(scope="module")
def masked_here(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return evaluate("pruned-hf", f"{LOCAL},heads={UNEVEN}", "prune_tiny_words", tmp_path_factory.mktemp("masked"))


@pytest.mark.parametrize("plugin", [False, True], ids=["remote code", "plugin"])
def test_a_checkpoint_whose_layers_differ_loads_and_agrees(
    uneven: tuple[Path, str], masked_here: dict[str, Any], tmp_path: Path, plugin: bool
) -> None:
    """By the file beside the weights, or without it where this package is installed beside vLLM."""
    folder, line = uneven
    line = line.replace("--trust-remote-code", "") if plugin else f"VLLM_PLUGINS= {line}"
    with vllm(line, tmp_path / "vllm.log", "--dtype float32") as started:
        results = evaluate(
            "pruned-server", f"base_url={started.url},pretrained={folder},dtype=float32", "prune_tiny_words", tmp_path
        )
    assert results == masked_here
