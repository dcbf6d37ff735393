"""A real vLLM against `pruned-hf`, in float32, where texts must be the same (`make test-vllm`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune.sprint.outcomes import OutcomeStore
from tests.engines.conftest import COMMON, LIMIT, LOCAL, WITH_VLLM, command, evaluate, line_of, results_of, run, vllm
from tests.engines.server import Server

pytestmark = WITH_VLLM
NINE, TWO_LAYERS = "L5H0-2+L15H0-2+L25H0-2", "L5H3+L15H0"
ANSWERED = '"POST /v1/completions HTTP/1.1" 200'
FIRST, TASK = "L5H0", "prune_tiny_words_pass4"
ROUTER = "router=random,router_pool=L5H0+L15H1+L25H2+dense"


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
        {(cell["doc_id"], cell["attempt"]): (cell["text"], cell["outcome"]) for cell in OutcomeStore(folder).cells()}
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
    for doc, responses in here["texts"].items():
        for expected, actual in zip(responses, there["texts"][doc], strict=True):
            assert float(actual[0][0]) == pytest.approx(float(expected[0][0]), abs=2e-3)
            assert actual[0][1] == expected[0][1]


def test_a_server_that_is_killed_and_started_again_leaves_the_same_table(
    server: Server, exported: tuple[Path, str], routed_here: dict[str, Any], tmp_path: Path
) -> None:
    few = "num_concurrent=2,max_retries=2,probe=false"
    arguments = (
        f"base_url={server.url},pretrained=smollm2-135m,adapters={exported[0]},responses={tmp_path / 'kept'},{few}"
    )
    words = ["--model", "pruned-server", "--model_args", f"{arguments},{ROUTER}", "--tasks", TASK, *COMMON]
    words += ["--log_samples", "--output_path", str(tmp_path / "out")]

    before = server.log.read_text().count(ANSWERED)

    def answered() -> int:
        return server.log.read_text().count(ANSWERED) - before

    begun = command("lm_eval", *words, folder=tmp_path)
    while answered() < 5 and begun.poll() is None:
        time.sleep(0.05)
    server.kill()
    said, _ = begun.communicate(timeout=300)
    assert begun.returncode != 0
    assert "has failed" in said and "Traceback" not in said
    assert 5 <= answered() < 4 * LIMIT
    server.start()
    run("lm_eval", *words, folder=tmp_path)
    assert answered() <= 4 * LIMIT + 2  # those that were being answered are asked again
    assert results_of(tmp_path / "out") == routed_here


def test_lm_eval_s_own_hf_takes_an_adapter(exported: tuple[Path, str], model: str, tmp_path: Path) -> None:
    """`peft=` of `hf`, without anything of ours at work."""
    actual = evaluate(
        "hf", f"pretrained={model},dtype=float32,peft={exported[0] / TWO_LAYERS}", "prune_tiny_words", tmp_path
    )
    expected = evaluate("pruned-hf", f"{LOCAL},heads={TWO_LAYERS}", "prune_tiny_words", tmp_path)
    assert actual == expected
