"""Run the notebooks anew, in place: `python docs/site/notebooks.py [NAME …]`. `page` makes a page of the site."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def execute(path: Path) -> dict[str, Any]:
    """Run a notebook in a temporary folder; return it with its outputs, without what only one machine has."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    os.environ.update(QUIET)
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # for lines that begin with !
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=where).execute()
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(cleaned, cell.outputs) if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


def cleaned(output: Any) -> Any:
    """Return an output without the text that only names its picture."""
    if "image/png" in output.get("data", {}):
        output.data.pop("text/plain", None)
        output.metadata = {}
    return output


def page(path: Path, pictures: Path) -> str:
    """Return a notebook as Markdown; its pictures are written to a folder beside the page."""
    notebook, parts = json.loads(path.read_text(encoding="utf-8")), []
    for number, cell in enumerate(notebook["cells"], 1):
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for count, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{number}-{count}.png"
                pictures.mkdir(parents=True, exist_ok=True)
                (pictures / name).write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![output of the cell above]({pictures.name}/{name})")
            elif "text/html" in data:
                parts.append(plain_table("".join(data["text/html"])))
            else:
                text = "".join(output.get("text") or data.get("text/plain", "")).rstrip()
                parts.append(f"```text\n{text}\n```")
    link = f"*This page is a notebook that was run: [{path.name}]({path.name}).*"
    return "\n\n".join([parts[0], link, *parts[1:]]) + "\n"


def plain_table(html: str) -> str:
    """Return a table of pandas as the site shows tables: without styles and without empty lines, which end it."""
    html = re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL).replace(' border="1" class="dataframe"', "")
    return "\n".join(line.strip() for line in html.splitlines() if line.strip())


def main(names: list[str]) -> None:
    """Run the notebooks that are named, or all."""
    from lmeval_prune.artefacts import write_text

    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            write_text(path, json.dumps(execute(path), indent=1, ensure_ascii=False) + "\n")
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
