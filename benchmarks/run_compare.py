"""Costs of `lmeval-prune compare` for two runs of 57 tasks of 250 questions: `python benchmarks/run_compare.py`."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _record import environment, timed, write

TASKS, QUESTIONS, PROMPT = 57, 250, 12_000  # the size of MMLU's groups, with five examples in each prompt


def sample(number: int, right: bool) -> dict[str, Any]:
    """Return a sample of a multiple-choice task, as lm-eval writes it."""
    prompt = f"Question {number}: {'What is it? ' * (PROMPT // 12)}"
    return {
        "doc_id": number,
        "doc": {"question": f"Question {number}?", "choices": list("ABCD"), "answer": number % 4},
        "target": str(number % 4),
        "arguments": {f"gen_args_{i}": {"arg_0": prompt, "arg_1": f" {choice}"} for i, choice in enumerate("AB")},
        "resps": [[[str(-1.0 - right), "False"]], [["-1.5", "False"]]],
        "filtered_resps": [[str(-1.0 - right), "False"], ["-1.5", "False"]],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": f"{number:064d}",
        "prompt_hash": f"{number:064d}",
        "target_hash": f"{number % 4:064d}",
        "acc": float(right),
    }


def write_run(folder: Path, model: str, seed: int) -> int:
    """Write a run as `lm_eval --log_samples` does, and return the bytes of its samples."""
    draws, results, configs = np.random.default_rng(seed), {}, {}
    size, date = 0, "2026-01-01T00-00-00.000000"
    folder.mkdir()
    for task in (f"mmlu_{number}" for number in range(TASKS)):
        right = draws.random(QUESTIONS) < 0.5
        results[task] = {"acc,none": float(right.mean()), "sample_len": QUESTIONS}
        metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
        configs[task] = {"task": task, "output_type": "multiple_choice", "metric_list": metrics}
        path = folder / f"samples_{task}_{date}.jsonl"
        path.write_text("".join(json.dumps(sample(i, bool(is_right))) + "\n" for i, is_right in enumerate(right)))
        size += path.stat().st_size
    config = {"model": "hf", "model_args": {"pretrained": model}}
    groups = {"mmlu": list(results)}
    content = {"results": results, "configs": configs, "group_subtasks": groups, "config": config}
    (folder / f"results_{date}.json").write_text(json.dumps(content))
    return size


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = sum(write_run(folder / model, model, seed) for seed, model in enumerate("ab"))
        words = [str(folder / "a"), str(folder / "b"), "--output", str(folder / "out")]
        command = [str(Path(sys.executable).with_name("lmeval-prune")), "compare", *words]
        _, seconds = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        page = (folder / "out" / "page.html").stat().st_size
    machine = environment() | {"load_before": load}  # after the measurement: the command would inherit torch's memory
    results = {
        "tasks": TASKS,
        "questions_of_a_task": QUESTIONS,
        "megabytes_of_samples": round(size / 1e6),
        "seconds": round(seconds, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_gib": round(used.ru_maxrss * 1024 / 2**30, 2),
        "page_bytes": page,
    }
    write("run_compare", {"environment": machine, **results})


if __name__ == "__main__":
    main()
