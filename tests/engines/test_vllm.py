"""A real vLLM against `pruned-hf`, in float32, where texts must be the same (`make test-vllm`)."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _engines import Server

from lmeval_prune.sprint.outcomes import OutcomeStore
from tests.engines.conftest import COMMON, LIMIT, command, evaluate, results_of, run

VLLM = os.environ.get("LMEVAL_PRUNE_VLLM", "")
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not VLLM, reason="make test-vllm names a vLLM")]
NINE, TWO_LAYERS = "L5H0-2+L15H0-2+L25H0-2", "L5H3+L15H0"
UNEVEN = "L5H0-2+L7H0-5"  # of nine heads in groups of three
FIRST, TASK = "L5H0", "prune_tiny_words_pass4"
ROUTER = "router=random,router_pool=L5H0+L15H1+L25H2+dense"
LOCAL = "pretrained=smollm2-135m,dtype=float32"


def vllm(line: str, log: Path, options: str = "") -> Server:
    return Server(line, Path(VLLM).parent, log, options=f"--enforce-eager --max-model-len 1024 {options}")


def line_of(printed: str) -> str:
    """The command that an export says serves it in vLLM, without the comment behind it."""
    found = next(line for line in printed.splitlines() if re.search(r"(^|\s)vllm serve ", line))
    return found.partition("#")[0].strip()


@pytest.fixture(scope="module")
def exported(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Nine adapters of a head and one of two, and the line that serves them."""
    folder = tmp_path_factory.mktemp("vllm")
    words = ["--pretrained", "smollm2-135m", "--each", NINE, "--heads", TWO_LAYERS, "--dtype", "float32"]
    printed = run("lmeval-prune", "export", "adapter", *words, "--output", folder / "adapters", folder=folder)
    return folder / "adapters", line_of(printed)


@pytest.fixture(scope="module")
def server(exported: tuple[Path, str]) -> Iterator[Server]:
    adapters, line = exported
    with vllm(line, adapters.parent / "vllm.log") as started:
        yield started


@pytest.fixture
def served(server: Server, exported: tuple[Path, str]) -> Callable[..., str]:
    """model_args of the server."""

    def arguments(*more: str) -> str:
        return ",".join([f"base_url={server.url}", "pretrained=smollm2-135m", f"adapters={exported[0]}", *more])

    return arguments


