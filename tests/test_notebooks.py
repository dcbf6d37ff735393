"""The notebooks of docs/notebooks: what is committed, their pages on the site, and (`make test-docs`) that they run."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError
from tests.conftest import ROOT

sys.path.append(str(ROOT / "docs/site"))
import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w./<:~-])/(?!/)[\w.-]+/[\w./-]+|\b[A-Z]:\\|\b0x[0-9a-f]{6,}|file://")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def texts(output: dict[str, Any]) -> str:
    parts = [output.get("text", ""), *(data for kind, data in output.get("data", {}).items() if kind != "image/png")]
    return "\n".join("".join(part) for part in parts)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_committed_notebook_was_run(path: Path) -> None:
    """From the first cell to the last, without errors; its outputs name no path of a machine."""
    notebook = read(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert notebook["cells"][0]["cell_type"] == "markdown" and len(notebook["cells"]) <= 20
    for output in (entry for cell in cells for entry in cell["outputs"]):
        assert output["output_type"] != "error" and output.get("name") != "stderr"
        assert not MACHINE_PATH.search(texts(output)) and "Traceback" not in texts(output), texts(output)
    assert (
        any("image/png" in entry.get("data", {}) for cell in cells for entry in cell["outputs"]) or "cut" in path.stem
    )
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"} and all(
        cell["metadata"] == {} for cell in cells
    )


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell prints and draws as much as in the committed notebook, whatever the figures are."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    try:
        embedded.resolve("smollm2-135m")
    except InputError as error:
        pytest.skip(str(error))
    for name in (*notebooks.QUIET, "PATH"):  # `execute` sets them, and later tests have them as they were
        monkeypatch.setenv(name, os.environ.get(name, ""))
    kinds = [
        [
            [(output["output_type"], sorted(output.get("data", {}))) for output in cell.get("outputs", [])]
            for cell in run["cells"]
        ]
        for run in (read(path), notebooks.execute(path))
    ]
    assert kinds[0] == kinds[1]
