"""The size of a grid's page, and how soon it can be used: `python benchmarks/grid_page.py`.

1,000 questions × 20 variants. The answers are GSM8K's solutions (LMEVAL_PRUNE_DATA), each followed up to a random word,
as a pruned model does, and then by the end of another one. Times are medians of five loads in Chromium, on this
processor and four times slower.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _record import environment, timed, write
from playwright.sync_api import Page, sync_playwright

from lmeval_prune.artefacts import write_text
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.outcomes import write_tables
from lmeval_prune.grid.report import write as write_report

DATA = Path(os.environ.get("LMEVAL_PRUNE_DATA", "../shared/data"))
LOADS, SLOWER = 5, (1, 4)


def write_grid(path: Path, questions: int, variants: int) -> int:
    """Write a grid's folder; return the number of characters of all answers."""
    lines = (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:questions]
    problems = [json.loads(line) for line in lines]
    draws, folder, cells, characters = np.random.default_rng(0), GridFolder(path), [], 0
    folder.create("A large page", None, [])
    for number in range(variants):
        rows = []
        for i, problem in enumerate(problems):
            words, other = problem["answer"].split(" "), problems[draws.integers(len(problems))]["answer"].split(" ")
            word_count = len(words) if not number else int(draws.integers(len(words) + 1))
            answer = " ".join(
                words[:word_count] + other[min(word_count, len(other) // 2) :] * (word_count < len(words))
            )
            characters += len(answer)
            rows.append(row(i, problem, answer, float(draws.random() < 0.6 - 0.02 * number)))
        with folder.new_cell(f"c{number}") as cell:
            write_tables(cell, {"gsm8k": rows}, {})
            write_text(cell / "results.json", "{}")
        entry = {
            "key": f"c{number}",
            "variant": f"variant {number}",
            "task": "gsm8k",
            "metric": None,
            "selected_on": [],
        }
        cells.append({**entry, "model_args": {}, "prepare": {}, "costs": f"c{number}", "command": "lm_eval"})
        folder.write_costs(f"c{number}", {"parameters": 1e6 * (135 - number), "device": "cpu", "threads": 1})
    folder.create("A large page", None, cells)
    return characters


def row(number: int, problem: dict[str, str], answer: str, right: float) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": {"question": problem["question"]},
        "target": problem["answer"].rpartition("#### ")[2],
        "arguments": [[problem["question"], {}]],
        "resps": [[answer]],
        "filter": "none",
        "metrics": ["exact_match"],
        "doc_hash": f"{number:064d}",
        "exact_match": right,
    }


def load(page: Page, address: str) -> dict[str, float]:
    """Open the page; return the seconds until tables and questions are there, and until another variant is shown."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-ready=true]")
    marks = page.evaluate(
        "() => Object.fromEntries(performance.getEntriesByType('mark').map((one) => [one.name, one.startTime]))"
    )
    begin = page.evaluate("() => performance.now()")
    page.select_option("#b", index=7)
    page.wait_for_selector("#questions .item")
    end = page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done(performance.now())))")
    return {
        "tables": marks["tables"] / 1000,
        "questions": marks["questions"] / 1000,
        "another_variant": (end - begin) / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--variants", type=int, default=20)
    parser.add_argument("--keep", help="copy the page to this file")
    options = parser.parse_args()
    machine = environment()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as path, sync_playwright() as play:
        characters = write_grid(Path(path), options.questions, options.variants)
        (*_, paths), seconds = timed(lambda: write_report(path))
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 740})
        session, times = page.context.new_cdp_session(page), {}
        for slower in SLOWER:
            session.send("Emulation.setCPUThrottlingRate", {"rate": slower})
            loads = [load(page, paths[-1].as_uri()) for _ in range(LOADS)]
            times[f"slower_{slower}"] = {
                key: round(statistics.median(load_times[key] for load_times in loads), 2) for key in loads[0]
            }
        results = {
            "questions": options.questions,
            "variants": options.variants,
            "answer_characters": characters,
            "page_bytes": paths[-1].stat().st_size,
            "compare_seconds": round(seconds, 1),
            "browser": browser.version,
            "seconds": times,
        }
        if options.keep:
            shutil.copy(paths[-1], options.keep)
        browser.close()
    write("grid_page", {"environment": machine, **results})


if __name__ == "__main__":
    main()
