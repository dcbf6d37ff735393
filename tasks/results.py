"""lm-eval's `process_results` for our tasks: a document and its responses become metric values.

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

from lmeval_prune.scoring import (
    MARKED,
    evaluate,
    extract,
    has_operator,
    is_division,
    numbers_equal,
    readings,
    reduced_fraction,
)
from lmeval_prune.scoring.mathematics import MAX_LENGTH, Verdict, shared
from lmeval_prune.scoring.numbers import WRAPPER, close, normalise, plain

LEVELS = ("low", "medium", "high")


def _scores(correct: bool, answer: str, how: str) -> dict[str, Any]:
    return {
        "exact_match": float(correct),
        "strict_match": float(correct and how in MARKED),
        "extracted": answer,
        "how": how,
    }


def _parts(doc: dict[str, Any], correct: bool) -> dict[str, float | None]:
    """Accuracy by complexity and by grade, for the documents that have them; None where not its part."""
    parts: dict[str, float | None] = {}
    if doc.get("complexity"):
        levels = doc.get("complexities", LEVELS)
        parts |= {f"complexity_{level}": float(correct) if doc["complexity"] == level else None for level in levels}
    if doc.get("grade"):
        parts |= {f"grade_{k}": float(correct) if doc["grade"] == k else None for k in range(1, 7)}
    return parts


# --------------------------------------------------------------------------- one number


def number(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of a final answer that is one number."""
    answer, how = extract(results[0])
    correct = numbers_equal(answer, doc["target"])
    return _scores(correct, answer, how) | _parts(doc, correct)


# --------------------------------------------------------------------------- numbers, times, ratios, words

_TIME = re.compile(r"0?(\d{1,2}(?::\d\d)+)\s*(?:([ap])\.?\s?m\.?)?")
_COLONS = re.compile(r"\d+(?::\d+)+(?:\s?[ap]\.?\s?m\.?)?", re.IGNORECASE)  # a time or a ratio
_THEREFORE = re.compile(r"(?:(?:so|thus|hence|therefore)\b,?\s+)?([A-Za-z]+)", re.IGNORECASE)


def text_or_number(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
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
    return _scores(correct, answer, how) | _parts(doc, correct)


def _says(line: str, gold: str) -> bool:
    """Whether a line gives this answer, as stated above."""
    line = line[-MAX_LENGTH:].strip(" *_")
    if gold.lower() in ("yes", "no"):
        first = _THEREFORE.match(line)
        return bool(first) and first[1].lower() == gold.lower()
    times = _COLONS.findall(line) if _COLONS.fullmatch(gold) else []
    return same_text(times[-1] if times else line, gold)


def same_text(answer: str, gold: str) -> bool:
    """Equal as numbers, item by item where a semicolon or comma separates several, as times, or as words."""
    if len(answer) > MAX_LENGTH:
        return False
    golds = re.split(r"\s*;\s*", gold.strip("; "))
    if len(golds) == 1:
        return _same_item(answer, gold)
    ways = (r"\s*;\s*|,\s+(?:and\s+)?|\s+and\s+", r"\s*[;,]\s*(?:and\s+)?|\s+and\s+")  # `1,200; 3` before `3,4`
    answer = _unwrapped(answer).strip()
    answer = answer[1:-1] if answer.startswith("(") and answer.find(")") == len(answer) - 1 else answer
    splits = (re.split(way, answer) for way in ways)
    return any(len(items) == len(golds) and all(map(_same_item, items, golds)) for items in splits)


def _same_item(answer: str, gold: str) -> bool:
    if numbers_equal(answer, gold):
        return True
    plain, plain_gold = _plain(answer), _plain(gold)
    times = _TIME.fullmatch(plain), _TIME.fullmatch(plain_gold)
    if times[0] and times[1]:  # 5:45 p.m. is 5:45, but not 5:45 a.m.
        return times[0][1] == times[1][1] and (times[0][2] or times[1][2]) == (times[1][2] or times[0][2])
    if re.fullmatch(r"\d+:\d+", plain_gold):  # a ratio
        plain = re.sub(r"(?<=\d)\s*(?:\bto\b|:)\s*(?=\d)", ":", plain)
    return plain == plain_gold and bool(plain)


def _unwrapped(text: str) -> str:
    return WRAPPER.sub(r"\1", normalise(text))


def _plain(text: str) -> str:
    words = re.sub(r"\s+", " ", _unwrapped(text)).strip(" .$").lower()
    return re.sub(r"^(?:the|an?|they are|it is|it's) (?=\S)", "", words)


# --------------------------------------------------------------------------- mathematics

_KNOWN: dict[tuple[str, str], Verdict] = {}  # what workers have found; timeouts until the next task
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|ln|exp|pi|lcm|gcd|max|min)\b)[A-Za-z]{3,}|\\[pb]?mod\b")
_BASE = re.compile(r"[0-9A-F]*_\{?(\d{1,4})\}?$")  # of 432_7


