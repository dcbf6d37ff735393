"""When two answers are the same: as text, in mathematics, and as expressions; for numbers see `numbers_equal`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from lmeval_prune.scoring.expressions import evaluate, has_operator, is_division, reduced_fraction
from lmeval_prune.scoring.numbers import WRAPPER, close, normalise, numbers_equal, plain, readings
from lmeval_prune.scoring.verifier import Verdict, shared

MAX_LENGTH = 2000  # characters; longer answers are no answers

# --------------------------------------------------------------------------- numbers, times, ratios, words

_TIME = re.compile(r"0?(\d{1,2}(?::\d\d)+)\s*(?:([ap])\.?\s?m\.?)?")


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
    words, gold_words = _words(answer), _words(gold)
    times = _TIME.fullmatch(words), _TIME.fullmatch(gold_words)
    if times[0] and times[1]:  # 5:45 p.m. is 5:45, but not 5:45 a.m.
        return times[0][1] == times[1][1] and (times[0][2] or times[1][2]) == (times[1][2] or times[0][2])
    if re.fullmatch(r"\d+:\d+", gold_words):  # a ratio
        words = re.sub(r"(?<=\d)\s*(?:\bto\b|:)\s*(?=\d)", ":", words)
    return words == gold_words and bool(words)


def _unwrapped(text: str) -> str:
    return WRAPPER.sub(r"\1", normalise(text))


def _words(text: str) -> str:
    words = re.sub(r"\s+", " ", _unwrapped(text)).strip(" .$").lower()
    return re.sub(r"^(?:the|an?|they are|it is|it's) (?=\S)", "", words)


# --------------------------------------------------------------------------- mathematics

_KNOWN: dict[tuple[str, str], Verdict] = {}  # what workers have found
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|ln|exp|pi|lcm|gcd|max|min)\b)[A-Za-z]{3,}|\\[pb]?mod\b")
_BASE = re.compile(r"[0-9A-F]*_\{?(\d{1,4})\}?$")  # of 432_7


def equal_mathematics(answer: str, gold: str) -> Verdict:
    """`equal`, `different`, `timeout` or `crash`."""
    return verdicts([(answer, gold)])[0]


def same_mathematics(answer: str, other: str) -> bool:
    """Whether two answers are the same, `other` as the gold one."""
    return equal_mathematics(answer, other) == "equal"


def verdicts(pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
    """`equal_mathematics` of many (answer, gold) pairs: what is not easy, over all workers at once and only once."""
    pairs = list(pairs)
    easy = {pair: easy_verdict(*pair) for pair in pairs}
    hard = [pair for pair, verdict in easy.items() if verdict is None and pair not in _KNOWN]
    if hard:
        _KNOWN.update(zip(hard, shared().verify_many([(gold, answer) for answer, gold in hard]), strict=True))
    return [easy[pair] or _KNOWN[pair] for pair in pairs]


def forget_failures() -> None:
    """Let `verdicts` try again what timed out or crashed."""
    for pair in [pair for pair, verdict in _KNOWN.items() if verdict in ("timeout", "crash")]:
        del _KNOWN[pair]


def easy_verdict(answer: str, gold: str) -> Verdict | None:
    """What can be said without a worker: numbers first, since `3 1/2` and `31/2` are not, without spaces, the same."""
    if not answer or len(answer) > MAX_LENGTH:
        return "different"
    if readings(answer) and readings(gold):
        return "equal" if numbers_equal(answer, gold) else "different"
    if latex_key(answer) == latex_key(gold):
        return "equal"
    if readings(gold) and _PROSE.search(plain(answer)):  # math-verify reads `5 and a half` as 5
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


# --------------------------------------------------------------------------- expressions


def expression_is_right(text: str, target: str, gold: str, names: Mapping[str, Fraction]) -> bool:
    """Whether the value of an expression is the target, and it is computed.

    Where the gold expression computes something, a number alone is not an expression; nor is the target written as a
    fraction, but where the gold expression is one division.

    Args:
        text: an expression.
        target: its value, as text.
        gold: an expression that has this value; empty if none is known.
        names: values of names such as `n0`.
    """
    value, targets = evaluate(text, names), readings(target)
    copied = reduced_fraction(text) in targets and not is_division(gold)
    computes = not has_operator(gold) or (has_operator(text) and not copied)
    return value is not None and computes and any(close(value, one) for one in targets)


def same_expression(answer: str, other: str) -> bool:
    """Whether two expressions have one value, or (with names) are the same text."""
    values = evaluate(answer), evaluate(other)
    return values[0] == values[1] and (values[0] is not None or latex_key(answer) == latex_key(other))
