r"""Reading one number as people and models write it, and comparing two.

Two numbers are the same if their values are, up to the noise of a float. Only a gold number without end (1/3, 66.666666) is also
equalled by its rounding to three significant digits or more. A percentage is read both ways, `80%` as 80 and as 0.8, since gold
answers write it either way; `5 million` is 5,000,000.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
NOISE = Fraction(1, 10**6)  # of a float, absolute and relative
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CHINESE_SCALES = {"百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8, "百万": 10**6, "千万": 10**7, "万万": 10**8}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SPACE = "\u00a0\u2007\u2009\u202f"  # between groups of digits
_VULGAR = "".join(map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F))))

_TOKEN = re.compile(
    rf"""
      (?P<digits>
        \d*\.\d*\(\d{{1,9}}\)(?!\w)
        | (?:[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:_\d{{3}})+|(?:['’]\d{{3}})+|(?:[{_SPACE} ]\d{{3}})+|(?:,\d\d)+,\d{{3}})(?!\d)|\d+)(?:\.\d+)?
        | \.\d+
      )(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?![A-Za-z\d]))?
    | (?P<vulgar>[{_VULGAR}])
    | (?P<money>(?:(?<![A-Za-z])(?:US|AU|CA|NZ|HK|NT|[ACRS]))?\$|[€£¥₹₩₽]|(?<![A-Za-z])Rs\.?(?=\s?\d))
    | (?P<word>[A-Za-z]+(?:['’][A-Za-z]+)*)
    | (?P<scale>(?:(?<=\d)|(?<=\d[ ]))(?!千米|千克|千瓦|百分|千分)(?:[百千万]?万|亿|[百千]))
    | (?P<chinese>[\u4e00-\u9fff]+)
    | (?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)
    | (?P<command>\\[A-Za-z]+)
    | (?P<arrow>[-=]{{1,3}}>|[→⇒])
    | (?P<equals>:=|[=≈≃≅≡])
    | (?P<relation><=|>=|[<>≤≥≠])
    | (?P<minus>[-\u2010\u2011\u2212\u2013\u2014])
    | (?P<operator>\*\*|[+*/⁄^×·⋅∙÷√±∓|∪∩&_])
    | (?P<open>[(\[{{])
    | (?P<close>[)\]}}])
    | (?P<percent>[%％])
    | (?P<degree>°)
    | (?P<stop>[,;:.!?，、。；：！？\n…])
    | (?P<other>\S)
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Token:
    """A piece of a text: its kind, where it is, and whether white space stands before it."""

    kind: str
    text: str
    start: int
    end: int
    spaced: bool


def tokens(text: str) -> list[Token]:
    """Cut a text into tokens."""
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        before = found[-1].end if found else 0
        kind = match.lastgroup or "other"
        found.append(
            Token("digits" if kind == "exponent" else kind, match.group(), *match.span(), match.start() > before)
        )
    return found


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


def number_at(found: Sequence[Token], place: int) -> Number | None:
    """The number that begins with a token: sign, currency, digits, fraction, power of ten, percentage and scale."""
    at, sign = place, 1
    if word_at(found, at) == "negative" or (word_at(found, at) == "minus" and _may_begin(found, at)):
        at, sign = at + 1, -1
    for _ in range(3):
        if has_kind(found, at, "minus") and sign > 0 and not is_spaced(found, at + 1) and found[at].text not in "–—":
            at, sign = at + 1, -1
        elif has_kind(found, at, "money") or (
            has_kind(found, at, "operator") and found[at].text == "+" and _may_begin(found, at)
        ):
            at += 1
        else:
            break
    opened = at
    while has_kind(found, at, "open"):
        at += 1
    opened = at - opened
    inner = _core(found, at)
    if inner is None or (opened and is_pair(found[at].text, found[at - 1].text)):
        return None
    value, decimals, at = inner
    for _ in range(opened):
        if not has_kind(found, at + 1, "close"):
            return None
        at += 1
    value, decimals, at = _power(found, value, decimals, at)
    values: tuple[Fraction, ...] = (sign * value,)
    if has_kind(found, at + 1, "percent") or word_at(found, at + 1) in ("percent", "percentage"):
        at, values = at + 1, (sign * value, sign * value / 100)
    elif word_at(found, at + 1) == "per" and word_at(found, at + 2) == "cent":
        at, values = at + 2, (sign * value, sign * value / 100)
    elif (scale := SCALES.get(word_at(found, at + 1).removesuffix("s"))) is not None:
        at, values, decimals = at + 1, (sign * value * scale,), None
    elif (short := _short_scale(found, place, at + 1)) is not None:
        at, values, decimals = at + 1, (sign * value * short,), None
    elif has_kind(found, at + 1, "scale"):
        at, values, decimals = at + 1, (sign * value * _CHINESE_SCALES[found[at + 1].text],), None
    return Number(values, decimals, place, at)


def is_pair(digits: str, bracket: str) -> bool:
    """Whether the comma in `(1,100)` separates two numbers; in `(1,234,567)` and `{1,100}` it does not."""
    return digits.count(",") == 1 and bracket in "(["


def _short_scale(found: Sequence[Token], place: int, at: int) -> int | None:
    """Of `$45k` and `$3M`."""
    if not has_kind(found, at, "word") or found[at].spaced:
        return None
    paid = any(has_kind(found, i, "money") for i in range(place, at))
    return {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}.get(found[at].text) if paid else None


def _may_begin(found: Sequence[Token], at: int) -> bool:
    """Whether nothing that could be subtracted from stands before."""
    return (
        at == 0
        or found[at - 1].kind in ("equals", "stop", "open", "arrow", "money")
        or word_at(found, at - 1) in ("is", "are", "was", "be", "equals")
    )


def _core(found: Sequence[Token], at: int) -> tuple[Fraction, int | None, int] | None:
    """Value, decimals and last token of digits, a fraction or a mixed number."""
    if at >= len(found):
        return None
    if found[at].kind == "vulgar":
        return _vulgar(found[at]), None, at
    if found[at].kind == "minus" and not is_spaced(found, at + 1) and not has_kind(found, at + 1, "minus"):  # (-3)
        inner = _core(found, at + 1)
        return None if inner is None else (-inner[0], inner[1], inner[2])
    if found[at].kind != "digits" or len(found[at].text) > MAX_DIGITS:
        return None
    value, decimals = _digits(found[at])
    if "(" in found[at].text:
        return value, None, at
    if decimals > 1 and has_kind(found, at + 1, "stop") and found[at + 1].text == "…" and not found[at + 1].spaced:
        cycle = re.search(r"(\d{1,6}?)\1+$", found[at].text.partition(".")[2])  # 0.333…
        if cycle:
            return value + _repeated(cycle[1], decimals), None, at + 1
    if (fraction := _fraction(found, at)) is not None:
        return fraction, None, at + 2
    if has_kind(found, at + 1, "vulgar"):
        return value + _vulgar(found[at + 1]), None, at + 1
    if decimals == 0:
        for gap, opened in ((1, False), (2, False), (2, True)):
            top = at + gap
            if gap == 2 and not (
                found[at + 1 : at + 2] and found[at + 1].text in (("(",) if opened else ("又", "+", "and", "&"))
            ):
                continue
            if gap == 1 and not is_spaced(found, top):
                continue
            part = _fraction(found, top)
            if part is not None and part < 1 and (not opened or has_kind(found, top + 3, "close")):
                return value + part, None, top + 2 + opened
        words = [word_at(found, at + i) for i in (1, 2, 3)]
        if words[:2] == ["and", "a"] and words[2] in ("half", "quarter", "third"):
            return value + Fraction(1, {"half": 2, "quarter": 4, "third": 3}[words[2]]), None, at + 3
    return value, decimals, at


def _fraction(found: Sequence[Token], at: int) -> Fraction | None:
    """`3/4`, but not a part of a date."""
    if not (
        has_kind(found, at, "digits") and has_kind(found, at + 1, "operator") and has_kind(found, at + 2, "digits")
    ):
        return None
    if found[at + 1].text not in "/⁄" or (has_kind(found, at + 3, "operator") and found[at + 3].text == "/"):
        return None
    if max(len(found[at].text), len(found[at + 2].text)) > MAX_DIGITS:
        return None
    (top, _), (bottom, _) = _digits(found[at]), _digits(found[at + 2])
    return top / bottom if bottom else None


def _power(found: Sequence[Token], value: Fraction, decimals: int | None, at: int) -> tuple[Fraction, int | None, int]:
    """Times a power of ten: `5 × 10^3`, `5 x 10³`."""
    ten = at + 2
    times = (has_kind(found, at + 1, "operator") and found[at + 1].text in "×*·⋅") or word_at(found, at + 1) == "x"
    if not (times and has_kind(found, ten, "digits") and found[ten].text == "10"):
        return value, decimals, at
    if has_kind(found, ten + 1, "raised"):
        return value * _ten(found[ten + 1].text.translate(_SUPERSCRIPTS)), None, ten + 1
    if has_kind(found, ten + 1, "operator") and found[ten + 1].text in ("^", "**"):
        rest = found[ten + 2 : ten + 6]
        text = "".join(token.text for token in rest)
        if power := re.match(r"[({]?([-\u2212]?\d{1,3})[)}]?", text):
            length = len(power.group())
            for number, token in enumerate(rest):
                length -= len(token.text)
                if length <= 0:
                    return value * _ten(power[1].replace("\u2212", "-")), None, ten + 2 + number
    return value, decimals, at


def _ten(exponent: str) -> Fraction:
    return Fraction(10) ** int(exponent or 0) if re.fullmatch(r"-?\d{1,3}", exponent) else Fraction(1)


def _digits(token: Token) -> tuple[Fraction, int]:
    text, _, exponent = token.text.lower().partition("e")
    text, _, cycle = re.sub(rf"[,'’ _{_SPACE}]", "", text).rstrip(")").partition("(")
    if cycle:
        decimals = len(text.partition(".")[2])
        return Fraction(text + "0") + _repeated(cycle, decimals), decimals
    plain = text
    value = Fraction(plain) * (Fraction(10) ** int(exponent) if exponent else 1)
    return value, len(plain.partition(".")[2]) if not exponent else 0


def _repeated(cycle: str, decimals: int) -> Fraction:
    """What a cycle of digits adds after so many decimals."""
    return Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**decimals)


def _vulgar(token: Token) -> Fraction:
    return Fraction(unicodedata.numeric(token.text)).limit_denominator(100)


def has_kind(found: Sequence[Token], place: int, kind: str) -> bool:
    """Whether there is a token of that kind."""
    return 0 <= place < len(found) and found[place].kind == kind


def is_spaced(found: Sequence[Token], place: int) -> bool:
    """Whether white space, or nothing more, stands before a place."""
    return place >= len(found) or found[place].spaced


def word_at(found: Sequence[Token], place: int) -> str:
    """The word there in lower case; empty if it is none."""
    return found[place].text.lower() if has_kind(found, place, "word") else ""


def same_number(answer: Number, gold: Number, exact: bool = False) -> bool:
    """Whether a reading of one equals a reading of the other, as stated above.

    Args:
        exact: roundings are other numbers, unless they have six significant digits and the gold one has no end.
    """
    if not exact:
        return any(_close(a, answer.decimals, g, gold.decimals) for a in answer.values for g in gold.values)
    pairs = [(a, g) for a in answer.values for g in gold.values]
    return any(abs(a - g) <= (0 if _ends(g) else NOISE) * abs(g) for a, g in pairs)


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
    """Whether a value without end is, to the decimals of a number, two or more, that number."""
    digits = gold.decimals or 0
    return digits > 1 and not _ends(value) and any(abs(value - g) <= Fraction(1, 2 * 10**digits) for g in gold.values)


def _is_cut(value: Fraction, digits: int) -> bool:
    """Whether decimals are the beginning of some that do not end: many, or repeating."""
    written = str(abs(value.numerator * 10**digits // value.denominator))[-digits:] if digits else ""
    return digits > 8 or (digits > 4 and re.search(r"(\d+?)\1{2,}\d?$", written) is not None)


def _ends(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1
