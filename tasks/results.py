"""lm-eval's `process_results` for our tasks: a document and its responses become metric values.

Every item reports, beside the scores, `extracted` (the answer that was found) and `how`. `exact_match`
takes the last number where nothing marks an answer; `strict_match` needs a mark (a box, `####`, or
'the answer is').
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from lmeval_prune.scoring import MARKED, evaluate, extract, numbers_equal, readings
from lmeval_prune.scoring.mathematics import shared
from lmeval_prune.scoring.numbers import close, normalise

LEVELS = ("low", "medium", "high")


def _scores(correct: bool, answer: str, how: str) -> dict[str, Any]:
    return {
        "exact_match": float(correct),
        "strict_match": float(correct and how in MARKED),
        "extracted": answer,
        "how": how,
    }


def number(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of a final answer that is one number."""
    answer, how = extract(results[0])
    correct = numbers_equal(answer, doc["target"])
    return _scores(correct, answer, how) | _parts(doc, correct)


def text_or_number(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of a final answer that is one or more numbers (`3; 4`), a time, a ratio or a word."""
    answer, how = extract(results[0])
    correct = same_text(answer, doc["target"])
    if not correct and re.search(r"[A-Za-z:]", doc["target"]) and how == "number":
        last = [line for line in results[0].strip().splitlines() if line.strip()][-1]
        correct = bool(re.search(rf"(?<!\w){re.escape(_plain(doc['target']))}(?!\w)", _plain(last)))
    return _scores(correct, answer, how) | _parts(doc, correct)


def same_text(answer: str, gold: str) -> bool:
    """Equal as numbers, item by item where a semicolon or comma separates several, or as words."""
    golds = [part for part in re.split(r"\s*;\s*", gold) if part]
    answers = [part for part in re.split(r"\s*[;,]\s+|\s*;\s*|\s+and\s+", answer) if part]
    if len(golds) > 1:
        pairs = zip(answers, golds, strict=False)
        return len(answers) == len(golds) and all(numbers_equal(a, g) or _plain(a) == _plain(g) for a, g in pairs)
    return numbers_equal(answer, gold) or (_plain(answer) == _plain(gold) and bool(_plain(gold)))


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", normalise(text))).strip(" .$").lower()


def mathematics(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of a MATH answer: the same as the gold one as a number, as LaTeX, or by math-verify."""
    answer, how = extract(results[0])
    verdict = equal_mathematics(answer, doc["target"])
    correct = verdict == "equal"
    levels = {f"level_{k}": float(correct) if doc["level"] == k else None for k in range(1, 6)}
    return _scores(correct, answer, how) | {"timeouts": float(verdict in ("timeout", "crash"))} | levels


def equal_mathematics(answer: str, gold: str) -> str:
    """`equal`, `different`, `timeout` or `crash`; easy cases do not reach a worker."""
    if not answer:
        return "different"
    if numbers_equal(answer, gold) or latex_key(answer) == latex_key(gold):
        return "equal"
    if readings(answer) and readings(gold):
        return "different"
    return shared().verify(gold, answer)


def latex_key(text: str) -> str:
    """LaTeX without spaces, text wrappers, degree signs and size commands: equal keys are equal answers."""
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r"\1", normalise(text))
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"[\s$]|\^\\circ|\^\{\\circ\}|\\displaystyle", "", text).rstrip(".")


def equation(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of an expression over the problem's numbers: right if its value is the target."""
    text, how = extract(results[0], numbers=False)
    if how == "none":
        text = next((line for line in reversed(results[0].strip().splitlines()) if re.search(r"\d", line)), "")
        how = "line" if text else "none"
    value = evaluate(text, {name: Fraction(number) for name, number in (doc.get("names") or {}).items()})
    gold = readings(doc["target"])
    correct = value is not None and any(close(value, g) for g in gold)
    return _scores(correct, text, how) | _parts(doc, correct)


def _parts(doc: dict[str, Any], correct: bool) -> dict[str, float | None]:
    """Accuracy by complexity and by grade, for the documents that have them; None where not its part."""
    parts: dict[str, float | None] = {}
    if doc.get("complexity"):
        parts |= {f"complexity_{level}": float(correct) if doc["complexity"] == level else None for level in LEVELS}
    if doc.get("grade"):
        parts |= {f"grade_{k}": float(correct) if doc["grade"] == k else None for k in range(1, 7)}
    return parts


# --------------------------------------------------------------------------- aggregations


class Share(float):
    """A mean that knows of how many documents, so that a group can pool it."""

    count: int

    def __new__(cls, value: float, count: int) -> Share:
        """A share of `count` documents."""
        share = super().__new__(cls, value)
        share.count = count
        return share


def share(values: Iterable[float | None]) -> Share:
    """Mean of the values that are not None (documents of one level, say); NaN if there are none."""
    known = [value for value in values if value is not None]
    return Share(math.fsum(known) / len(known) if known else math.nan, len(known))


def pooled(values: list[Share], sizes: list[int]) -> Share:
    """A group's share: every document counts once. (`sizes` are lm-eval's, of whole tasks, and not used.)"""
    known = [value for value in values if value.count]
    total = sum(value.count for value in known)
    return Share(math.fsum(value * value.count for value in known) / total if total else math.nan, total)


def total(values: Iterable[float]) -> float:
    """How many documents."""
    return math.fsum(values)


def found(values: Iterable[str | list[str]]) -> float:
    """Share of responses in which an answer was found."""
    flat = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return sum(bool(text) for text in flat) / len(flat)


def marked(values: Iterable[str]) -> float:
    """Share of responses whose answer was marked by the model (boxed, `####`, 'the answer is')."""
    known = list(values)
    return sum(how in MARKED for how in known) / len(known)
