"""When two answers are the same: as text, and as expressions; for numbers see `numbers_equal`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from lmeval_prune.scoring.expressions import evaluate, has_operator, is_division, reduced_fraction
from lmeval_prune.scoring.normalisation import MAX_LENGTH, clean, plain
from lmeval_prune.scoring.prose import equals_number, numbers_equal, readings
from lmeval_prune.scoring.vocabulary import phrases

_TIME = re.compile(r"0?(\d{1,2}(?::\d\d)+)\s*(?:([ap])\.?\s?m\.?)?")  # 05:45 p.m.
_LETTER = re.compile(
    r"(?:(?:option|choice|answer) )?(?:\(([a-k])\)|([a-k])(?=$|[.:)] ))"
)  # (c), c, option c, c. helium
_SEPARATOR = re.compile(r"\s*;\s*|,\s+(?:and\s+)?|,(?!\d{3})|\s+and\s+")  # of several: 3; 4, or 3, 4 and 5


def same_text(answer: str, gold: str) -> bool:
    """Return whether answers are equal as numbers, item by item where a semicolon or comma separates several, as times, or as words."""
    if len(answer) > MAX_LENGTH:
        return False
    golds = re.split(r"\s*;\s*", gold.strip("; "))
    if len(golds) == 1:
        return _same_item(answer, gold)
    answer = plain(clean(answer)).strip()
    answer = answer[1:-1] if answer.startswith("(") and answer.find(")") == len(answer) - 1 else answer
    items = _SEPARATOR.split(answer)
    return len(items) == len(golds) and all(map(_same_item, items, golds))


def _same_item(answer: str, gold: str) -> bool:
    if numbers_equal(answer, gold):
        return True
    words, gold_words = _words(answer), _words(gold)
    time, gold_time = _TIME.fullmatch(words), _TIME.fullmatch(gold_words)
    if time and gold_time:  # 5:45 p.m. is 5:45 and 17:45, but not 5:45 a.m.
        (clock, half), (gold_clock, gold_half) = _halved(time, gold_time), _halved(gold_time, time)
        return clock == gold_clock and (half or gold_half) == (gold_half or half)
    if (letter := _letter(gold_words)) and _LETTER.fullmatch(gold_words):
        return _letter(words) == letter
    if re.fullmatch(r"\d+:\d+", gold_words):  # a ratio
        words = re.sub(r"(?<=\d)\s*(?:\bto\b|:)\s*(?=\d)", ":", words)
    return words == gold_words and bool(words)


def _letter(words: str) -> str:
    """Return the letter of a choice with which words begin; empty without one, or with several."""
    match = _LETTER.match(words)
    if not match or re.search(r"\b(?:or|and)\b|\([a-k]\)", words[match.end() :]):
        return ""
    return match[1] or match[2]


def _halved(time: re.Match[str], other: re.Match[str]) -> tuple[str, str | None]:
    """Return a time and its half of the day; beside one with its half, a time of 24 hours in the hours of 12."""
    hour, _, minutes = str(time[1]).partition(":")
    if time[2] or not other[2] or 1 <= int(hour) <= 12 or int(hour) > 23:
        return time[1], time[2]
    return f"{int(hour) % 12 or 12}:{minutes}", "p" if int(hour) > 12 else "a"


def _words(text: str) -> str:
    words = re.sub(r"\s+", " ", plain(clean(text))).strip(" .$").lower()
    words = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|,(?!\d)", "", words)
    words = re.sub(rf"^(\d+) (?:of )?({phrases('months')})$", r"\2 \1", words, flags=re.IGNORECASE)
    return re.sub(r"^(?:the|an?|they are|it is|it's|on) (?=\S)", "", words)


def expression_is_right(text: str, target: str, gold: str, names: Mapping[str, Fraction]) -> bool:
    """Return whether the value of an expression is the target, and it is computed.

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
    return value is not None and computes and equals_number(value, target)


def same_expression(answer: str, other: str) -> bool:
    """Return whether two expressions have one value, or (with names) are the same text."""
    values = evaluate(answer), evaluate(other)
    keys = [re.sub(r"\s", "", plain(clean(text))) for text in (answer, other)]
    return values[0] == values[1] and (values[0] is not None or keys[0] == keys[1])
