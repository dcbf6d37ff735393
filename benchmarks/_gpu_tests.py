"""Tests on the device: what passed, and what failed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from _gpu_common import Report

ROOT = Path(__file__).parents[1]
FILES = ("tests/gpu/test_gpu_static_step.py", "tests/test_kernels.py", "tests/gpu/test_gpu.py")
TINY = ("tests/gpu/test_gpu_static_step.py::test_each_row_has_its_mask",)


def run_tests(file: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a file of tests in a process of its own; count outcomes, and name failures."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={record}", file]
        environment = {**os.environ, "LMEVAL_PRUNE_TEST_DEVICE": options.device}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"skipped": f"not done after {seconds:.0f} s"}
        cases = list(ElementTree.parse(record).iter("testcase")) if record.is_file() else []
    outcomes: Counter[str] = Counter()
    failures = {}
    for case in cases:
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcomes["passed" if problem is None else problem.tag] += 1
        if problem is not None and problem.tag != "skipped":
            failures[f"{case.get('classname')}.{case.get('name')}"] = (problem.text or "")[-1500:]
    row: dict[str, Any] = {"exit_status": done.returncode, "outcomes": dict(outcomes), "failures": failures}
    if done.returncode:
        row |= {"failed": f"exit status {done.returncode}", "output": (done.stdout + done.stderr)[-3000:]}
    return row


def run(options: argparse.Namespace, report: Report) -> None:
    """Run the files one after another."""
    for file in options.files or (TINY if options.tiny else FILES):
        left = max(1.0, options.budget - report.seconds)
        report.row("tests", {"file": file}, lambda: run_tests(file, options, left))  # noqa: B023
    report.results["passed"] = all(row.get("exit_status") == 0 for row in report.results["rows"])
