"""Distance of the embedded model from itself without a tenth of its heads, chosen by norm + entropy and at random.

    python benchmarks/distance_result.py [--draws 8] [--threads 1]

Measured by `lmeval-prune distance`: on GSM8K's test problems with their solutions, and on greedy answers to them. The
heads are chosen on training problems.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import environment, write

from lmeval_prune.tasks import data

MODEL = "smollm2-135m"
BUDGET = ("--budget", "heads", "--unit", "head", "--ratio", "0.1")
MEANS = ("mean_kld", "same_top", "same_answers")


def run(*arguments: str, threads: int) -> None:
    """Run a command of lmeval-prune."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "lmeval_prune", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=8, help="random choices of heads")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment()}
    problems = data.load("gsm8k", "test")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = zip(problems["question"], problems["answer"], strict=True)
        text = "\n\n".join(f"Question: {question}\nAnswer: {answer}" for question, answer in pairs)
        (folder / "problems.txt").write_text(text)
        methods = {"norm_entropy": ("--method", "norm_entropy", "--task", "prune_gsm8k")}
        methods |= {f"random_{i}": ("--method", "random", "--options", f"seed={i}") for i in range(options.draws)}
        heads = []
        for plan, method in methods.items():
            file = str(folder / f"{plan}.json")
            run("prune", "--pretrained", MODEL, *method, *BUDGET, "--output", file, threads=options.threads)
            heads += ["--heads", file]
        texts = {
            "solutions": ("--text", str(folder / "problems.txt"), "--windows", "8"),
            "answers": ("--task", "prune_gsm8k", "--limit", "8", "--apply_chat_template"),
        }
        texts["answers"] += ("--gen_kwargs", "max_gen_toks=128")
        for kind, arguments in texts.items():
            file = folder / f"{kind}.json"
            also = ["--heads", "L5H3"] if kind == "answers" else []
            common = ("--model_args", "dtype=float32", "--output", str(file))
            run("distance", MODEL, *heads, *also, *arguments, *common, threads=options.threads)
            variants = json.loads(file.read_text())["variants"]
            for summary in variants.values():
                summary.pop("texts")
            results[kind] = variants
            for variant, summary in variants.items():
                print(kind, variant, {name: round(summary[name], 3) for name in MEANS if name in summary}, flush=True)
    write("distance", results)


if __name__ == "__main__":
    main()
