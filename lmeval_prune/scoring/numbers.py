r"""Reading numbers as people and models write them, and comparing them.

A number equals a gold one that is no whole number if they differ by at most `RELATIVE` of its size; a whole
gold number allows `ABSOLUTE` only (rounding of a computed float), and no other whole number. So 33.33 is
100/3, but 9.05 is not 9 and 10001 is not 10000. A percentage is read both ways, `80%` as 80 and as 0.8,
and so is a scale word, `5 million` as 5 and as 5,000,000: gold answers write it either way.
"""

from __future__ import annotations

import re
from fractions import Fraction

RELATIVE = Fraction(1, 5000)
ABSOLUTE = Fraction(1, 10**6)
_MAX_DIGITS = 400

_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# A minus sign is a sign only where no number or bracket ends before it: 20-7 holds 20 and 7.
NUMBER = re.compile(
    rf"(?:(?<![0-9A-Za-z_)\].])-\s?)?(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}})?(?:\s?/\s?\d+(?:\.\d+)?)?(?:\s?%)?"
)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"万": 10**4, "亿": 10**8}  # not 千, which begins 千米 and 千克
_SCALE = re.compile(rf"\s*({'|'.join(SCALES)})(?![A-Za-z])", re.IGNORECASE)
# What may stand around a number: a name and `=`, 'about', a unit of two letters or more (one letter only as a common
# unit after a space), Chinese words. A letter at the digits (2x, 5i), an operator or a function make it another thing.
_BEFORE = re.compile(
    r"(?:(?:[A-Za-z]\w{0,2}|[A-Za-z]{3,}(?:\s[A-Za-z]+){0,3})?\s*=)?\s*"
    r"(?:(?:about|approximately|exactly|only|roughly|a total of)\s+)?[\u4e00-\u9fff]*:?\s*[$€£¥]?\s*",
    re.IGNORECASE,
)
_WORD = r"(?:[A-Za-z\u00b0²³]{2,}\.?|[\u4e00-\u9fff]+)"
_AFTER = re.compile(
    rf"(?:\s*(?:{_WORD}|[°$€£¥])|\s+[mghslL])?(?:\s*/\s*[A-Za-z]+|(?:\s+|-){_WORD})*"
    r"(?:\s*\((?:[A-Za-z]{2,}[-A-Za-z ./]*|[\u4e00-\u9fff/]+)\))?\s*[.。]?"
)
NO_UNIT = re.compile(
    r"π|(?<![A-Za-z])(?:pi|sqrt|mod|plus|minus|less|times|factorial|negative|half|and|or)(?![A-Za-z])|\d\s*(?:squar|cub)ed",
    re.IGNORECASE,
)
# Words in LaTeX's wrappers stand for themselves.
WRAPPER = re.compile(r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:bf|rm|it|sf|tt)|mbox|boldsymbol)\s*\{([^{}]*)\}")
_SHAPES = [
    (re.compile(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|\\degree"), "°"),
    (re.compile(r"\\(?:approx|simeq)|≈"), "="),
    (re.compile(r"\\q?quad|[~\u00a0]"), " "),
    (re.compile(r"(?<=\d)\s?又\s?(?=\d)"), " "),
    (re.compile(r"\s?\bper\s?cent\b", re.IGNORECASE), "%"),
    (re.compile(r"(?<=\d)\s?(?:×|\*|[xX]|\\times|\\cdot)\s?10\s?\^\s?(?:\{(-?\d{1,3})\}|(-?\d{1,3}))"), r"e\1\2"),
    # a unit's exponent: cm^2, m3
    (
        re.compile(
            r"(?<=[A-Za-z])\s?\^\s?(?:\{[23]\}|[23])|(?:(?<=[cdkm]m)|(?<=\dm)|(?<=\d m)|(?<=ft))[23](?!\w|\.\d)"
        ),
        "",
    ),
]
_PLAIN = re.compile(rf"([-+]?)\s?({_DIGITS})(?:[eE]([-+]?\d{{1,3}}))?")
_FRACTION = re.compile(rf"([-+]?)\s?\(?({_DIGITS})\s?/\s?({_DIGITS})\)?")
_MIXED = re.compile(r"([-+]?)\s?(\d+)\s*(?:[+ ]|\()\s*\(?(\d+)\s?/\s?(\d+)\)?\)?")
_FULL_STOP = re.compile(r"(?<!\d)．|．(?!\d)")  # a decimal point only between digits
_FULL_WIDTH = {
    **{0xFF01 + i: 0x21 + i for i in range(94)},
    0x3000: 0x20,
    0x2212: 0x2D,
    0x2013: 0x2D,
    0xFE63: 0x2D,
}


def normalise(text: str) -> str:
    r"""Full-width characters to plain ones, LaTeX fractions, thin spaces and signs to plain text."""
    text = _FULL_STOP.sub("。", text).translate(_FULL_WIDTH)
    text = re.sub(r"\\[dtc]?frac\s*\{\s*([-\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}", r"(\1/\2)", text)
    text = re.sub(r"\\[dtc]?frac\s*(\d)\s*(\d)", r"(\1/\2)", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("{,}", ",").replace("\\left", "").replace("\\right", "")
    return re.sub(r"\\[,!;: ]", "", text)


def plain(text: str) -> str:
    """`normalise`, and words out of their wrappers, degrees, percentages, powers of ten and units as plain text."""
    text = re.sub(r"\s{1,3}\^", "^", WRAPPER.sub(r" \1 ", normalise(text)))
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    return text


def _fraction(digits: str) -> Fraction | None:
    digits = digits.replace(",", "")
    return Fraction(digits) if len(digits) <= _MAX_DIGITS else None


def readings(text: str) -> tuple[Fraction, ...]:
    """Values that a text can mean as one number; empty if it is not one.

    Currency signs and unit words around the number are passed over (`$1,200`, `18 apples`), and so is
    the left side of an equation (`x = 5`).
    """
    if len(text) > 2 * _MAX_DIGITS:
        return ()
    text = plain(text).strip().strip("$ ").rstrip(".。").strip()
    if NO_UNIT.search(text):
        return ()
    percent = "%" in text
    text = text.replace("%", "").replace("$", "").strip()
    value, scale = _value(text), 1
    if value is None and len(text) <= _MAX_DIGITS:
        bare = text[len(before.group()) :] if (before := _BEFORE.match(text)) else text
        end = max((place for place, letter in enumerate(bare, 1) if letter.isdecimal()), default=0)
        end += bare[end:].startswith(")")
        if _AFTER.fullmatch(bare[end:]):
            value = _value(bare[:end])
            scale = SCALES[word[1].lower()] if (word := _SCALE.match(bare[end:])) else 1
    if value is None:
        return ()
    return tuple(dict.fromkeys((value, value / 100 if percent else value * scale)))


def _value(text: str) -> Fraction | None:
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and len(text) < 100:
        text = text[1:-1].strip()
        if "," in text:  # (1,100) is a pair
            return None
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
    return abs(answer - gold) <= (ABSOLUTE if gold.denominator == 1 else max(ABSOLUTE, RELATIVE * abs(gold)))


def numbers_equal(answer: str, gold: str) -> bool:
    """Whether both texts are numbers and one reading of one equals one reading of the other."""
    return any(close(a, g) for a in readings(answer) for g in readings(gold))
