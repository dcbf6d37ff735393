"""Kernels compile for GPUs that are not here; in a process of its own, since here they are interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason='kernels need triton (pip install -e ".[kernels]")')


@pytest.mark.long
def test_every_kernel_compiles_for_ampere_and_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for kernel in ("decode", "join", "decide"):
        for capability in (80, 90):
            assert f"_{kernel}_kernel sm_{capability}" in done.stdout