@pytest.fixture(scope="module")
def routed_here(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The router's tries by `pruned-hf`."""
    return evaluate("pruned-hf", f"{LOCAL},{ROUTER}", TASK, tmp_path_factory.mktemp("here"))


def test_a_sweep_of_nine_heads_and_dense_is_the_same(
    server: Server, exported: tuple[Path, str], tmp_path: Path
) -> None:
    sweep = ["lmeval-prune", "sweep", "--tasks", "prune_tiny_words", "--heads", NINE, *COMMON]
    run(*sweep, "--model_args", LOCAL, "--output", tmp_path / "here", folder=tmp_path)
    arguments = ["--model_args", f"pretrained=smollm2-135m,adapters={exported[0]}", "--server", server.url]
    run(*sweep, *arguments, "--output", tmp_path / "there", folder=tmp_path)
    here, there = (
        {(cell["doc_id"], cell["head"]): (cell["text"], cell["outcome"]) for cell in OutcomeStore(folder).cells()}
        for folder in (tmp_path / "here", tmp_path / "there")
    )
    assert len(here) == 10 * LIMIT and there == here
    assert any(here[doc, FIRST] != here[doc, "dense"] for doc, _ in here)


def test_a_router_of_three_heads_is_the_same(
    served: Callable[..., str], routed_here: dict[str, Any], tmp_path: Path
) -> None:
    assert evaluate("pruned-server", served(ROUTER), TASK, tmp_path) == routed_here


def test_sampled_tries_differ_and_are_drawn_again_alike(served: Callable[..., str], tmp_path: Path) -> None:
    """lm-eval sends one seed with all requests: N tries would be one."""
    sampling = ["--gen_kwargs", "max_gen_toks=24,do_sample=true,temperature=1.0"]
    once, again = (
        evaluate("pruned-server", served("heads=L5H0"), TASK, tmp_path / name, *sampling) for name in ("one", "two")
    )
    assert all(len(set(texts)) == 4 for (texts,) in once["texts"].values())
    assert once["texts"] == again["texts"]


def test_given_texts_are_scored_as_here(served: Callable[..., str], tmp_path: Path) -> None:
    here = evaluate("pruned-hf", f"{LOCAL},heads={TWO_LAYERS}", "prune_tiny_choice", tmp_path)
    there = evaluate("pruned-server", served(f"heads={TWO_LAYERS}"), "prune_tiny_choice", tmp_path)
    for doc, found in here["texts"].items():
        for ours, theirs in zip(found, there["texts"][doc], strict=True):
            assert float(theirs[0][0]) == pytest.approx(float(ours[0][0]), abs=2e-3)
            assert theirs[0][1] == ours[0][1]


def test_a_server_that_is_killed_and_started_again_leaves_the_same_table(
    exported: tuple[Path, str], routed_here: dict[str, Any], tmp_path: Path
) -> None:
    adapters, line = exported
    server = vllm(line, tmp_path / "vllm.log")
    few = "num_concurrent=2,max_retries=2,probe=false"
    arguments = f"base_url={server.url},pretrained=smollm2-135m,adapters={adapters},responses={tmp_path / 'kept'},{few}"
    words = ["--model", "pruned-server", "--model_args", f"{arguments},{ROUTER}", "--tasks", TASK, *COMMON]
    words += ["--log_samples", "--output_path", str(tmp_path / "out")]

    def answered() -> int:
        return server.log.read_text().count('"POST /v1/completions HTTP/1.1" 200')

    try:
        server.start()
        begun = command("lm_eval", *words, folder=tmp_path)
        while answered() < 5 and begun.poll() is None:
            time.sleep(0.05)
        server.kill()
        said, _ = begun.communicate(timeout=300)
        assert begun.returncode != 0
        assert "no server answers any more" in said and "Traceback" not in said
        before = answered()
        assert 5 <= before < 4 * LIMIT
        server.start()
        run("lm_eval", *words, folder=tmp_path)
        assert answered() <= 4 * LIMIT + 2  # those that were being answered are asked again
    finally:
        server.kill()
    assert results_of(tmp_path / "out") == routed_here


@pytest.fixture(scope="module")
def uneven(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint whose layers have unlike head counts, and the line that serves it."""
    folder = tmp_path_factory.mktemp("uneven")
    words = ["--pretrained", "smollm2-135m", "--heads", UNEVEN, "--output", folder / "cut"]
    line = line_of(run("lmeval-prune", "export", "model", *words, folder=folder))
    layers = json.loads((folder / "cut" / "config.json").read_text())["per_layer_config"]
    assert {index: one["num_attention_heads"] for index, one in layers.items()} == {"5": 6, "7": 3}
    return folder / "cut", line


@pytest.fixture(scope="module")
def masked_here(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return evaluate("pruned-hf", f"{LOCAL},heads={UNEVEN}", "prune_tiny_words", tmp_path_factory.mktemp("masked"))


@pytest.mark.parametrize("plugin", [False, True], ids=["remote code", "plugin"])
def test_a_checkpoint_whose_layers_differ_loads_and_agrees(
    uneven: tuple[Path, str], masked_here: dict[str, Any], tmp_path: Path, plugin: bool
) -> None:
    """By the file beside the weights, or without it where this package is installed beside vLLM."""
    _, line = uneven
    line = line.replace("--trust-remote-code", "") if plugin else f"VLLM_PLUGINS= {line}"
    with vllm(line, tmp_path / "vllm.log", "--dtype float32") as started:
        found = evaluate("pruned-server", f"base_url={started.url},{LOCAL}", "prune_tiny_words", tmp_path)
    assert found == masked_here


def test_lm_eval_s_own_hf_takes_an_adapter(exported: tuple[Path, str], model: str, tmp_path: Path) -> None:
    """`peft=` of `hf`, without anything of ours at work."""
    theirs = evaluate(
        "hf", f"pretrained={model},dtype=float32,peft={exported[0] / TWO_LAYERS}", "prune_tiny_words", tmp_path
    )
    ours = evaluate("pruned-hf", f"{LOCAL},heads={TWO_LAYERS}", "prune_tiny_words", tmp_path)
    assert theirs == ours