def mathematics(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of a MATH answer: the same as the gold one as a number, as LaTeX, or by math-verify."""
    answer, how = extract(results[0], numbers=False)
    verdict = equal_mathematics(answer, doc["target"])
    correct = verdict == "equal"
    levels = {f"level_{k}": float(correct) if doc["level"] == k else None for k in range(1, 6)}
    return _scores(correct, answer, how) | {"timeouts": float(verdict in ("timeout", "crash"))} | levels


def equal_mathematics(answer: str, gold: str) -> Verdict:
    """`equal`, `different`, `timeout` or `crash`."""
    return verdicts([(answer, gold)])[0]


def same_mathematics(answer: str, other: str) -> bool:
    """Whether two answers are the same, `other` as the gold one."""
    return equal_mathematics(answer, other) == "equal"


def verdicts(pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
    """`equal_mathematics` of many (answer, gold) pairs: what is not easy, over all workers at once and only once."""
    pairs = list(pairs)
    easy = {pair: _easy(*pair) for pair in pairs}
    hard = [pair for pair, verdict in easy.items() if verdict is None and pair not in _KNOWN]
    if hard:
        _KNOWN.update(zip(hard, shared().verify_many([(gold, answer) for answer, gold in hard]), strict=True))
    return [easy[pair] or _KNOWN[pair] for pair in pairs]


def _easy(answer: str, gold: str) -> Verdict | None:
    """What can be said without a worker: numbers first, since `3 1/2` and `31/2` are not, without spaces, the same."""
    if not answer or len(answer) > MAX_LENGTH:
        return "different"
    if readings(answer) and readings(gold):
        return "equal" if numbers_equal(answer, gold) else "different"
    if latex_key(answer) == latex_key(gold):
        return "equal"
    if readings(gold) and _WORDS.search(plain(answer)):  # math-verify reads `5 and a half` as 5
        return "different"
    base, gold_base = _BASE.search(answer), _BASE.search(gold)  # math-verify passes over them
    if base and int(base[1]) != (int(gold_base[1]) if gold_base else 10) and (gold_base or base.start() == 0):
        return "different"
    return None


def latex_key(text: str) -> str:
    """LaTeX without text wrappers, degrees, size commands and spaces (but between digits): equal keys are equal."""
    text = re.sub(r"\\[dt]frac", r"\\frac", _unwrapped(text))
    text = re.sub(r"[$]|\^\\circ|\^\{\\circ\}|\\displaystyle", "", text).strip()
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).rstrip(".")


@register_filter("prune_verdicts")
class Verdicts(Filter):
    """Compares the answers of a whole task at once, before `mathematics` scores them one by one; changes nothing.

    With several responses to a question, also with each other, for `maj@N` and `distinct`.
    """

    def apply(self, resps: Iterable[str | Sequence[str]], docs: list[dict[str, Any]]) -> Iterable[Any]:
        """Fill the store of verdicts; `resps` are texts, or lists of texts, and are handed on."""
        resps = list(resps)
        for pair in [pair for pair, verdict in _KNOWN.items() if verdict in ("timeout", "crash")]:
            del _KNOWN[pair]
        pairs: list[tuple[str, str]] = []
        for texts, doc in zip(resps, docs, strict=True):
            answers = [extract(text, numbers=False).answer for text in ([texts] if isinstance(texts, str) else texts)]
            one_each = dict.fromkeys(answer for answer in answers if answer)
            pairs += [(answer, gold) for gold, answer in itertools.combinations([doc["target"], *one_each], 2)]
        verdicts(pairs)
        return resps


# --------------------------------------------------------------------------- expressions


def equation(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
    """Scores of an expression over the problem's numbers: right if its value is the target.

    Where the gold expression computes something, a number alone is not an expression; nor is the target written as a
    fraction, but where the gold expression is one division.
    """
    text, how = extract(results[0], numbers=False)
    if how not in MARKED:
        text = next((line for line in reversed(results[0].splitlines()) if re.search(r"\d", line)), "").strip()
        how = "line" if text else "none"
    names = {name: Fraction(number) for name, number in (doc.get("names") or {}).items() if number}
    value = evaluate(text, names)
    gold = doc.get("formula") or doc.get("equation") or ""
    targets = readings(doc["target"])
    copied = reduced_fraction(text) in targets and not is_division(gold)
    computes = not has_operator(gold) or (has_operator(text) and not copied)
    correct = value is not None and computes and any(close(value, target) for target in targets)
    return _scores(correct, text, how) | _parts(doc, correct)


def same_expression(answer: str, other: str) -> bool:
    """Whether two expressions have one value, or (with names) are the same text."""
    values = evaluate(answer), evaluate(other)
    return values[0] == values[1] and (values[0] is not None or latex_key(answer) == latex_key(other))


SAME: dict[Callable[..., dict[str, Any]], Callable[[str, str], bool]] = {
    number: numbers_equal,
    text_or_number: same_text,
    mathematics: same_mathematics,
    equation: same_expression,
}
