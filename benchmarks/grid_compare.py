"""How long comparing 1,000 cells of 1,000 questions takes, and the memory: `python benchmarks/grid_compare.py`."""

import resource
import tempfile
import time
from typing import Any

import numpy as np
from _record import environment, timed, write

from lmeval_prune.artefacts import write_text
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import write_tables
from lmeval_prune.grid.report import write as write_report

CELLS, QUESTIONS = 1000, 1000


def question(number: int, value: float) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": {"question": f"Question {number}?"},
        "target": "42",
        "arguments": [[f"prompt {number}", {}]],
        "resps": [[f"Some steps, and then the answer: {number % 7}"]],
        "filter": "none",
        "metrics": ["exact_match"],
        "doc_hash": f"{number:064d}",
        "exact_match": value,
    }


def main() -> None:
    machine = environment()
    draws = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        folder, cells = GridFolder(path), []
        folder.create("Large", None, [])
        for number in range(CELLS):
            with folder.new_cell(f"c{number}") as cell:
                rows = [question(i, float(right)) for i, right in enumerate(draws.random(QUESTIONS) < 0.5)]
                write_tables(cell, {"t": rows}, {})
                write_text(cell / "results.json", "{}")
            entry = {"key": f"c{number}", "variant": f"v{number}", "task": "t", "metric": None, "selected_on": []}
            cells.append({**entry, "model_args": {}, "prepare": {}, "costs": "", "command": "lm_eval"})
        folder.create("Large", None, cells)
        before = time.process_time()
        (*_, paths), seconds = timed(lambda: write_report(path))
        busy = time.process_time() - before
        size = paths[-1].stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results = {
        "cells": CELLS,
        "questions": QUESTIONS,
        "seconds": round(seconds, 1),
        "processor_seconds": round(busy, 1),
    }
    write("grid_compare", {"environment": machine, **results, "peak_gib": round(peak / 2**30, 2), "page_bytes": size})


if __name__ == "__main__":
    main()
