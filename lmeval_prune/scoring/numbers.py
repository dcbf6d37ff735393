r"""One number as people and models write it, and when two are the same.

Two numbers are the same if their values are, up to the noise of a float. Only a gold number without end (1/3, 66.666666) is also
equalled by its rounding to three significant digits or more. A percentage is read both ways, `80%` as 80 and as 0.8, since gold
answers write it either way; `5 million` is 5,000,000.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

from lmeval_prune.scoring.normalisation import SUPERSCRIPTS, phrases, values

MAX_DIGITS = 400
NOISE = Fraction(1, 10**6)  # of a float, absolute and relative
VULGAR = "".join(map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F))))  # ¼ ½ ¾ ⅐ …
MONEY = r"(?:(?:(?<![A-Za-z])(?:US|AU|CA|NZ|HK|NT|[ACRS]))?\$|[€£¥₹₩₽]|(?<![A-Za-z])Rs\.?(?=\s?\d))"
_MONEY = re.compile(MONEY)
_SPACES = "\u00a0\u2007\u2009\u202f"  # between groups of digits
_SCALES = values("scales")
_SHORT_SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}  # of money: $45k
_PARTS = values("parts")  # half: 2
_DIGITS = rf"""(?:(?:\d*\.\d*\(\d{{1,9}}\)(?!\w) | (?:[1-9]\d{{0,2}}(?:  # 0.1(6) is 0.1666…
      (?:,\d{{3}})+ | (?:_\d{{3}})+ | (?:['’]\d{{3}})+ | (?:[{_SPACES}\ ]\d{{3}})+ | (?:,\d\d)+,\d{{3}}  # the last is Indian
    )(?!\d) | \d+)(?:\.\d+)? | \.\d+)(?:[eE][-+]?\d{{1,3}}(?![A-Za-z\d]))?)"""
_LEAD = re.compile(  # signs, currency and brackets before the digits
    rf"(?i)(?P<word>(?:negative|minus)\s+)?(?P<signs>(?:-|\+\s?|{MONEY}\s*){{0,3}})(?P<brackets>(?:\\?[(\[{{]\s?-?){{0,9}})"
)
_MAGNITUDE = re.compile(  # a quotient, a vulgar fraction, or digits with what makes them a mixed number
    rf"""(?P<top>{_DIGITS})\s?[/⁄]\s?(?P<bottom>{_DIGITS})(?!\s?/|\d)
    | (?P<digits>{_DIGITS})?\s?(?P<vulgar>[{VULGAR}])
    | (?P<whole>{_DIGITS})
      (?: (?:\s+|\s?(?:又|\+|and|&)\s?|\s?(?P<bracket>\())(?P<over>\d{{1,9}})\s?/\s?(?P<under>\d{{1,9}})(?!\d|\s?/)(?(bracket)\))
        | \sand\sa\s(?P<part>{"|".join(_PARTS)})\b | (?P<more>…) )?""",
    re.VERBOSE,
)
_CLOSING = re.compile(r"\s?\\?[)\]}]")  # of brackets around a number: (3/8)
_POWER = re.compile(  # of ten
    r"\s?[×*·⋅x]\s?10(?:\s?(?:\^|\*\*)\s?(-?\d{1,3}|\{\s?-?\d{1,3}\s?\})|(⁻?[⁰¹²³⁴-⁹]{1,3}))(?!\d|\.\d)"
)
_PERCENT = re.compile(rf"(?i)\s*(?:[%％]|{phrases('percent')}\b)")  # 25%
_SCALE = re.compile(  # million, 万
    rf"(?i)\s?(?:({'|'.join(word for word in _SCALES if word.isascii())})s?\b"
    r"|((?!千米|千克|千瓦|百分|千分)(?:[百千万]?万|亿|[百千])))"
)
# Where a number may begin; after what a sign is its own.
_CANDIDATE = re.compile(rf"(?i)\d[\d.,]*|\.\d+|[{VULGAR}]|{MONEY}|\\?[(\[{{]|[-+–—]|\b(?:negative|minus)\b")
_EQUATED = re.compile(r"(?:\A|[=≈≃≅≡])\s*$")  # = - 12
_BEGUN = re.compile(rf"(?i)(?:\A|[=≈≃≅≡→⇒(\[{{,;:.!?，、。；：！？\n…]|\b{phrases('equal_words')})\s*$")
_SIGN_AFTER = re.compile(r"[+*/⁄^×·⋅∙÷√±∓|∪∩&_<>≤≥≠\u4e00-\u9fff]\s*$|(?<![\\#A-Za-z])[A-Za-z]+\s+$|[^\w\s\\#]\s+$")
_SIGNS = frozenset(["-", "–", "—", "+", "minus"])
_SEPARATORS = re.compile(rf"[,'’ _{_SPACES}]")  # of thousands


@dataclass(frozen=True)
class Number:
    """A number that a text gives."""

    values: tuple[Fraction, ...]  # what it can mean
    decimals: int | None  # after the point; None for a fraction
    is_quotient: bool = False  # written as a division

    def negated(self) -> Number:
        return replace(self, values=tuple(-value for value in self.values))


def number_at(text: str, start: int) -> tuple[Number, int] | None:
    """Return the number that begins there, with its sign, currency, brackets, power of ten, percentage and scale, and its end."""
    lead = _LEAD.match(text, start)
    match = _MAGNITUDE.match(text, lead.end()) if lead else None
    if not lead or not match or match.end() - match.start() > MAX_DIGITS:
        return None
    brackets = re.findall(r"[(\[{]", lead["brackets"])
    if brackets and brackets[-1] in "([" and match.group().count(",") == 1:
        return None  # (1,100) are two numbers, (1,234,567) and {1,100} one
    value, decimals, end = _magnitude(match)
    percent = _PERCENT.match(text, end)
    end = percent.end() if percent else end
    for _ in brackets:
        closing = _CLOSING.match(text, end)
        if not closing:
            return None
        end = closing.end()
    if power := _POWER.match(text, end):
        exponent = (power[1] or power[2].translate(SUPERSCRIPTS)).strip("{ }")
        value, decimals, end = value * Fraction(10) ** int(exponent), None, power.end()
    value = (value, -value)[(lead.group().count("-") + bool(lead["word"])) % 2]
    if percent := percent or _PERCENT.match(text, end):
        return Number((value, value / 100), decimals), max(end, percent.end())
    if scale := _SCALE.match(text, end):
        return Number((value * _SCALES[(scale[1] or scale[2]).lower()],), None), scale.end()
    short = _SHORT_SCALES.get(text[end : end + 1])
    if short and _MONEY.search(lead["signs"]) and not text[end + 1 : end + 2].isalnum():
        return Number((value * short,), None), end + 1
    return Number((value,), decimals, match["top"] is not None), end


def find_numbers(text: str) -> list[tuple[int, int, Number]]:
    """Return the numbers of a text, with their starts and ends."""
    located: list[tuple[int, int, Number]] = []
    position = end = 0
    while candidate := _CANDIDATE.search(text, position):
        start, sign = candidate.start(), candidate.group().lower()
        reading = _signed(text, end, start, sign) if sign in _SIGNS else number_at(text, start)
        position = candidate.end()
        if reading:
            number, position = reading
            number = number.negated() if text[start - 1 : start] == "负" else number
            located.append((start, position, number))
            end = position
    return located


def _signed(text: str, end: int, start: int, sign: str) -> tuple[Number, int] | None:
    """Return the number with a sign at `start`, if it is one: nothing that could be subtracted from stands before it.

    `end` is that of the number before it, `sign` a dash, plus, or 'minus'.
    """
    before = text[max(end, start - 20) : start]
    before = f"#{before}" if end and end >= start - 20 else before
    after = text[start + 1 : start + 2]
    begun = bool(_BEGUN.search(before))
    if sign in ("+", "minus"):
        return number_at(text, start) if begun else None
    is_tight = not after.isspace() and (begun or (sign == "-" and _SIGN_AFTER.search(before)))
    if after in ("-", "+", "–") or not (is_tight or (sign != "—" and _EQUATED.search(before))):
        return None
    reading = number_at(text, start + 1 + after.isspace())
    return reading and (reading[0].negated(), reading[1])


def _magnitude(match: re.Match[str]) -> tuple[Fraction, int | None, int]:
    """Return the value of digits, of a fraction or of a mixed number, its decimals, and its end."""
    if match["vulgar"]:
        part = Fraction(unicodedata.numeric(match["vulgar"])).limit_denominator(100)
        return part + (_digits(match["digits"])[0] if match["digits"] else 0), None, match.end()
    if match["top"]:
        value, divisor = _digits(match["top"])[0], _digits(match["bottom"])[0]
        return (value / divisor, None, match.end()) if divisor else (value, 0, match.end("top"))
    value, decimals = _digits(match["whole"])
    cycle = match["more"] and re.search(r"\.\d*?(\d{1,6}?)\1+$", match["whole"])  # 0.333…
    if cycle:
        return value + _repeated(cycle[1], decimals), None, match.end()
    part = Fraction(1, _PARTS[match["part"]]) if match["part"] else Fraction(0)
    if match["under"] and int(match["over"]) < int(match["under"]):
        part = Fraction(int(match["over"]), int(match["under"]))
    if part and not decimals:
        return value + part, None, match.end()
    return value, None if "(" in match["whole"] else decimals, match.end("whole")


def _digits(text: str) -> tuple[Fraction, int]:
    """Return the value of digits, and how many are decimals."""
    text, _, exponent = text.lower().partition("e")
    text, _, cycle = _SEPARATORS.sub("", text).rstrip(")").partition("(")
    decimals = len(text.partition(".")[2])
    if cycle:
        return Fraction(text + "0") + _repeated(cycle, decimals), decimals
    if exponent:
        return Fraction(text) * Fraction(10) ** int(exponent), 0
    return Fraction(text if decimals else int(text)), decimals


def _repeated(cycle: str, decimals: int) -> Fraction:
    return Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**decimals)


# --------------------------------------------------------------------------- comparing


def same_number(answer: Number, gold: Number, exact: bool = False) -> bool:
    """Return whether a reading of an answer equals a reading of the gold one, as stated above.

    If `exact`, roundings are other numbers, unless they have six significant digits and the gold one has no end.
    """
    pairs = [(a, g) for a in answer.values for g in gold.values]
    if exact:
        return any(abs(a - g) <= (0 if _ends(g) else NOISE) * abs(g) for a, g in pairs)
    return any(_close(a, answer.decimals, g, gold.decimals) for a, g in pairs)


def _close(answer: Fraction, digits: int | None, gold: Fraction, gold_digits: int | None) -> bool:
    if abs(answer - gold) <= NOISE * min(Fraction(1), abs(gold)):
        return True
    shown = gold_digits or 0
    if shown > 3 and (not digits or digits > shown) and abs(answer - gold) <= Fraction(1, 2 * 10**shown):
        return True  # a more exact answer
    decimals = str(abs(gold.numerator * 10**shown // gold.denominator))[-shown:] if shown > 4 else ""
    is_cut = shown > 8 or re.search(r"(\d+?)\1{2,}\d?$", decimals)  # the beginning of decimals that do not end
    if digits is None or (_ends(gold) and not is_cut):
        return False
    written = abs(answer) * 10**digits  # without end: the answer's own rounding of it, up or down
    exact = abs(gold) * 10**digits
    is_rounded = abs(exact - written) <= Fraction(1, 2) or written == exact.__floor__()
    return is_rounded and answer * gold > 0 and digits > 1 and written >= 100


def rounds_to(value: Fraction, gold: Number) -> bool:
    """Return whether a value without end is, to the decimals of a number, two or more, that number."""
    digits = gold.decimals or 0
    return digits > 1 and not _ends(value) and any(abs(value - g) <= Fraction(1, 2 * 10**digits) for g in gold.values)


def _ends(value: Fraction) -> bool:
    return 10 ** value.denominator.bit_length() % value.denominator == 0
