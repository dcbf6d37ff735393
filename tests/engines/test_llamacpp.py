"""A real llama.cpp against `pruned-hf`, weights and cache in float32 (`make test-llamacpp`)."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmeval_prune.models.servers import KINDS
from tests.engines.conftest import LOCAL, TOKENS, evaluate, run
from tests.engines.server import Server

LLAMACPP = os.environ.get("LMEVAL_PRUNE_LLAMACPP", "")
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not LLAMACPP, reason="make test-llamacpp names a llama-server")]
HEADS, TASK = ["L5H0", "L15H1", "L25H2"], "prune_tiny_words_pass4"
ROUTER = f"router=random,router_pool={'+'.join(HEADS)}+dense"
UNEVEN = "L5H0-2+L7H0-5"


def llamacpp(printed: str, log: Path) -> Server:
    """A server by the line that an export prints."""
    return Server(next(line for line in printed.splitlines() if "llama-server " in line), Path(LLAMACPP).parent, log)


def export(*words: str | Path, folder: Path) -> str:
    return run("lmeval-prune", "export", *words, "--pretrained", "smollm2-135m", "--format", "gguf", folder=folder)


@pytest.fixture(scope="module")
def dense(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    export("model", "--dtype", "float32", "--output", folder / "dense.gguf", folder=folder)
    return folder / "dense.gguf"


@pytest.fixture(scope="module")
def server(dense: Path) -> Iterator[tuple[Server, Path]]:
    folder = dense.parent
    words = [word for head in HEADS for word in ("--heads", head)]
    printed = export("adapter", *words, "--dtype", "float32", "--output", folder / "adapters", folder=folder)
    with llamacpp(printed.replace("MODEL.gguf", str(dense)), folder / "llamacpp.log") as started:
        yield started, folder / "adapters"


def served(server: tuple[Server, Path], *more: str) -> str:
    """Return model_args of the server."""
    model_args = [f"base_url={server[0].url}", "server=llamacpp", "pretrained=smollm2-135m", f"adapters={server[1]}"]
    return ",".join([*model_args, *more])


def test_a_router_of_three_heads_is_the_same(server: tuple[Server, Path], tmp_path: Path) -> None:
    """Dense is among the tries: a request that names no adapter would have all of them applied."""
    here = evaluate("pruned-hf", f"{LOCAL},{ROUTER}", TASK, tmp_path)
    assert evaluate("pruned-server", served(server, ROUTER), TASK, tmp_path) == here


def test_adapters_compose(server: tuple[Server, Path], tmp_path: Path) -> None:
    both = "heads=L5H0+L15H1"  # no adapter of these two was exported
    here = evaluate("pruned-hf", f"{LOCAL},{both}", "prune_tiny_words", tmp_path)
    assert evaluate("pruned-server", served(server, both), "prune_tiny_words", tmp_path) == here


def test_a_repetition_penalty_is_that_of_hf(server: tuple[Server, Path], tmp_path: Path) -> None:
    """It counts the prompt, which is longer than llama.cpp's own window."""
    penalty = ["--gen_kwargs", f"max_gen_toks={TOKENS},repetition_penalty=1.3"]
    here = evaluate("pruned-hf", LOCAL, "prune_tiny_words", tmp_path, *penalty)
    assert evaluate("pruned-server", served(server), "prune_tiny_words", tmp_path, *penalty) == here


def test_samples_are_drawn_from_the_tokens_that_hf_draws_from(server: tuple[Server, Path], model: str) -> None:
    tokens = AutoTokenizer.from_pretrained(model)("The capital of the country is").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([tokens])).logits[:, -1]
    settings = {"temperature": 2.0, "top_k": 40, "top_p": 0.6, "min_p": 0.05}
    for warp in (
        TemperatureLogitsWarper(settings["temperature"]),
        TopKLogitsWarper(int(settings["top_k"])),
        TopPLogitsWarper(settings["top_p"]),
        MinPLogitsWarper(settings["min_p"]),
    ):
        logits = warp(None, logits)
    expected = {int(token): float(share) for token, share in enumerate(logits[0].softmax(-1)) if share}
    kind = KINDS["llamacpp"]
    payload = {"prompt": tokens, "max_tokens": 1, "logprobs": 40, "n_probs": 40, "post_sampling_probs": True}
    off = [{"id": number, "scale": 0} for number in range(len(HEADS))]
    content = json.dumps({**payload, "lora": off, **kind.sampling_fields(settings, True, 512)}).encode()
    request = urllib.request.Request(f"{server[0].url}/v1/completions", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        (first,) = json.load(answer)["choices"][0]["logprobs"]["content"]
    assert {top["id"]: top["prob"] for top in first["top_probs"] if top["prob"]} == pytest.approx(expected, abs=2e-3)


def test_a_model_whose_layers_differ_loads_and_agrees(model: str, tmp_path: Path) -> None:
    words = ["--heads", UNEVEN, "--dtype", "float32", "--output", tmp_path / "cut.gguf"]
    printed = export("model", *words, folder=tmp_path)
    assert "deci" in printed
    here: dict[str, Any] = evaluate("pruned-hf", f"{LOCAL},heads={UNEVEN}", "prune_tiny_words", tmp_path)
    with llamacpp(printed, tmp_path / "llamacpp.log") as started:
        model_args = f"base_url={started.url},server=llamacpp,pretrained=smollm2-135m"
        assert evaluate("pruned-server", model_args, "prune_tiny_words", tmp_path) == here


@pytest.mark.parametrize("blocks", ["L20-22", "L0.attention+L5.attention+L7.feed_forward+L20"])
def test_a_model_without_blocks_loads_and_agrees(blocks: str, model: str, tmp_path: Path) -> None:
    """Without whole layers; and where a head or a channel of zeros stands in for a block."""
    words = ["--blocks", blocks, "--dtype", "float32", "--output", tmp_path / "cut.gguf"]
    printed = export("model", *words, folder=tmp_path)
    assert ("deci" in printed) == ("attention" in blocks)
    run(
        "lmeval-prune",
        "mask",
        "--pretrained",
        "smollm2-135m",
        "--blocks",
        blocks,
        "--output",
        "plan.json",
        folder=tmp_path,
    )
    here: dict[str, Any] = evaluate("pruned-hf", f"{LOCAL},plan={tmp_path / 'plan.json'}", "prune_tiny_words", tmp_path)
    with llamacpp(printed, tmp_path / "llamacpp.log") as started:
        model_args = f"base_url={started.url},server=llamacpp,pretrained=smollm2-135m"
        assert evaluate("pruned-server", model_args, "prune_tiny_words", tmp_path) == here
