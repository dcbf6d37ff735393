"""Functions for `process_results` of lm-eval's tasks: compute the metrics of a response to a document.

Each function returns `exact_match` and `strict_match`, the answer (`extracted`), where it was found (`how`), and if
that was the end of the response, without a mark (`unmarked`). `exact_match` accepts such an answer; `strict_match`
requires a marked one (a box, `####`, or 'the answer is').
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.scoring import (
    MARKED,
    ExpressionReader,
    Extraction,
    MathematicsReader,
    NumberReader,
    extract,
    numbers_equal,
)
from lmeval_prune.scoring.equality import expression_is_right, same_expression, same_text
from lmeval_prune.scoring.mathematics import forget_failures, same_mathematics, verdicts
from lmeval_prune.scoring.readers import text_reader

Scores = dict[str, Any]


def _response(doc: dict[str, Any], results: Sequence[str]) -> str:
    """Return the response to a document."""
    if isinstance(results, str):
        raise InputError("results is one text; give a list of texts: process_results(doc, [text])")
    return results[0]


def _scores(correct: bool, extraction: Extraction) -> Scores:
    strict = float(correct and extraction.how in MARKED)
    return {
        "exact_match": float(correct),
        "strict_match": strict,
        "unmarked": float(extraction.how == "end"),
        "extracted": extraction.answer,
        "how": extraction.how,
    }


@print_input_errors
def number(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Score an answer that is one number."""
    extraction = extract(_response(doc, results), NumberReader())
    return _scores(numbers_equal(extraction.answer, doc["target"]), extraction)


@print_input_errors
def text_or_number(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Score an answer that is one or more numbers (`3; 4`), a time, a ratio or a word."""
    extraction = extract(_response(doc, results), text_reader(doc["target"]))
    return _scores(same_text(extraction.answer, doc["target"]), extraction)


@print_input_errors
def mathematics(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Score a MATH answer: of the same form as the gold answer, with parts equal as numbers or by math-verify."""
    extraction = extract(_response(doc, results), MathematicsReader(doc["target"]))
    verdict = verdicts([(extraction.answer, doc["target"])])[0]
    return _scores(verdict == "equal", extraction) | {"timeouts": float(verdict in ("timeout", "crash"))}


@register_filter("prune_verdicts")
class Verdicts(Filter):
    """Compares all answers of a task in one call, before `mathematics` scores each; returns the responses unchanged.

    Several responses to a question are also compared with each other, for `maj@N` and `distinct`.
    """

    @print_input_errors
    def apply(self, resps: Iterable[str | Sequence[str]], docs: list[dict[str, Any]]) -> Iterable[Any]:
        """Compute and cache the verdicts; `resps` are texts or lists of texts, and are returned."""
        resps = list(resps)
        forget_failures()
        pairs: list[tuple[str, str]] = []
        for texts, doc in zip(resps, docs, strict=True):
            reader = MathematicsReader(doc["target"])
            answers = [extract(text, reader).answer for text in ([texts] if isinstance(texts, str) else texts)]
            distinct = dict.fromkeys(filter(None, answers))
            pairs += [(answer, gold) for gold, answer in itertools.combinations([doc["target"], *distinct], 2)]
        verdicts(pairs)
        return resps


@print_input_errors
def equation(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Score an arithmetic expression; see `expression_is_right`."""
    extraction = extract(_response(doc, results), ExpressionReader())
    names = {name: Fraction(number) for name, number in (doc.get("names") or {}).items() if number}
    gold = doc.get("formula") or doc.get("equation") or ""
    return _scores(expression_is_right(extraction.answer, doc["target"], gold, names), extraction)


@print_input_errors
def ending(doc: dict[str, Any], results: Sequence[str]) -> Scores:
    """Score the completion of a sentence: its first words, as many as the gold ending has."""
    response = _response(doc, results)
    words = re.findall(r"\w+", response)[: len(re.findall(r"\w+", doc["target"]))]
    extraction = Extraction(" ".join(words), "end" if words else "none")
    return _scores(same_text(extraction.answer, doc["target"]), extraction)


# By scoring function: how to compare two answers that it extracted.
EQUALITIES: dict[Callable[..., Scores], Callable[[str, str], bool]] = {
    number: numbers_equal,
    text_or_number: same_text,
    mathematics: same_mathematics,
    equation: same_expression,
    ending: same_text,
}
