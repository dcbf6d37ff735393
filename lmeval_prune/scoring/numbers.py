r"""Reading numbers as people and models write them, and comparing them.

Two numbers are equal if they differ by at most `RELATIVE` of the gold one's size (or `ABSOLUTE`); two
whole numbers only if they are the same. So 9.05 is not 9, 33.33 is 100/3, and 10001 is not 10000. A
percentage is read both ways, `80%` as 80 and as 0.8, because gold answers write it either way.
"""

from __future__ import annotations

import re
from fractions import Fraction

RELATIVE = Fraction(1, 5000)
ABSOLUTE = Fraction(1, 10**6)
_MAX_DIGITS = 400

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus sign is a sign only where no number or bracket ends before it: 20-7 holds 20 and 7.
NUMBER = re.compile(rf"(?:(?<![\w)\].])-\s?)?(?:{_DIGITS})(?:\s?/\s?\d+(?:\.\d+)?)?(?:\s?%)?")
_PLAIN = re.compile(rf"([-+]?)\s?({_DIGITS})(?:[eE]([-+]?\d{{1,3}}))?")
_FRACTION = re.compile(rf"([-+]?)\s?\(?({_DIGITS})\s?/\s?({_DIGITS})\)?")
_MIXED = re.compile(r"([-+]?)\s?(\d+)\s*(?:[+ ]|\()\s*\(?(\d+)\s?/\s?(\d+)\)?\)?")
_FULL_WIDTH = {
    **{0xFF01 + i: 0x21 + i for i in range(94)},
    0x3000: 0x20,
    0x2212: 0x2D,
    0x2013: 0x2D,
    0xFE63: 0x2D,
}


def normalise(text: str) -> str:
    r"""Full-width characters to plain ones, LaTeX fractions, thin spaces and signs to plain text."""
    text = text.translate(_FULL_WIDTH)
    text = re.sub(r"\\[dtc]?frac\s*\{\s*([-\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}", r"(\1/\2)", text)
    text = re.sub(r"\\[dtc]?frac\s*(\d)\s*(\d)", r"(\1/\2)", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("{,}", ",").replace("\\left", "").replace("\\right", "")
    return re.sub(r"\\[,!;: ]", "", text)


def _fraction(digits: str) -> Fraction | None:
    digits = digits.replace(",", "")
    return Fraction(digits) if len(digits) <= _MAX_DIGITS else None


def readings(text: str) -> tuple[Fraction, ...]:
    """Values that a text can mean as one number; empty if it is not one.

    Currency signs and unit words around the number are passed over (`$1,200`, `18 apples`), and so is
    the left side of an equation (`x = 5`).
    """
    text = normalise(text).strip().strip("$ ").rstrip(".。").strip()
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", text).strip()
    text = re.sub(r"^[A-Za-z]\w{0,2}\s*=\s*", "", text)
    text = text.lstrip("$€£¥ ").replace("$", "").strip()
    percent = "%" in text
    body = text.replace("%", "").strip()
    value = _value(body)
    if value is None:
        found = NUMBER.findall(body)
        if len(found) != 1 or re.search(r"[=<>^_*\\]|\d\s*\(|\)\s*\d", body) or len(body) > 200:
            return ()
        value = _value(found[0].replace("%", "").strip())
    if value is None:
        return ()
    return (value, value / 100) if percent else (value,)


def _value(text: str) -> Fraction | None:
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and len(text) < 100:
        text = text[1:-1].strip()
    if found := _PLAIN.fullmatch(text):
        sign, digits, exponent = found.groups()
        value = _fraction(digits)
        if value is not None and exponent:
            value *= Fraction(10) ** int(exponent)
    elif found := _FRACTION.fullmatch(text):
        sign, top, bottom = found.groups()
        numerator, denominator = _fraction(top), _fraction(bottom)
        value = numerator / denominator if numerator is not None and denominator else None
    elif found := _MIXED.fullmatch(text):
        sign, whole, top, bottom = found.groups()
        if len(text) > _MAX_DIGITS or int(bottom) == 0:
            return None
        value = int(whole) + Fraction(int(top), int(bottom))
    else:
        return None
    return -value if value is not None and sign == "-" else value


def close(answer: Fraction, gold: Fraction) -> bool:
    """Whether two values are equal within the tolerance stated above."""
    if answer.denominator == 1 and gold.denominator == 1:
        return answer == gold
    return abs(answer - gold) <= max(ABSOLUTE, RELATIVE * abs(gold))


def numbers_equal(answer: str, gold: str) -> bool:
    """Whether both texts are numbers and one reading of one equals one reading of the other."""
    return any(close(a, g) for a in readings(answer) for g in readings(gold))
