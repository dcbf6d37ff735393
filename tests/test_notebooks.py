"""The notebooks of docs/notebooks: what is committed, their pages on the site, and (`make test-docs`) that they run."""

from __future__ import annotations

import base64
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


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("saved to /home/someone/out", True),
        ("see /tmp/x/y.json", True),
        ("C:\\Users\\x", True),
        ("<f at 0x7f3a2b1c>", True),
        ("out/compare/table.csv", False),
        ("1 / 2 and a/b", False),
        ("https://example.org/a/b", False),
        ("</td></tr>", False),
        ("+ / −", False),
    ],
)
def test_what_counts_as_a_path_of_a_machine(text: str, is_path: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is is_path


def test_the_page_of_a_notebook(tmp_path: Path) -> None:
    picture = base64.b64encode(b"a picture").decode()
    table = '<div>\n<style scoped>\n a {}\n</style>\n<table border="1" class="dataframe">\n\n <tr><td>1</td></tr>\n</table></div>'
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
        {"output_type": "display_data", "data": {"image/png": picture}, "metadata": {}},
        {"output_type": "execute_result", "data": {"text/html": [table], "text/plain": "1"}, "metadata": {}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["f()\n", "g()"], "outputs": outputs},
    ]
    path = tmp_path / "name.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    page = notebooks.page(path, tmp_path / "pictures")
    assert page.startswith("# Title\ntext\n\n*This page is a notebook") and "```python\nf()\ng()\n```" in page
    assert "```text\n1\n2\n```" in page and "<div>\n<table>\n<tr><td>1</td></tr>\n</table></div>" in page
    assert "(pictures/name-2-1.png)" in page and (tmp_path / "pictures/name-2-1.png").read_bytes() == b"a picture"


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
