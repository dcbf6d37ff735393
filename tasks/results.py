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
    """Scores of a final answer that is one or more numbers (`3; 4`), a time, a ratio or a word.

    An answer in words that is not in a box or after `####` counts where the last line holds it.
    """
    answer, how = extract(results[0])
    correct = same_text(answer, doc["target"])
    if (
        not correct
        and how not in ("boxed", "hashes")
        and re.search(r"[A-Za-z:;]", doc["target"])
        and results[0].strip()
    ):
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
    names = {name: Fraction(number) for name, number in (doc.get("names") or {}).items() if number}
    value = evaluate(text, names)
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
    """The mean of some documents' values (those of one level, say), which knows of how many.

    lm-eval pools the tasks of a group as Σ value·size / Σ size, with the sizes of whole tasks (a group's
    `aggregation` function is not called in release 0.4.13). A share takes part in that sum with its own
    number of documents instead, so that in the group, too, each document counts once.
    """

    count: int

    def __new__(cls, value: float, count: int) -> Share:
        """The mean `value` of `count` documents."""
        share = super().__new__(cls, value)
        share.count = count
        return share

    def __mul__(self, size: Any) -> Any:
        """Begin the pooled sum; `size` is not used."""
        return _Pool(float(self) * self.count, self.count)


class _NoDocuments(str):
    """What stands in results (JSON has no NaN) where a task has no such documents; adds nothing to a group's sum."""

    def __mul__(self, size: Any) -> Any:
        return _Pool(0.0, 0)


class _Pool:
    """A sum of values and how many they are."""

    def __init__(self, total: float, count: int) -> None:
        self.total = total
        self.count = count

    def __add__(self, other: Any) -> _Pool:
        return _Pool(self.total + other.total, self.count + other.count) if isinstance(other, _Pool) else self

    __radd__ = __add__

    def __truediv__(self, size: Any) -> Share | str:
        return Share(self.total / self.count, self.count) if self.count else _NoDocuments("N/A")


def share(values: Iterable[float | None]) -> Share | str:
    """Mean of the values that are not None; `"N/A"` if there are none."""
    known = [value for value in values if value is not None]
    return Share(math.fsum(known) / len(known), len(known)) if known else _NoDocuments("N/A")


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
