"""lm-eval's `process_results` for our tasks: a document and its responses become metric values."""

from __future__ import annotations

import re
from typing import Any

from lmeval_prune.scoring import extract, numbers_equal
from lmeval_prune.scoring.numbers import normalise


def number(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the final answer is the target as a number."""
    return {"exact_match": float(numbers_equal(extract(results[0]).answer, doc["target"]))}


def mathematics(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the final answer is the target, as a number or (without spaces and text wrappers) as LaTeX."""
    answer = extract(results[0]).answer
    return {"exact_match": float(numbers_equal(answer, doc["target"]) or _latex(answer) == _latex(doc["target"]))}


def _latex(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", normalise(text))
    return re.sub(r"[\s$]|\^\\circ|\^\{\\circ\}", "", text).rstrip(".") or "no answer"
