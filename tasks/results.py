"""lm-eval's `process_results` for our tasks: a document and its response become metric values.

Every item reports, beside the scores, `extracted` (the answer that was found) and `how`. `exact_match`
takes the last number where nothing marks an answer; `strict_match` needs a mark (a box, `####`, or
'the answer is'). `SAME` names, for each of these functions, when two extracted answers are the same one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from lmeval_prune.errors import reported
from lmeval_prune.scoring import MARKED, extract, numbers_equal, readings
from lmeval_prune.scoring.equality import (
    MAX_LENGTH,
    equal_mathematics,
    expression_is_right,
    forget_failures,
    same_expression,
    same_mathematics,
    same_text,
    verdicts,
)

Scores = dict[str, Any]

_COLONS = re.compile(r"\d+(?::\d+)+(?:\s?[ap]\.?\s?m\.?)?", re.IGNORECASE)  # a time or a ratio
_THEREFORE = re.compile(r"(?:(?:so|thus|hence|therefore)\b,?\s+)?([A-Za-z]+)", re.IGNORECASE)


def _scores(correct: bool, answer: str, how: str) -> Scores:
    return {
        "exact_match": float(correct),
        "strict_match": float(correct and how in MARKED),
        "extracted": answer,
        "how": how,
    }


def number(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Scores of a final answer that is one number."""
    answer, how = extract(results[0])
    return _scores(numbers_equal(answer, doc["target"]), answer, how)


def text_or_number(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Scores of a final answer that is one or more numbers (`3; 4`), a time, a ratio or a word.

    An answer that nothing marks counts only if it is the last line: prose that merely holds the word may say
    anything about it. Yes and no may go on ('Therefore, yes, there are 3 left.'), and of times and
    ratios the line's last one counts.
    """
    gold = doc["target"]
    answer, how = extract(results[0], numbers=bool(readings(gold)))
    correct = same_text(answer, gold)
    if not correct and (how not in ("boxed", "hashes") or gold.lower() in ("yes", "no")):
        lines = [line for line in results[0].splitlines() if line.strip()]
        correct = bool(re.search(r"[A-Za-z:;]", gold)) and _says(
            answer if how in MARKED else lines[-1] if lines else "", gold
        )
    return _scores(correct, answer, how)


def _says(line: str, gold: str) -> bool:
    """Whether a line gives this answer, as stated above."""
    line = line[-MAX_LENGTH:].strip(" *_")
    if gold.lower() in ("yes", "no"):
        first = _THEREFORE.match(line)
        return first is not None and first[1].lower() == gold.lower()
    times = _COLONS.findall(line) if _COLONS.fullmatch(gold) else []
    return same_text(times[-1] if times else line, gold)


def mathematics(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Scores of a MATH answer: the same as the gold one as a number, as LaTeX, or by math-verify."""
    answer, how = extract(results[0], numbers=False)
    verdict = equal_mathematics(answer, doc["target"])
    return _scores(verdict == "equal", answer, how) | {"timeouts": float(verdict in ("timeout", "crash"))}


@register_filter("prune_verdicts")
class Verdicts(Filter):
    """Compares the answers of a whole task at once, before `mathematics` scores them one by one; changes nothing.

    With several responses to a question, also with each other, for `maj@N` and `distinct`.
    """

    @reported
    def apply(self, resps: Iterable[str | Sequence[str]], docs: list[dict[str, Any]]) -> Iterable[Any]:
        """Fill the store of verdicts; `resps` are texts, or lists of texts, and are handed on."""
        resps = list(resps)
        forget_failures()
        pairs: list[tuple[str, str]] = []
        for texts, doc in zip(resps, docs, strict=True):
            answers = [extract(text, numbers=False).answer for text in ([texts] if isinstance(texts, str) else texts)]
            one_each = dict.fromkeys(answer for answer in answers if answer)
            pairs += [(answer, gold) for gold, answer in itertools.combinations([doc["target"], *one_each], 2)]
        verdicts(pairs)
        return resps


def equation(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Scores of an expression over the problem's numbers; see `expression_is_right`."""
    text, how = extract(results[0], numbers=False)
    if how not in MARKED:
        text = next((line for line in reversed(results[0].splitlines()) if re.search(r"\d", line)), "").strip()
        how = "line" if text else "none"
    names = {name: Fraction(number) for name, number in (doc.get("names") or {}).items() if number}
    gold = doc.get("formula") or doc.get("equation") or ""
    return _scores(expression_is_right(text, doc["target"], gold, names), text, how)


SAME: dict[Callable[..., Scores], Callable[[str, str], bool]] = {
    number: numbers_equal,
    text_or_number: same_text,
    mathematics: same_mathematics,
    equation: same_expression,
}
