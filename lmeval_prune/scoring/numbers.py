r"""Reading one number as people and models write it, and comparing two.

Two numbers are the same if their values are, up to the noise of a float. Only a gold number without end (1/3, 66.666666) is also
equalled by its rounding to three significant digits or more. A percentage is read both ways, `80%` as 80 and as 0.8, since gold
answers write it either way; `5 million` is 5,000,000.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from lmeval_prune.scoring.latex import SUPERSCRIPTS
from lmeval_prune.scoring.tokens import SPACES, Tokens
from lmeval_prune.scoring.vocabulary import values, words

MAX_DIGITS = 400
NOISE = Fraction(1, 10**6)  # of a float, absolute and relative
_SCALES = values("scales")
_PARTS = values("parts")  # half: 2
_SHORT_SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}  # of money: $45k
_SIGNS_BEFORE = frozenset(["equals", "stop", "open", "arrow", "money", ""])  # kinds after which + or minus is a sign
_EQUAL_WORDS = words("equal_words")
_PERCENT_WORDS = words("percent")
_MIXED_SIGNS = frozenset(["又", "+", "and", "&"])
_SEPARATORS = re.compile(rf"[,'’ _{SPACES}]")


@dataclass(frozen=True)
class Number:
    """A number that a text gives.

    Attributes:
        values: what it can mean.
        decimals: after the point; None for a fraction.
        first, last: its tokens, the last one included.
    """

    values: tuple[Fraction, ...]
    decimals: int | None
    first: int
    last: int


_Magnitude = tuple[Fraction, "int | None", int]  # value, decimals, last token


def number_at(tokens: Tokens, first: int) -> Number | None:
    """Read the number that begins with a token: sign, currency, digits, fraction, power of ten, percentage and scale."""
    sign, at = _sign(tokens, first)
    opened = 0
    while tokens.kind(at + opened) == "open":
        opened += 1
    at += opened
    magnitude = _magnitude(tokens, at)
    if magnitude is None or (opened and is_pair(tokens[at].text, tokens[at - 1].text)):
        return None
    value, decimals, last = magnitude
    if any(tokens.kind(last + 1 + i) != "close" for i in range(opened)):
        return None
    value, decimals, last = _power(tokens, value, decimals, last + opened)
    value, word = sign * value, tokens.word(last + 1)
    if tokens.kind(last + 1) == "percent" or word in _PERCENT_WORDS:
        return Number((value, value / 100), decimals, first, last + 1)
    if word == "per" and tokens.word(last + 2) == "cent":
        return Number((value, value / 100), decimals, first, last + 2)
    if scale := _scale(tokens, first, last + 1):
        return Number((value * scale,), None, first, last + 1)
    return Number((value,), decimals, first, last)


def is_pair(digits: str, bracket: str) -> bool:
    """Return whether the comma in `(1,100)` separates two numbers; in `(1,234,567)` and `{1,100}` it does not."""
    return digits.count(",") == 1 and bracket in "(["


def _sign(tokens: Tokens, at: int) -> tuple[int, int]:
    """Read signs, words for them, and currencies."""
    sign = 1
    if tokens.word(at) == "negative" or (tokens.word(at) == "minus" and _may_begin(tokens, at)):
        at, sign = at + 1, -1
    for _ in range(3):
        kind, text = tokens.kind(at), tokens.text(at)
        if kind == "minus" and sign > 0 and not tokens.spaced(at + 1) and text not in "–—":
            sign = -1
        elif kind != "money" and not (text == "+" and _may_begin(tokens, at)):
            break
        at += 1
    return sign, at


def _may_begin(tokens: Tokens, at: int) -> bool:
    """Return whether nothing that could be subtracted from stands before."""
    return tokens.kind(at - 1) in _SIGNS_BEFORE or tokens.word(at - 1) in _EQUAL_WORDS


def _scale(tokens: Tokens, first: int, at: int) -> int | None:
    """Return the factor of a scale: million, 万, and k in $45k."""
    if tokens.kind(at) == "scale":
        return _SCALES[tokens[at].text]
    if scale := _SCALES.get(tokens.word(at).removesuffix("s")):
        return scale
    paid = not tokens.spaced(at) and any(tokens.kind(i) == "money" for i in range(first, at))
    return _SHORT_SCALES.get(tokens.text(at)) if paid else None


def _magnitude(tokens: Tokens, at: int) -> _Magnitude | None:
    """Read digits, a fraction or a mixed number."""
    kind, text = tokens.kind(at), tokens.text(at)
    if kind == "vulgar":
        return _vulgar(text), None, at
    if kind == "minus" and not tokens.spaced(at + 1) and tokens.kind(at + 1) != "minus":  # (-3)
        inner = _magnitude(tokens, at + 1)
        return inner and (-inner[0], inner[1], inner[2])
    return _from_digits(tokens, at) if kind == "digits" and len(text) <= MAX_DIGITS else None


def _from_digits(tokens: Tokens, at: int) -> _Magnitude:
    text, following = tokens[at].text, tokens.text(at + 1)
    value, decimals = _digits(text)
    if "(" in text:
        return value, None, at
    if following == "…" and decimals > 1 and not tokens.spaced(at + 1):
        cycle = re.search(r"(\d{1,6}?)\1+$", text.partition(".")[2])  # 0.333…
        if cycle:
            return value + _repeated(cycle[1], decimals), None, at + 1
    fraction = _fraction(tokens, at)
    if fraction is not None:
        return fraction, None, at + 2
    if tokens.kind(at + 1) == "vulgar":
        return value + _vulgar(following), None, at + 1
    return (_mixed(tokens, at, value) if decimals == 0 else None) or (value, decimals, at)


def _mixed(tokens: Tokens, at: int, whole: Fraction) -> _Magnitude | None:
    """Read `2 1/2`, `2又1/2`, `2 (1/2)` and `2 and a half`."""
    separator = tokens.text(at + 1)
    separated, opened = separator in _MIXED_SIGNS, separator == "("
    top = at + 1 + (separated or opened)
    part = _fraction(tokens, top) if separated or opened or tokens.spaced(top) else None
    if part is not None and part < 1 and (not opened or tokens.kind(top + 3) == "close"):
        return whole + part, None, top + 2 + opened
    if tokens.word(at + 1) == "and" and tokens.word(at + 2) == "a" and (parts := _PARTS.get(tokens.word(at + 3))):
        return whole + Fraction(1, parts), None, at + 3
    return None


def _fraction(tokens: Tokens, at: int) -> Fraction | None:
    """Read `3/4`, but not a part of a date."""
    if (tokens.kind(at), tokens.kind(at + 1), tokens.kind(at + 2)) != ("digits", "operator", "digits"):
        return None
    top, bottom = tokens[at].text, tokens[at + 2].text
    if tokens[at + 1].text not in "/⁄" or tokens.text(at + 3) == "/" or max(len(top), len(bottom)) > MAX_DIGITS:
        return None
    divisor = _digits(bottom)[0]
    return _digits(top)[0] / divisor if divisor else None


def _power(tokens: Tokens, value: Fraction, decimals: int | None, at: int) -> _Magnitude:
    """Multiply by a power of ten that follows: `5 × 10^3`, `5 x 10³`."""
    times = (tokens.kind(at + 1) == "operator" and tokens[at + 1].text in "×*·⋅") or tokens.word(at + 1) == "x"
    if not times or tokens.text(at + 2) != "10":
        return value, decimals, at
    if tokens.kind(at + 3) == "raised":
        return value * _ten(tokens[at + 3].text.translate(SUPERSCRIPTS)), None, at + 3
    if tokens.text(at + 3) in ("^", "**"):
        written = ""
        for i in range(at + 4, at + 8):
            written += tokens.text(i).replace("\u2212", "-")
            if power := re.fullmatch(r"-?(\d{1,3})|\((-?\d{1,3})\)|\{(-?\d{1,3})\}", written):
                return value * _ten(power.group().strip("(){}")), None, i
    return value, decimals, at


def _ten(exponent: str) -> Fraction:
    return Fraction(10) ** int(exponent or 0) if re.fullmatch(r"-?\d{1,3}", exponent) else Fraction(1)


def _digits(text: str) -> tuple[Fraction, int]:
    """Return the value of digits, and how many are decimals."""
    text, _, exponent = text.lower().partition("e")
    text, _, cycle = _SEPARATORS.sub("", text).rstrip(")").partition("(")
    decimals = len(text.partition(".")[2])
    if cycle:
        return Fraction(text + "0") + _repeated(cycle, decimals), decimals
    if exponent:
        return Fraction(text) * Fraction(10) ** int(exponent), 0
    return Fraction(text), decimals


def _repeated(cycle: str, decimals: int) -> Fraction:
    """Return what a cycle of digits adds after so many decimals."""
    return Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**decimals)


def _vulgar(character: str) -> Fraction:
    return Fraction(unicodedata.numeric(character)).limit_denominator(100)


# --------------------------------------------------------------------------- comparing


def same_number(answer: Number, gold: Number, exact: bool = False) -> bool:
    """Return whether a reading of an answer equals a reading of the gold one, as stated above.

    Args:
        answer: that is judged.
        gold: that is right.
        exact: roundings are other numbers, unless they have six significant digits and the gold one has no end.
    """
    pairs = [(a, g) for a in answer.values for g in gold.values]
    if exact:
        return any(abs(a - g) <= (0 if _ends(g) else NOISE) * abs(g) for a, g in pairs)
    return any(_close(a, answer.decimals, g, gold.decimals) for a, g in pairs)


def _close(answer: Fraction, digits: int | None, gold: Fraction, gold_digits: int | None) -> bool:
    if abs(answer - gold) <= NOISE * min(Fraction(1), abs(gold)):
        return True
    if digits is None or (_ends(gold) and (gold_digits is None or not _is_cut(gold, gold_digits))):
        return False
    written = abs(answer) * 10**digits  # without end: the answer's own rounding of it, up or down
    if answer * gold <= 0 or digits < 2 or written < 100:
        return False
    exact = abs(gold) * 10**digits
    return abs(exact - written) <= Fraction(1, 2) or written == exact.__floor__()


def rounds_to(value: Fraction, gold: Number) -> bool:
    """Return whether a value without end is, to the decimals of a number, two or more, that number."""
    digits = gold.decimals or 0
    return digits > 1 and not _ends(value) and any(abs(value - g) <= Fraction(1, 2 * 10**digits) for g in gold.values)


def _is_cut(value: Fraction, digits: int) -> bool:
    """Return whether decimals are the beginning of some that do not end: many, or repeating."""
    written = str(abs(value.numerator * 10**digits // value.denominator))[-digits:] if digits else ""
    return digits > 8 or (digits > 4 and re.search(r"(\d+?)\1{2,}\d?$", written) is not None)


def _ends(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1
