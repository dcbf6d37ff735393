"""Comparing MATH answers: our workers against math-verify called as its documentation shows, one answer after another.

    LMEVAL_PRUNE_DATA=FOLDER python benchmarks/scoring_speed.py

The pairs are MATH-500's answers, each with the next problem's and each as a sum with zero, as far as they need
math-verify at all. The verdicts must be the same.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from _record import environment, timed, write

from lmeval_prune.scoring.mathematics import easy_verdict
from lmeval_prune.scoring.verifier import Verifier
from lmeval_prune.tasks import data


def by_math_verify(pairs: list[tuple[str, str]]) -> list[bool]:
    """Judge pairs in this process, with the library's own time limits of five seconds."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configuration = [LatexExtractionConfig(), ExprExtractionConfig()]
    return [
        bool(verify(*(parse(f"${text}$", configuration, parsing_timeout=5) for text in pair), timeout_seconds=5))
        for pair in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    golds = data.load("math500", "test")["target"]
    pairs = [(gold, other) for i, gold in enumerate(golds) for other in (golds[i - 1], f"{gold} + 0")]
    pairs = [(gold, answer) for gold, answer in pairs if easy_verdict(answer, gold) is None][: options.pairs]
    by_math_verify(pairs[:1])  # its imports
    times: dict[str, list[float]] = {"workers": [], "math_verify": []}
    verifier = Verifier(workers=len(os.sched_getaffinity(0)))
    _, start = timed(lambda: verifier.verify_many([("x", "y")] * 4 * verifier.workers))
    for _ in range(options.rounds):
        verdicts, seconds = timed(lambda: verifier.verify_many(pairs))
        times["workers"].append(round(seconds, 2))
        are_equal, seconds = timed(lambda: by_math_verify(pairs))
        times["math_verify"].append(round(seconds, 2))
        assert [verdict == "equal" for verdict in verdicts] == are_equal
    verifier.close()
    results: dict[str, Any] = {
        "environment": environment(),
        "pairs": len(pairs),
        "equal": sum(are_equal),
        "workers": verifier.workers,
        "seconds_to_start_workers": round(start, 2),
        "seconds_with_workers": times["workers"],
        "seconds_of_math_verify_in_one_process": times["math_verify"],
        "ratio_of_fastest": round(min(times["math_verify"]) / min(times["workers"]), 2),
    }
    write("scoring_speed", results)


if __name__ == "__main__":
    main()
