"""Peak memory of `engine=auto` under limits of a cgroup, texts compared with those without one.

    python benchmarks/memory_limit.py [--limits 0,1200,800] [--questions 24] [--tokens 128] [--threads 1]

Each run is `lm_eval --model pruned-hf` in a memory cgroup of its own with a limit in MiB (0: none). It needs root, and
cgroups of version 1 or 2 that can be written. Mapped files, such as weights, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import environment, write

ROOT = Path("/sys/fs/cgroup")
VERSION_1 = (ROOT / "memory").is_dir()
LIMIT, PEAK = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if VERSION_1 else ("memory.max", "memory.peak")


def run(limit: int, options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Evaluate in a cgroup; return the peak of its memory, how often a limit was reached, and the texts."""
    group = (ROOT / "memory" if VERSION_1 else ROOT) / f"lmeval-prune-{os.getpid()}"
    group.mkdir()
    try:
        if limit:
            (group / LIMIT).write_text(str(limit << 20))
        command = ["-m", "lm_eval", "--model", "pruned-hf", "--model_args", "pretrained=smollm2-135m,heads=L5H3"]
        command += ["--tasks", "prune_gsm8k", "--apply_chat_template", "--limit", str(options.questions)]
        command += ["--gen_kwargs", f"max_gen_toks={options.tokens}", "--output_path", str(output), "--log_samples"]
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        )
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        peak = int((group / PEAK).read_text()) >> 20
    finally:
        group.rmdir()
    (samples,) = output.rglob("samples_*.jsonl")
    rows = map(json.loads, samples.read_text().splitlines())
    decisions = re.findall("engine=auto: (.*)", done.stderr)
    return {"peak_mib": peak, "decisions": decisions, "texts": {row["doc_id"]: row["resps"][0][0] for row in rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", default="0,1200,800", help="in MiB; 0 is none")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "cgroup_version": 1 if VERSION_1 else 2, "runs": {}}
    expected: dict[int, str] = {}
    for limit in map(int, options.limits.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            result = run(limit, options, Path(folder))
        texts = result.pop("texts")
        expected = expected or texts
        assert all(texts.values()), "empty answers"
        results["runs"][limit] = result | {"texts": len(texts), "identical": texts == expected}
        print(limit, results["runs"][limit], flush=True)
    write("memory_limit", results)


if __name__ == "__main__":
    main()
